"""Keep track of the hosts' keepers, and tell running processes about a sync."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MeshError
from mesh_core._features.workspace.extension import Copies
from mesh_core._features.workspace.synced import Synced, Told
from mesh_core._features.workspace.told import send_told
from mesh_core._meshes.joined import concat
from mesh_core._native import Region, Slice
from mesh_core.extensions import find, install

if TYPE_CHECKING:
    from mesh_core._features.workspace.placing import Workspace
    from mesh_core._meshes.hosts import HostMesh
    from mesh_core._process.process import Process

_TOLD_S = 2.0
"""A process whose event loop is busy for longer imports from the copies once it gets to the message."""


class Fleet:
    """The keepers of all hosts that were ever synced; one per host, whatever slices of meshes are synced."""

    def __init__(self) -> None:
        self._crews: list[tuple[list[int], Any, Any]] = []
        """The numbers of hosts, the processes on them, and the keepers in those."""

    def procs_ids(self) -> set[int]:
        """Return the process meshes of the keepers."""
        return {procs._procs_id for _, procs, _ in self._crews}

    def keepers(self, hosts: HostMesh) -> Any:
        """Return the keepers of these hosts as one mesh, spawning those that are missing."""
        wanted = hosts._numbers
        for crew in list(self._crews):
            self._mend(crew, wanted)
        known = {host for numbers, _, _ in self._crews for host in numbers}
        if not known.intersection(wanted):
            self._hire(hosts)
        else:
            for index, host in enumerate(wanted):
                if host not in known:
                    self._hire(hosts._with_region(Region([], Slice(hosts._view.rank_at(index), [], []))))
        found: list[Any] = []
        for numbers, _, keepers in self._crews:
            places = [numbers.index(host) for host in wanted if host in numbers]
            if len(places) == len(numbers):
                found.append(keepers.flatten("hosts"))
            elif places:
                found += _parts(keepers, places)
        return found[0] if len(found) == 1 else concat(found, dim="hosts")

    def _hire(self, hosts: HostMesh) -> None:
        from mesh_core._features.workspace.keeper import Keeper

        procs = hosts.spawn_procs(name="workspace")
        self._crews.append((hosts._numbers, procs, procs.spawn("workspace", Keeper)))

    def _mend(self, crew: tuple[list[int], Any, Any], wanted: list[int]) -> None:
        """Respawn keepers that died on these hosts."""
        numbers, procs, keepers = crew
        dead = [point.rank for point in keepers.failed() if numbers[point.rank] in wanted]
        if not dead:
            return
        try:
            procs.respawn([point.rank for point in procs.failed() if point.rank in dead]).get()
            keepers.respawn(dead).get()
        except (MeshError, ValueError):
            # The host is dead or cannot spawn processes; spawning the next crew there will report that.
            self._crews.remove(crew)
            procs.stop()


def _parts(keepers: Any, places: list[int]) -> list[Any]:
    """Return the keepers at these places, as one mesh if the places are evenly spaced, else one by one."""
    step = places[1] - places[0] if len(places) > 1 else 1
    if step > 0 and places == list(range(places[0], places[0] + step * len(places), step)):
        return [keepers._with_region(Region(["hosts"], Slice(places[0], [len(places)], [step])))]
    return [keepers._with_region(Region(["hosts"], Slice(place, [1], [1]))) for place in places]


def tell_running(
    process: Process, fleet: Fleet, workspace: Workspace, changed: list[str], again: bool
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Have running processes import from the copies and, with ``again``, reload the ``changed`` files."""
    keepers = fleet.procs_ids()
    told = Told(process.slots.of(Synced).told, workspace.source, workspace.to, changed, again)
    futures = send_told(find(Copies) or install(Copies), process, told, keepers)
    until = time.monotonic() + _TOLD_S
    reloaded: set[str] = set()
    kept: set[str] = set()
    failed: list[str] = []
    for future in futures:
        if not again:
            # Only sys.path changes; even a busy process handles this before anything sent later.
            future._call.wait(max(0.0, until - time.monotonic()))
            continue
        for answer in future.get():
            reloaded.update(answer.reloaded)
            kept.update(answer.kept)
            if answer.failed:
                failed.append(answer.failed)
    if failed:
        raise MeshError(
            f"the hosts have the new files of {workspace.source}, but {len(failed)} processes could not "
            f"reload them and continue with their old code: {failed[0]}. Correct it and sync again"
        )
    return tuple(sorted(reloaded)), tuple(sorted(kept))
