"""Who has a turn on which replica, where the pool was made: :class:`Places`, the replicas, and what is done about lost ones."""

from __future__ import annotations

import contextvars
import itertools
import logging
import threading
from collections.abc import Callable, Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mesh_core._errors import MeshError, SupervisionError
from mesh_core._pool._places import Places, State

if TYPE_CHECKING:
    from mesh_core._actors import ActorMesh
    from mesh_core._estate import Holding
    from mesh_core._pool._following import Following
    from mesh_core.policies import Action, Event


class OnCrash(Enum):
    """What a pool does when one of its replicas has died."""

    RAISE = "raise"
    RETRY = "retry"
    RESPAWN = "respawn"


class Asker(Protocol):
    """Who wants a turn."""

    def got(self, place: int, replica: ActorMesh[Any]) -> None:
        """There is one: it is to be given back when it is over."""
        ...

    def refused(self, error: BaseException) -> None:
        """There will be none."""
        ...


class Turns(Protocol):
    """What a pool needs, wherever it is used."""

    def ask(self, asker: Asker) -> None:
        """Want a turn."""
        ...

    def drop(self, asker: Asker) -> bool:
        """Want none any more; false if there was one, or it was refused."""
        ...

    def back(self, place: int, lost: BaseException | None) -> None:
        """A turn is over, perhaps because the replica was lost."""
        ...


class Member(NamedTuple):
    """A replica."""

    replica: ActorMesh[Any]
    """A mesh of one."""
    mesh: ActorMesh[Any]
    """The whole of which it is a part, as it was added."""
    rank: int
    """Its rank there."""


_TRIES = 3
"""How often in a row making a replica again may fail before it is given up."""


class OwnTurns:
    """The turns of a pool in the process that made it."""

    def __init__(self, name: str, per_rank: int, on_crash: OnCrash, following: Following) -> None:
        self.name = name
        self.on_crash = on_crash
        self.per_rank = per_rank
        self.resized: Callable[[], object] = _nothing
        """Called when there are more or fewer replicas."""
        self._following = following
        self._lock = threading.Lock()
        self._places: Places[Asker] = Places(per_rank)
        self._members: dict[int, Member] = {}
        self._numbers = itertools.count()
        self._failed: dict[int, int] = {}
        """How often in a row making a replica again has failed."""
        self._idle: dict[int, list[Callable[[], object]]] = {}
        """Whom to tell when a place has nothing to do any more."""
        self._last: BaseException | None = None
        """What the last replica was lost to."""
        self._policies: list[tuple[Holding, Any]] = []
        # What is made again has the owner that it had.
        self._context = contextvars.copy_context()

    # Turns.

    def ask(self, asker: Asker) -> None:
        with self._lock:
            self._places.ask(asker)
        self._give()

    def drop(self, asker: Asker) -> bool:
        with self._lock:
            return self._places.drop(asker)

    def back(self, place: int, lost: BaseException | None) -> None:
        if lost is not None:
            member = self._members.get(place)
            # Others may have told, and it may have been made again meanwhile.
            if member is not None and _is_lost(member.replica):
                self.lose(place, lost)
        with self._lock:
            self._places.back(place)
            tell = self._idle.pop(place, []) if not self._places.busy(place) else []
        for each in tell:
            each()
        self._give()

    def _give(self) -> None:
        """Give the turns that can be given."""
        refused: list[Asker] = []
        while True:
            with self._lock:
                if self._places.is_hopeless:
                    refused = self._places.asking()
                    for asker in refused:
                        self._places.drop(asker)
                    break
                place = self._places.candidate()
                if place is None:
                    return
                member = self._members[place]
                first = self._places.give(place) if _lives(member.replica) else None
            if first is None:
                self.lose(place, None)
            else:
                first.got(place, member.replica)
        for asker in refused:
            asker.refused(self._no_replicas())

    def _no_replicas(self) -> MeshError:
        if not len(self._places):
            return MeshError(f"{self.name} has no replicas: all were removed. add() some first")
        failure = self._last.failure if isinstance(self._last, SupervisionError) else None
        because = "" if self._last is None else f"; the last one: {str(self._last).partition(chr(10))[0]}"
        error = SupervisionError(
            f"{self.name} has lost all of its {len(self._places)} replicas{because}. Make them again with respawn() and add() "
            'them, or use on_crash="respawn"',
            failure=failure,
        )
        error.__cause__ = self._last
        return error

    # Replicas.

    def add(self, mesh: ActorMesh[Any]) -> None:
        """There are more replicas; those that the pool has already are taken for repaired."""
        self._adopt(mesh)
        with self._lock:
            known = {_key(member): place for place, member in self._members.items()}
            for _, replica in mesh:
                member = Member(replica, mesh, replica._view.rank_at(0))
                place = known.get(_key(member))
                if place is None:
                    place = next(self._numbers)
                self._members[place] = member
                if self._places.state(place) is not State.REPAIRING:
                    self._places.add(place)
        self.resized()
        self._give()

    def places_of(self, part: ActorMesh[Any] | None) -> list[int]:
        """The places of these replicas; all without a part."""
        with self._lock:
            if part is None:
                return list(self._members)
            known = {_key(member): place for place, member in self._members.items()}
        found = [known.get((part._procs_id, part._actor_id, rank)) for rank in part._view]
        if None in found:
            raise ValueError(
                f"{part!r} is not part of {self.name}; give it actors that the pool was made of, or that were added"
            )
        return [place for place in found if place is not None]

    def drain(self, places: Iterable[int], idle: Callable[[], object]) -> int:
        """Give these nothing more to do, and call ``idle`` for each that has nothing left; returns how many those are."""
        now = count = 0
        with self._lock:
            for place in places:
                count += 1
                if self._places.state(place) is State.READY:
                    self._places.set(place, State.DRAINING)
                if self._places.busy(place):
                    self._idle.setdefault(place, []).append(idle)
                else:
                    now += 1
        self.resized()
        for _ in range(now):
            idle()
        return count

    def resume(self, places: Iterable[int]) -> None:
        """These work again."""
        with self._lock:
            for place in places:
                if self._places.state(place) in (State.DRAINING, State.LOST):
                    self._failed.pop(place, None)
                    self._places.set(place, State.READY)
        self.resized()
        self._give()

    def remove(self, places: Iterable[int]) -> None:
        """These are no replicas of the pool any more."""
        with self._lock:
            for place in places:
                self._members.pop(place, None)
                self._places.remove(place)
        self.resized()
        self._give()

    def turns(self) -> int:
        """How many turns can be taken at the same time."""
        with self._lock:
            return self._places.turns

    def states(self) -> dict[State, int]:
        """How many replicas there are in each state."""
        with self._lock:
            found = [self._places.state(place) for place in self._places]
        return {state: found.count(state) for state in State}

    # Lost ones.

    def _adopt(self, mesh: ActorMesh[Any]) -> None:
        """See to the failures of these actors, if the pool is to do something about them."""
        if self.on_crash is OnCrash.RAISE:
            return
        making = mesh._making
        holding = None if making is None else making.holding
        if self.on_crash is OnCrash.RESPAWN and (making is None or holding is None or making.procs is None):
            raise ValueError(
                f'on_crash="respawn" is for actors that were spawned here, together with their processes, and {mesh!r} was '
                'not; use on_crash="retry", or make the pool where the actors were spawned'
            )
        if holding is None:
            return
        if holding.policy is None:
            from mesh_core._policy_run import PolicyRun

            holding.policy = PolicyRun(_Handled(self), mesh.name)
            self._policies.append((holding, holding.policy))
        elif self.on_crash is OnCrash.RESPAWN and all(run is not holding.policy for _, run in self._policies):
            raise ValueError(
                f'{mesh!r} has a policy of its own (supervise=), so that a pool with on_crash="respawn" cannot decide about '
                'its failures; use on_crash="retry", and have the policy make actors again'
            )

    def failed(self, rank: int | None, error: BaseException) -> None:
        """A policy has heard of the failure of a rank."""
        with self._lock:
            places = [place for place, member in self._members.items() if member.rank == rank]
        for place in places:
            member = self._members.get(place)
            if member is not None and _is_lost(member.replica):
                self.lose(place, error)
        self._give()

    def lose(self, place: int, error: BaseException | None) -> None:
        """A replica is lost."""
        with self._lock:
            if self._places.state(place) not in (State.READY, State.DRAINING):
                return
            self._last = error or self._last
            repair = self.on_crash is OnCrash.RESPAWN
            self._places.set(place, State.REPAIRING if repair else State.LOST)
        self.resized()
        if repair:
            self._following.soon(lambda: self._repair(place))

    def _repair(self, place: int) -> None:
        member = self._members.get(place)
        if member is None:
            return
        try:
            self._context.copy().run(self._respawn, place, member)
        except Exception as error:  # noqa: BLE001 - whatever it is, there is no replica
            self._not_repaired(place, error)

    def _respawn(self, place: int, member: Member) -> None:
        from mesh_core._repair import lost_places, respawn

        making = member.mesh._making
        procs = None if making is None else making.procs
        if procs is None:
            raise MeshError(f"{member.mesh!r} was stopped")

        def actor() -> None:
            context = self._context.copy()
            again = context.run(member.replica.respawn, [0])
            self._following.follow(again, lambda: self._repaired(place, again))

        if not lost_places(member.replica):
            actor()
            return
        below = respawn(procs._with_region(procs._root), [member.rank], None)

        def then() -> None:
            error = below.exception()
            if error is not None:
                self._not_repaired(place, error)
                return
            try:
                actor()
            except Exception as failed:  # noqa: BLE001
                self._not_repaired(place, failed)

        self._following.follow(below, then)

    def _repaired(self, place: int, again: Any) -> None:
        error = again.exception()
        if error is not None:
            self._not_repaired(place, error)
            return
        with self._lock:
            self._failed.pop(place, None)
            self._places.set(place, State.READY)
        self.resized()
        self._give()

    def _not_repaired(self, place: int, error: BaseException) -> None:
        with self._lock:
            tries = self._failed[place] = self._failed.get(place, 0) + 1
            self._last = error
            given_up = tries >= _TRIES
            if given_up:
                self._places.set(place, State.LOST)
        if given_up:
            logging.getLogger("mesh").error(
                "%s has given up a replica: making it again has failed %d times, the last time with %s: %s",
                self.name,
                tries,
                type(error).__name__,
                str(error).partition("\n")[0],
            )
            self._give()
        else:
            self._following.soon(lambda: self._repair(place))

    def close(self) -> None:
        """The pool is closed: failures of its replicas are their owner's again."""
        policies, self._policies = self._policies, []
        for holding, run in policies:
            if holding.policy is run:
                holding.policy = None


class _Handled:
    """The policy of actors that a pool sees to: their failures are handled, and it is told of them."""

    def __init__(self, turns: OwnTurns) -> None:
        self._turns = turns

    def on(self, event: Event, now: float) -> tuple[_Handled, tuple[Action, ...]]:
        from mesh_core._failure import error_of
        from mesh_core.policies import Failed, Ignore

        if not isinstance(event, Failed):
            return self, ()
        self._turns.failed(event.rank, error_of(event.failure))
        return self, (Ignore(),)


def _key(member: Member) -> tuple[int, int, int]:
    return member.replica._procs_id, member.replica._actor_id, member.rank


def _lives(replica: ActorMesh[Any]) -> bool:
    home, rank = replica._home, replica._view.rank_at(0)
    return not replica._process.runtime.is_gone(*home.addr(replica._procs_id, rank))


def _is_lost(replica: ActorMesh[Any]) -> bool:
    return not _lives(replica) or bool(replica._lost())


def _nothing() -> None:
    return None
