"""An actor's own thread, which runs its plain functions."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from mesh_core._common import context
from mesh_core._common.codes import MessageKind
from mesh_core._hosting import ending
from mesh_core._hosting.cell_state import LOOP

if TYPE_CHECKING:
    from mesh_core._actors.endpoint import EndpointProperty
    from mesh_core._hosting.actor_cell import ActorCell
    from mesh_core._native import Message

# Constants, because they are compared for each message and looking up an enum member takes time.
_STOP_ACTOR: Final = MessageKind.STOP_ACTOR
_FAILURE: Final = MessageKind.FAILURE

BURST = 256
"""How many messages are taken from an inbox at once."""


class _Begun(threading.Event):
    """Set when a thread has begun; whoever starts the thread does not wait for that."""

    _started_by_now = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait, except the first time, which is within ``Thread.start``."""
        if not self._started_by_now:
            self._started_by_now = True
            return True
        return super().wait(timeout)


class ActorThread(threading.Thread):
    """An actor's own thread.

    ``Thread.start`` waits until the new thread runs Python. Where thousands of actors are spawned, that is a hand-over of the
    interpreter and back for each, on a busy machine longer than everything else.
    """

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        super().__init__(target=run, name=name, daemon=True)
        # The attribute of the standard library, in 3.11 to 3.14. Elsewhere it would wait as usual.
        self._started = _Begun()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread's end, even if it has not begun."""
        until = None if timeout is None else time.monotonic() + timeout
        if self._started.wait(timeout):
            super().join(None if until is None else max(0.0, until - time.monotonic()))


class OnThread:
    """Handles an actor's messages on a thread of its own: all but those for coroutines, which the inbox gives to the loop."""

    __slots__ = ("_at", "_burst", "_cell", "_passed_on", "ident")

    def __init__(self, cell: ActorCell) -> None:
        self._cell = cell
        self.ident = 0
        self._burst: list[Message] = []
        """The messages that the thread has taken from the inbox, and, in `_at`, how far it is: the loop gets the rest if the thread
        does not come back."""
        self._at = -1
        self._passed_on: concurrent.futures.Future[None] | None = None
        """What the loop runs for the thread, which waits."""

    def start(self) -> None:
        """Start the thread; it constructs the actor."""
        thread = ActorThread(f"mesh-{self._cell.instance.name}", self._serve)
        self._cell.actor_host.threads.add(thread)
        thread.start()

    def _serve(self) -> None:
        self.ident = threading.get_ident()
        self._cell.inbox.worked_by(self.ident)
        try:
            self._cell.construct()
            if not self._cell.over:
                self._work()
        except BaseException as error:  # noqa: BLE001 - the guard: a dead thread is a failure
            self._died(error)

    def _work(self) -> None:
        inbox = self._cell.inbox
        burst = inbox.take(BURST)
        while burst:
            if not self._handle(burst):
                return
            # The last references must not outlive the handling: they hold buffers and unsent replies.
            burst.clear()
            self._cell.forget_skipped()
            burst = inbox.take(BURST)

    def _handle(self, burst: list[Message]) -> bool:
        """Handle messages; return false after the actor's last one."""
        cell = self._cell
        self._burst, self._at = burst, -1
        for index, message in enumerate(burst):
            if cell.errands:
                # Failures go ahead of messages.
                cell.run_errands()
            if cell.broken is None:
                self._at = index
            elif self._left_behind(index):
                return False
            spec = cell.table.get(message.name) or cell.unmarked(message)
            if spec is not None and not spec.is_async and not cell.skipped and cell.broken is None:
                self._run(message, spec)
            elif message.kind is _STOP_ACTOR:
                ending.stop_on_thread(cell, message, burst[index + 1 :])
                return False
            elif message.kind is _FAILURE:
                cell.run_errands()
            elif not cell.given_up(message) and not cell.refused(message, spec):
                assert spec is not None
                if spec.is_async:
                    self._pass_on(message, spec)
                else:
                    self._run(message, spec)
        return True

    def _run(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        cell = self._cell
        if message.left is not None and cell.too_late(message):
            return
        context.enter((cell.instance, message))
        args = None
        try:
            args, kwargs = message.load()
            if spec.respond is not None:
                cell.function(message, spec)(args, kwargs)
            elif cell.actor_host.process.around is None:
                message.reply(spec.function(cell.object, *args, **kwargs))
            else:
                message.reply(cell.function(message, spec)(cell.object, *args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - reported to the caller
            try:
                if args is None:
                    cell.unread(message, error)
                else:
                    cell.failed(message, error)
            except BaseException as worse:  # noqa: BLE001 - whatever it is, the thread goes on
                cell.escaped(message, worse)

    def _left_behind(self, index: int) -> bool:
        """Return, to the thread of an actor that has failed, whether the loop has gone on without it."""
        with self._cell.actor_host.failing:
            if self._cell.drains == LOOP:
                return True
            self._at = index
            return False

    def _pass_on(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        """Have the loop run a coroutine that the inbox did not know as one, and wait for it.

        It is a method that is no endpoint, or an endpoint that is answered in another way than usual. The inbox gives the next message of
        that name to the loop itself.
        """
        cell = self._cell
        cell.divide([message.name])
        work = cell.on_loop.run_for_thread(message, spec)
        self._passed_on = asyncio.run_coroutine_threadsafe(work, cell.loop)
        with contextlib.suppress(concurrent.futures.CancelledError):
            self._passed_on.result()
        self._passed_on = None

    def let_go(self) -> None:
        """Let the thread no longer wait for the loop, which has ended; called by that."""
        if (passed_on := self._passed_on) is not None:
            passed_on.cancel()

    def abandon(self) -> list[Message]:
        """Go on without the thread; return the messages that it took and has not begun."""
        with self._cell.actor_host.failing:
            self._cell.drains = LOOP
            return self._burst[self._at + 1 :]

    def _died(self, error: BaseException) -> None:
        cell = self._cell
        with cell.actor_host.failing:
            # The current message was most likely not answered; if it was, nobody waits for a second answer.
            held = self._burst[max(self._at, 0) : self._at + 1]
        for message in held:
            if message.call:
                cell.refuse(message, error)
        cell.fail(error)
        cell.actor_host.loop.call_soon_threadsafe(cell.on_loop.take_over)
