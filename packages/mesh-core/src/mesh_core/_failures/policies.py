"""The contract between Mesh and a policy: events, actions and :class:`Policy`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from mesh_core._common.codes import FailureKind
from mesh_core._failures.failure import MeshFailure


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank of the mesh failed: its process died, or its actor failed in a process that is still running.

    >>> from mesh_core import FailureKind
    >>> Failed("workers", 2, FailureKind.KILLED)
    Failed(mesh='workers', rank=2, kind=<FailureKind.KILLED: 'killed'>)
    """

    mesh: str
    """The name of the mesh that the policy was given to."""
    rank: int | None
    kind: FailureKind
    failure: MeshFailure = field(default_factory=MeshFailure, repr=False, compare=False)
    """Everything that is known about the failure."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A process of the mesh ended in order, but not because its owner stopped the mesh. This is no failure.

    >>> Ended("workers", 2).rank
    2
    """

    mesh: str
    rank: int


@dataclass(frozen=True, slots=True)
class Due:
    """A timer that the policy set with :class:`Later` expired.

    >>> Later(5.0, Due("still failing?")).event
    Due(name='still failing?')
    """

    name: str = ""
    """Identifies the timer to the policy."""


Event: TypeAlias = Failed | Ended | Due


@dataclass(frozen=True, slots=True)
class Repaired:
    """The policy's repair succeeded; an event for :meth:`RepairPolicy.on_repair`.

    >>> Repaired("workers", (Restart(),)).actions
    (Restart(ranks=None),)
    """

    mesh: str
    actions: tuple[Restart | Respawn, ...]
    """What was carried out, in order."""
    failures: tuple[MeshFailure, ...] = field(default=(), repr=False, compare=False)
    """The failures that this handled."""


@dataclass(frozen=True, slots=True)
class RepairFailed:
    """The policy's repair failed; an event for :meth:`RepairPolicy.on_repair`.

    >>> RepairFailed("workers", Respawn(), "no memory for a process").reason
    'no memory for a process'
    """

    mesh: str
    action: Restart | Respawn
    """The action that failed; later ones were not begun."""
    reason: str
    """The first line of the error."""
    failures: tuple[MeshFailure, ...] = field(default=(), repr=False, compare=False)
    """The failures that it was meant to handle, with the reason in their ``chain``."""


RepairEvent: TypeAlias = "Repaired | RepairFailed"


@dataclass(frozen=True, slots=True)
class Ignore:
    """The failure is handled: nobody else is notified. The mesh continues without the failed rank.

    >>> Ignore()
    Ignore()
    """


@dataclass(frozen=True, slots=True)
class Escalate:
    """Pass the failure on: to ``__supervise__`` of the owner, then to the owner's owner, and so on up to the script.

    >>> Escalate("3 failures within 60.0 s")
    Escalate(reason='3 failures within 60.0 s')
    """

    reason: str = ""
    """Why; added to the failure's ``chain``."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop the mesh in order. The failure is handled, unless the policy escalates it as well.

    The policy gets no more events, and its timers are cancelled.

    >>> Stop()
    Stop()
    """


@dataclass(frozen=True, slots=True)
class Restart:
    """Respawn actors in place with their original constructor arguments; for a mesh of actors.

    If their processes died, those are respawned first, provided the mesh's owner spawned them too. Running actors
    are stopped first. The failure is handled; if the restart does not succeed, it is passed on.

    >>> Restart(), Restart(ranks=(0, 1, 2))
    (Restart(ranks=None), Restart(ranks=(0, 1, 2)))
    """

    ranks: tuple[int, ...] | None = None
    """Which ranks; ``None`` means all that have failed by then."""


@dataclass(frozen=True, slots=True)
class Respawn:
    """Respawn processes in place, without the actors on them; for a mesh of processes.

    Running processes are stopped first. The failure is handled; if the respawn does not succeed, it is passed on.

    >>> Respawn()
    Respawn(ranks=None)
    """

    ranks: tuple[int, ...] | None = None
    """Which ranks; ``None`` means all that have failed by then."""


@dataclass(frozen=True, slots=True)
class Later:
    """Send ``event`` to the policy ``seconds`` from now; until then the failure is neither handled nor passed on.

    ``event`` is a :class:`Due`, or the :class:`Failed` to decide about later.

    >>> Later(5.0, Due("retry"))
    Later(seconds=5.0, event=Due(name='retry'))
    """

    seconds: float
    event: Due | Failed

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, (int, float)) or not 0 <= self.seconds < math.inf:
            raise ValueError(f"seconds of Later must be a finite number from 0, got {self.seconds!r}")
        if not isinstance(self.event, (Due, Failed)):
            raise TypeError(f"event of Later must be a Due or a Failed, got {self.event!r}")


Action: TypeAlias = Ignore | Escalate | Stop | Restart | Respawn | Later


@runtime_checkable
class Policy(Protocol):
    """Decides what to do about the failures of one mesh.

    A policy is a state. :meth:`on` returns the next state and never changes this one, so one policy object can be
    given to many meshes, and tested without processes.
    """

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        """Return the next state and what to do.

        ``now`` counts seconds from an arbitrary moment and never goes back. For a :class:`Failed`:

        - :class:`Ignore` or :class:`Stop`: the failure is handled;
        - :class:`Restart` or :class:`Respawn`: it is handled once that succeeded;
        - :class:`Escalate`: it is passed on, even together with :class:`Stop`;
        - :class:`Later` alone: it is put off;
        - no actions: it is passed on.

        For a :class:`Due` or an :class:`Ended`, all actions but ``Later`` apply to all failures that are put off.

        An exception is logged and counts as ``Escalate``; the state does not change.
        """
        ...


@runtime_checkable
class RepairPolicy(Policy, Protocol):
    """A policy that is also told what became of its repairs.

    A :class:`Policy` without this method is not asked again: failures that it could not repair are passed on.

    >>> from dataclasses import dataclass, replace
    >>> @dataclass(frozen=True)
    ... class TryTwice:
    ...     tried: int = 0
    ...
    ...     def on(self, event: Event, now: float) -> tuple[Policy, list[Action]]:
    ...         return TryTwice(1), [Restart()] if isinstance(event, Failed) else []
    ...
    ...     def on_repair(self, event: RepairEvent, now: float) -> tuple[Policy, list[Action]]:
    ...         if isinstance(event, Repaired) or self.tried == 2:
    ...             return TryTwice(), []
    ...         return TryTwice(2), [Restart()]
    >>> policy, actions = TryTwice(1).on_repair(RepairFailed("workers", Restart(), "no memory"), now=0.0)
    >>> actions
    [Restart(ranks=None)]
    >>> isinstance(policy, RepairPolicy)
    True
    """

    def on_repair(self, event: RepairEvent, now: float) -> tuple[Policy, Sequence[Action]]:
        """Return the next state and what to do, as :meth:`Policy.on` does.

        Actions for a :class:`RepairFailed` apply to its ``failures``, and mean the same as for a :class:`Failed`: no
        actions pass them on, ``Restart`` and ``Respawn`` try again at once, and :class:`Later` waits first. For a
        :class:`Repaired` they apply to all failures that are put off, as for a :class:`Due`.

        An exception is logged, and what could not be repaired is passed on.
        """
        ...


def checked_actions(actions: object) -> tuple[Action, ...]:
    """Return a policy's actions as a tuple; raise if :meth:`Policy.on` may not return them.

    >>> checked_actions([Later(1.0, Due()), Stop()])
    (Later(seconds=1.0, event=Due(name='')), Stop())
    """
    if not isinstance(actions, Sequence) or isinstance(actions, str):
        raise TypeError(f"a policy must return a sequence of actions, got {actions!r}")
    for each in actions:
        if not isinstance(each, (Ignore, Escalate, Stop, Restart, Respawn, Later)):
            raise TypeError(
                f"an action must be Ignore, Escalate, Stop, Restart, Respawn or Later, got {each!r}"
            )
    kinds = {type(each) for each in actions}
    if Escalate in kinds and Ignore in kinds:
        raise ValueError(f"a policy must return Ignore or Escalate, got both: {list(actions)!r}")
    if kinds & {Restart, Respawn} and kinds & {Escalate, Stop}:
        raise ValueError(
            f"a policy must return Restart and Respawn without Escalate and Stop, got both: {list(actions)!r}"
        )
    return tuple(actions)
