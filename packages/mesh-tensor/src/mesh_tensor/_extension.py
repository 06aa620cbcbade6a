"""Each process's extension for tensors: at a controller the streams to meshes, at a worker the tensors.

Imported in every process of a job, and therefore without PyTorch until tensors are used.
"""

from __future__ import annotations

import itertools
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from mesh_core import MeshError
from mesh_core.extensions import Extension, Proc, find, install
from mesh_tensor._bench import Bench
from mesh_tensor._streams._guard import Guard
from mesh_tensor._streams._handover import Handover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mesh_core import Future, ProcMesh, Sending, ValueMesh
    from mesh_tensor._capture._recorder import Recorder
    from mesh_tensor._propagate import Issuer
    from mesh_tensor._stream import Flusher, Stream


class Tensors(Extension):
    """Keeps the tensors of a process and works on them on a thread of its own; or lets others do so."""

    name = "mesh_tensor"
    is_side = False
    """It is a stream besides the default one."""

    def start(self) -> None:
        """Make room."""
        self._benches: dict[Any, Bench] = {}
        self._streams: dict[ProcMesh, Issuer] = {}
        self._lock = threading.Lock()
        self.lock = threading.RLock()
        """Those of all streams."""
        self._flusher: Flusher | None = None
        self.numbers = itertools.count(1)
        self.templates = itertools.count(1)
        self.groups = itertools.count(1)
        self.firsts = itertools.count()
        self.streams: WeakSet[Stream] = WeakSet()
        """All, of both views."""
        self.refuses = threading.local()
        self.guard = Guard()
        self.backends: dict[tuple[ProcMesh, str], str] = {}
        """By mesh and kind of device, PyTorch's name of the collectives there, if one was chosen."""
        self.handover = Handover()
        self.clear_text: dict[str, str] | None = None
        """Whether collectives may go between hosts, and over which addresses."""
        self.recorders: dict[int, Recorder] = {}
        """By thread, the recording in progress."""

    def recorded(self, tell: Callable[[Recorder], None]) -> None:
        """Notify the recording of this thread, if there is one."""
        recorder = self.recorders.get(threading.get_ident())
        if recorder is not None:
            tell(recorder)

    def tell(self, to: Any, message: Any) -> Sending:
        """Send a message without tensors of a mesh."""
        with self.without_tensors():
            return super().tell(to, message)

    def call(self, to: Any, message: Any, *, timeout: float | None = None) -> Future[ValueMesh[Any]]:
        """Send a message without tensors of a mesh, and return a future of the answer."""
        with self.without_tensors():
            return super().call(to, message, timeout=timeout)

    @contextmanager
    def without_tensors(self) -> Iterator[None]:
        """Refuse tensors of a mesh when this thread pickles them."""
        before, self.refuses.here = getattr(self.refuses, "here", False), True
        try:
            yield
        finally:
            self.refuses.here = before

    def stop(self) -> None:
        """Undo that."""
        self.handover.close()
        if self._flusher is not None:
            self._flusher.close()

    @property
    def flusher(self) -> Flusher:
        """Sends waiting instructions."""
        if self._flusher is None:
            from mesh_tensor._stream import Flusher

            self._flusher = Flusher()
        return self._flusher

    def issuer(self, procs: ProcMesh, cls: type) -> Issuer:
        """Return the issuer of operators for a mesh; the same one each time. Its tensors are of the class."""
        from mesh_tensor._propagate import Issuer
        from mesh_tensor._stream import Stream

        with self._lock:
            found = self._streams.get(procs)
            if found is None:
                from mesh_tensor._lending import carry

                carry(cls)
                self.have_tensors_on(procs)
                found = self._streams[procs] = Issuer(Stream(self, procs, cls), cls)
                self.have_recorded(found.stream)
            return found

    def have_tensors_on(self, procs: ProcMesh) -> None:
        """Let processes keep tensors from now on; raise if their PyTorch is of another release than this one's."""
        self.install_on(procs).get()
        here = release()
        for point, there in self.call(procs, ("release",)).get():
            if there is None or _minor(there) != _minor(here):
                has = "has no PyTorch" if there is None else f"has PyTorch {there}"
                raise MeshError(
                    f"{procs} cannot have this script's tensors: the process at {point} {has}, and this process has {here}, whose operators may "
                    "be other ones. Install the same release, such as 2.15, in the environment of both"
                )

    def have_recorded(self, stream: Stream) -> None:
        """Let timelines of meshes that share processes with a new stream's record it too."""
        for each in {one.timeline for one in list(self.streams) if one.timeline is not None}:
            each.join(stream)

    def receive(self, message: tuple[Any, ...], sender: Proc) -> Any:
        """Do what a controller says."""
        kind, *rest = message
        if kind == "release":
            return release()
        import torch

        bench = self._benches.get(sender.address)
        if bench is None:
            bench = self._benches[sender.address] = Bench(
                self.proc.address, sender.address, self.handover, is_side=self.is_side
            )
        with torch.no_grad():
            if kind == "several":
                return self._several(bench, *rest)
            if bench.timing is not None:
                return bench.timing.do(kind, rest)
            return getattr(bench, kind)(*rest)

    def _several(self, bench: Bench, messages: list[tuple[Any, ...]]) -> None:
        """Carry out several messages, each as if it had come alone: an error in one does not affect the next."""
        raised = []
        for kind, *rest in messages:
            try:
                if bench.timing is not None:
                    bench.timing.do(kind, rest)
                else:
                    getattr(bench, kind)(*rest)
            except Exception as error:  # noqa: BLE001 - raised below
                raised.append(error)
        if raised:
            raise raised[0] if len(raised) == 1 else ExceptionGroup("several instructions raised", raised)


def release() -> str | None:
    """Return this process's release of PyTorch, if there is one; it is not imported for that."""
    imported = getattr(sys.modules.get("torch"), "__version__", None)
    if imported is not None:
        return str(imported)
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("torch")
    except PackageNotFoundError:
        return None


def _minor(release: str | None) -> list[str]:
    """Return what operators differ between: not builds, nor corrections."""
    return (release or "").split(".")[:2]


def issuer_for(procs: Any, cls: type) -> Issuer:
    """Return the issuer of operators for a mesh, whose tensors are of the class."""
    issuer: Issuer | None = getattr(procs, "issuer", None)
    if issuer is not None:
        return issuer
    tensors = find(Tensors) or install(Tensors)
    return (tensors.guard.active or tensors).issuer(procs, cls)
