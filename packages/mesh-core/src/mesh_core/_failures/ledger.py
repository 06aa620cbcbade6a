"""The ledger of one process's failures: who has to be notified of each of them next, and who has been.

A state machine without threads, locks, clocks or I/O: an event goes in, actions come out. :mod:`mesh_core._failures.supervision`
brings the events, one at a time, and carries the actions out.

These are asked in turn, and the first to say yes has handled the failure:

1. the policy that the mesh was spawned with (``supervise=``);
2. ``__supervise__`` of the actor that owns the mesh;
3. the owner of that actor, and so on up to the script;
4. the script's fault handler. Without one the next call of the script that waits raises the failure.

SUP-1: a failure that has been raised to the script by a call of its own needs no other answer.
SUP-2: no failure is lost: what nobody was told of when the script ends is reported there, and its exit status is 1.
SUP-3: an owner is asked about a death once for each mesh, however many notices of it come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from mesh_core._failures.failure import MeshFailure
    from mesh_core._failures.owned_meshes import Holding
    from mesh_core._failures.policies import Event as PolicyEvent
    from mesh_core._failures.policies import RepairEvent
    from mesh_core._failures.policy_run import Decision, PolicyRun

Key = tuple[int, int, int]
"""What has failed: the address of its process (mesh and rank), and an actor there; 0 for the whole process."""
Owner = tuple[tuple[int, int, int], int]
"""An owner in any process: the address of the process, and the owner's id there."""
SCRIPT: Owner = ((0, 0, 0), 0)
_UNKNOWN: Key = (0, 0, 0)
"""The key of failures that were made by hand."""


# Actions. An owner is the id of an actor in this process; 0 stands for all code that no actor runs.


class Consult(NamedTuple):
    """Ask the policy of a mesh; the answer is :class:`Decided`."""

    owner: int
    holding: Holding
    run: PolicyRun
    event: PolicyEvent | RepairEvent
    awaited: bool = False


class Ask(NamedTuple):
    """Ask an owner, or for the script its fault handler; the answer is :class:`Answered`."""

    owner: int
    failure: MeshFailure
    awaited: bool = False


class PassOn(NamedTuple):
    """Send a failure to an owner in another process."""

    to: Owner
    failure: MeshFailure


class Note(NamedTuple):
    """Tell those who keep a journal what became of a failure."""

    failure: MeshFailure
    handled: bool
    by: str


class CarryOut(NamedTuple):
    """Stop, repair or start timers, as a policy has decided."""

    asked: Consult
    decision: Decision


class Interrupt(NamedTuple):
    """Wake all calls of the script that wait: one of them is to raise the failure that is due."""


class Tell(NamedTuple):
    """Raise the failure in the thread that waits, or report it as the script ends."""

    failure: MeshFailure


Action: TypeAlias = "Consult | Ask | PassOn | Note | CarryOut | Interrupt | Tell"


# Events.


class Died(NamedTuple):
    """A process has ended."""

    process: tuple[int, int]
    places: Iterable[tuple[int, Holding, int]]
    """The meshes that it was part of: the owner, the mesh and the rank in it."""
    failure: Callable[[Holding, int], MeshFailure] | None
    """Makes the failure for one of these; ``None`` if the process ended in order."""
    replaced: bool = False
    """Whether another process has its rank by now."""
    awaited: bool = False
    """Whether calls of this process waited for it, which raise the failure themselves."""


class ActorFailed(NamedTuple):
    """An actor has failed while its process lives, or an owner elsewhere has passed a failure on."""

    owner: int
    failure: MeshFailure
    holding: Holding | None = None
    """The mesh of the actor, if the owner still has it."""
    rank: int | None = None


class Decided(NamedTuple):
    """A policy has decided, or its repair has ended."""

    asked: Consult
    decision: Decision


class Answered(NamedTuple):
    """An owner or the fault handler has answered; ``above`` is the owner of that owner."""

    asked: Ask
    handled: bool
    by: str
    above: Owner | None = None


class Raised(NamedTuple):
    """A call has raised the failure in a thread of the script."""

    key: Key
    thread: int


class TakenBack(NamedTuple):
    """It was raised where nobody could catch it."""

    failure: MeshFailure


class Waits(NamedTuple):
    """A call waits in a thread of the script, and could raise something."""

    thread: int


class ScriptEnds(NamedTuple):
    """Nobody can be told any more."""


Event: TypeAlias = "Died | ActorFailed | Decided | Answered | Raised | TakenBack | Waits | ScriptEnds"


class FailureLedger:
    """The failures of one process. The script's process also keeps those that nobody has handled."""

    def __init__(self, *, at_script: bool) -> None:
        self._at_script = at_script
        self._open: dict[Key, tuple[MeshFailure, bool]] = {}
        """What the script has to be told, and whether its next call that waits is to do that."""
        self._told: set[Key] = set()
        self._last: MeshFailure | None = None
        """What was due last. All calls that wait at that moment raise it, each in its own thread."""
        self._raised_in: set[int] = set()
        """The threads that have raised it."""
        self._waiting: dict[PolicyRun, None] = {}
        """The script's policies that have put failures off."""

    @property
    def due(self) -> bool:
        """Whether the script's next call that waits raises a failure."""
        return any(due and key not in self._told for key, (_, due) in self._open.items())

    def on(self, event: Event) -> list[Action]:
        """Take an event; what is returned is to be done in this order."""
        match event:
            case Died():
                return self._died(event)
            case ActorFailed():
                return self._actor_failed(event)
            case Decided(asked, decision):
                return self._decided(asked, decision)
            case Answered():
                return self._answered(event)
            case Raised(key, thread):
                if key != _UNKNOWN:
                    self._raised(key, thread)
            case TakenBack(failure):
                self._open[failure._key] = (failure, False)
                self._told.discard(failure._key)
            case Waits(thread):
                return self._waits(thread)
            case ScriptEnds():
                return self._script_ends()
        return []

    # On the way to the script.

    def _died(self, event: Died) -> list[Action]:
        struck = [place for place in event.places if place[1].loses(event.process, place[2], event.replaced)]
        if event.failure is None:
            return [
                Consult(owner, holding, run, _ended(holding, rank))
                for owner, holding, rank in struck
                if (run := holding.policy) is not None
            ]
        actions: list[Action] = []
        # To an owner of actors there one death is one failure: the processes' own mesh is named only where there are none. A
        # policy is asked about the mesh that it was given for in any case.
        with_actors = {owner for owner, holding, _ in struck if holding.actor_id}
        for owner, holding, rank in struck:
            if holding.actor_id or holding.policy or owner not in with_actors:
                failure = event.failure(holding, rank)
                actions += self._reach(owner, holding, failure, awaited=event.awaited)
        return actions

    def _actor_failed(self, event: ActorFailed) -> list[Action]:
        owner, failure, holding, rank = event
        if holding is not None:
            if rank is not None:
                holding.fails(rank)
            if failure.mesh is None:
                # As its owner knows it.
                failure = dataclasses.replace(failure, mesh=holding.mesh)
        return self._reach(owner, holding, failure)

    def _reach(
        self, owner: int, holding: Holding | None, failure: MeshFailure, *, awaited: bool = False
    ) -> list[Action]:
        if holding is not None and (run := holding.policy) is not None:
            from mesh_core._failures.policy_run import failed

            return [Consult(owner, holding, run, failed(failure, holding.mesh.name), awaited)]
        if owner == 0 and not self._at_script:
            return [PassOn(SCRIPT, failure)]
        return [Ask(owner, failure, awaited)]

    def _decided(self, asked: Consult, decision: Decision) -> list[Action]:
        if asked.owner == 0 and self._at_script:
            self._waiting.pop(asked.run, None)
            if asked.run.put_off:
                self._waiting[asked.run] = None
        by = f"the policy of {asked.holding.mesh.name!r}"
        actions: list[Action] = [Note(failure, True, by) for failure in decision.handled]
        if decision.stop or decision.repairs or decision.timers:
            # No call waits for what comes of it.
            actions.append(CarryOut(asked._replace(awaited=False), decision))
        for failure in decision.passed_on:
            actions += self._reach(asked.owner, None, failure, awaited=asked.awaited)
        return actions

    def _answered(self, event: Answered) -> list[Action]:
        (_, failure, awaited), handled, by, above = event
        if handled:
            return [Note(failure, True, by)]
        if above is not None:
            return [PassOn(above, dataclasses.replace(failure, chain=(*failure.chain, by)))]
        actions: list[Action] = [Note(failure, False, "the script")]
        if failure._key not in self._told:
            self._open[failure._key] = (failure, not awaited)
            if not awaited:
                self._last, self._raised_in = failure, set()
                actions.append(Interrupt())
        return actions

    # At the script.

    def _raised(self, key: Key, thread: int) -> None:
        self._told.add(key)
        self._open.pop(key, None)
        if self._last is not None and self._last._key == key:
            # This thread may still be woken for it, and has been told now.
            self._raised_in.add(thread)

    def _waits(self, thread: int) -> list[Action]:
        failure = next((failure for failure, due in self._open.values() if due), None)
        if failure is not None:
            self._last, self._raised_in = failure, set()
        elif self._last is None or thread in self._raised_in:
            return []
        else:
            failure = self._last
        self._raised(failure._key, thread)
        return [Tell(failure)]

    def _script_ends(self) -> list[Action]:
        left = {key: failure for key, (failure, _) in self._open.items()}
        # Nobody will decide about these any more.
        for run in self._waiting:
            for failure in run.put_off:
                left.setdefault(failure._key, failure)
        self._open, self._waiting, self._last = {}, {}, None
        return [Tell(failure) for key, failure in left.items() if key not in self._told]


def _ended(holding: Holding, rank: int) -> PolicyEvent:
    # Only policies are asked about it, and where there are none the module is not needed.
    from mesh_core._failures.policies import Ended

    return Ended(holding.mesh.name, holding.mesh._root.point_of(rank).rank)
