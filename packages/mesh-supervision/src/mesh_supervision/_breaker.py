"""A circuit breaker: where a policy gives up, the mesh is left alone for a while and tried again, instead of being stopped.

BRK-1: nothing is restarted while the circuit is open.
BRK-2: after ``trips`` openings without a quiet time between them, the failure is passed on.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from mesh_core import ProcMesh
from mesh_core.policies import (
    Action,
    Escalate,
    Event,
    Failed,
    Ignore,
    Later,
    Policy,
    RepairEvent,
    RepairFailed,
    Respawn,
    Restart,
)
from mesh_supervision._members import Members


class Circuit(enum.Enum):
    """The state of a circuit."""

    CLOSED = "closed"
    """The policy decides."""
    OPEN = "open"
    """Dead ranks stay dead."""
    TRIAL = "trial"
    """Everything was restarted, and is on trial."""


@dataclass(frozen=True)
class CircuitBreaker:
    """When ``policy`` would give up, leave the dead ranks alone for ``cooldown`` seconds, then restart all that have failed.

    If anything fails within ``cooldown`` seconds after that, the circuit opens again. When it has opened more than ``trips`` times in a
    row, the failure is passed on as ``policy`` decided. Meanwhile calls to dead ranks fail at once, and the surviving ranks
    continue.

    >>> from mesh_core import FailureKind
    >>> from mesh_supervision import OneForOne
    >>> policy = CircuitBreaker(OneForOne(intensity=0, period=60.0), cooldown=30.0, trips=2)
    >>> policy, actions = policy.on(Failed("workers", 1, FailureKind.KILLED), now=0.0)
    >>> actions[0].seconds, policy.circuit.value
    (30.0, 'open')
    >>> policy, actions = policy.on(actions[0].event, now=30.0)
    >>> actions, policy.circuit.value
    ((Restart(ranks=None),), 'trial')
    """

    policy: Policy
    cooldown: float = field(kw_only=True)
    trips: int = field(kw_only=True)
    circuit: Circuit = field(default=Circuit.CLOSED, init=False)
    """The state it is in."""
    _members: Members = field(init=False, repr=False, compare=False)
    _primary: Failed | None = field(default=None, init=False, repr=False, compare=False)
    """The failure that opened it, which comes back when the time is over."""
    _opened: int = field(default=0, init=False, repr=False)
    _quiet_from: float = field(default=0.0, init=False, repr=False)
    """If nothing fails until then, the circuit is closed again."""
    _reason: str = field(default="", init=False, repr=False)

    def __post_init__(self) -> None:
        if isinstance(self.policy, type) or not callable(getattr(self.policy, "on", None)):
            raise TypeError(f"a policy must have on(event, now), got {self.policy!r}")
        if not 0 < self.cooldown < math.inf:
            raise ValueError(f"cooldown must be a finite number of seconds above 0, got {self.cooldown!r}")
        if isinstance(self.trips, bool) or not isinstance(self.trips, int) or self.trips < 1:
            raise ValueError(f"trips must be a whole number from 1, got {self.trips!r}")
        object.__setattr__(self, "_members", Members.of([self.policy]))

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        """Decide by the state of the circuit."""
        if self.circuit is Circuit.OPEN:
            if event is not self._primary:
                return self, (Ignore(),) if isinstance(event, Failed) else ()
            return self._try(event, now)
        if self.circuit is Circuit.TRIAL:
            if now < self._quiet_from:
                if not isinstance(event, Failed):
                    return self, ()
                return self.open(event, (Escalate(self._reason),), now)
            return self._next(circuit=Circuit.CLOSED, _opened=0).on(event, now)
        found = self._members.find(event)
        if found is not None and found.stale:
            return self._next(_members=found.members), (Ignore(),) if isinstance(event, Failed) else ()
        members, said = self._members, event
        if found is not None:
            members, said = found.members, found.event  # type: ignore[assignment]  # no repair, as `event` is none
        members, actions = members.ask(0, said, now)
        following = self._next(_members=members)
        if isinstance(event, Failed) and any(isinstance(each, Escalate) for each in actions):
            return following.open(event, actions, now)
        return following, actions

    def on_repair(self, event: RepairEvent, now: float) -> tuple[Policy, Sequence[Action]]:
        """Open the circuit if its trial has failed; otherwise notify the policy."""
        found = self._members.find(event)
        if found is not None:
            if found.stale:
                return self._next(_members=found.members), (Ignore(),) if isinstance(
                    event, RepairFailed
                ) else ()
            members, actions = found.members.ask(0, found.event, now)
            following = self._next(_members=members)
            gives_up = any(isinstance(each, Escalate) for each in actions) or not actions
            if isinstance(event, RepairFailed) and gives_up and event.failures:
                actions = actions or (Escalate(event.reason),)
                return following.open(_failed(event), actions, now)
            return following, actions
        if not isinstance(event, RepairFailed):
            return self, ()
        if self.circuit is Circuit.TRIAL and event.failures:
            reason = f"{self._reason}\n    the trial did not succeed: {event.reason}"
            return self.open(_failed(event), (Escalate(reason),), now)
        return self, (Ignore(),)

    def open(self, failure: Failed, actions: Sequence[Action], now: float) -> tuple[Policy, Sequence[Action]]:
        """Leave the dead ranks alone, or pass the failure on if that has been tried often enough."""
        reason = next((each.reason for each in actions if isinstance(each, Escalate)), "")
        if self._opened >= self.trips:
            told = f"the circuit was opened {self._opened} times in a row\n    {reason}" if reason else reason
            said = [each for each in actions if not isinstance(each, Escalate)]
            return self, (*said, Escalate(told))
        following = self._next(
            circuit=Circuit.OPEN,
            _members=self._members.reset(0),
            _primary=failure,
            _opened=self._opened + 1,
            _reason=reason,
        )
        return following, (Later(self.cooldown, failure),)

    def _try(self, failure: Failed, now: float) -> tuple[Policy, Sequence[Action]]:
        following = self._next(circuit=Circuit.TRIAL, _primary=None, _quiet_from=now + self.cooldown)
        procs = isinstance(failure.failure.mesh, ProcMesh)
        return following, (Respawn() if procs else Restart(),)

    def _next(self, **changes: object) -> CircuitBreaker:
        following = object.__new__(CircuitBreaker)
        for each in dataclasses.fields(self):
            object.__setattr__(following, each.name, changes.get(each.name, getattr(self, each.name)))
        return following


def _failed(event: RepairFailed) -> Failed:
    failure = event.failures[0]
    return Failed(event.mesh, failure.rank, failure.kind, failure)
