"""What the launcher of a job says about the ends of its hosts, for the failures of processes there."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_core import HostMesh
from mesh_core.extensions import HostReasons
from mesh_launchers._contract import Phase
from mesh_launchers._state import JobState


class Explained:
    """Passes the launcher's words on to the mesh. Its owner calls it under a lock, or from one thread."""

    def __init__(self) -> None:
        self._meshes: list[tuple[HostMesh, tuple[int, ...]]] = []
        """Hosts as they were attached, with their numbers in the job."""
        self._reasons: dict[int, tuple[HostReasons, int]] = {}
        self._known: dict[int, str] = {}
        """What the mesh itself has said about its hosts, and knows already."""
        self._told: dict[int, str] = {}

    def add(self, hosts: HostMesh, numbers: Sequence[int]) -> None:
        """Add hosts, with their numbers in the job."""
        self._meshes.append((hosts, tuple(numbers)))

    def knows(self, number: int, why: str) -> None:
        """Note what the mesh says of the end of a host."""
        self._known[number] = why

    def hear(self, state: JobState) -> None:
        """Take what the launcher says."""
        if not state.explains:
            return
        while self._meshes:
            hosts, numbers = self._meshes.pop()
            reasons = HostReasons(hosts)
            self._reasons.update({number: (reasons, place) for place, number in enumerate(numbers)})
        for host in state.hosts:
            # Lines of its log may follow.
            why = host.why.partition("\n")[0]
            if (
                why
                and host.phase in (Phase.RUNNING, Phase.FAILED)
                and host.number in self._reasons
                and host.why != self._known.get(host.number)
                and why != self._told.get(host.number)
            ):
                self._told[host.number] = why
                reasons, place = self._reasons[host.number]
                reasons.tell(place, why)
