"""An actor's own thread, which runs its plain functions."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any, Final

from mesh_core._common import context
from mesh_core._common.codes import MessageKind
from mesh_core._common.context import Context
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


class OnThread:
    """Drains an actor's inbox on a thread of its own, while there are plain functions to call."""

    __slots__ = ("_at", "_burst", "_cell", "_handed_back", "ident")

    def __init__(self, cell: ActorCell) -> None:
        self._cell = cell
        self.ident = 0
        self._burst: list[Message] = []
        """The messages that the thread has taken from the inbox, and, in `_at`, how far it is: the loop gets the rest if the thread
        does not come back."""
        self._at = -1
        self._handed_back: queue.SimpleQueue[list[Message]] = queue.SimpleQueue()

    def start(self) -> None:
        """Start the thread."""
        name = f"mesh-{self._cell.instance.name}"
        thread = threading.Thread(target=self._serve, name=name, daemon=True)
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
            left = self._handle(burst)
            if left is None:
                return
            # The last references must not outlive the handling: they hold buffers and unsent replies.
            burst.clear()
            if left:
                burst = self._lend(left)
                continue
            self._cell.forget_skipped()
            burst = inbox.take(BURST)

    def _handle(self, burst: list[Message]) -> list[Message] | None:
        """Handle messages up to the first one for the loop; return the rest, or ``None`` after the actor's last message."""
        cell = self._cell
        self._burst, self._at = burst, -1
        for index, message in enumerate(burst):
            if cell.errands:
                # Failures go ahead of messages.
                cell.run_errands()
            if cell.broken is None:
                self._at = index
            elif self._left_behind(index):
                return None
            spec = cell.table.get(message.name) or cell.unmarked(message)
            if spec is not None and not spec.is_async and not cell.skipped and cell.broken is None:
                self._run(message, spec)
            elif message.kind is _STOP_ACTOR:
                ending.stop_on_thread(cell, message, burst[index + 1 :])
                return None
            elif message.kind is _FAILURE:
                cell.run_errands()
            elif not cell.given_up(message) and not cell.refused(message, spec):
                assert spec is not None
                if spec.is_async:
                    return burst[index:]
                self._run(message, spec)
        return []

    def _run(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        cell = self._cell
        if message.left is not None and cell.too_late(message):
            return
        context.enter(Context(cell.instance, message))
        args = None
        try:
            args, kwargs = message.load()
            function = cell.function(message, spec)
            if spec.respond is None:
                message.reply(function(cell.object, *args, **kwargs))
            else:
                function(args, kwargs)
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

    def _lend(self, messages: list[Message]) -> list[Message]:
        """Leave the inbox to the loop until it finds a message for this thread; return the messages from that one on."""
        self._cell.actor_host.loop.call_soon_threadsafe(self._cell.on_loop.borrow, messages)
        return self._handed_back.get()

    def hand_back(self, messages: list[Message]) -> None:
        """Give the inbox back to the thread, which waits for it; called on the loop."""
        self._handed_back.put(messages)

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
