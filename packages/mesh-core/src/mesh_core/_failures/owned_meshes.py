"""What one owner has spawned, and how it ends: children first, the last one made before the others."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from mesh_core._common.codes import Request
from mesh_core._serialize.exceptions import ActorError

if TYPE_CHECKING:
    from mesh_core._failures.policies import Policy
    from mesh_core._failures.policy_run import PolicyRun, Supervise
    from mesh_core._failures.returns import Returns
    from mesh_core._futures.future import Future
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._native import Call


def check_policy(supervise: Supervise | None) -> Policy | None:
    """Return the policy that ``supervise=`` means; refuse what cannot be asked about failures."""
    if supervise is None:
        return None
    from mesh_core._failures.policy_run import policy_of

    return policy_of(supervise)


class Holding:
    """One mesh that somebody owns."""

    __slots__ = ("actor_id", "dead", "failed", "last", "lost", "mesh", "policy", "procs_id", "returns")

    def __init__(
        self, mesh: ActorMesh[Any] | ProcMesh, actor_id: int, policy: Policy | None, *, last: bool = False
    ) -> None:
        self.mesh = mesh
        self.last = last
        """Whether it stops after all others, whenever it was made."""
        self.procs_id = mesh._procs_id
        self.actor_id = actor_id
        """0 for a mesh of processes."""
        self.policy: PolicyRun | None = None
        """Asked about its failures before the owner is."""
        if policy is not None:
            from mesh_core._failures.policy_run import PolicyRun

            self.policy = PolicyRun(policy, mesh.name)
        self.returns: Returns | None = None
        """Answers callers who wait for restarts, if it has endpoints that do."""
        # Hardly any has something in them, and there may be very many: a set of its own takes each 200 bytes.
        self.dead: frozenset[tuple[int, int]] = frozenset()
        """Processes that were in it, by their addresses."""
        self.lost: frozenset[int] = frozenset()
        """Ranks of the processes' mesh: what is there now is dead."""
        self.failed: frozenset[int] = frozenset()
        """Ranks whose actors have failed, while their processes live."""

    def place(self, procs_id: int, rank: int) -> int | None:
        """The rank in this mesh of a process, which is told by a mesh and its rank there; ``None`` if it is not in it."""
        here = self.mesh._location.rank_of(self.procs_id, procs_id, rank)
        return here if here is not None and here in self.mesh._root else None

    def loses(self, process: tuple[int, int], rank: int, replaced: bool) -> bool:
        """Note that a process of it has ended, and whether its rank has another one by now; false if it was told before."""
        if process in self.dead:
            return False
        self.dead |= {process}
        if not replaced:
            self.lost |= {rank}
        self._strike(rank)
        return True

    def fails(self, rank: int) -> None:
        """Note that an actor of it has failed."""
        self.failed |= {rank}
        self._strike(rank)

    def regain(self, ranks: Iterable[int]) -> None:
        """Note that there are new processes, or actors, at these ranks."""
        ranks = set(ranks)
        self.lost -= ranks
        self.failed -= ranks

    def _strike(self, rank: int) -> None:
        place = None if self.returns is None else self.mesh._root.position(rank)
        if self.returns is not None and place is not None:
            self.returns.struck(place)

    def end_policy(self) -> None:
        """Its policy is no longer asked."""
        if self.returns is not None:
            self.returns.close()
        if self.policy is not None:
            self.policy.close()

    def stop(self, limit: float) -> Call:
        """Stop the mesh; its owner goes on owning it."""
        mesh = self.mesh
        runtime, location = mesh._process.runtime, mesh._location
        if not self.actor_id:
            return runtime.stop_procs(location.target(self.procs_id, mesh._all()), limit)
        target = location.target(self.procs_id, mesh._root)
        return runtime.sender(target, self.actor_id, "", Request.STOP_ACTOR).call("")


_NO_LIVES: Mapping[int, int] = MappingProxyType({})


class Making:
    """What the spawner of actors needs to make some of them again."""

    __slots__ = ("holding", "lives", "owner_id", "procs", "spawned", "stopped")

    def __init__(self, spawned: tuple[Any, ...], owner_id: int, procs: ProcMesh | None) -> None:
        self.spawned = spawned
        """The whole message, with the constructor's arguments."""
        self.owner_id = owner_id
        self.procs = procs
        """The processes that they are on, if these were spawned here."""
        self.lives: Mapping[int, int] = _NO_LIVES
        """In which life of its process each rank's actor was made, but for those in the first."""
        self.holding: Holding | None = None
        self.stopped = False

    def end(self) -> None:
        """They are stopped, and never made again: nothing is kept for that."""
        if self.holding is not None and self.holding.returns is not None:
            self.holding.returns.close()
        self.stopped = True
        self.spawned, self.holding, self.procs = (), None, None


class OwnedMeshes:
    """Everything that one owner has spawned: an actor, or the script (and code of a process that no actor runs)."""

    __slots__ = ("_holdings", "_left_alone", "_lock", "_returns")

    def __init__(self) -> None:
        self._holdings: dict[int, Holding] = {}
        self._left_alone: set[int] = set()
        """Meshes of actors that had a policy and were stopped; nobody is notified of their failures any longer."""
        self._returns: dict[int, Returns] = {}
        """By the ids of actors. These stay where all ranks are lost, and may be made again."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._holdings)

    def add(self, holding: Holding) -> None:
        """Own a mesh from now on."""
        with self._lock:
            procs = self._holdings.get(holding.procs_id)
            if procs is not None and procs is not holding:
                # Actors were never in processes that have ended before, of which another notice may be on its way.
                holding.dead |= procs.dead
            self._holdings[holding.actor_id or holding.procs_id] = holding

    def tell(self, holding: Holding, returns: Returns) -> None:
        """Answer callers of these actors who ask for restarts."""
        holding.returns = returns
        with self._lock:
            self._returns[holding.actor_id] = returns

    def returns(self, actor_id: int) -> Returns | None:
        """What such callers are told."""
        return self._returns.get(actor_id)

    def drop(self, thing: int, among: int | None = None) -> None:
        """Forget a mesh that was told to stop; with processes, the actors on them; see :meth:`Owners.drop`."""
        with self._lock:
            for key in _meant(self._holdings, thing, among):
                holding = self._holdings.pop(key)
                if holding.policy is not None and holding.actor_id:
                    self._left_alone.add(holding.actor_id)
                holding.end_policy()
            for key in _meant(self._returns, thing, among):
                self._returns.pop(key).close()

    def actors(self, actor_id: int) -> Holding | None:
        """The mesh of these actors."""
        return self._holdings.get(actor_id)

    def leaves_alone(self, actor_id: int) -> bool:
        """Whether these actors were stopped, so that a failure that was still on its way concerns nobody."""
        return actor_id in self._left_alone

    def procs(self) -> list[ProcMesh]:
        """The meshes of processes in it."""
        with self._lock:
            return [cast("ProcMesh", each.mesh) for each in self._holdings.values() if not each.actor_id]

    def broken(self) -> list[BaseException]:
        """What constructors have raised, where nobody has looked, neither at the spawn nor by a call."""
        with self._lock:
            meshes = [each.mesh for each in self._holdings.values()]
        errors = [mesh._ready.unseen() for mesh in meshes if mesh._ready is not None]
        return [error for error in errors if isinstance(error, ActorError)]

    def places(self, procs_id: int, rank: int) -> list[tuple[Holding, int]]:
        """The meshes that a process is part of, and its rank in each."""
        with self._lock:
            holdings = list(self._holdings.values())
        return [(each, here) for each in holdings if (here := each.place(procs_id, rank)) is not None]

    def forget(self, holding: Holding) -> None:
        """Nothing is left of a mesh that could be stopped."""
        with self._lock:
            self._holdings.pop(holding.actor_id or holding.procs_id, None)

    def in_turn(self, *, keep: bool) -> list[Holding]:
        """What has to be stopped, in this order: what was made last comes first, as it may use what was made before.

        Processes stop the actors on them in the same order, so that those are left out where nothing else was made in
        between.
        """
        with self._lock:
            holdings = list(self._holdings.values())
            if not keep:
                self._holdings = {}
                for each in holdings:
                    each.end_policy()
                for returns in self._returns.values():
                    returns.close()
                self._returns = {}
        found: list[Holding] = []
        among: int | None = None
        for each in holdings:
            if not each.actor_id:
                among = each.procs_id
            elif each.procs_id == among:
                continue
            else:
                among = None
            found.append(each)
        found.reverse()
        found.sort(key=lambda each: each.last)
        return found

    def _stops(self) -> Iterator[Future[None]]:
        """Stop everything, one mesh after the other: each begins when the next one is asked for."""
        for each in self.in_turn(keep=False):
            with contextlib.suppress(Exception):  # gone already, or the runtime is
                yield each.mesh.stop()

    def close(self, limit: float) -> None:
        """Stop everything, each when the one before has ended; after ``limit`` seconds without waiting."""
        until = time.monotonic() + limit
        for stop in self._stops():
            with contextlib.suppress(Exception):
                stop.get(timeout=max(0.0, until - time.monotonic()))

    async def close_async(self, limit: float) -> None:
        """As :meth:`close`, on an event loop."""
        until = time.monotonic() + limit
        for stop in self._stops():
            import asyncio

            with contextlib.suppress(Exception):
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await stop


def _meant(things: Mapping[int, Holding | Returns], thing: int, among: int | None) -> list[int]:
    """The keys of what :meth:`OwnedMeshes.drop` is about."""
    return [
        key
        for key, each in things.items()
        if thing in (key, each.procs_id) and among in (None, each.procs_id)
    ]


class Owners:
    """What each owner of one process has spawned, by owner: the ids of its actors, 0 for everything else."""

    def __init__(self) -> None:
        self._by_owner: dict[int, OwnedMeshes] = {}
        self.dropped: Callable[[int, int | None], object] | None = None
        """Told which meshes were told to stop, as :meth:`drop` is."""
        self._lock = threading.Lock()

    def of(self, owner: int) -> OwnedMeshes:
        """What an owner has spawned."""
        with self._lock:
            found = self._by_owner.get(owner)
            if found is None:
                found = self._by_owner[owner] = OwnedMeshes()
            return found

    def returns(self, actor_id: int) -> Returns | None:
        """What answers callers of these actors who wait for restarts, whoever owns the actors."""
        return next(
            (found for _, owned_meshes in self.all() if (found := owned_meshes.returns(actor_id))), None
        )

    def has(self, owner: int) -> bool:
        """Say whether an owner has anything."""
        found = self._by_owner.get(owner)
        return found is not None and len(found) > 0

    def places(self, procs_id: int, rank: int) -> list[tuple[int, Holding, int]]:
        """Everything here that a process is part of: the owner, the mesh and the process's rank in it."""
        return [(owner, *place) for owner, owned in self.all() for place in owned.places(procs_id, rank)]

    def forget_lost(self, places: Iterable[tuple[int, Holding, int]]) -> None:
        """Of meshes that are lost as a whole nothing is left to stop."""
        for owner, holding, _ in places:
            if len(holding.lost) == len(holding.mesh._root) and (owned := self._by_owner.get(owner)):
                owned.forget(holding)

    def boots(self, procs_id: int) -> bool:
        """Whether these processes were spawned here with a bootstrap."""
        procs = (owned.actors(procs_id) for _, owned in self.all())
        return any(each is not None and getattr(each.mesh, "_boots", False) for each in procs)

    def leave(self, owner: int) -> OwnedMeshes | None:
        """Take what an owner that ends has spawned."""
        with self._lock:
            return self._by_owner.pop(owner, None)

    def drop(self, thing: int, among: int | None = None) -> None:
        """Forget a mesh, whoever owns it; with ``among``, only if it is on those processes.

        Actors that were put together of parts have the number of the first part, and are not that part.
        """
        for _, owned_meshes in self.all():
            owned_meshes.drop(thing, among)
        if self.dropped is not None:
            self.dropped(thing, among)

    def all(self) -> list[tuple[int, OwnedMeshes]]:
        """Every owner with what it owns."""
        with self._lock:
            return list(self._by_owner.items())
