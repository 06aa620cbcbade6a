"""Several policies that share one mesh: what comes back is given to the one that has asked for it.

MEM-1: a timer, a failure that was put off, and the news of a repair go to the policy that has caused them.
MEM-2: what was caused before a policy was reset is nobody's any more.
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
    """A timer that runs for a policy."""

    comes: Due | Failed
    """What will come; told apart by identity."""
    meant: Due | Failed
    """What the policy waits for."""
    member: int
    life: int


class Flight(NamedTuple):
    """Repairs that a policy has asked for."""

    actions: tuple[Restart | Respawn, ...]
    member: int
    life: int


class Found(NamedTuple):
    """Whose an event is."""

    members: Members
    event: Event | RepairEvent
    member: int
    stale: bool
    """Whether that policy was reset since."""


class Members(NamedTuple):
    """The policies, and what is under way for each. It never changes."""

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
        """Policies that nothing has happened to."""
        return cls(tuple(policies), tuple(policies), (0,) * len(policies))

    def find(self, event: Event | RepairEvent) -> Found | None:
        """Whose an event is that comes back; ``None`` for what is new (MEM-1)."""
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
        """Whether something is under way for a policy."""
        mine = (index, self.lives[index])
        return any((each.member, each.life) == mine for each in self.owed) or any(
            (each.member, each.life) == mine for each in self.flights
        )

    def reset(self, index: int) -> Members:
        """Have a policy begin anew (MEM-2)."""
        current = list(self.current)
        lives = list(self.lives)
        current[index] = self.first[index]
        lives[index] += 1
        return self._replace(current=tuple(current), lives=tuple(lives))

    def ask(self, index: int, event: Event | RepairEvent, now: float) -> tuple[Members, tuple[Action, ...]]:
        """Ask one of them, and note what it has begun."""
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
