"""The meshes that an owner spawned, and how they are stopped: in reverse order of their spawns.

CON-1: what a constructor raised is heard of. Whoever waits for the spawn or for a call gets it; if nobody has when a message comes that nobody
waits for, or by the time the actors have been stopped, it is a failure like any other.
"""

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
    """Return the policy for ``supervise=``; raise if it cannot be asked about failures."""
    if supervise is None:
        return None
    from mesh_core._failures.policy_run import policy_of

    return policy_of(supervise)


class Holding:
    """A mesh and what its owner knows about it."""

    __slots__ = (
        "actor_id",
        "dead",
        "failed",
        "heard",
        "last",
        "lost",
        "mesh",
        "policy",
        "procs_id",
        "returns",
    )

    def __init__(
        self, mesh: ActorMesh[Any] | ProcMesh, actor_id: int, policy: Policy | None, *, last: bool = False
    ) -> None:
        self.mesh = mesh
        self.last = last
        """Whether it is stopped after all others, whenever it was spawned."""
        self.procs_id = mesh._procs_id
        self.actor_id = actor_id
        """0 for a mesh of processes."""
        self.policy: PolicyRun | None = None
        """Asked about its failures before the owner."""
        if policy is not None:
            from mesh_core._failures.policy_run import PolicyRun

            self.policy = PolicyRun(policy, mesh._name)
        self.returns: Returns | None = None
        """Answers callers who wait for restarts, if it has endpoints that wait."""
        # These are almost always empty, and there may be very many: a set for each would take 200 bytes.
        self.dead: frozenset[tuple[int, int]] = frozenset()
        """Processes that were in it and died, by address."""
        self.lost: frozenset[int] = frozenset()
        """Ranks in the mesh of processes whose current process is dead."""
        self.failed: frozenset[int] = frozenset()
        """Ranks whose actors failed in a process that is still running."""

        self.heard = False
        """Whether its owner was notified that a constructor raised."""

    def hears(self) -> bool:
        """Whether its owner is to be notified of a constructor that raised: not if somebody has looked at the spawn (CON-1).

        A policy is asked in any case.
        """
        ready = self.mesh._ready
        self.heard = self.heard or self.policy is not None or (ready is not None and ready._is_pending())
        return self.heard

    def place(self, procs_id: int, rank: int) -> int | None:
        """Return the rank in this mesh of a process given by a mesh and its rank there; ``None`` if it is not in it."""
        here = self.mesh._location.rank_of(self.procs_id, procs_id, rank)
        return here if here is not None and here in self.mesh._root else None

    def loses(self, process: tuple[int, int], rank: int, replaced: bool) -> bool:
        """Record that one of its processes ended, and whether its rank was respawned; return false if that is known already."""
        if process in self.dead:
            return False
        self.dead |= {process}
        if not replaced:
            self.lost |= {rank}
        self._strike(rank)
        return True

    def fails(self, rank: int) -> None:
        """Record that one of its actors failed."""
        self.failed |= {rank}
        self._strike(rank)

    def regain(self, ranks: Iterable[int]) -> None:
        """Record that these ranks have new processes or actors."""
        ranks = set(ranks)
        self.lost -= ranks
        self.failed -= ranks

    def _strike(self, rank: int) -> None:
        place = None if self.returns is None else self.mesh._root.position(rank)
        if self.returns is not None and place is not None:
            self.returns.struck(place)

    def end_policy(self) -> None:
        """Stop asking its policy."""
        if self.returns is not None:
            self.returns.close()
        if self.policy is not None:
            self.policy.close()

    def stop(self, limit: float) -> Call:
        """Stop the mesh; it stays owned."""
        mesh = self.mesh
        runtime, location = mesh._process.runtime, mesh._location
        if not self.actor_id:
            return runtime.stop_procs(location.target(self.procs_id, mesh._all()), limit)
        target = location.target(self.procs_id, mesh._root)
        return runtime.sender(target, self.actor_id, "", Request.STOP_ACTOR).call("")


_NO_LIVES: Mapping[int, int] = MappingProxyType({})


class Making:
    """What the spawner of actors needs to respawn some of them."""

    __slots__ = ("holding", "lives", "owner_id", "procs", "spawned", "stopped")

    def __init__(self, spawned: tuple[Any, ...], owner_id: int, procs: ProcMesh | None) -> None:
        self.spawned = spawned
        """The whole spawn message, with the constructor's arguments."""
        self.owner_id = owner_id
        self.procs = procs
        """The processes that the actors run on, if those were spawned here."""
        self.lives: Mapping[int, int] = _NO_LIVES
        """By rank, the incarnation of the process in which the actor was created, if not the first."""
        self.holding: Holding | None = None
        self.stopped = False

    def end(self) -> None:
        """Drop what was kept for respawning: the actors were stopped and will not be respawned."""
        if self.holding is not None and self.holding.returns is not None:
            self.holding.returns.close()
        self.stopped = True
        self.spawned, self.holding, self.procs = (), None, None


class OwnedMeshes:
    """Everything that one owner spawned: an actor, or the script (and any code outside of actors)."""

    __slots__ = ("_holdings", "_left", "_left_alone", "_lock", "_returns", "_unheard")

    def __init__(self) -> None:
        self._holdings: dict[int, Holding] = {}
        self._left_alone: set[int] = set()
        """Actor meshes that had a policy and were stopped; nobody is notified of their failures any longer."""
        self._returns: dict[int, Returns] = {}
        """By actor id. They remain if all ranks are lost, because those may be respawned."""
        self._left: list[Holding] = []
        """Actors that were stopped, and whose constructors may not have returned yet."""
        self._unheard: list[tuple[ActorMesh[Any], ActorError]] = []
        """Actors that were stopped before anybody looked at what their constructors raised."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._holdings)

    def restarts(self, procs_id: int) -> bool:
        """Whether a mesh of processes has a policy that is told what became of its repairs, as those are that restart."""
        holding = self._holdings.get(procs_id)
        return holding is not None and holding.policy is not None and holding.policy.hears_repairs

    def add(self, holding: Holding) -> None:
        """Take ownership of a mesh."""
        with self._lock:
            procs = self._holdings.get(holding.procs_id)
            if procs is not None and procs is not holding:
                # The actors were never in processes that ended before; another notice of those may be on its way.
                holding.dead |= procs.dead
            self._holdings[holding.actor_id or holding.procs_id] = holding

    def tell(self, holding: Holding, returns: Returns) -> None:
        """Answer callers of these actors who wait for restarts."""
        holding.returns = returns
        with self._lock:
            self._returns[holding.actor_id] = returns

    def returns(self, actor_id: int) -> Returns | None:
        """Return what answers such callers."""
        return self._returns.get(actor_id)

    def drop(self, thing: int, among: int | None = None) -> None:
        """Forget a mesh that was told to stop, and with processes the actors on them; see :meth:`Owners.drop`."""
        with self._lock:
            for key in _meant(self._holdings, thing, among):
                holding = self._holdings.pop(key)
                if holding.actor_id:
                    self._left.append(holding)
                if holding.policy is not None and holding.actor_id:
                    self._left_alone.add(holding.actor_id)
                holding.end_policy()
            for key in _meant(self._returns, thing, among):
                self._returns.pop(key).close()
        self._sift()

    def _sift(self) -> None:
        """Keep of the stopped actors those whose constructors have raised unheard, or whose replies are still on their way."""
        with self._lock:
            left, self._left = self._left, []
        waiting: list[Holding] = []
        arrived: list[Holding] = []
        for holding in left:
            if (ready := holding.mesh._ready) is not None:
                (arrived if ready.done() else waiting).append(holding)
        unheard = _unseen(arrived)
        with self._lock:
            self._left += waiting
            self._unheard += unheard

    def actors(self, actor_id: int) -> Holding | None:
        """Return the holding of these actors."""
        return self._holdings.get(actor_id)

    def leaves_alone(self, actor_id: int) -> bool:
        """Return whether these actors were stopped, so that a failure still on its way concerns nobody."""
        return actor_id in self._left_alone

    def procs(self) -> list[ProcMesh]:
        """Return the meshes of processes."""
        with self._lock:
            return [cast("ProcMesh", each.mesh) for each in self._holdings.values() if not each.actor_id]

    def broken(self) -> list[tuple[ActorMesh[Any], ActorError]]:
        """Return what constructors raised, unless somebody has seen it at the spawn or in a call."""
        with self._lock:
            holdings = list(self._holdings.values())
        return _unseen(holdings)

    def left_unheard(self) -> list[tuple[ActorMesh[Any], ActorError]]:
        """Return and forget what constructors raised whose actors were stopped before anybody looked at their spawn (CON-1)."""
        self._sift()
        with self._lock:
            unheard, self._unheard = self._unheard, []
        return unheard

    def places(self, procs_id: int, rank: int) -> list[tuple[Holding, int]]:
        """Return the meshes that a process is in, with its rank in each."""
        with self._lock:
            holdings = list(self._holdings.values())
        return [(each, here) for each in holdings if (here := each.place(procs_id, rank)) is not None]

    def forget(self, holding: Holding) -> None:
        """Forget a mesh that has nothing left to stop."""
        with self._lock:
            self._holdings.pop(holding.actor_id or holding.procs_id, None)

    def in_turn(self, *, keep: bool) -> list[Holding]:
        """Return what to stop, in order: what was spawned last comes first, because it may use what was spawned before.

        Processes stop the actors on them in the same order, so actors are left out if nothing else was spawned in
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
        """Stop everything, one mesh after the other: each stop begins when the next item is asked for."""
        for each in self.in_turn(keep=False):
            with contextlib.suppress(Exception):  # gone already, or the runtime is
                yield each.mesh.stop()

    def close(self, limit: float) -> None:
        """Stop everything, each after the previous one ended; after ``limit`` seconds without waiting."""
        until = time.monotonic() + limit
        for stop in self._stops():
            with contextlib.suppress(Exception):
                stop.get(timeout=max(0.0, until - time.monotonic()))

    async def close_async(self, limit: float) -> None:
        """Like :meth:`close`, on an event loop."""
        until = time.monotonic() + limit
        for stop in self._stops():
            import asyncio

            with contextlib.suppress(Exception):
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    await stop


def _unseen(holdings: Iterable[Holding]) -> list[tuple[ActorMesh[Any], ActorError]]:
    found = [
        (each.mesh, each.mesh._ready.unseen())
        for each in holdings
        if each.mesh._ready is not None and not each.heard
    ]
    return [(cast("ActorMesh[Any]", mesh), error) for mesh, error in found if isinstance(error, ActorError)]


def _meant(things: Mapping[int, Holding | Returns], thing: int, among: int | None) -> list[int]:
    """Return the keys that :meth:`OwnedMeshes.drop` refers to."""
    return [
        key
        for key, each in things.items()
        if thing in (key, each.procs_id) and among in (None, each.procs_id)
    ]


class Owners:
    """What each owner in one process spawned, by owner: the id of an actor, or 0 for everything else."""

    def __init__(self) -> None:
        self._by_owner: dict[int, OwnedMeshes] = {}
        self.dropped: Callable[[int, int | None], object] | None = None
        """Called like :meth:`drop` with the meshes that were told to stop."""
        self._lock = threading.Lock()

    def of(self, owner: int) -> OwnedMeshes:
        """Return what an owner spawned."""
        with self._lock:
            found = self._by_owner.get(owner)
            if found is None:
                found = self._by_owner[owner] = OwnedMeshes()
            return found

    def returns(self, actor_id: int) -> Returns | None:
        """Return what answers callers of these actors who wait for restarts, whoever owns the actors."""
        return next(
            (found for _, owned_meshes in self.all() if (found := owned_meshes.returns(actor_id))), None
        )

    def who_has(self, actor_id: int) -> tuple[int, Holding | None]:
        """Return the owner of these actors here, and what it holds."""
        for owner, owned_meshes in self.all():
            if (holding := owned_meshes.actors(actor_id)) is not None:
                return owner, holding
        return 0, None

    def restarts(self, owner: int, procs_id: int) -> bool:
        """See :meth:`OwnedMeshes.restarts`."""
        found = self._by_owner.get(owner)
        return found is not None and found.restarts(procs_id)

    def has(self, owner: int) -> bool:
        """Return whether an owner owns anything."""
        found = self._by_owner.get(owner)
        return found is not None and len(found) > 0

    def places(self, procs_id: int, rank: int) -> list[tuple[int, Holding, int]]:
        """Return all meshes here that a process is in: the owner, the mesh and the process's rank in it."""
        return [(owner, *place) for owner, owned in self.all() for place in owned.places(procs_id, rank)]

    def forget_lost(self, places: Iterable[tuple[int, Holding, int]]) -> None:
        """Forget meshes that are lost as a whole: nothing is left to stop."""
        for owner, holding, _ in places:
            if len(holding.lost) == len(holding.mesh._root) and (owned := self._by_owner.get(owner)):
                owned.forget(holding)

    def boots(self, procs_id: int) -> bool:
        """Return whether these processes were spawned here with a bootstrap."""
        procs = (owned.actors(procs_id) for _, owned in self.all())
        return any(each is not None and getattr(each.mesh, "_boots", False) for each in procs)

    def leave(self, owner: int) -> OwnedMeshes | None:
        """Remove and return what an owner that ends has spawned."""
        with self._lock:
            return self._by_owner.pop(owner, None)

    def drop(self, thing: int, among: int | None = None) -> None:
        """Forget a mesh, whoever owns it; with ``among``, only if it is on those processes.

        A mesh of actors that was combined from parts has the id of its first part, but is not that part.
        """
        for _, owned_meshes in self.all():
            owned_meshes.drop(thing, among)
        if self.dropped is not None:
            self.dropped(thing, among)

    def all(self) -> list[tuple[int, OwnedMeshes]]:
        """Return every owner with what it owns."""
        with self._lock:
            return list(self._by_owner.items())
