"""Several policies that share one mesh: an event that comes back is given to the policy that caused it.

MEM-1: a timer, a postponed failure, and the outcome of a repair go to the policy that caused them.
MEM-2: events caused before a policy was reset go to nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mesh_core.policies import (
    Action,
    Due,
    Event,
    Failed,
    Later,
    Policy,
    Repaired,
    RepairEvent,
    RepairFailed,
    Respawn,
    Restart,
    checked_actions,
)


class Owed(NamedTuple):
    """A running timer of a policy."""

    comes: Due | Failed
    """The event that will come; compared by identity."""
    meant: Due | Failed
    """The event that the policy waits for."""
    member: int
    life: int


class Flight(NamedTuple):
    """Repairs that a policy has asked for."""

    actions: tuple[Restart | Respawn, ...]
    member: int
    life: int


class Found(NamedTuple):
    """The policy that an event belongs to."""

    members: Members
    event: Event | RepairEvent
    member: int
    stale: bool
    """Return whether that policy was reset since."""


class Members(NamedTuple):
    """The policies, and what is in progress for each. Immutable."""

    first: tuple[Policy, ...]
    """As they were given."""
    current: tuple[Policy, ...]
    lives: tuple[int, ...]
    """How often each was reset."""
    owed: tuple[Owed, ...] = ()
    flights: tuple[Flight, ...] = ()
    timers: int = 0

    @classmethod
    def of(cls, policies: Sequence[Policy]) -> Members:
        """Policies without any events so far."""
        return cls(tuple(policies), tuple(policies), (0,) * len(policies))

    def find(self, event: Event | RepairEvent) -> Found | None:
        """Return which policy an event that comes back belongs to; ``None`` for a new event (MEM-1)."""
        if isinstance(event, (Repaired, RepairFailed)):
            for at, flight in enumerate(self.flights):
                wanted = flight.actions
                if event.actions == wanted if isinstance(event, Repaired) else event.action in wanted:
                    left = self._replace(flights=self.flights[:at] + self.flights[at + 1 :])
                    return Found(left, event, flight.member, self.lives[flight.member] != flight.life)
            return None
        for at, owed in enumerate(self.owed):
            if owed.comes is event:
                left = self._replace(owed=self.owed[:at] + self.owed[at + 1 :])
                return Found(left, owed.meant, owed.member, self.lives[owed.member] != owed.life)
        return None

    def busy(self, index: int) -> bool:
        """Return whether something is in progress for a policy."""
        mine = (index, self.lives[index])
        return any((each.member, each.life) == mine for each in self.owed) or any(
            (each.member, each.life) == mine for each in self.flights
        )

    def reset(self, index: int) -> Members:
        """Reset a policy (MEM-2)."""
        current = list(self.current)
        lives = list(self.lives)
        current[index] = self.first[index]
        lives[index] += 1
        return self._replace(current=tuple(current), lives=tuple(lives))

    def ask(self, index: int, event: Event | RepairEvent, now: float) -> tuple[Members, tuple[Action, ...]]:
        """Pass an event to one of them, and note what it has begun."""
        policy = self.current[index]
        if isinstance(event, (Repaired, RepairFailed)):
            on_repair = getattr(policy, "on_repair", None)
            if on_repair is None:
                return self, ()
            following, said = on_repair(event, now)
        else:
            following, said = policy.on(event, now)
        life, owed, timers = self.lives[index], list(self.owed), self.timers
        actions: list[Action] = []
        for each in checked_actions(said):
            action = each
            if isinstance(each, Later):
                comes = each.event
                if isinstance(comes, Due):
                    timers += 1
                    comes = Due(f"{index}.{timers} {comes.name}")
                    action = Later(each.seconds, comes)
                owed.append(Owed(comes, each.event, index, life))
            actions.append(action)
        repairs = tuple(each for each in actions if isinstance(each, (Restart, Respawn)))
        flights = (*self.flights, Flight(repairs, index, life)) if repairs else self.flights
        current = (*self.current[:index], following, *self.current[index + 1 :])
        return Members(self.first, current, self.lives, tuple(owed), flights, timers), tuple(actions)
