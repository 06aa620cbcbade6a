"""Where the processes of a mesh are: on which host each rank lives, and what that host is called."""

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
# A reference includes the names of up to this many hosts; for more hosts it includes only their numbers.
_NAMED = 64
# For a part of a mesh with up to this many ranks, its hosts are looked up.
_LOOKED_AT = 1000


def is_host_mesh(mesh_id: int) -> bool:
    """Whether that is the mesh of the process in which a host has its extensions."""
    return HOST_MESHES <= mesh_id < HOST_MESHES + _MOST_HOSTS


def is_guest_mesh(mesh_id: int) -> bool:
    """Whether that is the mesh of a script that has joined a job which outlives it."""
    return GUEST_MESHES <= mesh_id < GUEST_MESHES + _MOST_GUESTS


class Names(Mapping[int, str]):
    """What the hosts that were attached here are called: where they were attached, until they have said so."""

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
        """Return all of them together. Those of hosts attached here stay such, as these may not have said theirs yet."""
        if all(isinstance(each, Names) for each in known):
            return known[0]
        return {host: name for each in known for host, name in each.items()}


class Location:
    """The hosts of a mesh. It travels with every reference, so that messages find their way without asking anybody."""

    __slots__ = ("_names", "placement")

    def __init__(self, placement: Placement, names: Mapping[int, str]) -> None:
        self.placement = placement
        self._names = names

    @classmethod
    def on(cls, host: int, name: str) -> Location:
        """All ranks on one host."""
        return cls(Placement.on(host), {host: name})

    @property
    def names(self) -> Mapping[int, str]:
        """What hosts are called, by number; not of all of very many."""
        return self._names

    @property
    def is_joined(self) -> bool:
        """Whether its mesh was put together of others."""
        return False

    @property
    def only(self) -> int | None:
        """The number of the one host, where there is but one."""
        return self.placement.only

    @property
    def hosts(self) -> list[int]:
        """The numbers of the hosts, in the order of the ranks; none of the mesh of agents."""
        return self.placement.hosts()

    def meshes(self, procs_id: int) -> Iterator[int]:
        """The meshes that have processes in the mesh ``procs_id``, whose home this is."""
        yield procs_id

    def host_of(self, rank: int) -> int:
        """The number of a rank's host."""
        return self.placement.host_of(rank)

    def name_of(self, rank: int) -> str:
        """What a rank's host is called."""
        host = self.host_of(rank)
        return self._names.get(host) or f"host {host}"

    def name_now(self, runtime: Runtime, procs_id: int, rank: int) -> str:
        """What the host is called that a rank is on by now."""
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
        """The hosts of a part of the mesh, in a few words."""
        if self.only is None and 0 < len(view) <= _LOOKED_AT:
            hosts = {self.host_of(rank) for rank in view}
            return self.name_of(view.rank_at(0)) if len(hosts) == 1 else f"{len(hosts)} hosts"
        return self.label

    def target(self, procs_id: int, view: Region) -> Target:
        """The processes of a view, for messages to them."""
        if len(view) == 1:
            return Target.one(procs_id, view.rank_at(0), self.placement, view)
        return Target.many(procs_id, view, self.placement)

    def rank_of(self, procs_id: int, other_id: int, rank: int) -> int | None:
        """The rank in the mesh ``procs_id``, whose home this is, of what another mesh has as ``rank``."""
        return rank if other_id == procs_id else None

    def addr(self, procs_id: int, rank: int) -> tuple[int, int, int]:
        """The address of a rank's first process; see ``_native.locate`` for where it is now."""
        return procs_id, rank, self.host_of(rank)

    def __reduce__(self) -> Any:
        # A mesh of hosts names those that it is of.
        hosts = (self.placement.hosts() or list(self._names))[:_NAMED]
        return Location, (self.placement, {host: self._names[host] for host in hosts if host in self._names})


class ListedLocation(Location):
    """The same number of ranks on each of some hosts, which need not be evenly spaced."""

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

    def of(self, each: int) -> ListedLocation:
        """The same hosts, with another number of ranks on each."""
        return ListedLocation(self._hosts, self._names, each)

    def __reduce__(self) -> Any:
        names = {host: self._names[host] for host in self._hosts[:_NAMED] if host in self._names}
        return ListedLocation, (self._hosts, names, self._each)


def evenly(numbers: Sequence[int]) -> list[Region]:
    """Numbers as regions of those that are evenly spaced."""
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
    """The region of one rank."""
    return Region([], Slice(rank, [], []))
