"""The base class of what a ``with`` block closes."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Self


class Closing:
    """Something that the end of a ``with`` block closes, whether the block raised or not."""

    __slots__ = ()

    @abstractmethod
    def close(self) -> object:
        """End it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
