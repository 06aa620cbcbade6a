"""The event loop's work for one actor: running its coroutines."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from mesh_core._common import context
from mesh_core._common.codes import MessageKind
from mesh_core._common.errors import MeshError
from mesh_core._hosting import ending
from mesh_core._hosting.cell_state import LOOP, WORKING

if TYPE_CHECKING:
    from mesh_core._actors.endpoint import EndpointProperty
    from mesh_core._hosting.actor_cell import ActorCell, CallKey
    from mesh_core._native import Message

# Constants, because they are compared for each message and looking up an enum member takes time.
_STOP_ACTOR: Final = MessageKind.STOP_ACTOR
_FAILURE: Final = MessageKind.FAILURE

_BURST = 256
_SHARE_S = 0.001
"""How long an actor with a backlog keeps the loop from the others, or as long as one endpoint takes between two awaits."""
_STARTS = 16
"""How many concurrent endpoints an actor begins before other actors get their turn."""
_GRACE_S = 0.1
"""A caller that waits keeps its deadline itself, and can report more; this process does so, this much later, if none waits."""
_EXPIRED = "the call's deadline has passed"


class OnLoop:
    """Handles an actor's messages on its event loop: all of them or, if the actor has a thread, those for coroutines."""

    __slots__ = ("_cell", "_quiet", "runner", "running", "starting")

    def __init__(self, cell: ActorCell) -> None:
        self._cell = cell
        self.runner: asyncio.Task[None] | None = None
        """The task that handles messages one after the other, while there are any."""
        self.running: dict[CallKey, tuple[asyncio.Task[Any], Message]] = {}
        self.starting: set[Message] = set()
        """The messages of concurrent endpoints whose tasks have not begun."""
        self._quiet: asyncio.Future[None] | None = None

    def pump(self) -> None:
        """Handle messages that arrived."""
        if self.runner is None:
            self.runner = self._cell.loop.create_task(self._work([]))

    async def run_for_thread(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        """Run a coroutine for the actor's thread, which waits until it has ended or, if it is concurrent, begins."""
        cell = self._cell
        if spec.concurrent:
            self.starting.add(message)
            cell.loop.keep(cell.loop.create_task(self._run(message, spec)))
            return
        self.runner = asyncio.current_task()
        await self._run(message, spec)
        self.runner = None
        # What arrived meanwhile found a runner.
        self.pump()

    def take_over(self) -> None:
        """Take the inbox over from a thread that died or does not come back."""
        cell = self._cell
        assert cell.on_thread is not None
        left = cell.on_thread.abandon()
        if cell.over:
            return
        cell.inbox.leave_to_loop()
        cell.inbox.attach(cell.loop.waker, cell.instance.actor_id)
        if self.runner is None:
            self.runner = cell.loop.create_task(self._work(left))

    async def _work(self, burst: list[Message]) -> None:
        cell = self._cell
        until = time.monotonic() + _SHARE_S
        starts = 0
        # In turns with a thread, one at a time: a failure, which is the thread's, goes ahead of those that wait.
        while burst or (burst := cell.inbox.take_nowait(_BURST if cell.drains == LOOP else 1)):
            for index, message in enumerate(burst):
                if time.monotonic() > until or starts == _STARTS:
                    await asyncio.sleep(0)
                    until, starts = time.monotonic() + _SHARE_S, 0
                if cell.errands and cell.drains == LOOP:
                    # Failures go ahead of messages.
                    cell.run_errands()
                spec = cell.table.get(message.name) or cell.unmarked(message)
                if spec is None:  # as of a message that is no call
                    if message.kind is _STOP_ACTOR:
                        await ending.stop_on_loop(cell, message, burst[index + 1 :])
                        return
                    if message.kind is _FAILURE:
                        cell.run_errands()
                        continue
                if cell.loop.held is not None:
                    await cell.loop.room()
                if cell.skipped and cell.given_up(message):
                    continue
                if spec is None or cell.broken is not None:
                    cell.refused(message, spec)
                    continue
                if spec.concurrent:
                    starts += 1
                    self.starting.add(message)
                    cell.loop.keep(cell.loop.create_task(self._run(message, spec)))
                else:
                    await self._run(message, spec)
            burst = []
            del message
            cell.forget_skipped()
        # Nothing was awaited since the queue was found empty: a message that arrives now starts another runner.
        self.runner = None

    async def _run(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        cell = self._cell
        # A broadcast has no number, and nobody can cancel it, but the actor's end interrupts it too.
        key = (message.src, message.call or -id(message))
        # Without the loop it would ask for the process's number each time.
        task = asyncio.current_task(cell.loop)
        assert task is not None
        limit = None
        try:
            self.starting.discard(message)
            if cell.phase > WORKING:
                # It was cancelled after it was taken from the inbox and before its task ran.
                cell.stopped(message)
                return
            if cell.skipped and cell.given_up(message):
                return
            if (left := message.left) is not None:
                if cell.too_late(message):
                    return
                limit = cell.loop.call_later(left + _GRACE_S, task.cancel, _EXPIRED)
            context.enter((cell.instance, message))
            self.running[key] = task, message
            await self._perform(message, spec)
        except asyncio.CancelledError as error:
            self._cut_short(message, error)
            # The call was cancelled, not the actor: the runner goes on with the next message.
            if task.cancelling():
                task.uncancel()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the runner goes on
            cell.escaped(message, error)
        finally:
            if limit is not None:
                limit.cancel()
            self.running.pop(key, None)
            if self._quiet is not None:
                self._look_quiet()

    async def _perform(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        cell = self._cell
        args = None
        try:
            try:
                args, kwargs = message.load()
            except MeshError as error:
                args, kwargs = await _later(message, error)
            if type(args) is not tuple:
                args, kwargs = await args  # they contain references to values on another host
            function = cell.function(message, spec)
            if spec.respond is None:
                held = message.reply(await function(cell.object, *args, **kwargs))
                if held is not None:
                    cell.loop.held = held
            else:
                await function(args, kwargs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - reported to the caller
            if args is None:
                cell.unread(message, error)
            else:
                cell.failed(message, error)

    def _cut_short(self, message: Message, error: asyncio.CancelledError) -> None:
        from mesh_core._futures.deadlines import expired

        if self._cell.ending:
            self._cell.stopped(message)
        elif _EXPIRED in error.args:
            self._cell.refuse(message, expired(message))
        elif message.call:
            self._cell.refuse(message, error)
        else:
            self._cell.failed(message, error)

    # At the actor's end.

    @property
    def busy(self) -> bool:
        """Whether an endpoint runs or is about to."""
        return bool(self.running or self.starting)

    async def interrupt(self, limit: float) -> bool:
        """Cancel the endpoints that run and wait for them to end; return false if one does not end within the limit."""
        for task, _ in list(self.running.values()):
            task.cancel()
        if not self.busy:
            return True
        self._quiet = self._cell.loop.create_future()
        done, _ = await asyncio.wait([self._quiet], timeout=limit)
        self._quiet = None
        return bool(done)

    def _look_quiet(self) -> None:
        if self._quiet is not None and not self._quiet.done() and not self.busy:
            self._quiet.set_result(None)


async def _later(message: Message, error: MeshError) -> tuple[Any, Any]:
    """Read a message again once what it contains has arrived; raise ``error`` if it does not wait for anything."""
    from mesh_core._meshes.refs import arrive
    from mesh_core._serialize.late import load_again

    arguments = await load_again(message, error)
    return arrive(arguments) if message.has_refs else arguments
