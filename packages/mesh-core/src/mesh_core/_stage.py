"""Where a process's actors live: their threads, its event loop, and the handling of messages.

- The loop's thread (a worker's main thread) takes what is for the process itself (spawns, stops, cancellations) and
  runs async actors.
- An actor with sync endpoints has a thread of its own, which waits for its inbox directly.

STG-1: an actor handles one message at a time, in the order of arrival; only ``concurrent`` endpoints overlap.
STG-2: every call gets exactly one reply, whatever its endpoint does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mesh_core import _context, _logging
from mesh_core._context import Context, Instance, parse_shape
from mesh_core._endpoint import EndpointProperty, table_of
from mesh_core._errors import MeshError
from mesh_core._loop import ActorSelector
from mesh_core._native import Point, Waker
from mesh_core._nearest import did_you_mean
from mesh_core._serialize import explain_load_failure, loads

if TYPE_CHECKING:
    from mesh_core._native import Inbox, Message
    from mesh_core._process import Process

_BURST = 256
_SYSTEM = 0

_CallKey = tuple[tuple[int, int], int]


class Stage:
    """The actors of one process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.actors: dict[int, Hosted] = {}
        self._classes: dict[bytes, type] = {}
        self.waker = Waker()
        self._system = process.runtime.system_inbox()
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop(
            ActorSelector(process.runtime, self.waker)
        )
        self._exit_code = 0
        _logging.set_up(process.settings.log_level, process.identity.proc_id)
        self._tables: weakref.WeakKeyDictionary[type, dict[str, EndpointProperty[..., Any]]] = (
            weakref.WeakKeyDictionary()
        )
        # The loop itself keeps only weak references to tasks.
        self._tasks: set[asyncio.Task[Any]] = set()
        self._thread: threading.Thread | None = None
        self.threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        """Those of actors with sync endpoints."""

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Hold a task until it is done."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def table(self, cls: type) -> dict[str, EndpointProperty[..., Any]]:
        """An actor class's endpoints; one table for all its actors."""
        found = self._tables.get(cls)
        if found is None:
            found = self._tables[cls] = table_of(cls)
        return found

    # Running.

    def start_thread(self) -> None:
        """Run the loop in a thread of its own: this process's main thread belongs to a script."""
        self._thread = threading.Thread(target=self.run, name="mesh-actors", daemon=True)
        self._thread.start()

    def end_thread(self, limit: float) -> None:
        """End the thread that :meth:`start_thread` started, and wait for the actors', once the runtime is closed."""
        if self._thread is None:
            return
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self.loop.call_soon_threadsafe(self.loop.stop)
        until = time.monotonic() + limit
        me = threading.current_thread()
        if self._thread is not me:
            # First, as it starts the others.
            self._thread.join(limit)
        for thread in list(self.threads):
            if thread is not me:
                thread.join(max(0.0, until - time.monotonic()))

    def run(self) -> int:
        """Serve until the process is told to stop; returns its exit status."""
        asyncio.set_event_loop(self.loop)
        self.loop.add_reader(self.waker.fileno(), self._on_ready)
        self._system.attach(self.waker, _SYSTEM)
        with self._signals():
            self.loop.run_forever()
        self._end()
        return self._exit_code

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Have signals wake the loop, which does not sleep where the interpreter could see them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        here, there = socket.socketpair()
        with here, there:
            here.setblocking(False)
            there.setblocking(False)
            self.loop.add_reader(here, here.recv, 4096)
            before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
            try:
                yield
            finally:
                signal.set_wakeup_fd(before)
                self.loop.remove_reader(here)

    def _end(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        with contextlib.suppress(Exception):
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def _on_ready(self) -> None:
        for token in self.waker.drain():
            if token == _SYSTEM:
                for message in self._system.take_nowait(1_000_000):
                    self._on_system(message)
            else:
                actor = self.actors.get(token)
                if actor is not None:
                    actor.pump()

    def _on_system(self, message: Message) -> None:
        kind = message.kind
        if self._exit_code:
            # The bootstrap has failed, the process is about to end: nothing starts in it any more.
            return
        if kind == "spawn":
            self._spawn(message)
        elif kind == "cancel":
            actor = self.actors.get(message.actor)
            if actor is not None:
                actor.cancel((message.src, message.call))
        elif kind == "stop_proc":
            self.keep(self.loop.create_task(self._stop()))

    # Spawning.

    def _spawn(self, message: Message) -> None:
        if message.name == "@bootstrap":
            self._bootstrap(message)
            return
        me = self.process.identity
        extent = parse_shape(message.shape)
        name = message.name
        instance = Instance(
            actor_id=message.actor,
            proc_id=me.proc_id,
            rank=Point(message.index, extent),
            name=name,
            class_name="?",
        )
        inbox = self.process.runtime.inbox(message.actor)
        if inbox is None:
            return
        try:
            try:
                blob, _mesh_name, _host, args, kwargs = message.load()
                cls = self._class(blob)
            except MeshError:
                raise
            except Exception as error:
                raise explain_load_failure(error) from error
            instance.class_name = cls.__qualname__
            hosted = Hosted(self, inbox, instance, message, cls=cls, args=args, kwargs=kwargs)
        except Exception as error:  # noqa: BLE001 - it is the spawner's to hear
            hosted = Hosted(self, inbox, instance, message, broken=error)
        self.actors[message.actor] = hosted
        hosted.start()

    def _class(self, blob: bytes) -> type:
        cls = self._classes.get(blob)
        if cls is None:
            loaded = loads(blob)
            assert isinstance(loaded, type)
            cls = self._classes[blob] = loaded
        return cls

    def _bootstrap(self, message: Message) -> None:
        try:
            message.load()()
        except BaseException as error:  # noqa: BLE001 - reported, then the process ends
            self.reply_error(message, error, self.process.identity.mesh_name)
            self._exit_code = 1
            self.loop.stop()
        else:
            message.reply(None)
        self.process.runtime.close_inbox(message.actor)

    # Stopping.

    async def _stop(self) -> None:
        actors = list(self.actors.values())
        for actor in actors:
            actor.gone = self.loop.create_future()
            # Behind what waits already.
            actor.inbox.finish()
        for actor in actors:
            assert actor.gone is not None
            await actor.gone
        self.loop.stop()

    def forget(self, actor: Hosted) -> None:
        """An actor has ended."""
        self.actors.pop(actor.instance.actor_id, None)
        if actor.gone is not None and not actor.gone.done():
            actor.gone.set_result(None)

    # Replies.

    def reply_error(self, message: Message, error: BaseException, name: str, *, dead: bool = False) -> None:
        """Tell the caller what went wrong; where nobody waits, the log."""
        me = self.process.identity
        if message.call == 0:
            import logging
            import traceback

            text = "".join(traceback.format_exception(error))
            logging.getLogger("mesh").error(
                "actor %r on %s (pid %d) raised in %s, which nobody waits for:\n%s",
                name,
                me.proc_id,
                os.getpid(),
                message.name,
                text,
            )
            return
        from mesh_core._exceptions import encode_exception

        data, buffers = encode_exception(error, actor=name, rank=me.rank, host=me.host, pid=os.getpid())
        message.reply_error(data, buffers, dead=dead)


class Hosted:
    """One actor: its object, its queue, and the one who works through it."""

    __slots__ = (
        "_args",
        "_cls",
        "_kwargs",
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
        self._running: dict[_CallKey, asyncio.Task[Any]] = {}
        self._skipped: set[_CallKey] = set()
        self._starting: set[Message] = set()
        self._thread = any(not spec.is_async for spec in self.table.values())

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
        self._construct()
        take = self.inbox.take
        while burst := take(_BURST):
            for message in burst:
                if not self._handle(message):
                    return
            # The last references must not outlive the handling: they hold buffers, and replies not given.
            del burst, message
            self._forget_skipped()

    def _handle(self, message: Message) -> bool:
        """Handle one message; false if it was the last."""
        spec = self.table.get(message.name)
        if spec is None or spec.is_async or self._skipped or self.object is None:
            return self._handle_special(message, spec)
        self._run(message, spec)
        return True

    def _run(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        _context.enter(Context(self.instance, message))
        args = None
        try:
            args, kwargs = message.load()
            message.reply(spec.function(self.object, *args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - it is the caller's to hear
            self._failed(message, error if args is not None else _unreadable(error))

    def _handle_special(self, message: Message, spec: EndpointProperty[..., Any] | None) -> bool:
        if message.kind == "stop_actor":
            self._stop_thread(message)
            return False
        if self._given_up(message) or self._refused(message, spec):
            return True
        assert spec is not None
        if spec.is_async:
            self._starting.add(message)
            started = asyncio.run_coroutine_threadsafe(self._run_async(message, spec), self.stage.loop)
            if not spec.concurrent:
                # What it raised is its caller's by now; here it only has to be over.
                started.exception()
        else:
            self._run(message, spec)
        return True

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
        """Messages have come for an actor that the loop works for."""
        if self._runner is None:
            self._runner = self.stage.loop.create_task(self._work())

    async def _work(self) -> None:
        while burst := self.inbox.take_nowait(_BURST):
            for message in burst:
                spec = self.table.get(message.name)
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
            del burst, message
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
        _context.enter(Context(self.instance, message))
        if message.call:
            self._running[key] = task
        args = None
        try:
            args, kwargs = message.load()
            message.reply(await spec.function(self.object, *args, **kwargs))
        except asyncio.CancelledError as error:
            self._failed(message, error)
            # The call was cancelled, not the actor: its runner goes on with the next message.
            if task.cancelling():
                task.uncancel()
        except BaseException as error:  # noqa: BLE001 - it is the caller's to hear
            self._failed(message, error if args is not None else _unreadable(error))
        finally:
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

    def cancel(self, key: _CallKey) -> None:
        """A caller has given up: cancel the coroutine that works for it, or skip its message when it comes up."""
        running = self._running.get(key)
        if running is not None:
            running.cancel()
        else:
            self._skipped.add(key)

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


def _unreadable(error: BaseException) -> BaseException:
    """What the caller hears of arguments that could not be rebuilt here."""
    if isinstance(error, (MemoryError, MeshError)) or not isinstance(error, Exception):
        return error
    explained = explain_load_failure(error)
    explained.__cause__ = error
    return explained
