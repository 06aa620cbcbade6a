"""Supervisors as policies of mesh-core: its events go into the state machine, and the machine's actions come out as its own."""

from __future__ import annotations

import functools
import math
import signal
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from mesh_core import FailureKind, MeshFailure, ProcMesh
from mesh_core.policies import (
    Action,
    Ended,
    Escalate,
    Event,
    Failed,
    Ignore,
    Later,
    Policy,
    Repaired,
    RepairEvent,
    Respawn,
    Restart,
    Stop,
)
from mesh_supervision import _machine as machine
from mesh_supervision._backoff import Backoff
from mesh_supervision._machine import (
    Begin,
    Death,
    GiveUp,
    Plan,
    Ranks,
    RestartType,
    State,
    Strategy,
    Wait,
    new_tuple,
)

Type = RestartType | Literal["permanent", "transient", "temporary"]
_LONGEST_CAUSE = 200
_IN_ORDER = "ended in order"


@dataclass(frozen=True, kw_only=True)
class Supervisor:
    """Restarts ranks in their places, and gives up after more than ``intensity`` restarts within ``period`` seconds.

    When it gives up, it stops the mesh and passes the failure on, with every attempt in its ``chain``. The terms are those of
    Erlang/OTP and have the same meaning.

    >>> from mesh_core import FailureKind
    >>> from mesh_core.policies import Failed
    >>> policy = Supervisor("one_for_one", intensity=1, period=60.0)
    >>> policy, actions = policy.on(Failed("workers", 2, FailureKind.KILLED), now=0.0)
    >>> actions
    (Restart(ranks=(2,)),)
    >>> policy, actions = policy.on(Failed("workers", 0, FailureKind.EXITED), now=5.0)
    >>> print(actions[1].reason)
    one_for_one gave up: 1 restart is allowed within 60 s, and this would be number 2
        1. 5.000 s before: rank 2 failed (killed); restarted at once
        2. now: rank 0 failed (exited); not restarted
    """

    strategy: Strategy | Literal["one_for_one", "one_for_all", "rest_for_one"] = field(kw_only=False)
    """Which ranks are restarted when one has died."""
    intensity: int
    """The number of restarts that may begin within ``period`` seconds. With one more, it gives up."""
    period: float
    backoff: Backoff | None = None
    """The delays of restarts; without it there are none."""
    restart: Type = RestartType.PERMANENT
    """Whether a rank that has ended is restarted."""
    ranks: Mapping[int, Type] = field(default_factory=dict)
    """The ranks with another restart type than ``restart``."""
    scope: Literal["mesh", "rank"] = "mesh"
    """Whether ``intensity`` counts the restarts of the mesh, or those of each rank."""
    settle: float = 0.05
    """The number of seconds that one_for_all and rest_for_one wait for ranks that die of the same cause, and that all wait
    before they retry a restart that failed."""
    size: int = 0
    """The number of ranks. A failure includes it, so it only matters for a mesh whose processes end in order before any
    fails."""
    plan: Plan = field(init=False, repr=False, compare=False)
    """All of these, checked."""

    def __post_init__(self) -> None:
        if isinstance(self.intensity, bool) or not isinstance(self.intensity, int) or self.intensity < 0:
            raise ValueError(f"intensity must be a whole number from 0, got {self.intensity!r}")
        _check_seconds("period", self.period, positive=True)
        _check_seconds("settle", self.settle, positive=False)
        if self.backoff is not None and not isinstance(self.backoff, Backoff):
            raise TypeError(f"backoff must be a Backoff, got {self.backoff!r}")
        if self.scope not in ("mesh", "rank"):
            raise ValueError(f"scope must be 'mesh' or 'rank', got {self.scope!r}")
        if self.scope == "rank" and Strategy(self.strategy) is not Strategy.ONE_FOR_ONE:
            raise ValueError(
                "scope 'rank' is for one_for_one: the other strategies restart several ranks at a time"
            )
        plan = Plan(
            strategy=_member(Strategy, "strategy", self.strategy),
            intensity=self.intensity,
            period=self.period,
            backoff=self.backoff,
            restart=_member(RestartType, "restart", self.restart),
            types=MappingProxyType(
                {rank: _member(RestartType, f"ranks[{rank}]", each) for rank, each in self.ranks.items()}
            ),
            per_rank=self.scope == "rank",
            settle=self.settle,
        )
        object.__setattr__(self, "plan", plan)

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        """Decide about the first event; the returned policy decides about the next ones."""
        return _Supervising(self.plan, machine.START, _About(self.size)).on(event, now)

    def on_repair(self, event: RepairEvent, now: float) -> tuple[Policy, Sequence[Action]]:
        """Decide what follows the outcome of a restart."""
        return _Supervising(self.plan, machine.START, _About(self.size)).on_repair(event, now)


@dataclass(frozen=True, kw_only=True)
class OneForOne(Supervisor):
    """Restarts the rank that has died: for independent workers.

    >>> OneForOne(intensity=3, period=60.0).strategy.value
    'one_for_one'
    """

    strategy: Literal[Strategy.ONE_FOR_ONE] = field(default=Strategy.ONE_FOR_ONE, init=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class OneForAll(Supervisor):
    """Restarts all ranks when one has died: for ranks that share state, such as those of a training.

    >>> from mesh_core import FailureKind
    >>> from mesh_core.policies import Failed
    >>> policy, actions = OneForAll(intensity=3, period=60.0, size=3, settle=0.0).on(
    ...     Failed("workers", 1, FailureKind.KILLED), now=0.0
    ... )
    >>> actions
    (Restart(ranks=(0, 1, 2)),)
    """

    strategy: Literal[Strategy.ONE_FOR_ALL] = field(default=Strategy.ONE_FOR_ALL, init=False, repr=False)


@dataclass(frozen=True, kw_only=True)
class RestForOne(Supervisor):
    """Restarts the rank that has died and those after it: for ranks that need the ranks before them.

    >>> from mesh_core import FailureKind
    >>> from mesh_core.policies import Failed
    >>> policy, actions = RestForOne(intensity=3, period=60.0, size=3, settle=0.0).on(
    ...     Failed("workers", 1, FailureKind.KILLED), now=0.0
    ... )
    >>> actions
    (Restart(ranks=(1, 2)),)
    """

    strategy: Literal[Strategy.REST_FOR_ONE] = field(default=Strategy.REST_FOR_ONE, init=False, repr=False)


class _About(NamedTuple):
    """What is known about the mesh."""

    size: int
    procs: bool = False
    """Whether it is a mesh of processes."""
    sure: bool = False
    """Whether that is known and not only assumed: orderly ends do not say it."""


class _Supervising(NamedTuple):
    """A supervisor in use. It is immutable."""

    plan: Plan
    state: State
    about: _About

    def __repr__(self) -> str:
        state = self.state
        return (
            f"<{self.plan.strategy.value}: {len(state.attempts)} of {self.plan.intensity} restarts within "
            f"{self.plan.period:g} s, {len(state.waiting)} waiting, {len(state.running)} running"
            f"{', gave up' if state.over else ''}>"
        )

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        plan, state, about = self
        if isinstance(event, Failed):
            if plan.is_plain and (following := _restarted(plan, state, about, event, now)) is not None:
                return following
            if state.waiting and (back := machine.due(plan, state, event, now)) is not None:
                return _answer(plan, about, back, event)
            failure, rank, kind = event.failure, event.rank, event.kind
            mesh = failure.mesh
            if mesh is not None:
                if not about.sure or about.size != len(mesh):
                    about = _About(len(mesh), isinstance(mesh, ProcMesh), True)
            elif rank is not None and rank >= about.size:
                about = about._replace(size=rank + 1)
            normal = kind is FailureKind.EXITED and failure.exitcode == 0
            salt = 0 if plan.backoff is None else _salt(event.mesh)
            death = new_tuple(Death, (rank, _cause(failure, kind), event, normal, about.size, salt))
            return _answer(plan, about, machine.died(plan, state, death, now), event)
        if isinstance(event, Ended):
            if plan.type_of(event.rank) is not RestartType.PERMANENT or state.over:
                return self, ()
            if any(each is None or event.rank in each for each in state.running):
                return self, ()  # a restart in progress has stopped it
            # There is no failure to pass on if it cannot be restarted, so one is made, and comes back at once.
            return self, (Later(0.0, _made_up(event.mesh, event.rank)),)
        return self, ()

    def on_repair(self, event: RepairEvent, now: float) -> tuple[Policy, Sequence[Action]]:
        plan, state, about = self
        if isinstance(event, Repaired):
            # The most frequent case, on a short path: the only restart in progress has succeeded.
            attempts, waiting, running, gone, over, made = state
            actions = event.actions
            if len(running) == 1 == len(actions) and running[0] == actions[0].ranks and about[2]:
                state = new_tuple(State, (attempts, waiting, (), gone, over, made))
                return new_tuple(_Supervising, (plan, state, about)), ()
            for each in actions:
                state = machine.started(state, each.ranks)
            if not about.sure:
                about = about._replace(sure=True)
            return new_tuple(_Supervising, (plan, state, about)), ()
        if not about.sure:
            # The assumption may have been wrong.
            about = about._replace(procs=isinstance(event.action, Restart))
        ranks = event.action.ranks
        if event.failures:
            failure = event.failures[0]
            token = Failed(event.mesh, failure.rank, failure.kind, failure)
        else:
            token = _made_up(event.mesh, ranks[0] if ranks else None)
        cause = f"could not be restarted: {event.reason}"
        death = Death(token.rank, cause, token, False, about.size, _salt(event.mesh))
        return _answer(plan, about, machine.failed_to_start(plan, state, ranks, death, now), token)


_IGNORE = (Ignore(),)
_SINGLE: tuple[dict[int, Sequence[Action]], dict[int, Sequence[Action]]] = ({}, {})
"""Return what restarts one rank of a mesh of actors and of one of processes, as the same objects each time."""


def _restarted(
    plan: Plan, state: State, about: _About, event: Failed, now: float
) -> tuple[Policy, Sequence[Action]] | None:
    """Decide about the most frequent death, of one rank that is restarted at once, on a short path; ``None`` for all others."""
    rank, failure = event.rank, event.failure
    size, procs, is_sure = about
    mesh = failure.mesh
    if rank is None or (rank >= size if mesh is None else not is_sure or size != len(mesh)):
        return None
    number = failure.signal
    if number is None or event.kind is not _KILLED or (cause := _CAUSES.get(number)) is None:
        cause = _cause(failure, event.kind)
    after = machine.restarted(plan, state, rank, cause, now)
    if after is None:
        return None
    actions = _SINGLE[procs].get(rank)
    if actions is None:
        actions = _SINGLE[procs][rank] = _again(procs, (rank,))
    return new_tuple(_Supervising, (plan, after, about)), actions


def _answer(
    plan: Plan, about: _About, step: tuple[State, machine.Action], token: Failed
) -> tuple[Policy, Sequence[Action]]:
    """Return the next policy, and the machine's actions as those of mesh-core."""
    state, action = step
    following = new_tuple(_Supervising, (plan, state, about))
    if isinstance(action, Begin):
        return following, _again(about.procs, action.start)
    if isinstance(action, Wait):
        return following, (Later(action.seconds, token),)
    if isinstance(action, GiveUp):
        return following, (Stop(), Escalate(action.report))
    return following, _IGNORE


@functools.lru_cache(maxsize=4096)
def _again(procs: bool, ranks: Ranks) -> tuple[Action, ...]:
    return (Respawn(ranks) if procs else Restart(ranks),)


@functools.lru_cache(maxsize=256)
def _salt(mesh: str) -> int:
    return zlib.crc32(mesh.encode()) << 20


def _made_up(mesh: str, rank: int | None) -> Failed:
    failure = MeshFailure(mesh_name=mesh, rank=rank, reason=_IN_ORDER, kind=FailureKind.EXITED)
    return Failed(mesh, rank, FailureKind.EXITED, failure)


def _cause(failure: MeshFailure, kind: FailureKind) -> str:
    """Return in a few words how it died."""
    if failure.signal is not None:
        return _killed(failure.signal, kind is FailureKind.OUT_OF_MEMORY)
    exception = failure.exception
    if exception is not None:
        said = str(exception).partition("\n")[0]
        return _short(f"raised {type(exception).__name__}{f': {said}' if said else ''}")
    if failure.exitcode is not None:
        return f"exited with status {failure.exitcode}"
    return _short(failure.reason) if failure.reason else f"failed ({kind.value})"


@functools.lru_cache(maxsize=128)
def _killed(number: int, out_of_memory: bool) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    return f"was killed by signal {number} ({name}){', probably as memory ran out' if out_of_memory else ''}"


_KILLED = FailureKind.KILLED
_CAUSES = {int(each): _killed(int(each), False) for each in signal.Signals}


def _short(text: str) -> str:
    text = text.partition("\n")[0]
    return text if len(text) <= _LONGEST_CAUSE else text[:_LONGEST_CAUSE] + " ..."


def _check_seconds(name: str, value: Any, *, positive: bool) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ValueError(
            f"{name} must be a finite number of seconds {'above' if positive else 'from'} 0, got {value!r}"
        )


def _member(kind: Any, name: str, value: Any) -> Any:
    try:
        return kind(value)
    except ValueError:
        known = ", ".join(repr(each.value) for each in kind)
        raise ValueError(f"{name} must be one of {known}, got {value!r}") from None
