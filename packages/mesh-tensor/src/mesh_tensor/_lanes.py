"""A stream's end in each process: an extension with a thread of its own, beside the one that has the default stream.

A stream is an extension of the same kind as `Tensors`, so that its instructions run on a thread of their own, in the order sent, and its
questions are answered behind them. Each has its own tensors, templates and process groups in a process (LNE-1: two streams share nothing but
what `_streams/_handover.py` passes from one to the other). The classes are made when they are first named: pickle finds them by their names.

Imported in every process of a job that uses streams, and therefore without PyTorch.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from mesh_core.extensions import find, install
from mesh_tensor._bench import Bench
from mesh_tensor._extension import Tensors

if TYPE_CHECKING:
    from mesh_core import ProcMesh
    from mesh_tensor._propagate import Issuer
    from mesh_tensor._stream import Flusher
    from mesh_tensor._user_streams import Stream

_CLASS = "Lane"


class Lane(Tensors):
    """One stream: at a controller its messages to processes, in a process its tensors."""

    after = (Tensors.name,)
    is_side = True
    stream: Stream | None = None
    """The script's `Stream`."""

    def start(self) -> None:
        """Make room; whatever has a number in this process has it in all streams."""
        main = self.main = find(Tensors) or install(Tensors)
        self._benches: dict[Any, Bench] = {}
        self._streams: dict[ProcMesh, Issuer] = {}
        self._lock = threading.Lock()
        self.lock = main.lock
        self.numbers, self.templates, self.groups = main.numbers, main.templates, main.groups
        self.firsts, self.streams = main.firsts, WeakSet()
        self.refuses, self.recorders = main.refuses, main.recorders
        self.guard, self.handover, self.backends = main.guard, main.handover, main.backends

    @property
    def clear_text(self) -> dict[str, str] | None:  # type: ignore[override]
        """As for the default stream."""
        return self.main.clear_text

    @property
    def flusher(self) -> Flusher:
        """Sends waiting instructions, of all streams."""
        return self.main.flusher

    def issuer(self, procs: ProcMesh, cls: type) -> Issuer:
        """Return the issuer of operators for a mesh on this stream."""
        self.main.issuer(procs, cls)
        return super().issuer(procs, cls)

    def stop(self) -> None:
        """End: the flusher is the default stream's."""


def lane_class(number: int) -> type[Lane]:
    """Return the class of the stream with that number."""
    found: type[Lane] = __getattr__(f"{_CLASS}{number}")
    return found


def __getattr__(name: str) -> Any:
    number = name.removeprefix(_CLASS)
    if number == name or not number.isdecimal():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in globals():
        body = {"__module__": __name__, "__doc__": Lane.__doc__, "name": f"{Tensors.name}.stream.{number}"}
        globals().setdefault(name, type(name, (Lane,), body))
    return globals()[name]
