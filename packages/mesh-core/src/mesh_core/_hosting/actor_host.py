"""Where a process's actors live, with the process's own event loop.

The loop's thread (a worker's main thread) takes messages for the process itself (spawns, stops, cancellations). Coroutine actors
have loops of their own (``_hosting.actor_loops``); it runs the coroutines of those that have plain functions too. ``_hosting.actor_cell`` has what one actor does with its messages.

STG-3: whatever a message raises here, it is answered, and those behind it are handled.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mesh_core._common import context
from mesh_core._common.bypass import find_bypass
from mesh_core._common.codes import MessageKind
from mesh_core._common.context import Instance, parse_shape
from mesh_core._common.control import Control
from mesh_core._common.errors import BOOTSTRAP_FAILED, MeshError
from mesh_core._failures.failure import raised_in_words
from mesh_core._futures import unseen
from mesh_core._hosting import ending
from mesh_core._hosting.actor_cell import ActorCell, unreadable
from mesh_core._hosting.actor_loops import ActorLoop, ActorLoops
from mesh_core._meshes.reduce import Reductions
from mesh_core._native import Extent, Point
from mesh_core._serialize import loads
from mesh_core._serialize.late import arrival_of, load_again
from mesh_core._system.process_title import Title
from mesh_core._system.stack_dumps import stacks

if TYPE_CHECKING:
    from mesh_core._native import Deferral, Message
    from mesh_core._process.process import Process

_SYSTEM = 0
# The share of an owner's time that its children may take, so that it has time left to clean up.
_CHILDREN_FIRST = 0.8
# For this share of the time, the actors of a stopping process end one after the other; then the rest end together.
_IN_TURN = 0.5
# How long the end of a process waits for the loops of its coroutine actors, which may be in users' code.
_LOOPS_END_S = 1.0


class ActorHost:
    """The actors of one process."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.actors: dict[int, ActorCell] = {}
        self._classes: dict[bytes, type] = {}
        # Not in a script's process, which is the user's own.
        self._title = None if process.identity.is_script else Title(process.identity)
        self._system = process.runtime.system_inbox()
        self.loop = ActorLoop(process)
        self.loops = ActorLoops(self)
        self._exit_code = 0
        self.unready: str | None = None
        """Why this process ends before its first actor, in one line: what its bootstrap or an extension raised."""
        self.failing = threading.Lock()
        """Held while an actor comes to an end, which several threads may notice."""
        self.stop_limit = process.settings.stop_timeout
        """How long the end of an actor may take."""
        self._thread: threading.Thread | None = None
        self.reductions: Reductions | None = None
        """Replies that are combined here; made at the first one."""
        self.threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        """The threads of actors with sync endpoints."""

    # Running.

    def start_thread(self) -> None:
        """Run the loop in a thread of its own, because this process's main thread belongs to a script."""
        thread = threading.Thread(target=self.run, name="mesh-actors", daemon=True)
        thread.start()
        # Only now: while the interpreter exits no thread can be started, and this one is waited for.
        self._thread = thread
        self.loops.start()

    def end_thread(self, limit: float) -> None:
        """End the thread that :meth:`start_thread` started, and wait for those of actors, after the runtime is closed."""
        if self._thread is None:
            return
        self.loop.soon(self.loop.stop)
        until = time.monotonic() + limit
        me = threading.current_thread()
        if self._thread is not me:
            # First, because it starts the others.
            self._thread.join(limit)
        self.loops.end(max(0.0, until - time.monotonic()))
        for thread in list(self.threads):
            if thread is not me:
                thread.join(max(0.0, until - time.monotonic()))

    def run(self) -> int:
        """Serve until the process is told to stop; return its exit status."""
        self._system.worked_by(threading.get_ident())
        self._system.attach(self.loop.waker, _SYSTEM)
        with self._signals():
            self.loop.serve(self._on_ready)
        self._end()
        return self._exit_code

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Make signals wake the loop, which does not sleep where the interpreter could see them."""
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
        for actor in self.actors.values():
            if actor.on_thread is not None:
                actor.on_thread.let_go()
        self.loops.end(_LOOPS_END_S)
        self.loop.end()

    def _on_ready(self, token: int) -> None:
        if token == _SYSTEM:
            # Large ones not all at once: their senders are notified when a batch is gone.
            while batch := self._system.take_nowait(1_000_000):
                for message in batch:
                    try:
                        self._on_system(message)
                    except BaseException as error:  # noqa: BLE001 - the guard: STG-3
                        self._on_trouble(message, error)
                del message
        else:
            actor = self.actors.get(token)
            if actor is not None and actor.loop is self.loop:
                actor.on_loop.pump()

    def _on_trouble(self, message: Message, error: BaseException) -> None:
        if message.kind is MessageKind.SPAWN and message.actor not in self.actors:
            self._host_broken(message, error)
        else:
            self.reply_error(message, error, self.process.identity.mesh_name)

    def _on_system(self, message: Message) -> None:
        if self._exit_code:
            # The bootstrap failed and the process is about to end: nothing more starts in it.
            return
        kind = message.kind
        if kind is MessageKind.SPAWN:
            self._spawn(message)
        elif kind is MessageKind.CANCEL:
            self._cancel(message)
        elif kind is MessageKind.STOP_ACTOR:
            # The stop itself is in the actor's inbox, which a slow constructor keeps it from reaching.
            actor = self.actors.get(message.actor)
            if actor is not None and not actor.made:
                ending.hurry(actor)
        elif kind is MessageKind.PARTIAL:
            Reductions.of(self).on_partial(message)
        elif kind is MessageKind.INSPECT:
            message.reply(stacks())
        elif kind is MessageKind.STOP_PROC:
            self.loop.keep(self.loop.create_task(self._stop(message.within or 0.0)))
        elif kind is MessageKind.DOWN or kind is MessageKind.FAILURE:
            self.process.supervision.on_notice(message)
        elif kind is MessageKind.EXTENSION:
            self._on_extension(message)
        elif kind is MessageKind.UNSEEN:
            unseen.report(message)

    def _cancel(self, message: Message) -> None:
        the_call, gathered, answered = message.cancels
        if gathered:
            Reductions.of(self).forget(message)
        if not the_call:
            return
        actor = self.actors.get(message.actor)
        if actor is not None:
            actor.cancel((message.src, message.call), answered=answered)
        elif message.actor == 0:
            self.process.extensions.on_cancel((message.src, message.call))

    # Spawning.

    def _spawn(self, message: Message) -> None:
        before = self.actors.get(message.actor)
        if before is not None:
            self.loop.keep(self.loop.create_task(self._spawn_again(message, before)))
            return
        instance = self._instance(message, parse_shape(message.shape))
        # Whatever rebuilds the arguments learns for which actor.
        there = contextvars.copy_context()
        there.run(context.enter, (instance, message))
        try:
            spawned = there.run(message.load)
        except BaseException as error:  # noqa: BLE001 - reported to the spawner
            if arrival_of(error) is None:
                self._host_broken(message, unreadable(error))
            else:
                self.loop.keep(self.loop.create_task(self._spawn_later(message, instance, error)))
        else:
            self._make(message, instance, spawned)

    async def _spawn_later(self, message: Message, instance: Instance, error: BaseException) -> None:
        """Spawn an actor when an argument of its constructor has arrived; its messages wait."""
        context.enter((instance, message))
        try:
            spawned = await load_again(message, error)
        except asyncio.CancelledError:
            raise  # the process ends
        except BaseException as failed:  # noqa: BLE001 - reported to the spawner
            self._host_broken(message, unreadable(failed))
        else:
            self._make(message, instance, spawned)

    def _make(self, message: Message, instance: Instance, spawned: Any) -> None:
        """Begin to construct an actor, whose spawn was read."""
        inbox = self.process.runtime.inbox(message.actor)
        if inbox is None:
            return
        try:
            blob, _mesh_name, (owner, creator), args, kwargs = spawned
            instance.creator = creator
            cls = self._class(blob)
        except BaseException as error:  # noqa: BLE001 - reported to the spawner
            self._host_broken(message, unreadable(error))
            return
        instance.class_name = cls.__qualname__
        inbox.describe(cls.__qualname__)
        cell = self.actors[message.actor] = ActorCell(
            self, inbox, instance, message, cls=cls, args=args, kwargs=kwargs, owner=(message.src, owner)
        )
        self._show_title()
        cell.start()

    async def _spawn_again(self, message: Message, before: ActorCell) -> None:
        """Respawn an actor that failed here, once everything that follows from the failure is over."""
        if before.broken is None and not before.ending:
            error = MeshError(f"cannot respawn {before.describe()}: it is running. Stop it first.")
            self.reply_error(message, error, before.instance.name)
            return
        if before.downfall is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(asyncio.wrap_future(before.downfall), self.stop_limit)
        if before.gone is None:
            before.gone = self.loop.create_future()
        before.inbox.finish()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(before.gone), self.stop_limit)
        if self.actors.get(message.actor) is before:
            error = MeshError(f"cannot respawn {before.describe()}: it failed, and has not ended yet")
            self.reply_error(message, error, before.instance.name)
            return
        self._spawn(message)

    def _host_broken(self, message: Message, error: BaseException) -> None:
        """Host an actor that could not be made: it answers its spawn, and every call, with ``error``."""
        inbox = self.process.runtime.inbox(message.actor)
        if inbox is not None:
            instance = self._instance(message, None)
            cell = self.actors[message.actor] = ActorCell(self, inbox, instance, message, broken=error)
            cell.start()

    def _instance(self, message: Message, extent: Extent | None) -> Instance:
        return Instance(
            actor_id=message.actor,
            proc_id=self.process.identity.proc_id,
            rank=Point(0, Extent([], [])) if extent is None else Point(message.index, extent),
            name=message.name,
            class_name="?",
        )

    def host(self, cls: type, actor_id: int, name: str) -> None:
        """Host an actor of Mesh's own, for which messages are already waiting; called from any thread.

        Its coroutines run on the process's loop, where the process is told of failures too: what it does follows these in order.
        """

        def begin() -> None:
            inbox = self.process.runtime.inbox(actor_id)
            if inbox is None or actor_id in self.actors:
                return
            instance = Instance(
                actor_id=actor_id,
                proc_id=self.process.identity.proc_id,
                rank=Point(0, Extent([], [])),
                name=name,
                class_name=cls.__qualname__,
            )
            cell = self.actors[actor_id] = ActorCell(self, inbox, instance, None, cls=cls)
            cell.start(here=True)

        self.loop.call_soon_threadsafe(begin)

    def _class(self, blob: bytes) -> type:
        cls = self._classes.get(blob)
        if cls is None:
            loaded = loads(blob)
            assert isinstance(loaded, type)
            cls = self._classes[blob] = loaded
            for tell in self.process.hooks.hosting:
                tell(cls)
        return cls

    # Messages for the process itself and for its extensions.

    def _on_extension(self, message: Message) -> None:
        extensions = self.process.extensions
        match message.name:
            case Control.BOOTSTRAP:
                self._bootstrap(message)
            case Control.STARTED:
                if (failure := extensions.failure) is None:
                    message.reply(None)
                else:
                    self._decline(message, failure, str(failure))
            case Control.BYPASS:
                find_bypass(self.process)
            case Control.RETURNS:
                from mesh_core._failures.returns import on_question

                on_question(message, self.process)
            case Control.INSTALL:
                extensions.have(message.load(), asked=message.call != 0)
                message.reply(None)
            case _:
                extensions.on_message(message)

    def _bootstrap(self, message: Message) -> None:
        try:
            message.load()()
        except BaseException as error:  # noqa: BLE001 - reported, then the process ends
            self._decline(message, error, f"its bootstrap {raised_in_words(error)}")
        else:
            message.reply(None)

    def _decline(self, message: Message, error: BaseException, why: str) -> None:
        """End this process, because it cannot become what it was spawned to be."""
        self.reply_error(message, error, self.process.identity.mesh_name, bootstrap=True)
        self._exit_code = BOOTSTRAP_FAILED
        self.unready = why
        self.loop.stop()

    # Stopping.

    async def _stop(self, limit: float) -> None:
        self.stop_limit = min(limit, self.stop_limit) * _CHILDREN_FIRST
        await self._stop_actors()
        # What was spawned by code that runs in no actor.
        await self.process.owners.of(0).close_async(self.stop_limit)
        self.loop.stop()

    async def _stop_actors(self) -> None:
        """Stop the actors in reverse order of their creation; a later one may use an earlier one until its end."""
        actors = list(self.actors.values())
        for actor in actors:
            actor.gone = self.loop.create_future()
        # A slow one must leave time for those that come after it.
        until = self.loop.time() + self.stop_limit * _IN_TURN
        for actor in reversed(actors):
            assert actor.gone is not None
            # The stop queues behind waiting messages.
            quick = actor.ends_quickly()
            actor.inbox.finish()
            if not quick and not actor.gone.done() and (left := until - self.loop.time()) > 0:
                await asyncio.wait([actor.gone], timeout=left)
        for actor in actors:
            assert actor.gone is not None
            await actor.gone

    def stop_actors(self, limit: float) -> None:
        """Stop the controller's own actors, and what they own, within ``limit`` seconds."""
        if self._thread is None or self._thread is threading.current_thread() or not self.actors:
            return
        self.stop_limit = limit * _CHILDREN_FIRST
        # The loop may have ended already, or an actor may not end in time.
        with contextlib.suppress(RuntimeError, TimeoutError):
            asyncio.run_coroutine_threadsafe(self._stop_actors(), self.loop).result(limit)

    def forget(self, actor: ActorCell) -> None:
        """Remove an actor that has ended."""
        if self.actors.get(actor.instance.actor_id) is actor:
            del self.actors[actor.instance.actor_id]
            self._show_title()
        self.loops.left(actor)
        if actor.gone is not None and not actor.gone.done():
            actor.gone.set_result(None)

    def _show_title(self) -> None:
        """Show the actors of this process in process listings."""
        if self._title is not None:
            self._title.show(self.actors)

    # Replies.

    def reply_error(
        self,
        message: Message,
        error: BaseException,
        name: str,
        *,
        dead: bool = False,
        bootstrap: bool = False,
    ) -> None:
        """Send an error to the caller or, if nobody waits, log it."""
        if os.getpid() != self.process.pid:
            from mesh_core._system.leaving import end_copy

            end_copy(error)
        me = self.process.identity
        if message.call == 0:
            message.failed()
            self.log_failure(message, error, name)
            return
        from mesh_core._serialize.exceptions import encode_exception

        data, buffers = encode_exception(
            error, actor=name, rank=me.rank, host=me.host, pid=os.getpid(), bootstrap=bootstrap
        )
        self.hold_back(message.reply_error(data, buffers, dead=dead))

    def hold_back(self, held: Deferral | None) -> None:
        """If a reply that the calling thread has sent must leave before more messages are handled, have its loop wait for that."""
        if held is not None:
            here = asyncio._get_running_loop()
            (here if isinstance(here, ActorLoop) else self.loop).held = held

    def log_failure(self, message: Message, error: BaseException, name: str) -> None:
        """Log an error that no caller is waiting for."""
        import logging

        from mesh_core._serialize.exceptions import format_traceback

        # A message without a name is the actor's spawn.
        what = f"raised in {message.name}" if message.name else "failed in its constructor"
        logging.getLogger("mesh").error(
            "actor %r on %s (pid %d) %s, which nobody waits for:\n%s",
            name,
            self.process.identity.proc_id,
            os.getpid(),
            what,
            # Errors of Mesh's own that were never raised have no traceback.
            format_traceback(error) or f"{type(error).__name__}: {error}",
        )
