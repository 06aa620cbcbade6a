"""What a process keeps for promises and for futures of other libraries."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_core._native import Completion


class Promises:
    """One instance for each process, kept in its slots."""

    __slots__ = ("adopted", "failures")

    def __init__(self) -> None:
        self.adopted: weakref.WeakKeyDictionary[Any, Completion] = weakref.WeakKeyDictionary()
        """By future of another library: a completion that is done when the future is."""
        self.failures: weakref.WeakSet[Any] = weakref.WeakSet()
        """Exceptions of promises that nobody has looked at yet."""
