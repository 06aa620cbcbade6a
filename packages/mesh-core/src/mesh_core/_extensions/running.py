"""The extensions running in one process: how they start and stop, and what they receive.

EXT-1: an extension starts after those named in its ``after``, before any actor of its process is created, and stops in
reverse order, after the last actor ended.
EXT-2: the messages of one sender to one extension are handled in the order sent: a plain ``receive`` runs on the
extension's own thread, one call after the other; an ``async`` one begins in that order on the event loop of actors.
EXT-3: each message that is to be answered gets an answer, whatever the extension does.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from mesh_core._common.errors import MeshError
from mesh_core._common.proc import Signatures
from mesh_core._extensions.base import Extension
from mesh_core._extensions.carried import Carried, in_order, pack
from mesh_core._geometry.mesh import check_name
from mesh_core._native import Placement, Target

if TYPE_CHECKING:
    import asyncio

    from mesh_core._common.context import Instance
    from mesh_core._common.tracing import Around
    from mesh_core._extensions.events import ActorEnd, ProcEnd, Spawning
    from mesh_core._futures.future import Future
    from mesh_core._futures.sending import Sending
    from mesh_core._geometry.values import ValueMesh
    from mesh_core._hosting.actor_cell import ActorCell, CallKey
    from mesh_core._native import Message
    from mesh_core._process.process import Process

E = TypeVar("E", bound=Extension)
T = TypeVar("T")
_END_S = 1.0
"""How long the end of a process waits for an extension's thread."""


class Extensions:
    """The extensions of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._lock = threading.RLock()
        self._running: dict[str, _Running] = {}
        self._starting: list[Extension] = []
        """Extensions that may send already but do not receive yet."""
        self._stopping: dict[str, _Running] = {}
        """Extensions that no longer receive but may send until their ``stop`` returns."""
        self.failure: MeshError | None = None
        """Why an extension that this worker was spawned with could not start."""
        self._failures: dict[str, MeshError] = {}
        """The same in a host's process, which keeps running for the other extensions."""
        self._untold: set[str] = set()
        """The names in ``_failures`` whose failure nobody has been told yet."""
        self._ended: set[tuple[int, int, int]] = set()
        """Processes of this host whose ends were reported."""

    def find(self, name: str) -> Extension | None:
        """Return the instance of that name."""
        running = self._running.get(name) or self._stopping.get(name)
        return None if running is None else running.extension

    def may_send(self, extension: Extension) -> bool:
        """Return whether this is this process's instance, from the beginning of its ``start`` to the end of its ``stop``."""
        return self.find(extension.name) is extension or any(each is extension for each in self._starting)

    # Messages from one of them to others.

    def call(
        self, extension: Extension, to: Any, message: Any, timeout: float | None
    ) -> Future[ValueMesh[Any]]:
        """See :meth:`Extension.call`."""
        from mesh_core._extensions import messages as _messages

        return _messages.call(extension, to, message, timeout)

    def install_on(self, extension: Extension, to: Any) -> Future[ValueMesh[Any]]:
        """See :meth:`Extension.install_on`."""
        from mesh_core._extensions import messages as _messages

        return _messages.install_on(extension, to)

    def tell(self, extension: Extension, to: Any, message: Any) -> Sending:
        """See :meth:`Extension.tell`."""
        from mesh_core._extensions import messages as _messages

        return _messages.tell(extension, to, message)

    def install(self, cls: type[E], payload: Any) -> E:
        """Create and start an instance."""
        _check(cls)
        with self._lock:
            if cls.name in self._running:
                raise MeshError(
                    f"extension {cls.name!r} is installed in this process already; uninstall({cls.name!r}) first"
                )
            return self._start(cls, payload)

    def ensure(self, cls: type[Extension]) -> None:
        """Install one of Mesh's own extensions here, unless it is already."""
        with self._lock:
            if cls.name not in self._running:
                self._start(cls, None)

    def _start(self, cls: type[E], payload: Any) -> E:
        extension = cls()
        extension._mesh_process = self._process
        extension.payload = payload
        self._starting.append(extension)
        try:
            extension.start()
        finally:
            self._starting.remove(extension)
        running = self._running[cls.name] = _Running(self._process, extension)
        running.hook()
        return extension

    def uninstall(self, name: str) -> None:
        """Stop an instance."""
        with self._lock:
            running = self._running.pop(name, None)
            if running is not None:
                self._stopping[name] = running
        if running is None:
            known = (
                ", ".join(sorted(each for each in self._running if not each.startswith("mesh."))) or "none"
            )
            raise MeshError(f"no extension {name!r} is installed in this process; there are: {known}")
        self._end([running])

    # Carried to spawned processes.

    def travelling(self) -> list[Extension]:
        """Return the extensions that spawned processes may carry."""
        return [each.extension for each in list(self._running.values()) if not each.extension._everywhere]

    def carried(self, spawning: Spawning) -> str:
        """Return the extensions that spawned processes carry, as text; empty if there are none."""
        told = [pack(each, spawning) for each in self.travelling()]
        there = [each for each in told if each is not None]
        return json.dumps(there) if there else ""

    def begin(self, told: str) -> None:
        """Start the extensions that this worker was spawned with."""
        name = "?"
        try:
            for carried in in_order([Carried(*each) for each in json.loads(told)]):
                name = carried.name
                if self._process.identity.is_host:
                    self._try(carried)
                else:
                    self._start(*carried.load())
        except BaseException as error:  # noqa: BLE001 - whatever it is, the spawner of this process is notified
            self.failure = _not_started(name, error)

    def _try(self, carried: Carried) -> None:
        """Start an extension of this host; the next process that asks for it is told if it failed."""
        try:
            self._start(*carried.load())
        except BaseException as error:
            logging.getLogger("mesh").exception(
                "extension %r could not start on %s", carried.name, self._process.identity.proc_id
            )
            self._failures[carried.name] = _not_started(carried.name, error)
            self._untold.add(carried.name)

    def have(self, carried: Carried, *, asked: bool = True) -> None:
        """Start an extension in this running process, unless it is here. With ``asked``, an error is raised."""
        with self._lock:
            if carried.name in self._running:
                return
            if not asked:
                self._try(carried)
                return
            if carried.name in self._untold:
                self._untold.remove(carried.name)
                raise self._failures[carried.name]
            self._failures.pop(carried.name, None)
            self._start(*carried.load())

    def end(self) -> None:
        """Stop all extensions."""
        with self._lock:
            running = list(self._running.values())
            self._stopping.update(self._running)
            self._running.clear()
        self._process.hooks.closed += [each.closed for each in running[::-1]]
        self._end(running[::-1])

    def _end(self, running: list[_Running]) -> None:
        for each in running:
            each.end()
            name = each.extension.name
            with self._lock:
                if self._stopping.get(name) is each:
                    del self._stopping[name]

    # What they receive.

    def on_message(self, message: Message) -> None:
        """Handle a message for an extension."""
        running = self._running.get(message.name)
        if running is not None:
            running.take(message)
            return
        identity = self._process.identity
        me = identity.proc_id
        if identity.is_host:
            failure = self._failures.get(message.name)
            why = "install it there with install_on()" if failure is None else str(failure)
            error = MeshError(f"{me} has no extension {message.name!r}: {why}")
        else:
            error = MeshError(
                f"process {me} has no extension {message.name!r}: it was spawned before the extension was installed, or without "
                "it. Install it before spawning, and return a payload from its for_spawn(); or install it in running processes with "
                "its install_on()"
            )
        if message.call:
            self._process.actor_host().reply_error(message, error, me)
        else:
            message.failed()
            logging.getLogger("mesh").warning("a message was dropped: %s", error)

    def on_cancel(self, key: CallKey) -> None:
        """Cancel a message whose caller no longer waits."""
        for running in list(self._running.values()):
            running.cancel(key)

    def actor_ended(self, actor: ActorCell) -> None:
        """Notify extensions that an actor of this process ended."""
        running = [each for each in list(self._running.values()) if each.hears_actors]
        if not running:
            return
        from mesh_core._extensions.events import ActorEnd

        instance = actor.instance
        end = ActorEnd(instance.name, instance.class_name, instance.rank, actor.broken)
        for each in running:
            each.tell(end)

    def on_down(self, message: Message) -> None:
        """Notify extensions that a process of this host ended, if this is the host's process."""
        identity = self._process.identity
        if not identity.is_host or (down := message.down()) is None:
            return
        lost = down[2]
        address = (*lost.process, identity.host_no)
        running = [each for each in list(self._running.values()) if each.hears_procs]
        if not running or address in self._ended:
            return
        self._ended.add(address)
        from mesh_core._extensions.events import ProcEnd

        failure = None
        if not lost.orderly:
            from mesh_core._failures.failure import of_loss

            name = f"{down[0]:x}"
            failure = of_loss(lost, None, name=name, host=identity.host, point=None, rank=down[1])
        end = ProcEnd(address=address, point=None, mesh=None, failure=failure)
        for each in running:
            each.tell_proc(end)


def _not_started(name: str, error: BaseException) -> MeshError:
    failure = MeshError(f"extension {name!r} could not start: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


def _check(cls: type[Extension]) -> None:
    if not (isinstance(cls, type) and issubclass(cls, Extension)) or cls is Extension:
        raise TypeError(f"install() takes a class derived from Extension, got {cls!r}")
    name = getattr(cls, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"{cls.__qualname__}.name must be a non-empty string, got {name!r}")
    check_name(name)
    if name.startswith("."):
        raise ValueError(f"the name of an extension must not begin with a dot, got {name!r}")
    if isinstance(cls.after, str):
        raise TypeError(f"{cls.__qualname__}.after must be a sequence of names, got {cls.after!r}")


class _Running:
    """A running extension, and the thread that works for it."""

    def __init__(self, process: Process, extension: Extension) -> None:
        self.extension = extension
        self._process = process
        self._is_async: bool | None = None
        """Whether ``receive`` is a coroutine function; known after the first message."""
        self.hears_actors = type(extension).actor_ended is not Extension.actor_ended
        self.hears_procs = process.identity.is_host and type(extension).proc_ended is not Extension.proc_ended
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._tasks: dict[CallKey, asyncio.Task[None]] = {}
        self._signatures = process.slots.of(Signatures)
        self._around: Around | None = None
        """What it has put around endpoints."""

    def hook(self) -> None:
        """Register the hooks that the extension defines."""
        cls, hooks = type(self.extension), self._process.hooks
        if cls.endpoint_raised is not Extension.endpoint_raised:
            hooks.raised.append(self._raised)
        if (
            cls.endpoint_began is not Extension.endpoint_began
            or cls.endpoint_ended is not Extension.endpoint_ended
        ):
            from mesh_core._extensions.observing import observed_by

            self._around = observed_by(self.extension)
            hooks.around.append(self._around)
            self._process.wrap_endpoints()
        if cls.make_actor is not Extension.make_actor:
            hooks.making.append(self.extension.make_actor)
        if cls.actor_class is not Extension.actor_class:
            hooks.actor_class.append(self._replace)
        if self.hears_procs:
            # The agent reports on all its processes when asked to watch itself.
            host = self._process.identity.host_no
            self._process.runtime.watch_procs(Target.one(0, host, Placement.on(host)))

    def _unhook(self) -> None:
        hooks = self._process.hooks
        if self._around is not None:
            hooks.around.remove(self._around)
            self._process.wrap_endpoints()
        with contextlib.suppress(ValueError):
            hooks.raised.remove(self._raised)
        with contextlib.suppress(ValueError):
            hooks.actor_class.remove(self._replace)
        with contextlib.suppress(ValueError):
            hooks.making.remove(self.extension.make_actor)

    def _replace(self, cls: type) -> type:
        found = self.extension.actor_class(cls)
        from mesh_core._actors.actor import Actor

        if not (isinstance(found, type) and issubclass(found, Actor)):
            raise TypeError(
                f"actor_class({cls.__qualname__}) of extension {self.extension.name!r} must return an actor class, "
                f"got {found!r}"
            )
        return found

    def _raised(self, actor: Instance, endpoint: str, error: BaseException) -> None:
        from mesh_core._extensions.events import Raised

        self.extension.endpoint_raised(Raised(actor.name, actor.class_name, actor.rank, endpoint, error))

    def take(self, message: Message) -> None:
        """Handle a message soon."""
        if self._is_async is None:
            import inspect

            self._is_async = inspect.iscoroutinefunction(self.extension.receive)
        if self._is_async:
            self._on_loop(self._begin, message)
        elif self.extension._at_once:
            self._receive(message)
        else:
            self._put(lambda: self._receive(message))

    def tell(self, end: ActorEnd) -> None:
        """Notify it of an actor's end soon."""
        self._put(lambda: self.extension.actor_ended(end))

    def tell_proc(self, end: ProcEnd) -> None:
        """Notify it of the end of a process of this host soon."""
        self._put(lambda: self.extension.proc_ended(end))

    def cancel(self, key: CallKey) -> None:
        """Cancel the handling of a message, if it is here."""
        if self._is_async:
            self._on_loop(self._give_up, key)

    def end(self) -> None:
        """Handle the messages that arrived, then stop."""
        self._unhook()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._todo.put(None)
            thread.join(_END_S)
        try:
            self.extension.stop()
        except Exception:
            logging.getLogger("mesh").exception(
                "extension %r raised when it was stopped", self.extension.name
            )

    def closed(self) -> None:
        """Notify it that the runtime is closed."""
        try:
            self.extension.closed()
        except Exception:
            logging.getLogger("mesh").exception(
                "extension %r raised when the runtime was closed", self.extension.name
            )

    def _put(self, work: Callable[[], None]) -> None:
        with self._lock:
            if self._thread is None:
                name = f"mesh-ext-{self.extension.name}"
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()
        self._todo.put(work)

    def _serve(self) -> None:
        while (work := self._todo.get()) is not None:
            try:
                work()
            except BaseException:
                logging.getLogger("mesh").exception("extension %r raised", self.extension.name)
            del work

    def _receive(self, message: Message) -> None:
        try:
            said, signature = message.load()
            message.reply(self.extension.receive(said, self._signatures.read(signature)))
        except BaseException as error:  # noqa: BLE001 - reported to the caller
            self._fail(message, error)

    def _on_loop(self, work: Callable[[T], None], about: T) -> None:
        actor_host = self._process.actor_host()
        if actor_host.loop.is_here:
            work(about)
        else:
            actor_host.loop.call_soon_threadsafe(work, about)

    def _give_up(self, key: CallKey) -> None:
        if (task := self._tasks.get(key)) is not None:
            task.cancel()

    def _begin(self, message: Message) -> None:
        key = (message.src, message.call or -id(message))
        task = self._tasks[key] = self._process.actor_host().loop.create_task(self._handle(message))
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    async def _handle(self, message: Message) -> None:
        try:
            said, signature = message.load()
            actor_host = self._process.actor_host()
            if actor_host.loop.held is not None:
                await actor_host.loop.room()
            held = message.reply(await self.extension.receive(said, self._signatures.read(signature)))
            actor_host.hold_back(held)
        except BaseException as error:  # noqa: BLE001 - reported to the caller
            self._fail(message, error)

    def _fail(self, message: Message, error: BaseException) -> None:
        self._process.actor_host().reply_error(message, error, f"extension {self.extension.name}")
