"""The tasks of ``map`` and ``map_unordered``: their outcomes are collected in one place, so that no task needs its own promise.

A thread that waits for outcomes is woken by those that other threads produce, not by those that it has produced itself.
"""

from __future__ import annotations

import contextlib
from _thread import get_ident
from collections import deque
from typing import TYPE_CHECKING, Any

from mesh_core._blocks.pool.tasks import Call, Runner, Work
from mesh_core._common.errors import MeshError
from mesh_core._futures.output import caught_up

if TYPE_CHECKING:
    from mesh_core._native import Call as Native
    from mesh_core._native import Completion
    from mesh_core._process.process import Process

_NO_KEYWORDS: dict[str, Any] = {}


class Arrivals:
    """The outcomes of some tasks, for the one thread or coroutine that takes them."""

    __slots__ = ("_bell", "_name", "_process", "_told", "answered", "helper", "ready", "wanted")

    def __init__(self, process: Process, name: str) -> None:
        self._process = process
        self._name = name
        self.ready: deque[Item] = deque()
        """Tasks that have an outcome, in the order of arrival."""
        self.answered: deque[Native] = deque()
        """The calls that gave these outcomes, if what was printed in them is still to be shown."""
        self.wanted: Item | None = None
        """If only one task is awaited: that task."""
        self.helper = 0
        """The thread that waits for outcomes while it does the work of the pools."""
        self._bell: Completion | None = None
        self._told: Completion | None = None

    def came(self, item: Item) -> None:
        """A task has an outcome."""
        self.ready.append(item)
        if self.helper != get_ident() and (self.wanted is None or self.wanted is item):
            self.ring()

    def answered_by(self, call: Native) -> None:
        """A task is about to have an outcome, from this call."""
        if self._process.shows_output:
            self.answered.append(call)

    def follow(self, limit: float) -> list[Completion]:
        """Return what is done when the output of all tasks that have an outcome now was shown, or after ``limit`` seconds.

        So tasks that arrive together wait together, and as many results as may be submitted ahead share one wait.
        """
        waiting: list[Completion] = []
        with contextlib.suppress(IndexError):
            while True:
                call = self.answered.popleft()
                if call.is_behind():
                    waiting += caught_up(self._process, call, limit)
        return waiting

    def ring(self) -> None:
        """Wake the waiting thread, so that it looks again."""
        bell = self._bell
        if bell is not None:
            bell.set(None, False, get_ident())

    def bell(self) -> Completion:
        """Return a completion that is done at the next arrival. Look for earlier arrivals after this call."""
        bell = self._bell
        if bell is None or bell.done():
            bell = self._process.runtime.completion()
            bell.show(self._name)
            self._bell, self._told = bell, None
        return bell

    def tell(self, list_: Completion, token: int) -> None:
        """Put the token into a list when the bell rings."""
        bell = self.bell()
        if self._told is not list_:
            bell.note(list_, token)
            self._told = list_


class Item(Work):
    """A task whose outcome is taken by code that already refers to it, so it needs no promise."""

    __slots__ = ("_arrivals", "_error", "_value", "is_over", "number")

    def __init__(
        self,
        runner: Runner,
        call: Call,
        args: tuple[Any, ...],
        retries: int,
        *,
        number: int,
        arrivals: Arrivals,
    ) -> None:
        super().__init__(runner, call, args, _NO_KEYWORDS, retries)
        self.number = number
        self.is_over = False
        self._arrivals = arrivals
        self._value: Any = None
        self._error: BaseException | None = None

    def _told_by(self, answered: Native) -> None:
        self._arrivals.answered_by(answered)

    def _keep(self, value: Any) -> None:
        self._value = value
        self.is_over = True
        self._arrivals.came(self)

    def _break(self, error: BaseException) -> None:
        self._error = error
        self.is_over = True
        self._arrivals.came(self)

    def _dropped(self) -> None:
        from asyncio import CancelledError

        self._break(CancelledError(f"a task of {self.runner.name} was cancelled"))

    def cancel(self) -> None:
        # On another thread: this may run during a garbage collection, at any point.
        with contextlib.suppress(MeshError):
            self.runner.following.soon(self.given_up)

    def result(self) -> Any:
        """Return the result or raise the error. May be called once."""
        error = self._error
        if error is None:
            return self._value
        self._error = None
        try:
            raise error
        finally:
            # The traceback refers to this frame.
            del error, self
