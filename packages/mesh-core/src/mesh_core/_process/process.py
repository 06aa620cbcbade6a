"""This process's part in the mesh: one object that holds the runtime and everything beside it."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from mesh_core._common.current import holder
from mesh_core._common.errors import MeshError, SupervisionError
from mesh_core._failures.owned_meshes import Holding, Owners
from mesh_core._geometry.location import Location, is_guest_mesh, is_host_mesh
from mesh_core._native import Extent, Region, Runtime, Target, begin_exit, host_name, leave_job, roll
from mesh_core._process.notices import Notices
from mesh_core._serialize import dumps

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence

    from mesh_core._actors.endpoint import EndpointProperty
    from mesh_core._common.interrupts import Interrupts
    from mesh_core._common.settings import Settings
    from mesh_core._common.tracing import Around, Tracer
    from mesh_core._extensions.host_procs import HostProcs
    from mesh_core._extensions.running import Extensions
    from mesh_core._failures.policies import Policy
    from mesh_core._failures.supervision import Supervision
    from mesh_core._failures.watches import Watches
    from mesh_core._futures.awaited import Awaited
    from mesh_core._futures.future import Future
    from mesh_core._futures.loop import Bridge
    from mesh_core._hosting.actor_cell import ActorCell
    from mesh_core._hosting.actor_host import ActorHost
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._native import Completion, Message, Placement
    from mesh_core._system.scratch import Scratch


_HOLDER = holder()

# How long a thread that calls while the interpreter exits is held, to let the exit happen.
_GRACE = 10.0

# An end that somebody asked for says what it is waiting for if it takes longer than this.
_MOMENT = 0.5


class Identity:
    """Which process this is: its mesh, its place there, and the names of both.

    Its address is something else (``Runtime.me``): the new process of a respawned rank has a new address.
    """

    __slots__ = ("host", "host_no", "location", "mesh_id", "mesh_name", "rank", "region", "scratch")

    def __init__(
        self,
        *,
        mesh_id: int,
        mesh_name: str,
        region: Region,
        rank: int,
        host: str,
        host_no: int,
        location: Location,
        scratch: str = "",
    ) -> None:
        self.mesh_id = mesh_id
        self.mesh_name = mesh_name
        self.region = region
        self.rank = rank
        self.host = host
        self.host_no = host_no
        self.location = location
        self.scratch = scratch
        """The host's own directory for this job; empty on the controller's host."""

    @property
    def proc_id(self) -> str:
        """The name of the process for people: its mesh and rank."""
        if self.is_host:
            return f"host {self.host}"
        return self.mesh_name if self.is_script else f"{self.mesh_name}[{self.rank}]"

    @property
    def is_host(self) -> bool:
        """Whether it runs the extensions of its host."""
        return is_host_mesh(self.mesh_id)

    @property
    def is_guest(self) -> bool:
        """Whether it runs a script that joined a job which outlives it."""
        return is_guest_mesh(self.mesh_id)

    @property
    def is_script(self) -> bool:
        """Whether it runs a user's script: as the controller, or as a guest of one."""
        return self.mesh_id == 0 or self.is_guest


class Process:
    """The runtime, and what Python keeps beside it. One per process, made on first use."""

    ending = False
    """Whether everything that it owns is being stopped: an orderly end is then not reported."""
    told_addresses: Mapping[int, str] = MappingProxyType({})
    """The addresses of hosts that another process attached."""
    _repairs_expected = False
    shows_output = False
    ask_shown: Callable[[list[tuple[int, int, int]], float], Completion | None] | None = None
    """Asks who shows the output of processes in this one's stead; see :meth:`Joined.on_output`."""
    """Whether it shows what workers print, so that results wait for that (LOG-8)."""
    ask_traits: Callable[[Sequence[int]], tuple[list[Any], list[int]]] | None = None
    """Asks the controller what hosts reported about themselves, if this process is a script but not the controller."""
    cannot_make: Mapping[tuple[int, int], str] = MappingProxyType({})
    """Why this script cannot respawn processes or actors that another script spawned."""

    around: Around | None = None
    """What is put around endpoints: what extensions do, and the tracer's spans."""

    def __init__(self, runtime: Runtime, identity: Identity) -> None:
        self.runtime = runtime
        from mesh_core._common.hooks import Hooks
        from mesh_core._common.slots import Slots
        from mesh_core._system.seeds import Seeds

        self.identity = identity
        self.pid = os.getpid()
        self.hooks = Hooks()
        """Callbacks of the features of this process."""
        self.slots = Slots()
        """State of the features of this process."""
        self.closed = False
        self.environ = dict(os.environ)
        """The environment that fork servers are started with; later changes are sent to each worker."""
        self.settling = threading.RLock()
        """Held while a finished call becomes a value; unpickling may run code that waits for another call."""
        self._lock = threading.Lock()
        # By the loop's id: the loop holds its bridge, and the bridge may hold tasks of the loop, and with them the loop.
        self._bridges: weakref.WeakValueDictionary[int, Bridge] = weakref.WeakValueDictionary()
        self._blobs: weakref.WeakKeyDictionary[type, tuple[bytes, list[memoryview]]] = (
            weakref.WeakKeyDictionary()
        )
        self._tables: weakref.WeakKeyDictionary[type, dict[str, EndpointProperty[..., Any]]] = (
            weakref.WeakKeyDictionary()
        )
        self._actor_host: ActorHost | None = None
        self.credentials: tuple[str, str] | None = None
        """The folder with the job's credentials, and where the host listens, unless these are in ``identity.scratch``."""
        self.job: tuple[int, str] = (self.pid, sys.argv[0] if sys.argv else "")
        """The controller's pid, and the script that it runs; workers have their controller's."""
        self.deadlines = False
        """Whether a message with a deadline was ever handled here; only then must calls look for one to inherit."""
        self._names: dict[str, int] = {}
        self.owners = Owners()
        self.here = Location.on(identity.host_no, identity.host)
        """The host that this process is on."""
        self.notices = Notices(self)
        self._supervision: Supervision | None = None
        self._extensions: Extensions | None = None
        self._watches: Watches | None = None
        self._host_procs: HostProcs | None = None
        self.alarmed = False
        """Whether the script's next call that waits raises a failure instead."""
        self.tracer: Tracer | None = None
        """Makes spans, if tracing is on; see ``_common.tracing``."""
        self.began_ns = time.time_ns()
        """A time before any process of the job was started."""
        self._scratch: Scratch | None = None
        self.seeds = Seeds()
        """The seeds of this process's random numbers."""
        self.boots: weakref.WeakValueDictionary[int, Future[None]] = weakref.WeakValueDictionary()
        """The outcomes of bootstraps of meshes that were spawned here."""
        self.python: str | None = None
        """The interpreter that this process was asked to have; processes that it spawns have the same."""
        self.env_changes: dict[str, str | None] = {}
        """Changes that its spawn made to its environment; processes that it spawns on other hosts get them too."""

    def trace_with(self, tracer: Tracer | None) -> None:
        """Let a tracer make spans from now on, or none."""
        self.tracer = tracer
        self.wrap_endpoints()

    def wrap_endpoints(self) -> None:
        """Put what there is by now around endpoints that begin from now on."""
        from mesh_core._common.tracing import nested

        self.around = nested([*self.hooks.around, *([] if self.tracer is None else [self.tracer.handling])])

    @property
    def settings(self) -> Settings:
        """The settings in force for the calling code; the runtime's own were fixed when it was made."""
        from mesh_core._common.settings import current_settings

        return current_settings()

    @property
    def in_charge(self) -> bool:
        """Whether there is something to stop here; false after a shutdown and in a forked copy."""
        return not self.closed and os.getpid() == self.pid

    def bridge(self, loop: asyncio.AbstractEventLoop | None = None) -> Bridge:
        """Return an event loop's connection to the runtime, by default the running loop's."""
        import asyncio

        try:
            loop = loop or asyncio.get_running_loop()
        except RuntimeError:
            raise MeshError(
                "a future can be awaited in an asyncio event loop only, and none runs in this thread. With trio or "
                "another library wait in a thread, as in 'await trio.to_thread.run_sync(future.get)', or use asyncio"
            ) from None
        # A loop that runs actors keeps its own.
        bridge: Bridge | None = getattr(loop, "mesh_bridge", None) or self._bridges.get(id(loop))
        if bridge is None or bridge.loop() is not loop:
            from mesh_core._futures.loop import Bridge

            bridge = self._bridges[id(loop)] = Bridge(
                loop, self._alarm, self.runtime, above=getattr(loop, "waker", None)
            )
        return bridge

    def _alarm(self) -> SupervisionError | None:
        return self.supervision.alarm()

    @property
    def supervision(self) -> Supervision:
        """The handling of failures that reach this process."""
        if self._supervision is None:
            from mesh_core._failures.supervision import Supervision

            with self._lock:
                if self._supervision is None:
                    self._supervision = Supervision(self)
        return self._supervision

    @property
    def extensions(self) -> Extensions:
        """The extensions of this process."""
        if self._extensions is None:
            from mesh_core._extensions.running import Extensions

            with self._lock:
                if self._extensions is None:
                    self._extensions = Extensions(self)
        return self._extensions

    @property
    def watches(self) -> Watches:
        """The watches for the ends of other processes."""
        if self._watches is None:
            from mesh_core._failures.watches import Watches

            with self._lock:
                if self._watches is None:
                    self._watches = Watches(self)
        return self._watches

    @property
    def host_procs(self) -> HostProcs:
        """The processes in which hosts run their extensions."""
        if self._host_procs is None:
            from mesh_core._extensions.host_procs import HostProcs

            with self._lock:
                if self._host_procs is None:
                    self._host_procs = HostProcs(self)
        return self._host_procs

    def bring_to_hosts(self, placement: Placement) -> None:
        """Start the extensions that are wanted on these hosts, on which processes are about to be spawned."""
        if self._extensions is None:
            return
        wanted = [each for each in self._extensions.travelling() if each.on_hosts]
        if wanted:
            self.host_procs.bring(wanted, placement.hosts())

    def forget_hosts(self, hosts: list[int]) -> None:
        """Forget the extension processes of hosts that are released."""
        if self._host_procs is not None:
            self._host_procs.forget(hosts)

    def on_down(self, message: Message) -> None:
        """Notify watches and extensions that another process has ended."""
        for hear in self.hooks.downs:
            hear(message)
        if self._watches is not None:
            self._watches.on_down(message)
        if self._extensions is not None:
            self._extensions.on_down(message)

    def carried(self, mesh_name: str, extent: Extent, location: Location) -> str:
        """Return the extensions that processes spawned by this one are to have, as text."""
        if self._extensions is None or not self._extensions.travelling():
            return ""
        from mesh_core._extensions.events import Spawning

        hosts = tuple(dict.fromkeys(location.name_of(rank) for rank in range(len(Region.whole(extent)))))
        is_local = location.only == self.identity.host_no
        return self._extensions.carried(Spawning(mesh_name, extent, hosts, is_local))

    def actor_ended(self, actor: ActorCell) -> None:
        """Notify extensions that an actor that lived here has ended."""
        if self._extensions is not None:
            self._extensions.actor_ended(actor)

    def end_extensions(self) -> None:
        """Stop the extensions of this process, which is ending."""
        if self._extensions is not None:
            self._extensions.end()

    def told(self, error: MeshError) -> None:
        """Note that a call raises a failure, which then needs no other report."""
        if error._deaths or error.results is not None or isinstance(error, SupervisionError):
            self.supervision.told(error)

    def alarm_loops(self) -> None:
        """Raise a failure in whatever event loops wait for."""
        from mesh_core._hosting.actor_loops import ActorLoop

        for bridge in list(self._bridges.values()):
            if not isinstance(bridge.loop(), ActorLoop):
                bridge.alarm()

    def reference_to(self, cell: ActorCell) -> ActorMesh[Any]:
        """Return a reference to an actor of this process, for whomever it is sent to."""
        from mesh_core._meshes.actors import reference_to

        assert cell._cls is not None  # it has been constructed
        return reference_to(self, cell, cell._cls)

    def reference_of(self, actor: object) -> ActorMesh[Any] | None:
        """Return a reference to the actor whose object this is; ``None`` if it is a plain object."""
        from mesh_core._meshes.actors import reference_of

        return reference_of(self, actor)

    def own_mesh(self) -> ProcMesh:
        """Return the mesh of processes that this process was spawned in."""
        from mesh_core._meshes.hosts import this_mesh

        return this_mesh()

    def own_proc(self) -> ProcMesh:
        """Return this process as a mesh of one."""
        from mesh_core._meshes.hosts import this_proc

        return this_proc()

    def host_registry(self) -> None:
        """Host the registry, which keeps the actors of which a job has one each."""
        from mesh_core._meshes.controllers import host_registry

        host_registry(self)

    def table(self, cls: type) -> dict[str, EndpointProperty[..., Any]]:
        """Return an actor class's endpoints; all its actors share one table."""
        found = self._tables.get(cls)
        if found is None:
            from mesh_core._actors.endpoint import table_of
            from mesh_core._hosting.responses import with_answers

            found = self._tables[cls] = with_answers(table_of(cls))
        return found

    def actor_class(self, cls: type) -> type:
        """Return the class that is spawned for ``cls``: ``cls`` itself, unless an extension replaces it."""
        for replace in self.hooks.actor_class:
            cls = replace(cls)
        return cls

    def forget_tables(self) -> None:
        """Forget the endpoint tables, because classes have changed."""
        self._tables.clear()

    def class_blob(self, cls: type) -> bytes:
        """Return an actor class as bytes, which are made once and sent with every spawn."""
        found = self._blobs.get(cls)
        if found is None:
            data, buffers = dumps(self.hooks.packed_class(cls), root=f"the actor class {cls.__qualname__}")
            found = self._blobs[cls] = (data, buffers)
        if found[1]:
            raise MeshError(
                f"the definition of {cls.__qualname__} holds {sum(b.nbytes for b in found[1]):,} bytes of data; "
                "pass large data to the constructor instead of keeping it in the class or its globals"
            )
        return found[0]

    def own(self, owner: int, mesh: Any, actor_id: int, policy: Policy | None) -> Holding:
        """Record that ``owner`` (the id of an actor here, 0 for everything else) has spawned a mesh."""
        holding = Holding(mesh, actor_id, policy)
        self.owners.of(owner).add(holding)
        self.notices.start()
        if policy is not None:
            self._expect_repairs()
        try:
            self.check_owner(owner)
        except MeshError:
            # The owner has ended meanwhile, and what it owned with it.
            mesh.stop()
            raise
        return holding

    def _expect_repairs(self) -> None:
        """Import what repairs need, once, on the thread that waits for notices anyway.

        At the first failure, the import would keep the script's other threads from the interpreter for 30 ms.
        """
        if self._repairs_expected or not self.identity.is_script:
            return
        self._repairs_expected = True
        with contextlib.suppress(MeshError):  # the runtime is shut down
            self.notices.barrier(_import_repairs)

    def check_owner(self, owner: int) -> None:
        """Refuse a spawn by an actor that has ended or failed: nothing would end what it spawns."""
        if owner != 0:
            actor = None if self._actor_host is None else self._actor_host.actors.get(owner)
            if actor is None or actor.ending or actor.broken is not None:
                raise MeshError(
                    "cannot spawn: the actor has ended or is ending, and what it owns ends with it"
                )

    def recording(self, owner: int, mesh: Any, actor_id: int) -> None:
        """Notify the hooks that ``owner`` is about to spawn a mesh."""
        for record in self.hooks.recording:
            record(owner, mesh, actor_id)

    def addresses(self) -> dict[int, str]:
        """Return the address of each host's agent, as far as this process knows."""
        attached = {host: address for host, _, address, *_ in roll(self.runtime)}
        return attached or dict(self.told_addresses)

    def name_of_host(self, host: int) -> str:
        """Return the name of a host, as far as it is known here."""
        return host_name(self.runtime, host) or f"host {host}"

    def unique_name(self, stem: str) -> str:
        """Return ``stem``, with a number if it was used before."""
        with self._lock:
            count = self._names[stem] = self._names.get(stem, 0) + 1
        return stem if count == 1 else f"{stem}-{count}"

    def actor_host(self) -> ActorHost:
        """Return the actor host of this process; it is started on first use."""
        if self._actor_host is None:
            # Not under the lock, which extensions that are just starting may need.
            for begin in self.hooks.staging:
                begin()
        with self._lock:
            if self._actor_host is None:
                from mesh_core._hosting.actor_host import ActorHost

                self._actor_host = ActorHost(self)
                self._actor_host.start_thread()
            return self._actor_host

    def scratch(self) -> Scratch:
        """Return a directory for this job's files on the controller's host; it is removed when everything has stopped."""
        if self._scratch is None:
            from mesh_core._system.scratch import Scratch

            self._scratch = Scratch()
        return self._scratch

    def flush_console(self) -> None:
        """Show what workers have printed so far."""
        if self.in_charge:
            for flush in self.hooks.flush:
                flush()

    def adopt_actor_host(self, actor_host: ActorHost) -> None:
        """Use the actor host that a worker's main thread runs."""
        self._actor_host = actor_host

    def shutdown(self) -> None:
        """Stop everything that this process owns. What has not stopped within ``stop_timeout`` is killed."""
        if self.in_charge:
            from mesh_core._common.interrupts import Interrupts

            with Interrupts(_HOLDER.sigterm) as interrupts:
                self.end(interrupts)
            if _HOLDER.sigterm is not None:
                _HOLDER.sigterm.remove()

    def end(self, interrupts: Interrupts) -> None:
        """Like :meth:`shutdown`. Ctrl-C hurries it, and is raised when everything has ended."""
        limit = self.settings.stop_timeout
        if self._supervision is not None:
            self._supervision.explained.end_waiting()
        self.ending = True
        try:
            with interrupts.raised():
                if (actor_host := self._started_actor_host()) is not None:
                    actor_host.stop_actors(limit)
                if self.identity.is_guest:
                    # What it spawned belongs to the next script.
                    self.flush_console()
                    self.closed = True
                else:
                    self._stop_owned(limit)
                    self.closed = True
                    self._stop_all(limit)
        except BaseException:
            # Processes that have not stopped yet are killed.
            self.closed = True
            limit = 0.0
            if not self.identity.is_guest:
                self._stop_all(limit)
            raise
        finally:
            self.end_extensions()
            for close in self.hooks.closing:
                close()
            if self.identity.is_guest:
                leave_job(self.runtime, limit)
            else:
                self.runtime.close(limit)
            if (actor_host := self._started_actor_host()) is not None:
                actor_host.end_thread(limit)
            self.notices.end(_GRACE)
            for close in self.hooks.closed:
                close()
            if self._scratch is not None:
                self._scratch.close()
            # Its descriptors close with the last mesh that refers to it.
            if _HOLDER.process is self:
                _HOLDER.process = None

    def _started_actor_host(self) -> ActorHost | None:
        # Another thread may be starting it just now.
        with self._lock:
            return self._actor_host

    def _stop_owned(self, limit: float) -> None:
        """Stop what the script owns, one mesh after the other; a signal can end the wait."""
        wait = _StopWait(self, limit)
        # The script still owns them, and is notified if one dies meanwhile.
        for each in self.owners.of(0).in_turn(keep=True):
            wait.until_done(each.stop(limit))

    def _stop_all(self, limit: float) -> None:
        """Stop the remaining processes that this one spawned."""
        runtime = self.runtime
        wait = _StopWait(self, limit)
        calls = [
            runtime.stop_procs(
                Target.many(mesh, Region.whole(Extent(["procs"], [size])), placement),
                limit,
            )
            for mesh, size, placement in runtime.live_meshes()
        ]
        for call in calls:
            wait.until_done(call)


def _import_repairs() -> None:
    import mesh_core._extensions.running
    import mesh_core._failures.repairs
    import mesh_core._failures.returns
    import mesh_core._hosting.actor_host
    import mesh_core._meshes.repair  # noqa: F401


class _StopWait:
    """Waits for stops, and says so if somebody asked for the end and it takes long."""

    def __init__(self, process: Process, limit: float) -> None:
        self._process = process
        now = time.monotonic()
        self._until = now + limit + 1.0
        self._says = now + _MOMENT if limit > _MOMENT and _wanted_by() else None

    def until_done(self, call: Awaited) -> None:
        """Wait for one stop, as long as there is time."""
        # Failures meanwhile are reported at the end, and do not hold it up.
        while not call.done():
            try:
                now = time.monotonic()
                if not call.wait(max(0.0, min(self._until, self._says or self._until) - now)):
                    if self._says is None:
                        break
                    self._says = None
                    self._say_stopping()
            except SupervisionError as failure:
                self._process.supervision.take_back(failure)

    def _say_stopping(self) -> None:
        from mesh_core._common.interrupts import say_stopping

        count = sum(size for _, size, _ in self._process.runtime.live_meshes())
        if count:
            say_stopping(count, by_sigterm=_wanted_by() == "SIGTERM")


def _wanted_by() -> str:
    """Return who asked this process to end now: Ctrl-C, SIGTERM, or nobody."""
    from mesh_core._common.interrupts import was_interrupted

    sigterm = _HOLDER.sigterm
    if sigterm is not None and sigterm.begun:
        return "SIGTERM"
    return "Ctrl-C" if was_interrupted() else ""


def _install(process: Process) -> Process:
    _HOLDER.process = process
    reference = weakref.ref(process)

    def forked() -> None:
        parent = reference()
        if parent is not None:
            parent.runtime.mark_forked()

    os.register_at_fork(after_in_child=forked)
    return process


def become_worker(
    identity: Identity, settings: Settings, *, addr: tuple[int, int, int], link: int, board: int, seat: int
) -> Process:
    """Make this process a worker: connect it to its agent, under its address."""
    return _install(Process(_worker_runtime(settings, addr, link, board, seat), identity))


def _worker_runtime(
    settings: Settings, addr: tuple[int, int, int], link: int, board: int, seat: int
) -> Runtime:
    from mesh_core._common.settings import runtime_options

    return Runtime.worker(addr, link, board, seat, runtime_options(settings))


def become_guest(identity: Identity, number: int, *, link: int, board: int, seat: int) -> Process:
    """Make this script a process of a job that outlives it; called with the holder's lock held."""
    _prepare_end()
    from mesh_core._common.settings import current_settings
    from mesh_core._native import GUEST_MESHES

    runtime = _worker_runtime(current_settings(), (GUEST_MESHES + number, 0, 0), link, board, seat)
    return _begin_script(Process(runtime, identity))


def make_controller() -> Process:
    """Make this script's process object; called with the holder's lock held."""
    from mesh_core._common.settings import current_settings, runtime_options

    _prepare_end()
    settings = current_settings()
    standby, _HOLDER.standby = _HOLDER.standby, None
    runtime = Runtime.controller(runtime_options(settings), standby)
    region = Region.whole(Extent([], []))
    host = os.uname().nodename  # that of `socket`, which takes longer to import
    identity = Identity(
        mesh_id=0,
        mesh_name="controller",
        region=region,
        rank=0,
        host=host,
        host_no=0,
        location=Location.on(0, host),
    )
    return _begin_script(Process(runtime, identity))


def _prepare_end() -> None:
    """Import what the end of a script needs: Ctrl-C in the middle of an import would leave half a module behind.

    The rest is imported by :meth:`Notices.start`, when processes have been ordered.
    """
    # Before `_leave` is registered: `logging` then closes its handlers after it, as records still arrive until then.
    import logging  # noqa: F401

    from mesh_core._common import interrupts, settings  # noqa: F401


def _begin_script(process: Process) -> Process:
    """Equip a script's process, and make it end with the interpreter."""
    from mesh_core._common import interrupts

    _HOLDER.equip_script(process)
    for join in _HOLDER.wanted:
        join(process)
    # Only now may other threads see it.
    _install(process)
    if not _HOLDER.leaves:
        atexit.register(_leave)
        _HOLDER.leaves = True
    _HOLDER.sigterm = interrupts.Termination.install(process.settings.sigterm_grace) or _HOLDER.sigterm
    return process


def _leave() -> None:
    """Stop everything when the interpreter exits; EXIT-1 in ``door.rs`` says what happens to threads that call meanwhile."""
    try:
        _end_and_report()
    except (KeyboardInterrupt, SystemExit):
        # The signal came before the first step could block it, or after the last.
        _end_and_report()


def _end_and_report() -> None:
    from mesh_core._common.interrupts import Interrupts, end_by_interrupt

    process = _HOLDER.process
    unheard: list[str] = []
    sigterm = _HOLDER.sigterm
    if sigterm is not None:
        # For good: nobody is left in whom a later signal could be raised.
        sigterm.hold()
    with Interrupts(sigterm) as interrupts:
        begin_exit(_GRACE if process is None else process.settings.stop_timeout + _GRACE, done=False)
        if process is not None and process.in_charge:
            from mesh_core._failures.supervision import stop_and_report

            # Ctrl-C asked for the end, and has hurried it.
            with contextlib.suppress(KeyboardInterrupt):
                unheard = stop_and_report(process, interrupts)
        begin_exit(_GRACE, done=True)
        interrupts.forget()
    end_by_interrupt()
    if unheard:
        from mesh_core._failures.supervision import leave_with

        leave_with(unheard, status=None if sigterm is not None and sigterm.begun else 1)


def shutdown() -> Future[None]:
    """Stop everything that this script spawned, now instead of at its end. Mesh can be used again afterwards.

    It has stopped when this returns; the future, which others may await, is done.

    >>> from mesh_core import shutdown, this_host
    >>> procs = this_host().spawn_procs(per_host={"gpus": 2})
    >>> shutdown().get()
    """
    from mesh_core._futures.future import Future

    _HOLDER.shutdown()
    return Future.of(None)
