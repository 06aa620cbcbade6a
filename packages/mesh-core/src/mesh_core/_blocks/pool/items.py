"""The tasks of ``map`` and ``map_unordered``: their outcomes are looked at in one place, so that none needs a promise of its own.

Whoever waits for outcomes is woken by those that come on another thread, and not by those that it has brought about itself.
"""

from __future__ import annotations

import contextlib
from _thread import get_ident
from collections import deque
from typing import TYPE_CHECKING, Any

from mesh_core._blocks.pool.tasks import Call, Runner, Work
from mesh_core._common.errors import MeshError

if TYPE_CHECKING:
    from mesh_core._native import Completion
    from mesh_core._process.process import Process


class Arrivals:
    """The outcomes of some tasks, for one who takes them."""

    __slots__ = ("_bell", "_name", "_process", "_told", "helper", "ready", "wanted")

    def __init__(self, process: Process, name: str) -> None:
        self._process = process
        self._name = name
        self.ready: deque[Item] = deque()
        """Those that have their outcome, in the order in which it came."""
        self.wanted: Item | None = None
        """The only one that is waited for."""
        self.helper = 0
        """The thread that waits for them, while it does what there is to do for pools."""
        self._bell: Completion | None = None
        self._told: Completion | None = None

    def came(self, item: Item) -> None:
        """One has its outcome."""
        self.ready.append(item)
        if self.helper != get_ident() and (self.wanted is None or self.wanted is item):
            self.ring()

    def ring(self) -> None:
        """Have who waits look again."""
        bell = self._bell
        if bell is not None:
            bell.set(None, False, get_ident())

    def bell(self) -> Completion:
        """What rings from now on: what is there already is to be looked for after this."""
        bell = self._bell
        if bell is None or bell.done():
            bell = self._process.runtime.completion()
            bell.show(self._name)
            self._bell, self._told = bell, None
        return bell

    def tell(self, list_: Completion, token: int) -> None:
        """Have a list get the token when the bell rings."""
        bell = self.bell()
        if self._told is not list_:
            bell.note(list_, token)
            self._told = list_


class Item(Work):
    """One whose outcome somebody takes who knows of it already."""

    __slots__ = ("_arrivals", "_error", "_value", "is_over", "number")

    def __init__(self, runner: Runner, call: Call, retries: int, number: int, arrivals: Arrivals) -> None:
        super().__init__(runner, call, retries)
        self.number = number
        self.is_over = False
        self._arrivals = arrivals
        self._value: Any = None
        self._error: BaseException | None = None

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
        # Elsewhere: this may be a collection of garbage, in the middle of anything.
        with contextlib.suppress(MeshError):
            self.runner.following.soon(self.given_up)

    def result(self) -> Any:
        """Its result, or raise its error; once only."""
        error = self._error
        if error is None:
            return self._value
        self._error = None
        try:
            raise error
        finally:
            # It refers to this frame.
            del error, self
