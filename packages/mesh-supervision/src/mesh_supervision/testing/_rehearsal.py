"""A simulated mesh: policies are tried on it without processes, with a clock that tests advance.

It carries actions out as Mesh does: one repair after the other, timers that come back, failures that are handled, passed on
or postponed.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from mesh_core import FailureKind, MeshFailure
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
    RepairFailed,
    RepairPolicy,
    Respawn,
    Restart,
    Stop,
    checked_actions,
)


@dataclass(frozen=True)
class Began:
    """A restart has begun of these ranks."""

    at: float
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class PassedOn:
    """A failure was passed on to the owner."""

    at: float
    failure: MeshFailure
    reason: str


class PaperMesh:
    """Stands for the mesh in a failure: it has a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size


@dataclass
class Rehearsal:
    """A policy in use by ``size`` simulated ranks.

    >>> from mesh_supervision import OneForOne
    >>> mesh = Rehearsal(OneForOne(intensity=1, period=60.0), size=3)
    >>> mesh.kill(1)
    >>> mesh.advance(5.0)
    >>> mesh.alive, [each.ranks for each in mesh.restarts]
    ([0, 1, 2], [(1,)])
    >>> mesh.kill(1)
    >>> mesh.stopped, len(mesh.passed_on)
    (True, 1)
    """

    policy: Policy
    size: int = 4
    repair_seconds: float = 0.01
    """The duration of a repair."""
    starts: Callable[[int], bool] = lambda rank: True
    """Called with each rank that is restarted: whether that succeeds."""
    name: str = "mesh"
    epoch: float = 0.0
    """The time of day at the start, in seconds since 1970, from which ``since`` of the failures counts."""

    now: float = field(default=0.0, init=False)
    events: list[tuple[float, Event | RepairEvent, tuple[Action, ...]]] = field(
        default_factory=list, init=False
    )
    """The events that the policy was given, and its answers."""
    restarts: list[Began] = field(default_factory=list, init=False)
    passed_on: list[PassedOn] = field(default_factory=list, init=False)
    handled: list[MeshFailure] = field(default_factory=list, init=False)
    put_off: list[MeshFailure] = field(default_factory=list, init=False)
    """Failures that are neither handled nor passed on, and not under repair."""
    under_repair: list[MeshFailure] = field(default_factory=list, init=False)
    stopped: bool = field(default=False, init=False)
    dead: set[int] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._mesh = PaperMesh(self.size)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._pids = itertools.count(1000)
        self._repairs: list[tuple[tuple[Restart | Respawn, ...], tuple[MeshFailure, ...]]] = []

    @property
    def alive(self) -> list[int]:
        """The living ranks."""
        return [] if self.stopped else [rank for rank in range(self.size) if rank not in self.dead]

    def failures(self) -> list[MeshFailure]:
        """All failures so far, whatever their state."""
        passed = [each.failure for each in self.passed_on]
        return [*self.handled, *passed, *self.put_off, *self.under_repair]

    def kill(self, *ranks: int, kind: FailureKind = FailureKind.KILLED, exitcode: int | None = None) -> None:
        """Let ranks die, all before the policy is given the first failure. Dead ranks stay as they are."""
        died = [rank for rank in dict.fromkeys(ranks) if rank in self.alive]
        self.dead.update(died)
        for rank in died:
            number = 9 if kind in (FailureKind.KILLED, FailureKind.OUT_OF_MEMORY) else None
            failure = MeshFailure(
                mesh=self._mesh,
                mesh_name=self.name,
                rank=rank,
                pid=next(self._pids),
                signal=number,
                exitcode=exitcode,
                since=self.epoch + self.now,
                kind=kind,
            )
            self._ask(Failed(self.name, rank, kind, failure))

    def end(self, rank: int) -> None:
        """Let a process end in order."""
        if rank in self.alive:
            self.dead.add(rank)
            self._ask(Ended(self.name, rank))

    def advance(self, seconds: float) -> None:
        """Let time pass, with everything that happens in it."""
        until = self.now + seconds
        while self._agenda and self._agenda[0][0] <= until:
            self.now, _, then = heapq.heappop(self._agenda)
            then()
        self.now = until

    def at(self, seconds: float, then: Callable[[], None]) -> None:
        """Call a function so many seconds from now."""
        heapq.heappush(self._agenda, (self.now + seconds, next(self._order), then))

    def _due(self, event: Event) -> None:
        # The timers of a stopped mesh are cancelled.
        if not self.stopped:
            self._ask(event)

    def _ask(self, event: Event | RepairEvent) -> None:
        if self.stopped:
            if isinstance(event, Failed):
                # Failures while it is being stopped end with it.
                self.handled.append(event.failure)
            return
        if isinstance(event, (Repaired, RepairFailed)):
            assert isinstance(self.policy, RepairPolicy)
            following, said = self.policy.on_repair(event, self.now)
        else:
            following, said = self.policy.on(event, self.now)
        actions = checked_actions(said)
        self.policy = following
        self.events.append((self.now, event, actions))
        self._settle(event, actions)

    def _settle(self, event: Event | RepairEvent, actions: tuple[Action, ...]) -> None:
        concerned = self._concerned(event)
        escalate = next((each for each in actions if isinstance(each, Escalate)), None)
        repairs = tuple(each for each in actions if isinstance(each, (Restart, Respawn)))
        stop = any(isinstance(each, Stop) for each in actions)
        timers = [each for each in actions if isinstance(each, Later)]
        if escalate is not None:
            self._pass_on(concerned, escalate.reason)
        elif repairs:
            self.under_repair += concerned
        elif stop or any(isinstance(each, Ignore) for each in actions):
            self.handled += concerned
        elif isinstance(event, (Failed, RepairFailed)) and not timers:
            self._pass_on(concerned, "")
        else:
            self.put_off += concerned
        if stop:
            self.stopped = True
            self.handled += [*self.put_off, *self.under_repair]
            self.put_off, self.under_repair = [], []
            return
        for each in timers:
            self.at(each.seconds, functools.partial(self._due, each.event))
        if repairs:
            self._repairs.append((repairs, tuple(concerned)))
            if len(self._repairs) == 1:
                self._repair()

    def _concerned(self, event: Event | RepairEvent) -> list[MeshFailure]:
        if isinstance(event, Failed):
            self.put_off = [each for each in self.put_off if each is not event.failure]
            return [event.failure]
        if isinstance(event, RepairFailed):
            return list(event.failures)
        concerned, self.put_off = self.put_off, []
        return concerned

    def _pass_on(self, failures: list[MeshFailure], reason: str) -> None:
        self.passed_on += [PassedOn(self.now, each, reason) for each in failures]

    def _repair(self) -> None:
        """Begin the next repair: its living ranks are stopped, and all are restarted after a while."""
        actions, _ = self._repairs[0]
        ranks = {
            rank for each in actions for rank in (sorted(self.dead) if each.ranks is None else each.ranks)
        }
        began = Began(self.now, tuple(sorted(ranks)))
        self.restarts.append(began)
        self.dead |= ranks
        self.at(self.repair_seconds, lambda: self._finish(began))

    def _finish(self, began: Began) -> None:
        if self.stopped:
            return
        actions, failures = self._repairs.pop(0)
        self.under_repair = [each for each in self.under_repair if all(each is not f for f in failures)]
        lost = next((rank for rank in began.ranks if not self.starts(rank)), None)
        self.dead -= {rank for rank in began.ranks if lost is None or rank < lost}
        event: RepairEvent
        if lost is None:
            event = Repaired(self.name, actions, failures)
        else:
            reason = f"rank {lost} does not start"
            told = tuple(replace(each, chain=(*each.chain, reason)) for each in failures)
            event = RepairFailed(self.name, actions[0], reason, told)
        if self._repairs:
            self._repair()
        if callable(getattr(self.policy, "on_repair", None)):
            self._told(event, failures)
        elif isinstance(event, RepairFailed):
            self._pass_on(list(event.failures), event.reason)
        else:
            self.handled += failures

    def _told(self, event: RepairEvent, failures: tuple[MeshFailure, ...]) -> None:
        if isinstance(event, Repaired):
            self.handled += failures
        self._ask(event)
