"""One actor in its process: its object, its queue, and the one who works through it.

An actor whose endpoints are all coroutines is worked for by the process's event loop. One with a sync endpoint has a
thread of its own. Where it has both, the inbox goes back and forth: whoever comes upon a message for the other hands
over the inbox with it, so that a run of calls of one kind is as fast as in an actor that has only that kind.

STG-1: an actor handles one message at a time, in the order of arrival; only ``concurrent`` endpoints overlap.
STG-2: every call gets exactly one reply, whatever its endpoint does.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import TYPE_CHECKING, Any

from mesh_core import _context
from mesh_core._context import Context, Instance
from mesh_core._endpoint import EndpointProperty
from mesh_core._errors import ActorTimeout, MeshError
from mesh_core._nearest import did_you_mean
from mesh_core._serialize import explain_load_failure

if TYPE_CHECKING:
    from mesh_core._native import Inbox, Message
    from mesh_core._stage import Stage

_BURST = 256
_GRACE_S = 0.1
"""A caller that waits keeps its deadline itself, and can say more about it; this process does where none waits."""
_EXPIRED = "the call's deadline has passed"

CallKey = tuple[tuple[int, int], int]
"""A call's caller and its number there."""


class Hosted:
    """One actor: its object, its queue, and the one who works through it."""

    __slots__ = (
        "_args",
        "_cls",
        "_handed_back",
        "_ident",
        "_kwargs",
        "_loops",
        "_runner",
        "_running",
        "_skipped",
        "_spawned",
        "_starting",
        "_thread",
        "broken",
        "gone",
        "inbox",
        "instance",
        "object",
        "stage",
        "table",
    )

    def __init__(
        self,
        stage: Stage,
        inbox: Inbox,
        instance: Instance,
        spawned: Message,
        *,
        cls: type | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        broken: BaseException | None = None,
    ) -> None:
        self.stage = stage
        self.inbox = inbox
        self.instance = instance
        self._cls = cls
        self._spawned: Message | None = spawned
        self._args = args
        self._kwargs = kwargs or {}
        self.object: Any = None
        self.broken = broken
        """Why there is no object."""
        self.table: dict[str, EndpointProperty[..., Any]] = stage.table(cls) if cls is not None else {}
        self.gone: asyncio.Future[None] | None = None
        """Done when the actor has ended; made when somebody waits for that."""
        self._runner: asyncio.Task[None] | None = None
        self._running: dict[CallKey, asyncio.Task[Any]] = {}
        self._skipped: set[CallKey] = set()
        self._starting: set[Message] = set()
        self._ident = 0
        self._thread = any(not spec.is_async for spec in self.table.values())
        self._loops = not self._thread
        """Whether the loop takes from the inbox just now, rather than the actor's thread."""
        self._handed_back: queue.SimpleQueue[list[Message]] = queue.SimpleQueue()

    def start(self) -> None:
        """Construct the object and begin to work."""
        if self._thread:
            name = f"mesh-{self.instance.name}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self.stage.threads.add(thread)
            thread.start()
        else:
            self._construct()
            self.inbox.attach(self.stage.waker, self.instance.actor_id)

    def _construct(self) -> None:
        spawned, self._spawned = self._spawned, None
        assert spawned is not None
        if self.broken is None:
            _context.enter(Context(self.instance, None))
            try:
                assert self._cls is not None
                self.object = self._cls(*self._args, **self._kwargs)
            except BaseException as error:  # noqa: BLE001 - it is the spawner's to hear
                self.broken = error
        self._args, self._kwargs = (), {}
        if self.broken is None:
            spawned.reply(None)
        else:
            self.stage.reply_error(spawned, self.broken, self.instance.name, dead=True)

    # On a thread of its own.

    def _serve(self) -> None:
        self._ident = threading.get_ident()
        self._construct()
        burst = self.inbox.take(_BURST)
        while burst:
            left = self._handle_all(burst)
            if left is None:
                return
            if left:
                burst = self._lend(left)
                continue
            # The last references must not outlive the handling: they hold buffers, and replies not given.
            burst.clear()
            self._forget_skipped()
            burst = self.inbox.take(_BURST)

    def _handle_all(self, burst: list[Message]) -> list[Message] | None:
        """Handle messages up to the first that is the loop's; what is left is returned, ``None`` after the last."""
        for index, message in enumerate(burst):
            spec = self.table.get(message.name)
            if spec is not None and not spec.is_async and not self._skipped and self.broken is None:
                self._run(message, spec)
            elif message.kind == "stop_actor":
                self._stop_thread(message)
                return None
            elif not self._given_up(message) and not self._refused(message, spec):
                assert spec is not None
                if spec.is_async:
                    return burst[index:]
                self._run(message, spec)
        return []

    def _run(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        if message.left is not None and self._too_late(message):
            return
        _context.enter(Context(self.instance, message))
        args = None
        try:
            args, kwargs = message.load()
            message.reply(spec.function(self.object, *args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - it is the caller's to hear
            self._failed(message, error if args is not None else _unreadable(error))

    def _lend(self, messages: list[Message]) -> list[Message]:
        """Leave the inbox to the loop until it comes upon a message for this thread; returns from that one on."""
        self.stage.loop.call_soon_threadsafe(self._borrow, messages)
        return self._handed_back.get()

    def _stop_thread(self, message: Message) -> None:
        cleanup = getattr(self.object, "__cleanup__", None)
        try:
            if cleanup is not None:
                done = cleanup(None)
                if asyncio.iscoroutine(done):
                    asyncio.run_coroutine_threadsafe(done, self.stage.loop).result()
            error = None
        except BaseException as failed:  # noqa: BLE001 - it is the stopper's to hear
            error = failed
        self._ended(message, error)

    # On the loop.

    def pump(self) -> None:
        """Messages have come for an actor whose inbox is the loop's."""
        if self._runner is None and self._loops:
            self._runner = self.stage.loop.create_task(self._work([]))

    def _borrow(self, messages: list[Message]) -> None:
        """Take the inbox over from the actor's thread, with what that had taken from it already."""
        self._loops = True
        self.inbox.attach(self.stage.waker, self.instance.actor_id)
        # Of its own: the thread must not hold on to messages, and the buffers in them, while it waits.
        mine = messages.copy()
        messages.clear()
        self._runner = self.stage.loop.create_task(self._work(mine))

    def _hand_back(self, messages: list[Message]) -> None:
        self._loops = False
        self._runner = None
        self.inbox.detach()
        self._handed_back.put(messages)

    def release(self) -> None:
        """The loop ends: let the actor's thread go, should it wait to get its inbox back."""
        if self._thread:
            self._handed_back.put([])

    async def _work(self, burst: list[Message]) -> None:
        while burst or (burst := self.inbox.take_nowait(_BURST)):
            for index, message in enumerate(burst):
                spec = self.table.get(message.name)
                if self._thread and (spec is None or not spec.is_async):
                    self._hand_back(burst[index:])
                    return
                if message.kind == "stop_actor":
                    await self._stop_async(message)
                    return
                if self._given_up(message) or self._refused(message, spec):
                    continue
                assert spec is not None
                if spec.concurrent:
                    self._starting.add(message)
                    self.stage.keep(self.stage.loop.create_task(self._run_async(message, spec)))
                else:
                    await self._run_async(message, spec)
            burst = []
            del message
            self._forget_skipped()
        # Nothing was awaited since the queue was seen empty: a message that comes now starts another runner.
        self._runner = None

    async def _run_async(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        self._starting.discard(message)
        if self._given_up(message):
            # Between whoever took the message and its turn on the loop.
            return
        key = (message.src, message.call)
        task = asyncio.current_task()
        assert task is not None
        limit = None
        if (left := message.left) is not None:
            if self._too_late(message):
                return
            limit = self.stage.loop.call_later(left + _GRACE_S, task.cancel, _EXPIRED)
        _context.enter(Context(self.instance, message))
        if message.call:
            self._running[key] = task
        args = None
        try:
            args, kwargs = message.load()
            message.reply(await spec.function(self.object, *args, **kwargs))
        except asyncio.CancelledError as error:
            self._failed(message, _expired(message) if _EXPIRED in error.args else error)
            # The call was cancelled, not the actor: its runner goes on with the next message.
            if task.cancelling():
                task.uncancel()
        except BaseException as error:  # noqa: BLE001 - it is the caller's to hear
            self._failed(message, error if args is not None else _unreadable(error))
        finally:
            if limit is not None:
                limit.cancel()
            self._running.pop(key, None)

    async def _stop_async(self, message: Message) -> None:
        cleanup = getattr(self.object, "__cleanup__", None)
        try:
            if cleanup is not None:
                done = cleanup(None)
                if asyncio.iscoroutine(done):
                    await done
            error = None
        except BaseException as failed:  # noqa: BLE001 - it is the stopper's to hear
            error = failed
        self._ended(message, error)

    # Both.

    def cancel(self, key: CallKey) -> None:
        """A caller has given up: cancel the coroutine that works for it, or skip its message when it comes up."""
        running = self._running.get(key)
        if running is not None:
            running.cancel()
        else:
            self._skipped.add(key)

    def _too_late(self, message: Message) -> bool:
        """Answer a message whose deadline has passed; whoever called has given up."""
        self.stage.process.deadlines = True
        if (message.left or 0.0) > 0:
            return False
        self._failed(message, _expired(message))
        return True

    def is_thread(self, ident: int) -> bool:
        """Whether this is the actor's own thread, which handles a message whenever it runs anything."""
        return self._thread and self._ident == ident

    def is_handled_by(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether this is the task in which the actor handles one message after the other."""
        return task is not None and self._runner is task

    def needs_loop(self, endpoint: str) -> bool:
        """Whether the process's loop has to run for that endpoint to be called."""
        spec = self.table.get(endpoint)
        return self._loops or (spec is not None and spec.is_async)

    def _given_up(self, message: Message) -> bool:
        if self._skipped:
            key = (message.src, message.call)
            if key in self._skipped:
                self._skipped.discard(key)
                return True
        return False

    def _forget_skipped(self) -> None:
        # With the queue empty and everything begun, what is left was for calls that were over already.
        if self._skipped and len(self.inbox) == 0 and not self._starting:
            self._skipped.clear()

    def _refused(self, message: Message, spec: EndpointProperty[..., Any] | None) -> bool:
        if self.broken is not None:
            self.stage.reply_error(message, self.broken, self.instance.name, dead=True)
            return True
        if spec is None:
            missing = AttributeError(
                f"{self.instance.class_name} has no endpoint {message.name!r}{did_you_mean(message.name, self.table)}; "
                "the caller and this process have different versions of the class"
            )
            self._failed(message, missing)
            return True
        return False

    def _failed(self, message: Message, error: BaseException) -> None:
        self.stage.reply_error(message, error, self.instance.name)

    def _ended(self, message: Message, error: BaseException | None) -> None:
        self.object = None
        self.stage.process.runtime.close_inbox(self.instance.actor_id)
        if error is not None:
            self.stage.reply_error(message, error, self.instance.name)
        elif message.call:
            message.reply(None)
        self.stage.loop.call_soon_threadsafe(self.stage.forget, self)


def _expired(message: Message) -> ActorTimeout:
    return ActorTimeout(
        f"the deadline of {message.name} passed before it had returned; it was not run to its end"
    )


def _unreadable(error: BaseException) -> BaseException:
    """What the caller hears of arguments that could not be rebuilt here."""
    if isinstance(error, (MemoryError, MeshError)) or not isinstance(error, Exception):
        return error
    explained = explain_load_failure(error)
    explained.__cause__ = error
    return explained
