"""Locations of meshes: which host each rank is on, and the names of hosts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mesh_core._native import (
    GUEST_MESHES,
    HOST_MESHES,
    Placement,
    Region,
    Slice,
    Target,
    host_name,
    locate,
    roll,
)

if TYPE_CHECKING:
    from mesh_core._native import Runtime

_MOST_HOSTS = 1 << 32
_MOST_GUESTS = 1 << 32
# A reference carries the names of at most this many hosts, and only the numbers of the others.
_NAMED = 64
# The hosts of a part of a mesh are looked up only if it has at most this many ranks.
_LOOKED_AT = 1000


def is_host_mesh(mesh_id: int) -> bool:
    """Whether this is the mesh of a process that runs the extensions of a host."""
    return HOST_MESHES <= mesh_id < HOST_MESHES + _MOST_HOSTS


def is_guest_mesh(mesh_id: int) -> bool:
    """Whether this is the mesh of a script that joined a job which outlives it."""
    return GUEST_MESHES <= mesh_id < GUEST_MESHES + _MOST_GUESTS


class Names(Mapping[int, str]):
    """The names of the hosts attached here: a host's address until it has reported its name."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __getitem__(self, host: int) -> str:
        name = host_name(self._runtime, host)
        if name is None:
            raise KeyError(host)
        return name

    def __iter__(self) -> Iterator[int]:
        return (host for host, *_ in roll(self._runtime) if host in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @staticmethod
    def of(*known: Mapping[int, str]) -> Mapping[int, str]:
        """Merge names. If all are :class:`Names`, return one of them, which stays up to date as hosts report their names."""
        if all(isinstance(each, Names) for each in known):
            return known[0]
        return {host: name for each in known for host, name in each.items()}


class Location:
    """The hosts of a mesh. Every reference carries one, so messages can be routed without asking anyone."""

    __slots__ = ("_names", "placement")

    def __init__(self, placement: Placement, names: Mapping[int, str]) -> None:
        self.placement = placement
        self._names = names

    @classmethod
    def on(cls, host: int, name: str) -> Location:
        """Return the location of a mesh whose ranks are all on one host."""
        return cls(Placement.on(host), {host: name})

    @property
    def names(self) -> Mapping[int, str]:
        """The names of hosts by number; incomplete for very many hosts."""
        return self._names

    @property
    def is_joined(self) -> bool:
        """Whether no single placement describes it: the mesh was joined from others, or its hosts are listed."""
        return False

    @property
    def only(self) -> int | None:
        """The number of the host if there is only one, else ``None``."""
        return self.placement.only

    @property
    def hosts(self) -> list[int]:
        """The numbers of the hosts, in rank order; empty for the mesh of agents."""
        return self.placement.hosts()

    def meshes(self, procs_id: int) -> Iterator[int]:
        """Yield the meshes whose processes make up the mesh ``procs_id``, which is at this location."""
        yield procs_id

    def host_of(self, rank: int) -> int:
        """Return the number of a rank's host."""
        return self.placement.host_of(rank)

    def name_of(self, rank: int) -> str:
        """Return the name of a rank's host."""
        host = self.host_of(rank)
        return self._names.get(host) or f"host {host}"

    def name_now(self, runtime: Runtime, procs_id: int, rank: int) -> str:
        """Return the name of the host that a rank is on now."""
        host = locate(runtime, *self.addr(procs_id, rank))[2]
        return self._names.get(host) or host_name(runtime, host) or f"host {host}"

    @property
    def label(self) -> str:
        """The hosts, in a few words."""
        only = self.only
        if only is not None:
            return self._names.get(only) or f"host {only}"
        return f"{len(self.hosts)} hosts"

    def called(self, view: Region) -> str:
        """Describe the hosts of a part of the mesh in a few words."""
        if self.only is None and 0 < len(view) <= _LOOKED_AT:
            hosts = {self.host_of(rank) for rank in view}
            return self.name_of(view.rank_at(0)) if len(hosts) == 1 else f"{len(hosts)} hosts"
        return self.label

    def target(self, procs_id: int, view: Region) -> Target:
        """Return the processes of a view as the target of messages."""
        if len(view) == 1:
            return Target.one(procs_id, view.rank_at(0), self.placement, view)
        return Target.many(procs_id, view, self.placement)

    def rank_of(self, procs_id: int, other_id: int, rank: int) -> int | None:
        """Translate a rank of the mesh ``other_id`` to a rank of the mesh ``procs_id``, which is at this location."""
        return rank if other_id == procs_id else None

    def addr(self, procs_id: int, rank: int) -> tuple[int, int, int]:
        """Return the address of a rank's first process; see ``_native.locate`` for where it is now."""
        return procs_id, rank, self.host_of(rank)

    def __reduce__(self) -> Any:
        # The placement of a mesh of hosts lists no hosts; they are those with names.
        hosts = (self.placement.hosts() or list(self._names))[:_NAMED]
        return Location, (self.placement, {host: self._names[host] for host in hosts if host in self._names})


class ListedLocation(Location):
    """The same number of ranks on each host of a list; the hosts need not be evenly spaced."""

    __slots__ = ("_each", "_hosts")

    def __init__(self, hosts: Sequence[int], names: Mapping[int, str], each: int = 1) -> None:
        super().__init__(Placement.on(hosts[0]), names)
        self._hosts = tuple(hosts)
        self._each = each

    @property
    def is_joined(self) -> bool:
        return True

    @property
    def only(self) -> int | None:
        return self._hosts[0] if len(set(self._hosts)) == 1 else None

    @property
    def hosts(self) -> list[int]:
        return list(self._hosts)

    def host_of(self, rank: int) -> int:
        return self._hosts[rank // self._each]

    def __reduce__(self) -> Any:
        names = {host: self._names[host] for host in self._hosts[:_NAMED] if host in self._names}
        return ListedLocation, (self._hosts, names, self._each)


def evenly(numbers: Sequence[int]) -> list[Region]:
    """Split numbers into regions of evenly spaced ones."""
    regions: list[Region] = []
    rest = list(numbers)
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 and rest[1] > rest[0] else 1
        count = 1
        while count < len(rest) and rest[count] == rest[0] + count * step:
            count += 1
        regions.append(Region(["hosts"], Slice(rest[0], [count], [step])))
        rest = rest[count:]
    return regions


def single(rank: int) -> Region:
    """Return the region of one rank."""
    return Region([], Slice(rank, [], []))
