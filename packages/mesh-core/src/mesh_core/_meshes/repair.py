"""Repair meshes: respawn dead ranks in place, grow, shrink.

References name a rank of a mesh, and the runtime knows where it is now (``mesh-proto/src/moves.rs``). The process that
spawned the processes keeps their :class:`~mesh_core._meshes.spawning.Recipe`, spawns replacements under new addresses,
and publishes the move. References need no update, wherever they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from mesh_core._common.checks import is_whole
from mesh_core._common.codes import HostState, Request
from mesh_core._common.errors import MeshError
from mesh_core._futures.future import Future
from mesh_core._geometry.location import single
from mesh_core._geometry.mesh import Kind, describe
from mesh_core._meshes.outcomes import Addressee, all_up, error_of, stopping
from mesh_core._native import (
    Extent,
    Placement,
    Point,
    Region,
    Target,
    gone,
    incarnation,
    known_moves,
    locate,
    publish_moves,
    roll,
)

if TYPE_CHECKING:
    from mesh_core._failures.owned_meshes import Making
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.hosts import HostMesh
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._meshes.spawning import Recipe
    from mesh_core._native import Call
    from mesh_core._process.process import Process

Ranks = Iterable[int | Point] | int | Point | None
"""Which ranks: places of the mesh in question; ``None`` means all failed ones."""
Run = tuple[int, int, int, int, int, int]
"""A run of ranks: the first, how many, the mesh, rank and host of the first's process, and which life it is."""
Moves = tuple[int, list[Run]]
"""How often a mesh was repaired, and where its ranks are since then."""


class _Made(Addressee):
    """The new processes of some ranks of a mesh, for errors."""

    __slots__ = ("_ranks",)

    def __init__(self, mesh: ProcMesh, root: Region, ranks: list[int]) -> None:
        super().__init__(mesh._name, mesh._location, root, root, mesh)
        self._ranks = ranks

    def host(self, index: int) -> str:
        return self.location.name_now(self.mesh._process.runtime, self.mesh._procs_id, self._ranks[index])

    def point(self, index: int) -> Point:
        return self.root.point_of(self._ranks[index])


def places_of(mesh: ProcMesh | ActorMesh[Any], ranks: Ranks) -> list[int]:
    """Resolve ``ranks`` to places; ``None`` means all failed ones."""
    if ranks is None:
        return [point.rank for point in mesh._itself.failed()]
    if isinstance(ranks, int | Point):
        ranks = [ranks]
    if not isinstance(ranks, Iterable):
        raise TypeError(f"ranks must be numbers or points of {mesh!r}, got {ranks!r}")
    count, places = len(mesh), []
    for rank in ranks:
        if isinstance(rank, Point):
            if rank.extent != mesh.extent:
                raise ValueError(
                    f"{rank!r} is not a point of {mesh!r}; take points from this mesh, for example from "
                    "failed()"
                )
            place = rank.rank
        elif isinstance(rank, int) and not isinstance(rank, bool):
            place = rank
        else:
            raise TypeError(f"ranks must be numbers or points of {mesh!r}, got {rank!r}")
        if not 0 <= place < count:
            raise IndexError(f"rank must be between 0 and {count - 1} for {mesh!r}, got {place}")
        places.append(place)
    return sorted(set(places))


def lost_places(mesh: ProcMesh | ActorMesh[Any]) -> list[int]:
    """Return the places whose processes ended, as far as this process knows."""
    return gone(mesh._process.runtime, mesh._location.target(mesh._procs_id, mesh._view))


def other_lives(mesh: ActorMesh[Any], making: Making) -> set[int]:
    """Return the ranks whose processes were respawned since their actors were constructed.

    This is known at once, while notices of ends are handled in turn.
    """
    runtime, location = mesh._process.runtime, mesh._location
    if all(known_moves(runtime, each) is None for each in location.meshes(mesh._procs_id)):
        return set()
    lives = {rank: incarnation(runtime, *location.addr(mesh._procs_id, rank)[:2]) for rank in mesh._root}
    return {rank for rank, life in lives.items() if life != making.lives.get(rank, 0)}


# Processes.


def respawn(mesh: ProcMesh, ranks: Ranks, on: HostMesh | None) -> Future[None]:
    """See :meth:`ProcMesh.respawn`."""
    recipe = _recipe(mesh, "respawned")
    with recipe.lock:
        _check_owner(recipe, mesh)
        places = places_of(mesh, ranks)
        runtime = mesh._process.runtime
        dead = set(lost_places(mesh))
        for place in places:
            if place not in dead:
                raise ValueError(
                    f"cannot respawn rank {place} of {mesh!r}: its process is running. Stop it first, or "
                    "respawn mesh.failed()"
                )
        by_host: dict[int, list[int]] = {}
        for place in places:
            rank = mesh._view.rank_at(place)
            host = locate(runtime, mesh._procs_id, rank, mesh._location.host_of(rank))[2]
            by_host.setdefault(host, []).append(rank)
        groups = _moved(by_host, on, mesh._process)
        root = recipe.root
        # As large as the mesh is now, whichever view this is.
        root = mesh._root if root is None or len(root) < len(mesh._root) else root
        if recipe.root is not None and any(rank not in recipe.root for _, ranks in groups for rank in ranks):
            # Ranks that were removed are back, and end with the others.
            recipe.root = root
        return _make(mesh, recipe, root, groups)


def grow(mesh: ProcMesh, sizes: Mapping[str, int], on: HostMesh | None) -> ProcMesh:
    """See :meth:`ProcMesh.grow`."""
    recipe = _recipe(mesh, "grown")
    with recipe.lock:
        _check_owner(recipe, mesh)
        label, count = _outermost(recipe, mesh, sizes, "grow")
        extent, size = mesh._root.extent, len(mesh._root)
        each = size // extent.size(label)
        bigger = Region.whole(Extent(extent.labels, [extent.sizes[0] + count, *extent.sizes[1:]]))
        fresh = list(range(size, len(bigger)))
        hosts = _hosts_of(on) if on is not None else _hosts_that_live(mesh)
        if not hosts:
            raise ValueError(
                f"cannot place new ranks: all hosts of {mesh!r} are dead. Name hosts for them with on="
            )
        # Slabs of the new places stay together on a host, one after the other.
        groups: dict[int, list[int]] = {}
        for slab in range(count):
            host = hosts[slab * len(hosts) // count] if count > len(hosts) else hosts[slab]
            groups.setdefault(host, []).extend(fresh[slab * each : (slab + 1) * each])
        grown = mesh._resized(bigger)
        grown._ready = _make(grown, recipe, bigger, list(groups.items()))
        recipe.root = bigger
        mesh._process.recording(recipe.owner_id, grown, 0)
        return grown


class _Waiting(Addressee):
    """A process that shows that a host is ready, for errors."""

    __slots__ = ("_host",)

    def __init__(self, mesh: ProcMesh, region: Region, host: int) -> None:
        super().__init__(mesh._name, mesh._location, region, region, mesh)
        self._host = host

    def host(self, index: int) -> str:
        name: str = self.mesh._process.name_of_host(self._host)
        return name


def prepare(mesh: ProcMesh, on: HostMesh) -> Future[None]:
    """See :meth:`ProcMesh.prepare`."""
    from mesh_core._futures.combined import all_done

    recipe = _recipe(mesh, "prepared for")
    with recipe.lock:
        _check_owner(recipe, mesh)
        process, root = mesh._process, mesh._root if recipe.root is None else recipe.root
        runtime, region = process.runtime, Region.whole(Extent(["ranks"], [1]))
        waits: list[Future[Any]] = []
        for host in _hosts_of(on):
            mesh_id, placement = runtime.new_id(), Placement.on(host)
            # A process like the others that runs nothing: the fork server that spawned it stays.
            call = recipe.order(mesh_id, region, placement, root.extent, ranks=[root.rank_at(0)])
            target, who = Target.many(mesh_id, region, placement), _Waiting(mesh, region, host)
            ready: Future[None] = Future(
                process,
                call,
                partial(all_up, who=who),
                lambda: f"the preparation of hosts for {mesh._name!r}",
            )

            def over(done: Future[None], target: Target = target) -> None:
                # A failure is kept for the caller that asks.
                done.unseen()
                if not process.closed:
                    runtime.stop_procs(target, process.settings.stop_timeout)

            ready.add_done_callback(over)
            waits.append(ready)
        return all_done(process, waits, f"the preparation of hosts for {mesh._name!r}")


def begin_apart(mesh: ProcMesh, recipe: Recipe) -> Future[None]:
    """Spawn the first processes of a mesh whose hosts are not contiguous."""
    groups: dict[int, list[int]] = {}
    for rank in mesh._root:
        groups.setdefault(mesh._location.host_of(rank), []).append(rank)
    with recipe.lock:
        return _make(mesh, recipe, mesh._root, list(groups.items()))


def shrink(mesh: ProcMesh, sizes: Mapping[str, int]) -> ProcMesh:
    """See :meth:`ProcMesh.shrink`."""
    recipe = _recipe(mesh, "shrunk")
    with recipe.lock:
        _check_owner(recipe, mesh)
        label, count = _outermost(recipe, mesh, sizes, "shrink")
        extent = mesh._root.extent
        left = extent.size(label) - count
        if left < 1:
            raise ValueError(
                f"{mesh!r} has {extent.size(label)} places in dimension {label!r}, and removing {count} "
                "would leave none; stop() ends the whole mesh"
            )
        smaller = Region.whole(Extent(extent.labels, [left, *extent.sizes[1:]]))
        process = mesh._process
        rest = mesh._root.slice(**{label: slice(left, None)})
        target = mesh._location.target(mesh._procs_id, rest)
        shrunk = mesh._resized(smaller)
        recipe.root = smaller
        process.recording(recipe.owner_id, shrunk, 0)
        if recipe.holding is not None:
            recipe.holding.mesh = shrunk
            # The mesh is lost as a whole once the remaining ranks are.
            process.supervision.regain(recipe.holding, rest)
        call = process.runtime.stop_procs(target, process.settings.stop_timeout)
        shrunk._ready = stopping(process, call, f"the shrinking of {mesh._name!r}")
        return shrunk


def stop_some(mesh: ProcMesh) -> Future[None]:
    """Stop the processes of a part of a mesh. Its owner still owns the others, and may respawn these."""
    process = mesh._process
    target = mesh._location.target(mesh._procs_id, mesh._view)
    call = process.runtime.stop_procs(target, process.settings.stop_timeout)
    return stopping(process, call, f"the stop of a part of {mesh._name!r}")


def _make(mesh: ProcMesh, recipe: Recipe, root: Region, groups: list[tuple[int, list[int]]]) -> Future[None]:
    """Spawn processes for ranks of a mesh on each of these hosts, and publish where they are."""
    from mesh_core._futures.combined import all_done

    process, procs_id = mesh._process, mesh._procs_id
    runtime = process.runtime
    version, known = known_moves(runtime, procs_id) or (0, [])
    lives = {first + n: life for first, count, *_, life in known for n in range(count)}
    where = {
        first + n: (procs, rank + n, host)
        for first, count, procs, rank, host, _ in known
        for n in range(count)
    }
    made: list[tuple[int, int, list[int]]] = []
    left: list[tuple[int, int, int]] = []
    for host, ranks in groups:
        mesh_id = runtime.new_id()
        made.append((mesh_id, host, ranks))
        for place, rank in enumerate(ranks):
            if rank in where or rank < recipe.size:
                left.append(where.get(rank, mesh._location.addr(procs_id, rank)))
                lives[rank] = lives.get(rank, 0) + 1
            else:
                lives[rank] = 0
            where[rank] = (mesh_id, place, host)
    runs = _runs(where, lives)
    holding = recipe.holding
    if holding is not None:
        if len(mesh._root) > len(holding.mesh._root):
            holding.mesh = mesh
        process.supervision.own_again(
            recipe.owner_id, holding, [rank for _, ranks in groups for rank in ranks]
        )
    waits: list[Future[Any]] = []
    for mesh_id, host, ranks in made:
        region = Region.whole(Extent(["ranks"], [len(ranks)]))
        placement = Placement.on(host)
        call = recipe.order(mesh_id, region, placement, root.extent, ranks=ranks, moves=(version + 1, runs))
        who = _Made(mesh, root, ranks)
        target = Target.many(mesh_id, region, placement)
        if recipe.log_as is not None:
            recipe.log_as(target, [mesh_id])
        ready, boots = recipe.begin(call, target, who)
        mesh._boots = mesh._boots or boots
        waits.append(ready)
    told = publish_moves(runtime, procs_id, version + 1, runs, left)
    if holding is not None:
        # The notice of the old process's end may have arrived in between, while that process still had its rank.
        process.supervision.own_again(
            recipe.owner_id, holding, [rank for _, ranks in groups for rank in ranks]
        )
    # The mesh in its current place and size.
    whole = mesh._with_region(root) if len(root) == len(mesh._root) else mesh._resized(root)
    process.recording(recipe.owner_id, whole, 0)
    waits.append(Future(process, told, _ignore_losses, lambda: f"telling where {mesh._name!r} is"))
    recipe.repair = all_done(process, waits, f"the repair of {mesh._name!r}")
    return recipe.repair


def _ignore_losses(call: Call) -> None:
    # A dead host does not need to know.
    call.outcomes()


def _runs(where: Mapping[int, tuple[int, int, int]], lives: Mapping[int, int]) -> list[Run]:
    """Return runs of ranks that follow each other in one mesh of processes."""
    runs: list[Run] = []
    for rank in sorted(where):
        procs, at, host = where[rank]
        life = lives[rank]
        if runs:
            first, count, before, begin, there, life_before = runs[-1]
            if (first + count, before, begin + count, there, life_before) == (rank, procs, at, host, life):
                runs[-1] = (first, count + 1, before, begin, there, life)
                continue
        runs.append((rank, 1, procs, at, host, life))
    return runs


def _recipe(mesh: ProcMesh, done: str) -> Recipe:
    if mesh._recipe is None:
        raise _not_here(mesh, 0, done, "it")
    return mesh._recipe


def _not_here(mesh: ProcMesh | ActorMesh[Any], actor_id: int, done: str, what: str) -> MeshError:
    why = mesh._process.cannot_make.get((mesh._procs_id, actor_id)) or (
        f"only the process that spawned {what} can do that, and this is a reference, or a mesh that was joined from others"
    )
    return MeshError(f"{mesh!r} cannot be {done} here: {why}")


def _check_owner(recipe: Recipe, mesh: ProcMesh) -> None:
    process = recipe.process
    if process.closed or recipe.stopped:
        raise MeshError(f"{mesh._name!r} has been stopped; spawn a new mesh")
    process.check_owner(recipe.owner_id)


def _outermost(recipe: Recipe, mesh: ProcMesh, sizes: Mapping[str, int], verb: str) -> tuple[str, int]:
    """Return the dimension that changes, and by how many places."""
    extent = mesh._root.extent
    root = recipe.root
    if root is not None and len(root) != len(mesh._root):
        raise ValueError(
            f"{mesh!r} now has {describe(root)}; {verb} the mesh that the last grow() or shrink() returned"
        )
    if len(mesh._view) != len(mesh._root):
        raise ValueError(f"cannot {verb} a part of a mesh ({describe(mesh._view)}); {verb} the whole mesh")
    if not extent.labels:
        raise ValueError(f"cannot {verb} {mesh!r}: it has no dimensions. Spawn it with one.")
    label = extent.labels[0]
    if set(sizes) != {label}:
        given = ", ".join(f"{key}={value!r}" for key, value in sizes.items()) or "nothing"
        raise ValueError(
            f"{verb}() must be given a number of places of the first dimension, {label!r}, got {given}; "
            f"ranks keep their numbers, so only the first can change. Write {verb}({label}=1)"
        )
    count = sizes[label]
    if not is_whole(count, 1):
        raise ValueError(f"{label} must be a whole number of at least 1, got {count!r}")
    return label, count


def _hosts_of(on: HostMesh) -> list[int]:
    if getattr(on, "_kind", None) is not Kind.HOSTS:
        raise TypeError(f"on= must be a HostMesh, such as hosts.slice(hosts=2), got {on!r}")
    return on._numbers


def _hosts_that_live(mesh: ProcMesh) -> list[int]:
    dead = _dead_hosts(mesh._process)
    hosts = dict.fromkeys(
        locate(mesh._process.runtime, mesh._procs_id, rank, mesh._location.host_of(rank))[2]
        for rank in mesh._root
    )
    return [host for host in hosts if host not in dead]


def _dead_hosts(process: Process) -> dict[int, str]:
    return {
        host: why
        for host, _, _, _, state, why, *_ in roll(process.runtime)
        if state in (HostState.DEAD, HostState.STOPPED)
    }


def _moved(
    by_host: Mapping[int, list[int]], on: HostMesh | None, process: Process
) -> list[tuple[int, list[int]]]:
    """Choose hosts for the ranks that were on these hosts; ranks that were together stay together."""
    if on is None:
        dead = _dead_hosts(process)
        for host in by_host:
            if host in dead:
                _refuse_host(process, host, by_host[host])
        return list(by_host.items())
    hosts = _hosts_of(on)
    groups: dict[int, list[int]] = {}
    for number, ranks in enumerate(by_host.values()):
        groups.setdefault(hosts[number % len(hosts)], []).extend(ranks)
    return [(host, sorted(ranks)) for host, ranks in groups.items()]


def _refuse_host(process: Process, host: int, ranks: list[int]) -> NoReturn:
    raise ValueError(
        f"cannot respawn rank {ranks[0]} on its host {process.name_of_host(host)}, which is dead or "
        "stopped; name another host with on=, for example respawn(on=spare)"
    )


# Actors.


def respawn_actors(mesh: ActorMesh[Any], ranks: Ranks) -> Future[None]:
    """See :meth:`ActorMesh.respawn`."""
    making: Making | None = mesh._making
    process = mesh._process
    if making is None:
        raise _not_here(mesh, mesh._actor_id, "respawned", "the actors")
    if process.closed or making.stopped:
        raise MeshError(f"{mesh._name!r} has been stopped; spawn the actors again")
    process.check_owner(making.owner_id)
    places = places_of(mesh, ranks)
    dead = set(lost_places(mesh))
    if missing := [place for place in places if place in dead]:
        raise MeshError(
            f"the process of rank {missing[0]} of {mesh!r} has ended; respawn the mesh of processes first, then the actors "
            "on it"
        )
    # Each actor keeps its place in the whole mesh, by which it knows its rank.
    root = mesh._root
    there = [mesh._view.rank_at(place) for place in places]
    indexes = sorted(root.position(rank) or 0 for rank in there)
    location, procs_id = mesh._location, mesh._procs_id
    pieces = [(index, location.target(procs_id, single(root.rank_at(index))), None) for index in indexes]
    target = Target.joined(pieces, root)
    holding = making.holding
    if holding is not None:
        process.supervision.own_again(making.owner_id, holding, there)
    lives = {rank: incarnation(process.runtime, *location.addr(procs_id, rank)[:2]) for rank in there}
    making.lives = {**making.lives, **lives}
    process.recording(making.owner_id, mesh._with_region(root), mesh._actor_id)
    returns = None if holding is None else holding.returns
    begun = {} if returns is None else returns.begin(indexes)
    call = process.runtime.sender(target, mesh._actor_id, mesh._name, Request.SPAWN).call(making.spawned)
    who = Addressee(mesh._name, location, root, root, mesh)

    def finish(call: Call) -> None:
        for index, outcome in enumerate(call.outcomes()):
            if outcome is not None and (error := error_of(outcome, index, who)) is not None:
                raise error
        if returns is not None:
            returns.back(begun)

    future: Future[None] = Future(process, call, finish, lambda: f"the respawn of {mesh._name!r}")
    if returns is not None:
        # Run even if nobody awaits it; a failure is kept for the first caller that asks.
        future.add_done_callback(lambda done: done.unseen())
    return future
