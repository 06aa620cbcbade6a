"""A supervision policy: a few failures are ignored; too many within a period stop the mesh and are passed on."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from mesh_core import FailureKind
from mesh_core.plugins import PolicyPlugin, hookimpl
from mesh_core.policies import Action, Escalate, Event, Failed, Ignore, Stop

__all__ = ["TOLERATE", "Tolerate"]


@dataclass(frozen=True, kw_only=True)
class Tolerate:
    """Ignores ``most`` failures within ``period`` seconds. A process lost for want of memory, or with its host, counts double.

    >>> from mesh_core import FailureKind
    >>> policy = Tolerate(most=1, period=60.0)
    >>> policy, actions = policy.on(Failed("workers", 0, FailureKind.ACTOR_FAILED), now=0.0)
    >>> actions
    [Ignore()]
    >>> policy, actions = policy.on(Failed("workers", 1, FailureKind.ACTOR_FAILED), now=1.0)
    >>> actions
    [Stop(), Escalate(reason='2 failures within 60 s, 1 is tolerated')]
    """

    most: int
    period: float
    failures: tuple[float, ...] = ()
    """When the failures of the last period came."""

    def on(self, event: Event, now: float) -> tuple["Tolerate", Sequence[Action]]:
        """Count failures."""
        if not isinstance(event, Failed):
            return self, []
        weight = 2 if event.kind in (FailureKind.OUT_OF_MEMORY, FailureKind.HOST_DEAD) else 1
        recent = (*(each for each in self.failures if now - each < self.period), *[now] * weight)
        state = replace(self, failures=recent)
        if len(recent) <= self.most:
            return state, [Ignore()]
        many = f"{len(recent)} failures within {self.period:g} s, {self.most} is tolerated"
        return state, [Stop(), Escalate(many)]


TOLERATE = PolicyPlugin(
    name="tolerate",
    api_version=1,
    create=lambda: Tolerate(most=3, period=60.0),
    summary="ignores 3 failures a minute, stops the mesh with the 4th",
)


@hookimpl
def mesh_register_policies() -> Iterable[PolicyPlugin]:
    """`supervise="tolerate"`."""
    yield TOLERATE
