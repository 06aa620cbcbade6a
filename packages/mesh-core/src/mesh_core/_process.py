"""This process's part in the mesh: one object that holds the runtime and everything that belongs to it."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

from mesh_core import _native
from mesh_core._errors import MeshError
from mesh_core._serialize import dumps

if TYPE_CHECKING:
    import asyncio

    from mesh_core._loop import Bridge
    from mesh_core._native import Region, Runtime
    from mesh_core._settings import Settings
    from mesh_core._stage import Stage


class Identity:
    """Which process this is: its mesh, its place there, and how both are called."""

    __slots__ = ("host", "mesh_id", "mesh_name", "rank", "region")

    def __init__(self, *, mesh_id: int, mesh_name: str, region: Region, rank: int, host: str) -> None:
        self.mesh_id = mesh_id
        self.mesh_name = mesh_name
        self.region = region
        self.rank = rank
        self.host = host

    @property
    def proc_id(self) -> str:
        """The process for people: its mesh and rank."""
        return self.mesh_name if self.mesh_id == 0 else f"{self.mesh_name}[{self.rank}]"


class Process:
    """The runtime, and what Python keeps beside it. One a process, made on first use."""

    def __init__(self, runtime: Runtime, identity: Identity) -> None:
        self.runtime = runtime
        self.identity = identity
        self.pid = os.getpid()
        self.closed = False
        self.environ = dict(os.environ)
        """The environment that nurseries are started with; what changed since is sent to each worker."""
        self.settling = threading.RLock()
        """Held while a finished call becomes a value; unpickling may run code that waits for another call."""
        self._lock = threading.Lock()
        self._bridges: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Bridge] = (
            weakref.WeakKeyDictionary()
        )
        self._blobs: weakref.WeakKeyDictionary[type, tuple[bytes, list[memoryview]]] = (
            weakref.WeakKeyDictionary()
        )
        self._stage: Stage | None = None
        self.deadlines = False
        """Whether a message with a deadline was ever handled here, so that calls have to look for one to inherit."""
        self._names: dict[str, int] = {}

    @property
    def settings(self) -> Settings:
        """The settings in force for whoever asks; the runtime's own were fixed when it was made."""
        from mesh_core._settings import current_settings

        return current_settings()

    @property
    def in_charge(self) -> bool:
        """Whether there is something to stop here; neither after a shutdown nor in a forked copy there is."""
        return not self.closed and os.getpid() == self.pid

    def bridge(self) -> Bridge:
        """The running event loop's end of the runtime."""
        import asyncio

        loop = asyncio.get_running_loop()
        bridge = self._bridges.get(loop)
        if bridge is None:
            from mesh_core._loop import Bridge

            bridge = self._bridges[loop] = Bridge(loop)
        return bridge

    def class_blob(self, cls: type) -> bytes:
        """An actor class as bytes, made once per class: it travels with every spawn."""
        found = self._blobs.get(cls)
        if found is None:
            data, buffers = dumps(cls, root=f"the actor class {cls.__qualname__}")
            found = self._blobs[cls] = (data, buffers)
        if found[1]:
            raise MeshError(
                f"the definition of {cls.__qualname__} holds {sum(b.nbytes for b in found[1]):,} bytes of data; "
                "pass large data to the constructor instead of keeping it in the class or its globals"
            )
        return found[0]

    def unique_name(self, stem: str) -> str:
        """``stem``, with a number if it was used before."""
        with self._lock:
            count = self._names[stem] = self._names.get(stem, 0) + 1
        return stem if count == 1 else f"{stem}-{count}"

    def stage(self) -> Stage:
        """Where actors of this process live; started on first use."""
        with self._lock:
            if self._stage is None:
                from mesh_core._stage import Stage

                self._stage = Stage(self)
                self._stage.start_thread()
            return self._stage

    def adopt_stage(self, stage: Stage) -> None:
        """Take the stage that a worker's main thread runs."""
        self._stage = stage

    def shutdown(self, within: float | None = None) -> None:
        """Stop everything that this process owns. What it has not stopped after ``within`` seconds is killed."""
        if not self.in_charge:
            return
        self.closed = True
        atexit.unregister(self.shutdown)
        limit = self.settings.stop_timeout if within is None else within
        self.runtime.close(limit)
        if self._stage is not None:
            self._stage.end_thread(limit)
        # Its descriptors close with the last mesh that refers to it.
        if _HOLDER.process is self:
            _HOLDER.process = None


class _Holder:
    """The one pointer to this process's :class:`Process`."""

    __slots__ = ("lock", "process")

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.process: Process | None = None


_HOLDER = _Holder()


def _runtime_options(settings: Settings) -> dict[str, Any]:
    return {
        "spin_us": settings.spin_us,
        "link_budget": settings.link_budget,
        "mailbox_budget": settings.mailbox_budget,
        "shm_budget": settings.shm_bytes,
        "shm_threshold": settings.shm_threshold,
    }


def _install(process: Process) -> Process:
    _HOLDER.process = process
    reference = weakref.ref(process)

    def forked() -> None:
        parent = reference()
        if parent is not None:
            parent.runtime.mark_forked()

    os.register_at_fork(after_in_child=forked)
    return process


def become_worker(identity: Identity, settings: Settings, *, link: int, board: int, seat: int) -> Process:
    """Make this process a worker: connect it to its agent."""
    runtime = _native.Runtime.worker(
        mesh=identity.mesh_id,
        rank=identity.rank,
        link=link,
        board=board,
        seat=seat,
        **_runtime_options(settings),
    )
    return _install(Process(runtime, identity))


def current() -> Process:
    """This process's :class:`Process`; a script's is made when it is first needed."""
    process = _HOLDER.process
    if process is not None and not process.closed:
        return process
    with _HOLDER.lock:
        process = _HOLDER.process
        if process is None or process.closed:
            import socket

            from mesh_core._settings import current_settings

            settings = current_settings()
            runtime = _native.Runtime.controller(**_runtime_options(settings))
            region = _native.Region.whole(_native.Extent([], []))
            identity = Identity(
                mesh_id=0, mesh_name="controller", region=region, rank=0, host=socket.gethostname()
            )
            process = _install(Process(runtime, identity))
            atexit.register(process.shutdown)
        return process


def shutdown() -> None:
    """Stop everything that this script has spawned, now rather than at its end. A later spawn begins anew.

    >>> from mesh_core import shutdown, this_host
    >>> procs = this_host().spawn_procs(per_host={"gpus": 2})
    >>> shutdown()
    """
    process = _HOLDER.process
    if process is not None:
        process.shutdown()
