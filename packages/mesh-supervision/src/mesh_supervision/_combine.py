"""Policies made of policies: levels that take over from each other, and one for each kind of failure or rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mesh_core import FailureKind
from mesh_core.policies import (
    Action,
    Ended,
    Escalate,
    Event,
    Failed,
    Ignore,
    Policy,
    RepairEvent,
    RepairFailed,
)
from mesh_supervision._members import Members


class Levels:
    """A stack of policies: when one gives up, the next one decides, and those below start afresh.

    As in a tree of supervisors, the first may restart single ranks and the next one all of them. When the last one gives up,
    the failure is passed on. While a restart of one level is in progress, all failures go to that level.

    >>> from mesh_core.policies import Failed
    >>> from mesh_supervision import OneForAll, OneForOne
    >>> policy = Levels(
    ...     OneForOne(intensity=1, period=60.0), OneForAll(intensity=1, period=600.0, size=2, settle=0.0)
    ... )
    >>> policy, actions = policy.on(Failed("workers", 0, FailureKind.KILLED), now=0.0)
    >>> actions
    (Restart(ranks=(0,)),)
    >>> policy, actions = policy.on(Failed("workers", 0, FailureKind.KILLED), now=1.0)
    >>> actions
    (Restart(ranks=(0, 1)),)
    """

    def __init__(self, *levels: Policy) -> None:
        _check_policies(levels)
        self._members = Members.of(levels)

    def __repr__(self) -> str:
        return f"Levels({', '.join(map(repr, self._members.current))})"

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        """Let the current level decide."""
        found = self._members.find(event)
        if found is not None:
            if found.stale:
                # The level above restarts everything.
                actions = (Ignore(),) if isinstance(event, Failed) else ()
                return _next(self, found.members), actions
            return self._climb(found.members, found.member, found.event, now)
        members = self._members
        busy = [index for index in range(len(members.first)) if members.busy(index)]
        return self._climb(members, max(busy, default=0), event, now)

    def on_repair(self, event: RepairEvent, now: float) -> tuple[Policy, Sequence[Action]]:
        """Notify the level that requested the repair."""
        found = self._members.find(event)
        if found is None:
            return self, ()
        if found.stale:
            return _next(self, found.members), (Ignore(),) if isinstance(event, RepairFailed) else ()
        return self._climb(found.members, found.member, found.event, now)

    def _climb(
        self, members: Members, index: int, event: Event | RepairEvent, now: float
    ) -> tuple[Policy, Sequence[Action]]:
        reasons: list[str] = []
        while True:
            members, actions = members.ask(index, event, now)
            escalate = next((each for each in actions if isinstance(each, Escalate)), None)
            passes = escalate is not None or (not actions and isinstance(event, (Failed, RepairFailed)))
            above = _as_failure(event)
            if not passes or above is None or index + 1 == len(members.first):
                if escalate is not None and reasons:
                    # Read from the top: the earlier reasons stand below.
                    whole = Escalate("\n".join([escalate.reason, *reversed(reasons)]))
                    actions = tuple(whole if each is escalate else each for each in actions)
                return _next(self, members), actions
            if escalate is not None:
                reasons.append(escalate.reason)
            for each in range(index + 1):
                members = members.reset(each)
            index, event = index + 1, above


class _Chosen(ABC):
    """One of several policies for each failure; ``otherwise`` is the last."""

    _members: Members

    @abstractmethod
    def _choose(self, event: Event | RepairEvent) -> int:
        """The index of the policy for an event that no policy has caused."""

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        """Pass an event to its policy."""
        found = self._members.find(event)
        if found is None:
            members, actions = self._members.ask(self._choose(event), event, now)
        else:
            members, actions = found.members.ask(found.member, found.event, now)
        return _next(self, members), actions

    def on_repair(self, event: RepairEvent, now: float) -> tuple[Policy, Sequence[Action]]:
        """Notify the policy that requested the repair."""
        found = self._members.find(event)
        if found is None:
            return self, ()
        members, actions = found.members.ask(found.member, found.event, now)
        return _next(self, members), actions


class ByKind(_Chosen):
    """One policy for failures of some kinds, and ``otherwise`` for all others. Each counts on its own.

    >>> from mesh_core.policies import Failed
    >>> from mesh_supervision import Escalate, OneForOne
    >>> policy = ByKind(
    ...     {FailureKind.OUT_OF_MEMORY: Escalate("needs more memory")},
    ...     otherwise=OneForOne(intensity=3, period=60.0),
    ... )
    >>> policy.on(Failed("workers", 0, FailureKind.OUT_OF_MEMORY), now=0.0)[1]
    (Stop(), Escalate(reason='needs more memory'))
    >>> policy.on(Failed("workers", 0, FailureKind.KILLED), now=0.0)[1]
    (Restart(ranks=(0,)),)
    """

    def __init__(self, kinds: Mapping[FailureKind, Policy], *, otherwise: Policy) -> None:
        for each in kinds:
            if not isinstance(each, FailureKind):
                raise TypeError(f"kinds must be FailureKinds, got {each!r}")
        self._places, self._members = _places(kinds, otherwise)

    def __repr__(self) -> str:
        return _shown("ByKind", {key.name: at for key, at in self._places.items()}, self._members)

    def _choose(self, event: Event | RepairEvent) -> int:
        last = len(self._members.first) - 1
        return self._places.get(event.kind, last) if isinstance(event, Failed) else last


class ByRank(_Chosen):
    """One policy for some ranks, and ``otherwise`` for all others. Each counts on its own.

    >>> from mesh_core.policies import Failed
    >>> from mesh_supervision import Escalate, OneForOne
    >>> policy = ByRank({0: Escalate("rank 0 keeps the state")}, otherwise=OneForOne(intensity=3, period=60.0))
    >>> policy.on(Failed("workers", 0, FailureKind.KILLED), now=0.0)[1]
    (Stop(), Escalate(reason='rank 0 keeps the state'))
    """

    def __init__(self, ranks: Mapping[int, Policy], *, otherwise: Policy) -> None:
        for each in ranks:
            if isinstance(each, bool) or not isinstance(each, int):
                raise TypeError(f"ranks must be numbers, got {each!r}")
        self._places, self._members = _places(ranks, otherwise)

    def __repr__(self) -> str:
        return _shown("ByRank", self._places, self._members)

    def _choose(self, event: Event | RepairEvent) -> int:
        last = len(self._members.first) - 1
        if not isinstance(event, (Failed, Ended)) or event.rank is None:
            return last
        return self._places.get(event.rank, last)


def _next(policy: Any, members: Members) -> Any:
    """The same combination in another state."""
    following = object.__new__(type(policy))
    following.__dict__.update(policy.__dict__, _members=members)
    return following


def _as_failure(event: Event | RepairEvent) -> Failed | None:
    """Return the event for the next level."""
    if isinstance(event, Failed):
        return event
    if isinstance(event, RepairFailed) and event.failures:
        failure = event.failures[0]
        return Failed(event.mesh, failure.rank, failure.kind, failure)
    return None


def _places(policies: Mapping[Any, Policy], otherwise: Policy) -> tuple[Mapping[Any, int], Members]:
    _check_policies([*policies.values(), otherwise])
    places = MappingProxyType({key: at for at, key in enumerate(policies)})
    return places, Members.of([*policies.values(), otherwise])


def _shown(name: str, keys: Mapping[Any, int], members: Members) -> str:
    told = ", ".join(f"{key}: {members.current[at]!r}" for key, at in keys.items())
    return f"{name}({{{told}}}, otherwise={members.current[-1]!r})"


def _check_policies(policies: Iterable[object]) -> None:
    policies = list(policies)
    if not policies:
        raise ValueError("Levels needs at least one policy")
    for each in policies:
        if isinstance(each, type) or not callable(getattr(each, "on", None)):
            raise TypeError(f"a policy must have on(event, now), got {each!r}")
