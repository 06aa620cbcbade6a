"""Policies that restart nothing: one handles all failures, the other passes all of them on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh_core import policies as core
from mesh_core.policies import Action, Event, Failed, Policy


@dataclass(frozen=True)
class Ignore:
    """Handles every failure without restarting anything. The mesh continues without its dead ranks.

    >>> from mesh_core import FailureKind
    >>> Ignore().on(core.Failed("workers", 2, FailureKind.KILLED), now=0.0)[1]
    (Ignore(),)
    """

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        """Ignore it."""
        return self, (core.Ignore(),) if isinstance(event, Failed) else ()


@dataclass(frozen=True)
class Escalate:
    """Passes every failure on, and stops the mesh unless ``stop`` is false.

    >>> from mesh_core import FailureKind
    >>> Escalate("no rank may be lost").on(core.Failed("workers", 2, FailureKind.KILLED), now=0.0)[1]
    (Stop(), Escalate(reason='no rank may be lost'))
    """

    reason: str = "escalates every failure"
    stop: bool = True

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        """Pass it on."""
        if not isinstance(event, Failed):
            return self, ()
        escalate = core.Escalate(self.reason)
        return self, (core.Stop(), escalate) if self.stop else (escalate,)
