"""Policies for tests: pure ones, and one that does what it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mesh_core.policies import Action, Due, Escalate, Event, Failed, Ignore, Later, Policy, Stop


@dataclass(frozen=True)
class Tolerate:
    """Ignores so many failures within a period; one more stops the mesh and is passed on."""

    most: int
    period: float
    failures: tuple[float, ...] = ()

    def on(self, event: Event, now: float) -> tuple[Tolerate, Sequence[Action]]:
        if not isinstance(event, Failed):
            return self, []
        recent = (*(each for each in self.failures if now - each < self.period), now)
        if len(recent) <= self.most:
            return Tolerate(self.most, self.period, recent), [Ignore()]
        return self, [Stop(), Escalate(f"{len(recent)} failures within {self.period} s")]


@dataclass(frozen=True)
class Grace:
    """Puts failures off, and passes them on together when the time is up."""

    seconds: float
    waiting: bool = False

    def on(self, event: Event, now: float) -> tuple[Grace, Sequence[Action]]:
        if isinstance(event, Failed):
            timers = [] if self.waiting else [Later(self.seconds, Due("grace"))]
            # A timer of its own for each would pass the first on too early for the second.
            return Grace(self.seconds, True), timers or [Later(self.seconds, Due("again"))]
        if event == Due("grace"):
            return Grace(self.seconds), [Escalate(f"{self.seconds} s are over")]
        return self, []


class Told:
    """Does what a function says, which may look at the outside world, and keeps what it was asked."""

    def __init__(self, answer: Callable[[Event], Sequence[Action]]) -> None:
        self.answer = answer
        self.events: list[Event] = []

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        self.events.append(event)
        return self, self.answer(event)
