"""A supervisor as a state machine: what is restarted after a death. No clock, no I/O, no mesh.

Ranks are numbers in start order. Each transition takes a plan, a state, the time and an event, and returns the
next state and an action.

RST-1: within any ``period`` seconds, at most ``intensity`` restarts begin.
RST-2: what is stopped is stopped in reverse start order, and what is started is started in start order.
RST-3: a temporary rank that has died, or was stopped, is never started again.
RST-4: it gives up once; after that nothing is restarted.
RST-5: a death covered by a restart that has not begun yet is part of that restart.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from mesh_supervision._backoff import Backoff


class Strategy(enum.Enum):
    """Which ranks are restarted when one has died."""

    ONE_FOR_ONE = "one_for_one"
    """The one that died."""
    ONE_FOR_ALL = "one_for_all"
    """All of them."""
    REST_FOR_ONE = "rest_for_one"
    """The one that died, and those with higher numbers."""


class RestartType(enum.Enum):
    """Whether a rank that has ended is restarted."""

    PERMANENT = "permanent"
    """Always."""
    TRANSIENT = "transient"
    """If it has failed, but not if it has ended in order or exited with status 0."""
    TEMPORARY = "temporary"
    """Never."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of a supervisor; immutable."""

    strategy: Strategy
    intensity: int
    period: float
    backoff: Backoff | None = None
    restart: RestartType = RestartType.PERMANENT
    types: Mapping[int, RestartType] = field(default_factory=dict)
    """Of the ranks that have another type than ``restart``."""
    per_rank: bool = False
    """Whether each rank has an intensity of its own."""
    settle: float = 0.05
    """How long a group is given to die together before it is restarted, and how long a failed restart waits before the next attempt."""

    is_plain: bool = field(init=False, repr=False)
    """Whether every death restarts that rank, at once, counted for the mesh: the case of :func:`restarted`."""

    def __post_init__(self) -> None:
        is_plain = (
            self.strategy is Strategy.ONE_FOR_ONE
            and self.restart is RestartType.PERMANENT
            and not (self.types or self.per_rank or self.backoff is not None)
        )
        object.__setattr__(self, "is_plain", is_plain)

    def type_of(self, rank: int | None) -> RestartType:
        """Return the restart type of a rank; that of the mesh if none is given."""
        return self.restart if rank is None else self.types.get(rank, self.restart)


Ranks: TypeAlias = tuple[int, ...] | None
"""In start order; ``None`` stands for whatever has failed."""


class Attempt(NamedTuple):
    """One restart that was decided."""

    number: int
    when: float
    """When the death was reported."""
    rank: int | None
    cause: str
    at: float
    """When the restart began; infinite while it waits."""


class Waiting(NamedTuple):
    """A restart that is delayed."""

    token: object
    """Comes back when it is time; compared by identity."""
    ranks: Ranks
    number: int


class Death(NamedTuple):
    """A rank has ended, or a restart caused by its death has failed."""

    rank: int | None
    cause: str
    token: object = None
    """Comes back to :func:`due` if its restart is delayed."""
    normal: bool = False
    """Whether it has ended in order."""
    size: int = 0
    """The number of ranks."""
    salt: int = 0
    """Makes its jitter differ from that of other supervisors."""


class State(NamedTuple):
    """The state of a supervisor."""

    attempts: tuple[Attempt, ...] = ()
    """Those that may count, the oldest decision first."""
    waiting: tuple[Waiting, ...] = ()
    running: tuple[Ranks, ...] = ()
    """Restarts that have begun and not ended, the oldest first."""
    gone: frozenset[int] = frozenset()
    """Temporary ranks that are dead for good."""
    over: bool = False
    """Whether it has given up."""
    made: int = 0
    """Restarts decided on so far."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Stop those of the first that are alive, in that order; then start the second, in that order."""

    stop: tuple[int, ...]
    start: Ranks


@dataclass(frozen=True, slots=True)
class Wait:
    """Let the token come back, to :func:`due`."""

    seconds: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Stop everything, and notify the level above."""

    report: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """It stays dead, or a restart in progress brings it back."""


Action: TypeAlias = Begin | Wait | GiveUp | Nothing
START = State()
NOTHING = Nothing()
new_tuple = tuple.__new__
"""Makes named tuples without their own ``__new__``, which takes half as much time again."""


def died(plan: Plan, state: State, death: Death, now: float) -> tuple[State, Action]:
    """Decide about the end of a rank."""
    if state.over:
        return state, NOTHING
    rank = death.rank
    kind = plan.restart if rank is None or not plan.types else plan.types.get(rank, plan.restart)
    if kind is not RestartType.PERMANENT:
        if kind is RestartType.TEMPORARY:
            if rank is not None and rank not in state.gone:
                state = state._replace(gone=state.gone | {rank})
            return state, NOTHING
        if death.normal:
            return state, NOTHING
    # The first restart in progress may be the one that made the process that has died now; those after it have not begun.
    if (state.waiting or state.running) and _covered(state, rank, state.running[1:]):
        return state, NOTHING
    least = 0.0 if plan.strategy is Strategy.ONE_FOR_ONE else plan.settle
    return _attempt(plan, state, death, now, least)


def restarted(plan: Plan, state: State, rank: int, cause: str, now: float) -> State | None:
    """The same as :func:`died` in the most frequent case, on a short path: the next state, in which ``(rank,)`` restarts.

    For a plain plan. ``None`` in any other case: something is delayed or in progress, or the intensity may be reached.
    """
    attempts, waiting, running, gone, over, count = state
    if waiting or running or over:
        return None
    left = len(attempts)
    if left >= plan.intensity:
        since = now - plan.period
        first = 0
        while first < left and attempts[first][4] < since:
            first += 1
        if left - first >= plan.intensity:
            return None
        attempts = attempts[first:]
    attempt = new_tuple(Attempt, (count, now, rank, cause, now))
    return new_tuple(State, ((*attempts, attempt), (), ((rank,),), gone, False, count + 1))


def failed_to_start(plan: Plan, state: State, ranks: Ranks, death: Death, now: float) -> tuple[State, Action]:
    """Decide about a restart of ``ranks`` that failed. It is tried again, and the attempt counts."""
    state = started(state, ranks)
    if state.over or ((state.waiting or state.running) and _covered(state, death.rank, state.running)):
        return state, NOTHING
    return _attempt(plan, state, death, now, plan.settle)


def started(state: State, ranks: Ranks) -> State:
    """Note that a restart of ``ranks`` has ended."""
    attempts, waiting, running, gone, over, count = state
    if running == (ranks,):
        return new_tuple(State, (attempts, waiting, (), gone, over, count))
    left = list(running)
    if ranks in left:
        left.remove(ranks)
    return State(attempts, waiting, tuple(left), gone, over, count)


def due(plan: Plan, state: State, token: object, now: float) -> tuple[State, Action] | None:
    """Begin the restart that ``token`` stands for; ``None`` if there is none."""
    found = next((each for each in state.waiting if each.token is token), None)
    if found is None:
        return None
    attempts = tuple(
        each._replace(at=now) if each.number == found.number else each for each in state.attempts
    )
    waiting = tuple(each for each in state.waiting if each is not found)
    state = state._replace(attempts=attempts, waiting=waiting)
    return (state, NOTHING) if state.over else _begin(plan, state, found.ranks)


def _covered(state: State, rank: int | None, running: tuple[Ranks, ...]) -> bool:
    """Return whether a death is part of a delayed restart, or is one of these (RST-5)."""
    return any(
        ranks is None or rank in ranks for ranks in (*(each.ranks for each in state.waiting), *running)
    )


def _attempt(plan: Plan, state: State, death: Death, now: float, least: float) -> tuple[State, Action]:
    """Count a restart; then begin it, delay it by at least this time, or give up (RST-1)."""
    attempts, waiting, running, gone, _, count = state
    rank = death.rank
    before = attempts
    if attempts and (len(attempts) >= plan.intensity or plan.backoff is not None or plan.per_rank):
        # A delayed restart counts whatever the time, since it begins later than now.
        since = now - plan.period
        before = attempts = tuple([each for each in attempts if each.at >= since])
        if plan.per_rank:
            before = tuple([each for each in attempts if each.rank == rank])
    if len(before) >= plan.intensity:
        last = Attempt(count, now, rank, death.cause, math.inf)
        return state._replace(over=True, waiting=()), GiveUp(report(plan, (*before, last)))
    delay = least
    if plan.backoff is not None:
        delay = max(least, plan.backoff.delay(len(before), death.salt + count))
    ranks = _concerned(plan, rank, death.size)
    if delay > 0:
        attempts = (*attempts, Attempt(count, now, rank, death.cause, math.inf))
        waiting = (*waiting, Waiting(death.token, ranks, count))
        return State(attempts, waiting, running, gone, False, count + 1), Wait(delay)
    attempts = (*attempts, new_tuple(Attempt, (count, now, rank, death.cause, now)))
    if ranks is None or len(ranks) == 1:
        state = new_tuple(State, (attempts, waiting, (*running, ranks), gone, False, count + 1))
        return state, _begin_single(ranks)
    return _begin(plan, State(attempts, waiting, running, gone, False, count + 1), ranks)


def _concerned(plan: Plan, rank: int | None, size: int) -> Ranks:
    """Return the ranks that restart with ``rank``, by the strategy."""
    if plan.strategy is Strategy.ONE_FOR_ONE:
        return None if rank is None else (rank,)
    if rank is None:
        return tuple(range(size)) or None
    first = 0 if plan.strategy is Strategy.ONE_FOR_ALL else rank
    return tuple(range(first, max(size, rank + 1)))


def _begin(plan: Plan, state: State, ranks: Ranks) -> tuple[State, Action]:
    if ranks is None or len(ranks) == 1:
        return state._replace(running=(*state.running, ranks)), _begin_single(ranks)
    there = tuple(each for each in ranks if each not in state.gone)
    stays = frozenset(each for each in there if plan.type_of(each) is RestartType.TEMPORARY)
    # RST-2, RST-3.
    begin = Begin(there[::-1], tuple(each for each in there if each not in stays))
    return state._replace(running=(*state.running, begin.start), gone=state.gone | stays), begin


@functools.lru_cache(maxsize=4096)
def _begin_single(ranks: Ranks) -> Begin:
    return Begin(ranks or (), ranks)


def report(plan: Plan, attempts: tuple[Attempt, ...]) -> str:
    """List every attempt; the last one is the one too many."""
    now = attempts[-1].when
    allowed = "restart is" if plan.intensity == 1 else "restarts are"
    whose = " for each rank" if plan.per_rank else ""
    headline = (
        f"{plan.strategy.value} gave up: {plan.intensity} {allowed} allowed within {plan.period:g} s{whose}, and this would "
        f"be number {len(attempts)}"
    )
    lines = [headline]
    for number, each in enumerate(attempts, 1):
        who = "the mesh" if each.rank is None else f"rank {each.rank}"
        ago = "now" if each is attempts[-1] else f"{now - each.when:.3f} s before"
        if each is attempts[-1]:
            then = "not restarted"
        elif math.isinf(each.at):
            then = "its restart was still waiting"
        else:
            waited = each.at - each.when
            then = f"restarted after {waited:.3f} s" if waited > 0 else "restarted at once"
        lines.append(f"    {number}. {ago}: {who} {each.cause}; {then}")
    return "\n".join(lines)
