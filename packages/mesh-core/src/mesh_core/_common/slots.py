"""State that parts of the system attach to an object that knows nothing of them: one instance per class."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Slots:
    """Instances by class, each created on first use."""

    __slots__ = ("_kept", "_lock")

    def __init__(self) -> None:
        self._kept: dict[type, Any] = {}
        self._lock = threading.RLock()

    def of(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        """Return the instance of ``kind``; created by ``make``, or by ``kind`` itself, if there is none yet.

        >>> slots = Slots()
        >>> slots.of(dict)["seen"] = 1
        >>> slots.of(dict)
        {'seen': 1}
        """
        found: T | None = self._kept.get(kind)
        if found is None:
            with self._lock:
                found = self._kept.get(kind)
                if found is None:
                    found = self._kept[kind] = kind() if make is None else make()
        return found

    def find(self, kind: type[T]) -> T | None:
        """Return the instance of ``kind``, if there is one."""
        found: T | None = self._kept.get(kind)
        return found
