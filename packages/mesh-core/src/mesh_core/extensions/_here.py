"""Which process this is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mesh_core import _process
from mesh_core._native import roll, seat

if TYPE_CHECKING:
    from mesh_core._native import Point
    from mesh_core._process import Process


@dataclass(frozen=True)
class Proc:
    """A process of the job."""

    mesh_name: str
    """The name of the mesh that it is part of; ``"controller"`` for the script's own process."""
    point: Point
    """Its place in that mesh."""
    host: str
    """The name of its host."""
    pid: int
    job: tuple[int, str]
    """The process id of the script that drives the job, on its own host, and what that script is."""
    address: tuple[int, int, int]
    """What messages are sent to it by, which no other process of the job has; ``(0, 0, 0)`` for the controller."""
    hosts: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Where hosts can be reached over the network, by name: those that were attached, and only where the script asks."""
    incarnation: int = field(default=0, compare=False)
    """How often the process of this rank had been made again when this one was; see :attr:`ProcMesh.incarnations`."""
    is_host: bool = False
    """Whether it is the process in which its host has its extensions."""

    @property
    def is_controller(self) -> bool:
        """Whether it is the script's own process."""
        return self.address == (0, 0, 0)

    def __str__(self) -> str:
        if self.is_host:
            return f"host {self.host}"
        return self.mesh_name if self.is_controller else f"{self.mesh_name}[{self.point.rank}]"

    def __hash__(self) -> int:
        return hash(self.address)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proc) and (other.address, other.job) == (self.address, self.job)


def current_proc() -> Proc:
    """Return the process that this code runs in.

    >>> from mesh_core.extensions import current_proc
    >>> here = current_proc()
    >>> str(here), here.is_controller
    ('controller', True)
    """
    return proc_of(_process.current())


def proc_of(process: Process) -> Proc:
    """The same, where the process's own object is at hand."""
    me = process.identity
    return Proc(
        mesh_name=me.mesh_name,
        point=me.region.point_of(me.rank),
        host=me.host,
        pid=process.pid,
        job=process.job,
        address=process.runtime.me,
        hosts={name: address for _, name, address, *_ in roll(process.runtime)}
        if me.mesh_id == 0 and not process.closed
        else {},
        incarnation=seat(process.runtime, *process.runtime.me)[2],
        is_host=me.is_host,
    )
