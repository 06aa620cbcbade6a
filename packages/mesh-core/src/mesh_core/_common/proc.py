"""Which process this is."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mesh_core._common.current import current
from mesh_core._native import roll, seat

if TYPE_CHECKING:
    from mesh_core._native import Point
    from mesh_core._process.process import Process

_MOST_READ = 4096
"""How many signatures are remembered."""


@dataclass(frozen=True)
class Proc:
    """A process of the job."""

    mesh_name: str
    """The name of the mesh that it is in; ``"controller"`` for the script's own process."""
    point: Point
    """Its place in that mesh."""
    host: str
    """The name of its host."""
    pid: int
    job: tuple[int, str]
    """The script's process id on its host, and a random string that identifies the script."""
    address: tuple[int, int, int]
    """The address that messages are sent to, unique in the job; ``(0, 0, 0)`` for the controller."""
    hosts: Mapping[str, str] = field(default_factory=dict, compare=False)
    """The network addresses of attached hosts, by name; empty except in the script."""
    incarnation: int = field(default=0, compare=False)
    """How many times this rank had been respawned when this process started; see :attr:`ProcMesh.incarnations`."""
    is_host: bool = False
    """Whether it is the process that runs its host's extensions."""

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
    return proc_of(current())


def proc_of(process: Process) -> Proc:
    """Return the :class:`Proc` of a process object."""
    return _proc_with(process, _hosts_of(process))


def signed(process: Process, message: Any) -> tuple[Any, bytes]:
    """Return an extension's message as it is sent: with its sender."""
    return message, process.slots.of(Signatures).own(process)


class Signatures:
    """Senders of messages, as pickled for the wire: re-pickled only when something changed, and unpickled once."""

    def __init__(self) -> None:
        self._own: tuple[Mapping[str, str], bytes] = ({}, b"")
        self._read: dict[bytes, Proc] = {}

    def own(self, process: Process) -> bytes:
        """Return the signature of this process."""
        hosts = _hosts_of(process)
        known, signature = self._own
        if not signature or hosts != known:
            signature = pickle.dumps(_proc_with(process, hosts), 5)
            self._own = hosts, signature
        return signature

    def read(self, signature: bytes) -> Proc:
        """Return the process that a signature stands for."""
        found = self._read.get(signature)
        if found is None:
            if len(self._read) >= _MOST_READ:
                self._read.clear()
            found = self._read[signature] = pickle.loads(signature)
        return found


def _hosts_of(process: Process) -> dict[str, str]:
    if process.identity.mesh_id != 0 or process.closed:
        return {}
    return {name: address for _, name, address, *_ in roll(process.runtime)}


def _proc_with(process: Process, hosts: Mapping[str, str]) -> Proc:
    me = process.identity
    return Proc(
        mesh_name=me.mesh_name,
        point=me.region.point_of(me.rank),
        host=me.host,
        pid=process.pid,
        job=process.job,
        address=process.runtime.me,
        hosts=hosts,
        incarnation=seat(process.runtime, *process.runtime.me)[2],
        is_host=me.is_host,
    )
