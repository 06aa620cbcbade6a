"""A supervision policy: failures at night are left to another policy, which may restart; by day somebody is paged.

A policy touches nothing but its arguments, so that it cannot page anybody itself. It passes the failure on, and marks it;
:class:`Pager`, a fault handler, sends what is marked.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, time, tzinfo

from mesh_core import MeshFailure
from mesh_core.plugins import PolicyPlugin, hookimpl
from mesh_core.policies import Action, Escalate, Event, Failed, Policy, RepairEvent
from mesh_supervision import Backoff, OneForOne

__all__ = ["NIGHTWATCH", "NightWatch", "Pager"]

PAGE = "somebody has to look at it"


@dataclass(frozen=True, kw_only=True)
class NightWatch:
    """Has ``policy`` decide about failures between ``begin`` and ``end``, by the clock of ``zone``; has all others paged.

    By day the mesh is not stopped: it goes on without the rank until somebody has decided.

    >>> from mesh_core import FailureKind, MeshFailure
    >>> policy = NightWatch(policy=OneForOne(intensity=3, period=3600.0))
    >>> def failure(hour):
    ...     since = datetime(2026, 6, 1, hour, tzinfo=UTC).timestamp()
    ...     return Failed("workers", 2, FailureKind.KILLED, MeshFailure(rank=2, signal=9, since=since))
    >>> policy.on(failure(hour=3), now=0.0)[1]
    (Restart(ranks=(2,)),)
    >>> policy.on(failure(hour=15), now=0.0)[1]
    (Escalate(reason='failed at 15:00 by day: somebody has to look at it'),)
    """

    policy: Policy
    begin: time = time(22)
    end: time = time(6)
    zone: tzinfo = field(default=UTC)

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        """Decide by when it failed, which the failure tells: ``now`` counts from an arbitrary moment."""
        if isinstance(event, Failed):
            since = event.failure.since
            clock = None if since is None else datetime.fromtimestamp(since, self.zone).time()
            if clock is None or not self._is_night(clock):
                when = "" if clock is None else f" at {clock:%H:%M} by day"
                return self, (Escalate(f"failed{when}: {PAGE}"),)
        # What comes back, as after a backoff, has failed at night.
        policy, actions = self.policy.on(event, now)
        return replace(self, policy=policy), actions

    def on_repair(self, event: RepairEvent, now: float) -> tuple[Policy, Sequence[Action]]:
        """Tell the policy of the night, which alone has anything restarted."""
        on_repair = getattr(self.policy, "on_repair", None)
        if on_repair is None:
            return self, ()
        policy, actions = on_repair(event, now)
        return replace(self, policy=policy), actions

    def _is_night(self, clock: time) -> bool:
        if self.begin <= self.end:
            return self.begin <= clock < self.end
        return clock >= self.begin or clock < self.end


class Pager:
    """A fault handler that sends the reports of failures which a :class:`NightWatch` has left to people.

    What it does not know is none of its business: without a night watch in the chain it raises, and the failure counts as
    unhandled.
    """

    def __init__(self, send: Callable[[str], object]) -> None:
        self._send = send

    def __call__(self, failure: MeshFailure) -> None:
        """Page somebody."""
        if not any(PAGE in each for each in failure.chain):
            raise LookupError(f"no night watch was asked about: {failure.headline()}")
        self._send(failure.report())


NIGHTWATCH = PolicyPlugin(
    name="nightwatch",
    api_version=1,
    create=lambda: NightWatch(policy=OneForOne(intensity=3, period=3600.0, backoff=Backoff())),
    summary="restarts between 22:00 and 6:00 UTC, 3 times an hour; by day somebody is paged",
)


@hookimpl
def mesh_register_policies() -> Iterable[PolicyPlugin]:
    """`supervise="nightwatch"`."""
    yield NIGHTWATCH
