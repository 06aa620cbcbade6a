"""Turns in the process that made the pool: :class:`Places`, the replicas, and what happens when some are lost.

AHD-1: a task is sent ahead only while tasks are short, and only to a replica of this host that no other pool of this process uses;
several only while they take together hardly longer than one may.
AHD-2: no task stays behind a long one: it is taken back when another replica is idle, or when the task before it takes long.
AHD-3: if the replica of a task that was sent ahead dies before the reply to the task before it has arrived, the task has not
begun (TAK-2), and runs elsewhere.
"""

from __future__ import annotations

import contextvars
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from mesh_core._blocks.pool.places import Places, State
from mesh_core._common.errors import MeshError, SupervisionError, first_line, in_a_line

if TYPE_CHECKING:
    from mesh_core._blocks.pool.following import Following
    from mesh_core._failures.owned_meshes import Holding
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core.policies import Action, Event


class OnCrash(StrEnum):
    """What a pool does when one of its replicas has died."""

    RAISE = "raise"
    RETRY = "retry"
    RESPAWN = "respawn"


class Asker(Protocol):
    """Something that wants a turn."""

    @property
    def may_go_ahead(self) -> bool:
        """Whether it may be sent ahead, and another behind it."""
        ...

    def got(self, place: int, replica: ActorMesh[Any], *, ahead: bool = False) -> None:
        """It has a turn, and must give it back when done. With ``ahead``, it will have it once the asker before it gives it back."""
        ...

    def take_back(self) -> None:
        """Another replica is free: if it has not begun, it should ask again."""
        ...

    def refused(self, error: BaseException) -> None:
        """It will never get a turn."""
        ...


class Turns(Protocol):
    """What a pool needs in every process that uses it."""

    def ask(self, asker: Asker, *, first: bool = False) -> None:
        """Ask for a turn. ``first`` is for askers that had a turn and could not use it."""
        ...

    def ask_all(self, askers: Sequence[Asker]) -> None:
        """Ask for a turn for each."""
        ...

    def drop(self, asker: Asker) -> bool:
        """Withdraw a request; false if a turn was given or refused already."""
        ...

    def back(self, place: int, lost: BaseException | None) -> None:
        """Give a turn back, perhaps because the replica was lost."""
        ...

    def leave(self, place: int, asker: Asker, lost: BaseException | None) -> bool:
        """An asker that was sent ahead is done; false if it has got a turn, which must be given back."""
        ...

    def sent_back(self) -> None:
        """A replica could not begin what was sent ahead, since its replies are large. Send nothing ahead for a while."""
        ...


class Member(NamedTuple):
    """A replica."""

    replica: ActorMesh[Any]
    """A mesh of one."""
    mesh: ActorMesh[Any]
    """The mesh that was added, which the replica is part of."""
    rank: int
    """Its rank in that mesh."""
    addr: tuple[int, int, int]
    """Its address."""


class _Given(NamedTuple):
    """Who is to be told that it has a turn at a replica, or is ahead there."""

    replica: ActorMesh[Any]
    askers: list[tuple[Asker, bool]]
    """In their order there; true for those that are ahead."""


_TRIES = 3
"""The number of failed attempts in a row to respawn a replica after which it is given up."""
_SHORT_S = 0.004
"""Tasks up to this time count as short. For longer ones, the time to reach the replica does not matter."""
_AHEAD_S = 0.002
_MOST_AHEAD = 8
"""How many tasks may be ahead at a replica: as many as it does in that time, but not more than that."""
_SURE = 16
_RATHER = 8
_LONG_AGO = 100
"""For a counter of short tasks, minus long ones: its maximum; the value from which tasks are sent ahead; and its negative value
after a replica has returned a task."""


class _Users(weakref.WeakSet["OwnTurns"]):
    """The pools of this process that use one replica."""


class _Replicas:
    """Which pools of this process use which replicas."""

    def __init__(self) -> None:
        self.users: weakref.WeakValueDictionary[tuple[int, int, int], _Users] = weakref.WeakValueDictionary()


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
        """How many attempts in a row to respawn a replica have failed."""
        self._since: dict[int, float] = {}
        """When the last turn on a place began."""
        self._users: dict[int, _Users] = {}
        """The pools that use the replica at a place, for places to which tasks may be sent ahead."""
        self._taking_back: set[Asker] = set()
        self._unsent: set[int] = set()
        """Places with askers that a thread is about to tell that they have their turn there, or are ahead."""
        self._short = 0
        self._pace = _AHEAD_S
        """How long a task takes: a mean of the last ones."""
        self._most_ahead = 1
        """How many may be ahead at a place."""
        self._idle: dict[int, list[Callable[[], object]]] = {}
        """What to call when a place has no more tasks."""
        self._last: BaseException | None = None
        """Why the last replica was lost."""
        self._policies: list[tuple[Holding, Any]] = []
        # A respawned replica has the same owner as before.
        self._context = contextvars.copy_context()

    # Turns.

    def ask(self, asker: Asker, *, first: bool = False) -> None:
        with self._lock:
            self._places.ask(asker, first=first)
        # A turn that is asked for frees no replica, so nothing is stuck that was not before.
        self._give(looks=False)

    def ask_all(self, askers: Sequence[Asker]) -> None:
        with self._lock:
            for asker in askers:
                self._places.ask(asker)
        self._give(looks=False)

    def drop(self, asker: Asker) -> bool:
        with self._lock:
            return self._places.drop(asker)

    def back(self, place: int, lost: BaseException | None) -> None:
        if lost is not None:
            self._check(place, lost)
        now = time.monotonic()
        with self._lock:
            taken = now - self._since.get(place, now)
            self._short = min(_SURE, self._short + 1) if taken < _SHORT_S else max(0, self._short - 2)
            self._pace += (min(taken, _SHORT_S) - self._pace) / _SURE
            self._most_ahead = (
                1 if self._pace > _AHEAD_S / 2 else int(min(_MOST_AHEAD, _AHEAD_S / self._pace))
            )
            follower = self._places.back(place, is_lost=lost is not None)
            if follower is not None:
                self._since[place] = now
                self._taking_back.discard(follower)
            tell: Sequence[Callable[[], object]] = ()
            if self._idle and not self._places.busy(place):
                tell = self._idle.pop(place, ())
        for each in tell:
            each()
        self._give()

    def leave(self, place: int, asker: Asker, lost: BaseException | None) -> bool:
        with self._lock:
            was_ahead = self._places.leave(place, asker)
            if was_ahead:
                self._taking_back.discard(asker)
        if was_ahead and lost is not None:
            self._check(place, lost)
        return was_ahead

    def sent_back(self) -> None:
        with self._lock:
            self._short = -_LONG_AGO

    def _behind(self, given: Collection[int]) -> int | None:
        """The place to which the next asker should be sent ahead; None for none.

        A replica gets its tasks in their order: nobody but the thread that gave turns there before sends another one ahead.
        """
        if self._short < _RATHER:
            return None
        place = self._places.behind(self._most_ahead)
        if place is None or (place in self._unsent and place not in given):
            return None
        asker = self._places.next_asking()
        if asker is None or not asker.may_go_ahead or time.monotonic() - self._since[place] > _SHORT_S:
            return None
        return place

    def _lead(self, place: int, asker: Asker) -> None:
        """A turn has begun."""
        self._since[place] = time.monotonic()
        users = self._users.get(place)
        if users is not None and len(users) == 1 and asker.may_go_ahead:
            self._places.lead(place)

    def _take_back_stuck(self) -> None:
        """Take back the tasks that were sent ahead and would begin earlier elsewhere."""
        with self._lock:
            stuck = self._stuck()
        for asker in stuck:
            asker.take_back()

    def _stuck(self) -> Sequence[Asker]:
        """Askers that were sent ahead and should be taken back: all behind a long task, and one for each idle replica."""
        wanted = self._places.idle - len(self._taking_back)
        now = time.monotonic()
        found: list[Asker] = []
        for place, chain in self._places.ahead_at.items():
            is_long = now - self._since[place] >= _SHORT_S
            if not is_long and len(found) >= wanted:
                break
            # The last one would have to wait longest.
            for asker in list(chain) if is_long else [chain[-1]]:
                if asker not in self._taking_back:
                    self._taking_back.add(asker)
                    found.append(asker)
        return found

    def _give(self, *, looks: bool = True) -> None:
        """Give the turns that can be given; then look for tasks that wait behind others without need, if told so."""
        places = self._places
        failed: BaseException | None = None
        while places.waiting:
            given: dict[int, _Given] = {}
            with self._lock:
                refused, gone = self._deal(given)
                self._unsent.update(given)
            for place, (replica, askers) in given.items():
                for asker, ahead in askers:
                    try:
                        asker.got(place, replica, ahead=ahead)
                    except BaseException as error:  # noqa: BLE001 - the others must be told all the same
                        failed = failed or error
            if given:
                with self._lock:
                    self._unsent.difference_update(given)
            for asker in refused:
                asker.refused(self._no_replicas())
            if gone is not None:
                self.lose(gone, None)
            elif not given:
                break
        if looks and places.ahead_at:
            # Once the replicas have what there is for them.
            self._following.settle(self._take_back_stuck)
        if failed is not None:
            raise failed

    def _deal(self, given: dict[int, _Given]) -> tuple[Sequence[Asker], int | None]:
        """Give turns until there are none left; returns who will never get one, and a place that turns out to be lost.

        ``given`` gets the askers of each place. Those of one place follow each other, so that its replica is woken once for all.
        """
        places = self._places
        while places.waiting:
            place, ahead = places.candidate(), False
            if place is None:
                if places.is_hopeless:
                    return places.refuse(), None
                place, ahead = self._behind(given), True
                if place is None:
                    break
            there = given.get(place)
            if there is None:
                member = self._members[place]
                if member.replica._process.runtime.is_gone(*member.addr):
                    return (), place
                there = given[place] = _Given(member.replica, [])
            if ahead:
                asker = places.send_ahead(place)
            else:
                asker = places.give(place)
                self._lead(place, asker)
            there.askers.append((asker, ahead))
        return (), None

    def _no_replicas(self) -> MeshError:
        if not len(self._places):
            return MeshError(f"{self.name} has no replicas: all were removed. add() some first")
        failure = self._last.failure if isinstance(self._last, SupervisionError) else None
        because = "" if self._last is None else f"; the last one: {first_line(self._last)}"
        error = SupervisionError(
            f"{self.name} has lost all of its {len(self._places)} replicas{because}. Respawn them with respawn() and add() "
            'them, or use on_crash="respawn"',
            failure=failure,
        )
        error.__cause__ = self._last
        return error

    # Replicas.

    def add(self, mesh: ActorMesh[Any]) -> None:
        """Add replicas. Those that the pool has already count as repaired."""
        self._adopt(mesh)
        with self._lock:
            known = {_key(member): place for place, member in self._members.items()}
            for _, replica in mesh:
                rank = replica._view.rank_at(0)
                member = Member(replica, mesh, rank, replica._location.addr(replica._procs_id, rank))
                place = known.get(_key(member))
                if place is None:
                    place = next(self._numbers)
                self._members[place] = member
                self._join(place, member)
                if self._places.state(place) is not State.REPAIRING:
                    self._places.add(place)
        self.resized()
        self._give()

    def _join(self, place: int, member: Member) -> None:
        """Note that the pool has this replica."""
        from mesh_core._native import locate

        runtime = member.replica._process.runtime
        at = locate(runtime, *member.replica._location.addr(member.replica._procs_id, member.rank))
        if self.per_rank > 1 or at[2] != runtime.me[2]:
            self._part(place)
            # Several tasks run there anyway; or it is on another host, and if that dies, nobody knows which tasks had begun.
            return
        replicas = member.replica._process.slots.of(_Replicas)
        users = self._users[place] = replicas.users.setdefault(_key(member), _Users())
        users.add(self)

    def places_of(self, part: ActorMesh[Any] | None) -> list[int]:
        """The places of these replicas; all places if ``part`` is None."""
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

    def drain(self, places: Collection[int], idle: Callable[[], object]) -> None:
        """Give these places no more tasks, and call ``idle`` for each when it has none left."""
        now = 0
        with self._lock:
            for place in places:
                if self._places.state(place) is State.READY:
                    self._places.set(place, State.DRAINING)
                if self._places.busy(place):
                    self._idle.setdefault(place, []).append(idle)
                else:
                    now += 1
            drained = set(places)
            ahead = [(place, asker) for place, asker in self._places.ahead() if place in drained]
            self._taking_back.update(asker for _, asker in ahead)
        self.resized()
        for _, asker in ahead:
            asker.take_back()
        for _ in range(now):
            idle()

    def resume(self, places: Iterable[int]) -> None:
        """Give these places tasks again."""
        with self._lock:
            for place in places:
                if self._places.state(place) in (State.DRAINING, State.LOST):
                    self._failed.pop(place, None)
                    self._places.set(place, State.READY)
        self.resized()
        self._give()

    def remove(self, places: Iterable[int]) -> None:
        """Remove these places from the pool."""
        with self._lock:
            for place in places:
                self._members.pop(place, None)
                self._part(place)
                self._places.remove(place)
        self.resized()
        self._give()

    def _part(self, place: int) -> None:
        users = self._users.pop(place, None)
        if users is not None:
            users.discard(self)

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
        """Handle the failures of these actors, if ``on_crash`` says so."""
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
            from mesh_core._failures.policy_run import PolicyRun

            holding.policy = PolicyRun(_Handled(self), mesh._name)
            self._policies.append((holding, holding.policy))
        elif self.on_crash is OnCrash.RESPAWN and all(run is not holding.policy for _, run in self._policies):
            raise ValueError(
                f'{mesh!r} has its own policy (supervise=), so a pool with on_crash="respawn" cannot handle '
                'its failures; use on_crash="retry", and let the policy respawn actors'
            )

    def failed(self, rank: int | None, error: BaseException) -> None:
        """A rank has failed, as its policy reports."""
        with self._lock:
            places = [place for place, member in self._members.items() if member.rank == rank]
        for place in places:
            self._check(place, error)
        self._give()

    def _check(self, place: int, error: BaseException) -> None:
        """Note the loss of a replica, unless it was noted before and the replica has been respawned meanwhile."""
        member = self._members.get(place)
        if member is not None and _is_lost(member.replica):
            self.lose(place, error)

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
        except Exception as error:  # noqa: BLE001 - whatever the reason, there is no replica
            self._not_repaired(place, error)

    def _respawn(self, place: int, member: Member) -> None:
        from mesh_core._meshes.repair import lost_places, respawn

        making = member.mesh._making
        procs = None if making is None else making.procs
        if procs is None:
            raise MeshError(f"{member.mesh!r} was stopped")

        def actor() -> None:
            context = self._context.copy()
            again = context.run(member.replica._itself.respawn, [0])
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
            if place in self._members:
                # It may be on a different host now.
                self._join(place, self._members[place])
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
                "%s has given up a replica: respawning it failed %d times, the last time with %s",
                self.name,
                tries,
                in_a_line(error),
            )
            self._give()
        else:
            self._following.soon(lambda: self._repair(place))

    def close(self) -> None:
        """The pool is closed: failures of its replicas go to their owner again."""
        with self._lock:
            for place in list(self._users):
                self._part(place)
        policies, self._policies = self._policies, []
        for holding, run in policies:
            if holding.policy is run:
                holding.policy = None


class _Handled:
    """The policy of a pool's actors: it handles their failures and reports them to the pool."""

    def __init__(self, turns: OwnTurns) -> None:
        self._turns = turns

    def on(self, event: Event, now: float) -> tuple[_Handled, tuple[Action, ...]]:
        from mesh_core._failures.failure import error_of
        from mesh_core.policies import Failed, Ignore

        if not isinstance(event, Failed):
            return self, ()
        self._turns.failed(event.rank, error_of(event.failure))
        return self, (Ignore(),)


def _key(member: Member) -> tuple[int, int, int]:
    return member.replica._procs_id, member.replica._actor_id, member.rank


def _is_lost(replica: ActorMesh[Any]) -> bool:
    addr = replica._location.addr(replica._procs_id, replica._view.rank_at(0))
    return replica._process.runtime.is_gone(*addr) or bool(replica._lost())


def _nothing() -> None:
    return None
