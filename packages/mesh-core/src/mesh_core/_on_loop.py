"""The event loop's work for one actor: its coroutines."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final

from mesh_core import _context, _ending
from mesh_core._codes import MessageKind
from mesh_core._context import Context
from mesh_core._errors import MeshError

if TYPE_CHECKING:
    from mesh_core._endpoint import EndpointProperty
    from mesh_core._hosted import CallKey, Hosted
    from mesh_core._native import Message

# Looked at for each message: a class of enums takes its time to find a member.
_STOP_ACTOR: Final = MessageKind.STOP_ACTOR
_FAILURE: Final = MessageKind.FAILURE

_BURST = 256
_SHARE_S = 0.001
"""So long an actor with a backlog keeps the loop from the others, or as long as one endpoint takes between two awaits."""
_STARTS = 16
"""So many concurrent endpoints an actor begins before others have their turn."""
_GRACE_S = 0.1
"""A caller that waits keeps its deadline itself, and can say more about it; this process does where none waits."""
_EXPIRED = "the call's deadline has passed"


class OnLoop:
    """Works through an actor's inbox on the process's event loop, as far as there are coroutines to be run."""

    __slots__ = ("_hosted", "_quiet", "runner", "running", "starting")

    def __init__(self, hosted: Hosted) -> None:
        self._hosted = hosted
        self.runner: asyncio.Task[None] | None = None
        """The task that handles one message after the other, while there are any."""
        self.running: dict[CallKey, tuple[asyncio.Task[Any], Message]] = {}
        self.starting: set[Message] = set()
        """Those of concurrent endpoints whose tasks have not begun."""
        self._quiet: asyncio.Future[None] | None = None

    def pump(self) -> None:
        """Messages have come for an actor whose inbox is the loop's."""
        if self.runner is None and self._hosted.loop_takes:
            self.runner = self._hosted.stage.loop.create_task(self._work([]))

    def borrow(self, messages: list[Message]) -> None:
        """Take the inbox over from the actor's thread, with what that had taken from it already."""
        hosted = self._hosted
        hosted.loop_takes = True
        hosted.inbox.attach(hosted.stage.waker, hosted.instance.actor_id)
        # Of its own: the thread must not hold on to messages, and the buffers in them, while it waits.
        mine = messages.copy()
        messages.clear()
        self.runner = hosted.stage.loop.create_task(self._work(mine))

    def take_over(self) -> None:
        """Take the inbox over from a thread that has died, or does not come back."""
        hosted = self._hosted
        assert hosted.on_thread is not None
        left = hosted.on_thread.abandon()
        if hosted.over:
            return
        hosted.inbox.attach(hosted.stage.waker, hosted.instance.actor_id)
        if self.runner is None:
            self.runner = hosted.stage.loop.create_task(self._work(left))

    def _hand_back(self, messages: list[Message]) -> None:
        hosted = self._hosted
        assert hosted.on_thread is not None
        hosted.loop_takes = False
        self.runner = None
        hosted.inbox.detach()
        hosted.on_thread.hand_back(messages)

    async def _work(self, burst: list[Message]) -> None:
        hosted = self._hosted
        until = time.monotonic() + _SHARE_S
        starts = 0
        while burst or (burst := hosted.inbox.take_nowait(_BURST)):
            for index, message in enumerate(burst):
                if time.monotonic() > until or starts == _STARTS:
                    await asyncio.sleep(0)
                    until, starts = time.monotonic() + _SHARE_S, 0
                thread = hosted.on_thread
                away = thread is None or thread.abandoned
                if hosted.errands and away:
                    # Failures go ahead of messages.
                    hosted.run_errands()
                spec = hosted.table.get(message.name) or hosted.unmarked(message)
                if not away and (hosted.errands or spec is None or not spec.is_async):
                    self._hand_back(burst[index:])
                    return
                if message.kind is _STOP_ACTOR:
                    await _ending.stop_on_loop(hosted, message, burst[index + 1 :])
                    return
                if message.kind is _FAILURE:
                    hosted.run_errands()
                    continue
                if hosted.stage.held is not None:
                    await hosted.stage.room()
                if hosted.given_up(message) or hosted.refused(message, spec):
                    continue
                assert spec is not None
                if spec.concurrent:
                    starts += 1
                    self.starting.add(message)
                    hosted.stage.keep(hosted.stage.loop.create_task(self._run(message, spec)))
                else:
                    await self._run(message, spec)
            burst = []
            del message
            hosted.forget_skipped()
        # Nothing was awaited since the queue was seen empty: a message that comes now starts another runner.
        self.runner = None

    async def _run(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        hosted = self._hosted
        # A broadcast has no number, and nobody who could cancel it; but the actor's end cuts it short too.
        key = (message.src, message.call or -id(message))
        task = asyncio.current_task()
        assert task is not None
        limit = None
        try:
            self.starting.discard(message)
            if hosted.ending:
                # Between whoever took the message and its turn on the loop.
                hosted.stopped(message)
                return
            if hosted.given_up(message):
                return
            if (left := message.left) is not None:
                if hosted.too_late(message):
                    return
                limit = hosted.stage.loop.call_later(left + _GRACE_S, task.cancel, _EXPIRED)
            _context.enter(Context(hosted.instance, message))
            self.running[key] = task, message
            await self._perform(message, spec)
        except asyncio.CancelledError as error:
            self._cut_short(message, error)
            # The call was cancelled, not the actor: its runner goes on with the next message.
            if task.cancelling():
                task.uncancel()
        except BaseException as error:  # noqa: BLE001 - whatever it is, the runner goes on
            hosted.escaped(message, error)
        finally:
            if limit is not None:
                limit.cancel()
            self.running.pop(key, None)
            if self._quiet is not None:
                self._look_quiet()

    async def _perform(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        hosted = self._hosted
        args = None
        try:
            try:
                args, kwargs = message.load()
            except MeshError as error:
                args, kwargs = await _later(message, error)
            if type(args) is not tuple:
                args, kwargs = await args  # there are references in it to what another host has
            function = hosted.function(message, spec)
            if spec.respond is None:
                held = message.reply(await function(hosted.object, *args, **kwargs))
                if held is not None:
                    hosted.stage.held = held
            else:
                await function(args, kwargs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - it is the caller's to hear
            if args is None:
                hosted.unread(message, error)
            else:
                hosted.failed(message, error)

    def _cut_short(self, message: Message, error: asyncio.CancelledError) -> None:
        from mesh_core._hosted import expired

        if self._hosted.ending:
            self._hosted.stopped(message)
        elif _EXPIRED in error.args:
            self._hosted.refuse(message, expired(message))
        elif message.call:
            self._hosted.refuse(message, error)
        else:
            self._hosted.failed(message, error)

    # At the actor's end.

    @property
    def busy(self) -> bool:
        """Whether an endpoint runs, or is about to."""
        return bool(self.running or self.starting)

    async def interrupt(self, limit: float) -> bool:
        """Cancel the endpoints that run, and wait for their ends; false if one does not end within the limit."""
        for task, _ in list(self.running.values()):
            task.cancel()
        if not self.busy:
            return True
        self._quiet = self._hosted.stage.loop.create_future()
        done, _ = await asyncio.wait([self._quiet], timeout=limit)
        self._quiet = None
        return bool(done)

    def _look_quiet(self) -> None:
        if self._quiet is not None and not self._quiet.done() and not self.busy:
            self._quiet.set_result(None)


async def _later(message: Message, error: MeshError) -> tuple[Any, Any]:
    """Read a message again once what is in it has come; raises what it has raised if it does not wait for anything."""
    from mesh_core._refs import arrive
    from mesh_core._serialize import loads
    from mesh_core.extensions._late import arrival_of

    while True:
        arrival = arrival_of(error)
        if arrival is None:
            raise error
        data, buffers = error._loaded_from or (message.raw()[0], [])
        await arrival
        try:
            arguments = loads(data, buffers)
        except MeshError as again:
            error = again
            continue
        return arrive(arguments) if message.has_refs else arguments
