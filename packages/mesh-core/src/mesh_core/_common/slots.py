"""What parts of the system keep beside an object that knows nothing of them: one instance of each class."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class Slots:
    """Instances by class, each made when it is first asked for."""

    __slots__ = ("_kept", "_lock")

    def __init__(self) -> None:
        self._kept: dict[type, Any] = {}
        self._lock = threading.RLock()

    def of(self, kind: type[T], make: Callable[[], T] | None = None) -> T:
        """The instance of ``kind``; made by ``make``, or by ``kind`` itself, if there is none yet.

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
        """The instance of ``kind``, if there is one."""
        found: T | None = self._kept.get(kind)
        return found
