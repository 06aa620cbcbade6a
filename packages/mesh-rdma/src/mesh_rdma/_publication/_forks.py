"""What a forked copy must not keep: a connection that it has as well would outlive its process, and so would a lease."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Closable(Protocol):
    """A socket, or what is like one."""

    def close(self) -> None:
        """Close this process's descriptor."""


class _Kept:
    def __init__(self) -> None:
        self._all: weakref.WeakSet[Closable] = weakref.WeakSet()
        self._registered = False

    def add(self, closable: Closable) -> None:
        if not self._registered:
            self._registered = True
            os.register_at_fork(after_in_child=self._forked)
        self._all.add(closable)

    def _forked(self) -> None:
        for each in list(self._all):
            each.close()


_KEPT = _Kept()
close_in_forks = _KEPT.add
