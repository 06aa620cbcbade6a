"""The processes that run the hosts' extensions: one on each host that has any, hidden from meshes.

The script owns all of them. A worker that needs an extension on a host asks the script. The id of such a process's mesh
follows from the host's number, so every process of the job can send there without asking anybody.

HPR-1: a host has one such process. It starts before processes that are spawned there for an extension wanted on hosts, and
stops after everything else that the script spawned.
HPR-2: it is respawned with its extensions when it dies, a few times; then the script is notified of a failure.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from mesh_core._common.codes import Request
from mesh_core._common.control import Control
from mesh_core._common.errors import MeshError
from mesh_core._geometry.location import ListedLocation, Location
from mesh_core._native import HOST_MESHES, Extent, Placement, Region, Target

if TYPE_CHECKING:
    from mesh_core._extensions.base import Extension
    from mesh_core._extensions.carried import Carried
    from mesh_core._failures.policies import Action, Event, Policy
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._process.process import Process

MESH_NAME: Final = "host"
AGAIN: Final = 3
"""How often a process is respawned within :data:`PERIOD`."""
PERIOD: Final = 60.0


def address_of(host: int) -> tuple[int, int, int]:
    """Return the address of a host's process, in its first incarnation."""
    return HOST_MESHES + host, 0, host


class HostsLocation(ListedLocation):
    """The location of the processes of some hosts, one rank for each."""

    __slots__ = ()

    def addr(self, procs_id: int, rank: int) -> tuple[int, int, int]:
        return address_of(self.host_of(rank))

    def target(self, procs_id: int, view: Region) -> Target:
        pieces: list[tuple[int, Target, int | None]] = []
        for place, rank in enumerate(view):
            mesh, there, host = self.addr(procs_id, rank)
            pieces.append((place, Target.one(mesh, there, Placement.on(host)), None))
        return pieces[0][1] if len(pieces) == 1 else Target.joined(pieces, view)


@dataclass(frozen=True, slots=True)
class Again:
    """The policy of a host's process: it is respawned unless it died too often recently."""

    deaths: tuple[float, ...] = ()

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        """See :class:`mesh_core.policies.Policy`."""
        from mesh_core._failures.failure import OF_HOSTS
        from mesh_core._failures.policies import Escalate, Failed, Ignore, Respawn

        if not isinstance(event, Failed):
            return self, ()
        if event.kind in OF_HOSTS:
            return self, (Ignore(),)  # its owners are notified of the host's end in other ways
        recent = (*(death for death in self.deaths if now - death < PERIOD), now)
        after = replace(self, deaths=recent[-AGAIN:])
        if len(recent) > AGAIN:
            why = f"it died {len(recent)} times within {PERIOD:g} s, and is not respawned automatically again"
            return after, (Escalate(why),)
        logging.getLogger("mesh").warning(
            "the process on host %s that runs its extensions died and is respawned: %s",
            event.failure.host,
            event.failure.headline(),
        )
        return after, (Respawn(),)


class _HostProc:
    """One host's process and the extensions it carries."""

    def __init__(self, process: Process, host: int, first: Carried) -> None:
        from mesh_core._failures.owned_meshes import Holding
        from mesh_core._meshes.procs import ProcMesh
        from mesh_core._meshes.spawning import Options, Recipe

        self._process = process
        self._carried = {first.name: first}
        own = process.identity
        name = own.host if host == own.host_no else process.name_of_host(host)
        location, mesh_id = Location.on(host, name), HOST_MESHES + host
        extent = Extent([], [])
        region = Region.whole(extent)
        self._is_local = host == own.host_no
        self._name = name
        recipe = Recipe(
            process,
            MESH_NAME,
            mesh_id,
            0,
            location,
            options=Options(),
            size=1,
            carries=self._told,
        )
        self.mesh: ProcMesh = ProcMesh(
            process,
            name=MESH_NAME,
            location=location,
            procs_id=mesh_id,
            root=region,
            view=region,
            ready=None,
            recipe=recipe,
        )
        for begin in process.hooks.spawning:
            begin()
        self.mesh._spawned = recipe.order(mesh_id, region, location.placement, extent)
        recipe.holding = Holding(self.mesh, 0, Again(), last=True)
        process.owners.of(0).add(recipe.holding)
        process.notices.start()

    def has(self, name: str) -> bool:
        """Return whether it carries an extension and is not dead for good."""
        return name in self._carried and not self.mesh._lost()

    def carry(self, carried: Carried) -> bool:
        """Add an extension; return whether the process is running and must be told."""
        self._carried.setdefault(carried.name, carried)
        recipe = self.mesh._recipe
        assert recipe is not None
        with recipe.lock:
            if not self.mesh._lost():
                return True
            # Nothing can be respawned on a dead host; messages sent there will say so.
            with contextlib.suppress(MeshError, ValueError):
                self.mesh._itself.respawn()
        return False

    def _told(self) -> str:
        """Pack Mesh's own extensions that processes carry now, and those of the host."""
        from mesh_core._extensions.carried import pack
        from mesh_core._extensions.events import Spawning

        spawning = Spawning(MESH_NAME, Extent([], []), (self._name,), self._is_local, is_host=True)
        own = [each for each in self._process.extensions.travelling() if each.name.startswith("mesh.")]
        packed = [pack(each, spawning) for each in own]
        return json.dumps([*(each for each in packed if each is not None), *self._carried.values()])


class HostProcs:
    """What a process knows about the hosts' processes: the script spawned them, other processes asked it to."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._lock = threading.RLock()
        self._made: dict[int, _HostProc] = {}
        self._asked: set[tuple[int, str]] = set()

    @property
    def _is_owner(self) -> bool:
        return self._process.identity.mesh_id == 0

    def bring(self, extensions: Iterable[Extension], hosts: Sequence[int]) -> None:
        """Install extensions on these hosts, before processes that carry them are spawned there."""
        for extension in extensions:
            lacking = [host for host in hosts if not self.has(host, extension.name)]
            if lacking and (carried := self.packed(extension, lacking)) is not None:
                self.order(lacking, carried, tell=True)

    def has(self, host: int, name: str) -> bool:
        """Return whether an extension was installed on a host, as far as this process knows."""
        if not self._is_owner:
            return (host, name) in self._asked
        made = self._made.get(host)
        return made is not None and made.has(name)

    def packed(self, extension: Extension, hosts: Sequence[int]) -> Carried | None:
        """Pack an extension for these hosts; return ``None`` if they are not to have it."""
        from mesh_core._extensions.carried import pack
        from mesh_core._extensions.events import Spawning

        names = tuple(self._process.name_of_host(host) for host in hosts)
        is_local = set(hosts) == {self._process.identity.host_no}
        extent = Extent(["hosts"], [len(hosts)])
        return pack(extension, Spawning(MESH_NAME, extent, names, is_local, is_host=True))

    def order(self, hosts: Sequence[int], carried: Carried, *, tell: bool) -> None:
        """Ensure that these hosts have an extension; with ``tell``, notify their running processes too."""
        if self._is_owner:
            self.make(hosts, carried, tell=tell)
            return
        to = Target.one(0, 0, Placement.on(0))
        asked = (list(hosts), carried, tell)
        self._process.runtime.sender(to, 0, Control.HOSTS, Request.EXTENSION, False).tell(asked)
        self._asked.update((host, carried.name) for host in hosts)

    def make(self, hosts: Sequence[int], carried: Carried, *, tell: bool) -> None:
        """Ensure that processes on these hosts carry an extension; runs in the script."""
        runtime = self._process.runtime
        with self._lock:
            for host in hosts:
                if self._process.closed:
                    return
                made = self._made.get(host)
                if made is None:
                    self._made[host] = _HostProc(self._process, host, carried)
                elif made.carry(carried) and tell:
                    mesh, rank, _ = address_of(host)
                    target = Target.one(mesh, rank, Placement.on(host))
                    runtime.sender(target, 0, Control.INSTALL, Request.EXTENSION, False).tell(carried)

    def forget(self, hosts: Iterable[int]) -> None:
        """Forget hosts that are released: their agents end the processes there."""
        with self._lock:
            for host in hosts:
                made = self._made.pop(host, None)
                if made is not None:
                    self._process.owners.drop(made.mesh._procs_id)


def check_there(process: Process, extension: Extension, hosts: Sequence[int]) -> None:
    """Raise for messages to hosts that are known not to have an extension."""
    if process.identity.mesh_id != 0:
        return
    for host in hosts:
        made = process.host_procs._made.get(host)
        if made is None or extension.name not in made._carried:
            name = process.name_of_host(host)
            raise MeshError(
                f"host {name} does not have extension {extension.name!r}: it was not installed there. Call "
                "install_on() of the extension with the hosts first, or set on_hosts = True in its class"
            )
