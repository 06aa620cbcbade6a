"""Meshes joined from others: :func:`concat`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

from mesh_core._common.current import current
from mesh_core._geometry.location import Location
from mesh_core._geometry.mesh import Mesh, describe
from mesh_core._native import Extent, Placement, Region, Slice, Target, known_moves, learn_moves

if TYPE_CHECKING:
    from mesh_core._meshes.repair import Moves

M = TypeVar("M", bound=Mesh)


@dataclass(frozen=True, slots=True)
class Part:
    """A mesh that is part of a joined one."""

    location: Location
    procs_id: int
    view: Region
    actor_id: int | None
    """The id of its actors; ``None`` for a mesh of processes."""
    start: int
    """Where it begins in the dimension along which meshes are joined."""
    size: int
    """How many places it has there."""


class JoinedLocation(Location):
    """The location of a joined mesh: each rank is a rank of one of its parts."""

    __slots__ = ("_axis", "_parts", "_sizes")

    def __init__(self, parts: Sequence[Part], axis: int, sizes: Sequence[int]) -> None:
        names: dict[int, str] = {}
        for part in parts:
            names |= part.location.names
        super().__init__(Placement.agents(), names)
        self._parts = tuple(parts)
        self._axis = axis
        self._sizes = tuple(sizes)

    @property
    def is_joined(self) -> bool:
        return True

    @property
    def only(self) -> int | None:
        hosts = {part.location.only for part in self._parts}
        return hosts.pop() if len(hosts) == 1 else None

    def _find(self, rank: int) -> tuple[Part, int]:
        """Return the part that has a rank, and the rank of the part's mesh that this is."""
        place, coordinates = rank, []
        for size in reversed(self._sizes):
            coordinates.append(place % size)
            place //= size
        coordinates.reverse()
        along = coordinates[self._axis]
        part = next(part for part in self._parts if part.start <= along < part.start + part.size)
        coordinates[self._axis] -= part.start
        index = 0
        for axis, (size, coordinate) in enumerate(zip(self._sizes, coordinates, strict=True)):
            index = index * (part.size if axis == self._axis else size) + coordinate
        return part, part.view.rank_at(index)

    def rank_of(self, procs_id: int, other_id: int, rank: int) -> int | None:
        for part in self._parts:
            there = part.location.rank_of(part.procs_id, other_id, rank)
            index = None if there is None else part.view.position(there)
            if index is None:
                continue
            sizes = [part.size if axis == self._axis else size for axis, size in enumerate(self._sizes)]
            coordinates = []
            for size in reversed(sizes):
                coordinates.append(index % size)
                index //= size
            coordinates.reverse()
            coordinates[self._axis] += part.start
            found = 0
            for size, coordinate in zip(self._sizes, coordinates, strict=True):
                found = found * size + coordinate
            return found
        return None

    def host_of(self, rank: int) -> int:
        part, there = self._find(rank)
        return part.location.host_of(there)

    def name_of(self, rank: int) -> str:
        part, there = self._find(rank)
        return part.location.name_of(there)

    @property
    def label(self) -> str:
        labels = list(dict.fromkeys(part.location.label for part in self._parts))
        return labels[0] if len(labels) == 1 else f"{len(labels)} groups of hosts"

    def called(self, view: Region) -> str:
        names = list(dict.fromkeys(self.name_of(rank) for rank in view))
        return names[0] if len(names) == 1 else f"{len(names)} hosts"

    def addr(self, procs_id: int, rank: int) -> tuple[int, int, int]:
        part, there = self._find(rank)
        return part.location.addr(part.procs_id, there)

    def meshes(self, procs_id: int) -> Iterator[int]:
        for part in self._parts:
            yield from part.location.meshes(part.procs_id)

    def target(self, procs_id: int, view: Region) -> Target:
        pieces: list[tuple[int, Target, int | None]] = []
        run: list[int] = []
        first, of = 0, self._parts[0]

        def end_run() -> None:
            if run:
                step = run[1] - run[0] if len(run) > 1 else 1
                ranks = (
                    Region([], Slice(run[0], [], []))
                    if len(run) == 1
                    else Region(["places"], Slice(run[0], [len(run)], [step]))
                )
                pieces.append((first, of.location.target(of.procs_id, ranks), of.actor_id))

        for place, rank in enumerate(view):
            part, there = self._find(rank)
            goes_on = part is of and bool(run) and there > run[-1]
            if goes_on and len(run) > 1:
                goes_on = there - run[-1] == run[1] - run[0]
            if not goes_on:
                end_run()
                run, first, of = [], place, part
            run.append(there)
        end_run()
        return Target.joined(pieces, view)

    def __reduce__(self) -> Any:
        runtime = current().runtime
        moves = {
            procs_id: known
            for procs_id in self.meshes(0)
            if (known := known_moves(runtime, procs_id)) is not None
        }
        return _revive, (self._parts, self._axis, self._sizes, moves)


def _revive(
    parts: Sequence[Part], axis: int, sizes: Sequence[int], moves: Mapping[int, Moves]
) -> JoinedLocation:
    for procs_id, known in moves.items():
        learn_moves(current().runtime, procs_id, *known)
    return JoinedLocation(parts, axis, sizes)


@overload
def concat(meshes: Sequence[M], dim: str) -> M: ...
# To type checkers, a mesh of actors has the type of the actors' class.
@overload
def concat(meshes: Sequence[Any], dim: str) -> Any: ...
def concat(meshes: Sequence[Any], dim: str) -> Any:
    """Join meshes along a dimension: meshes of processes, or of actors of one class.

    All must have the same dimensions, of the same sizes except for ``dim``. A mesh without dimension ``dim`` counts as one
    place in it. The result is a mesh like any other: it can be sliced and called, actors can be spawned on it, and a repair
    of a part repairs it too. It owns nothing: each part ends with its owner.

    >>> from mesh_core import concat, this_host
    >>> host = this_host()
    >>> with host.spawn_procs({"gpus": 2}) as old, host.spawn_procs({"gpus": 3}) as new:
    ...     both = concat([old, new], dim="gpus")
    ...     both.sizes, len(both.slice(gpus=slice(1, 4)))
    ({'gpus': 5}, 3)
    """
    from mesh_core._futures.combined import all_done
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.procs import ProcMesh

    if not isinstance(dim, str):
        raise TypeError(f"dim must be the name of a dimension, got {dim!r}")
    parts = list(meshes)
    if not parts:
        raise ValueError("concat() needs at least one mesh")
    kind = next((kind for kind in (ProcMesh, ActorMesh) if isinstance(parts[0], kind)), None)
    if kind is None or not all(isinstance(mesh, kind) for mesh in parts):
        types = ", ".join(dict.fromkeys(type(mesh).__name__ for mesh in parts))
        raise TypeError(f"concat() must be given meshes of processes, or meshes of actors, got {types}")
    labels, sizes, along = _shape(parts, dim)
    axis = labels.index(dim)
    starts = [sum(along[:number]) for number in range(len(parts))]
    homes = [
        Part(
            mesh._location,
            mesh._procs_id,
            mesh._view,
            mesh._actor_id if isinstance(mesh, ActorMesh) else None,
            start,
            size,
        )
        for mesh, start, size in zip(parts, starts, along, strict=True)
    ]
    sizes[axis] = sum(along)
    region = Region.whole(Extent(labels, sizes))
    first, process = parts[0], parts[0]._process
    name = (
        first._name
        if all(mesh._name == first._name for mesh in parts)
        else "+".join(dict.fromkeys(mesh._name for mesh in parts))
    )
    location, procs_id = JoinedLocation(homes, axis, sizes), process.runtime.new_id()
    waits = [mesh._ready for mesh in parts]
    ready = None if None in waits else all_done(process, waits, f"the start of {name!r}")
    if kind is ProcMesh:
        return ProcMesh(
            process, name=name, location=location, procs_id=procs_id, root=region, view=region, ready=ready
        )
    if any(not mesh._interface.is_like(first._interface) for mesh in parts):
        classes = ", ".join(dict.fromkeys(mesh._interface.class_name for mesh in parts))
        raise TypeError(f"concat() must be given actors of one class, got {classes}")
    return ActorMesh(
        process,
        first._interface,
        name=name,
        location=location,
        procs_id=procs_id,
        actor_id=first._actor_id,
        root=region,
        view=region,
        ready=ready,
    )


def _shape(meshes: Sequence[Any], dim: str) -> tuple[list[str], list[int], list[int]]:
    """Return the labels, the sizes, and how many places each mesh has along the dimension."""
    extents = [mesh._view.extent for mesh in meshes]
    along = [extent.size(dim) if dim in extent.labels else 1 for extent in extents]
    labels = next((extent.labels for extent in extents if dim in extent.labels), [dim, *extents[0].labels])
    rest = [label for label in labels if label != dim]
    first = extents[0]
    for mesh, extent in zip(meshes, extents, strict=True):
        others = [label for label in extent.labels if label != dim]
        if others != rest or any(extent.size(label) != first.size(label) for label in rest):
            raise ValueError(
                f"cannot join meshes along {dim!r}: their other dimensions must be equal, got "
                f"{describe(meshes[0]._view)} and {describe(mesh._view)}"
            )
    return list(labels), [1 if label == dim else first.size(label) for label in labels], along
