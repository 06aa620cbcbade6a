"""Policies that make what has failed again, unless it fails too often."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mesh_core.plugins import PolicyPlugin, hookimpl
from mesh_core.policies import Action, Escalate, Event, Failed, Respawn, Restart


@dataclass(frozen=True, kw_only=True)
class Revive:
    """Makes failed ranks again in their places, up to ``most`` times within ``period`` seconds; then it passes failures on.

    >>> from mesh_core import FailureKind
    >>> policy = Revive(most=1, period=60.0)
    >>> policy, actions = policy.on(Failed("counters", 0, FailureKind.KILLED), now=0.0)
    >>> actions
    [Restart(ranks=None)]
    >>> policy, actions = policy.on(Failed("counters", 0, FailureKind.KILLED), now=1.0)
    >>> actions
    [Escalate(reason='2 failures within 60 s, 1 is revived')]
    """

    most: int
    period: float
    action: Restart | Respawn = field(default_factory=Restart)
    """``Restart()`` for a mesh of actors, ``Respawn()`` for one of processes."""
    failures: tuple[float, ...] = ()
    """When the failures of the last period came."""

    def on(self, event: Event, now: float) -> tuple["Revive", Sequence[Action]]:
        """Count failures."""
        if not isinstance(event, Failed):
            return self, []
        recent = (*(each for each in self.failures if now - each < self.period), now)
        state = replace(self, failures=recent)
        if len(recent) <= self.most:
            return state, [self.action]
        return state, [Escalate(f"{len(recent)} failures within {self.period:g} s, {self.most} is revived")]


REVIVE = PolicyPlugin(
    name="revive",
    api_version=1,
    create=lambda: Revive(most=3, period=60.0),
    summary="makes failed actors again, 3 times a minute",
)
REVIVE_PROCS = PolicyPlugin(
    name="revive-procs",
    api_version=1,
    create=lambda: Revive(most=3, period=60.0, action=Respawn()),
    summary="makes processes that died again, 3 times a minute",
)


@hookimpl
def mesh_register_policies() -> Iterable[PolicyPlugin]:
    """`supervise="revive"` for actors, `supervise="revive-procs"` for processes."""
    yield REVIVE
    yield REVIVE_PROCS
