"""The base class of objects that a ``with`` block closes."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self


class Closing:
    """An object that is closed at the end of a ``with`` block, whether the block raised or not."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> object:
        """Close it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
