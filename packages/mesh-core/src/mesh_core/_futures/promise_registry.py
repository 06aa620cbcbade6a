"""What a process keeps for promises, and for futures of other libraries."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_core._native import Completion


class Promises:
    """One in each process, in its slots."""

    __slots__ = ("adopted", "failures")

    def __init__(self) -> None:
        self.adopted: weakref.WeakKeyDictionary[Any, Completion] = weakref.WeakKeyDictionary()
        """By a future of another library: what is done when that is."""
        self.failures: weakref.WeakSet[Any] = weakref.WeakSet()
        """Exceptions of promises that nobody has looked at so far."""
