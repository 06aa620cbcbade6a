"""A mesh whose tensors are given to other meshes, and to actors."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mesh_core import MeshError
from mesh_core.extensions import find, install
from mesh_tensor._arrivals import RETURNED, Arrivals

if TYPE_CHECKING:
    from mesh_core import ProcMesh
    from mesh_core.extensions import ProcEnd
    from mesh_tensor._arrivals import Address
    from mesh_tensor._stream import Stream


class Exchange:
    """A controller's view of it: one for each stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._lives = -1
        self.number = 0
        """A number by which the processes know the mesh, until some of them are restarted."""
        self._addresses: list[Address] = []
        self._receivers: dict[int, tuple[Stream, dict[str, str]]] = {}
        """Other meshes to which tensors were moved, by their numbers, and which dimension of theirs is which one here."""
        self._takers: dict[int, int] = {}
        """By the number of a tensor that was given to actors: how many of them have yet to take it."""

    @property
    def procs(self) -> ProcMesh:
        """The processes."""
        return self._stream.procs

    @property
    def arrivals(self) -> Arrivals:
        """The extension by which this process sends."""
        return find(Arrivals) or install(Arrivals)

    def join(self) -> None:
        """Tell all processes their places. That waits for nothing that was issued, and only happens once."""
        stream = self._stream
        if stream.broken:
            stream.check()
        if self._lives == stream.lives:
            return
        arrivals = self.arrivals
        stream.wait(arrivals.install_on(stream.procs))
        self._addresses = stream.wait(arrivals.call(stream.procs, ("join",))).values()
        for other in arrivals.exchanges.values():
            if not set(other._addresses).isdisjoint(self._addresses):  # noqa: SLF001 - of this class
                stream.link(other._stream)  # noqa: SLF001 - likewise
        ranks = {address: rank for rank, address in enumerate(self._addresses)}
        arrivals.exchanges.pop(self.number, None)
        self.number = next(stream.tensors.groups)
        stream.wait(arrivals.call(stream.procs, ("places", self.number, ranks)))
        arrivals.exchanges[self.number] = self
        self._receivers.clear()
        self._takers.clear()
        self._lives = stream.lives

    def source(self, to: Stream, rule: dict[str, str]) -> tuple[int, int]:
        """Return the identity of this mesh where another one waits for its tensors."""
        self._receivers[to.exchange.number] = to, rule
        return self.number, to.exchange.number

    def unsent(self, to: Stream, why: str) -> None:
        """Nothing more will be sent there."""
        with suppress(MeshError):
            self.arrivals.tell(to.procs, ("lost", (self.number, to.exchange.number), why))

    def lost(self, end: ProcEnd) -> None:
        """A process has ended: nobody should wait for what it would have sent."""
        if end.address not in self._addresses:
            return
        procs = self._stream.procs
        rank = self._addresses.index(end.address)
        place = next(point for point, _ in procs if point.rank == rank)
        why = f"the process at {place} of {procs} has ended before it could send its part"
        for number, (to, rule) in list(self._receivers.items()):
            with suppress(MeshError):
                receivers = to.procs.slice(**{dim: place[of] for dim, of in rule.items()})
                self.arrivals.tell(receivers, ("lost", (self.number, number), why))

    def taken(self, number: int, of: int) -> None:
        """An actor has taken a tensor, of so many that will: once all have, the other processes need not keep it."""
        left = self._takers.pop(number, of) - 1
        if left:
            self._takers[number] = left
            return
        stream = self._stream
        with suppress(MeshError), stream.lock:
            stream.tensors.tell(stream.procs, ("exchange", "unlend", -1, number))

    def returned(self, number: int, outcomes: list[Any]) -> None:
        """Give each process the result of its actor, or why there is none."""
        for (_, one), outcome in zip(self._stream.procs, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                said: tuple[str, Any] = "failed", f"{type(outcome).__name__}: {outcome}"
            else:
                said = "value", outcome
            with suppress(MeshError):
                self.arrivals.tell(one, ("value", (self.arrivals.proc.address, RETURNED, number), said))
