"""The failure ledger of one process: who must be notified of each failure next, and who has been.

A state machine without threads, locks, clocks or I/O: events go in, actions come out. :mod:`mesh_core._failures.supervision`
feeds it the events, one at a time, and carries out the actions.

These are asked in turn, and the first to return true handles the failure:

1. the policy that the mesh was spawned with (``supervise=``);
2. ``__supervise__`` of the actor that owns the mesh;
3. the owner of that actor, and so on up to the script;
4. the script's fault handler. Without one, the script's next waiting call raises the failure.

SUP-1: a failure that one of the script's own calls raised needs no other handling.
SUP-2: no failure is lost: those that nobody was notified of are reported when the script ends, with exit status 1.
SUP-3: an owner is asked about a death once for each mesh, however many notices of it arrive.
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
"""What failed: the address of its process (mesh and rank), and the actor there; 0 for the whole process."""
Owner = tuple[tuple[int, int, int], int]
"""An owner in any process: the address of the process, and the owner's id there."""
SCRIPT: Owner = ((0, 0, 0), 0)
_UNKNOWN: Key = (0, 0, 0)
"""The key of failures that were created by hand."""


# Actions. An owner is the id of an actor in this process; 0 stands for all code outside of actors.


class Consult(NamedTuple):
    """Ask a mesh's policy; its answer arrives as :class:`Decided`."""

    owner: int
    holding: Holding
    run: PolicyRun
    event: PolicyEvent | RepairEvent
    awaited: bool = False


class Ask(NamedTuple):
    """Ask an owner, or for the script its fault handler; the answer arrives as :class:`Answered`."""

    owner: int
    failure: MeshFailure
    awaited: bool = False


class PassOn(NamedTuple):
    """Send a failure to an owner in another process."""

    to: Owner
    failure: MeshFailure


class Note(NamedTuple):
    """Tell the journal what became of a failure."""

    failure: MeshFailure
    handled: bool
    by: str


class CarryOut(NamedTuple):
    """Stop, repair or start timers, as a policy decided."""

    asked: Consult
    decision: Decision


class Interrupt(NamedTuple):
    """Wake all waiting calls of the script: one of them is to raise the failure that is due."""


class Tell(NamedTuple):
    """Raise the failure in the waiting thread, or report it at the end of the script."""

    failure: MeshFailure


Action: TypeAlias = "Consult | Ask | PassOn | Note | CarryOut | Interrupt | Tell"


# Events.


class Died(NamedTuple):
    """A process ended."""

    process: tuple[int, int]
    places: Iterable[tuple[int, Holding, int]]
    """The meshes that it was in: owner, mesh, and rank in it."""
    failure: Callable[[Holding, int], MeshFailure] | None
    """Creates the failure for one of these; ``None`` if the process ended in order."""
    replaced: bool = False
    """Whether another process has taken its rank."""
    awaited: bool = False
    """Whether calls of this process were waiting for it; they raise the failure themselves."""


class ActorFailed(NamedTuple):
    """An actor failed in a running process, or an owner elsewhere passed a failure on."""

    owner: int
    failure: MeshFailure
    holding: Holding | None = None
    """The actor's mesh, if the owner still has it."""
    rank: int | None = None


class Decided(NamedTuple):
    """A policy decided, or its repair ended."""

    asked: Consult
    decision: Decision


class Answered(NamedTuple):
    """An owner or the fault handler answered; ``above`` is the owner of that owner."""

    asked: Ask
    handled: bool
    by: str
    above: Owner | None = None


class Raised(NamedTuple):
    """A call raised the failure in a thread of the script."""

    key: Key
    thread: int


class TakenBack(NamedTuple):
    """The failure was raised where nobody could catch it."""

    failure: MeshFailure


class Waits(NamedTuple):
    """A call waits in a thread of the script, and can raise a failure."""

    thread: int


class ScriptEnds(NamedTuple):
    """From now on nobody can be notified."""


Event: TypeAlias = "Died | ActorFailed | Decided | Answered | Raised | TakenBack | Waits | ScriptEnds"


class FailureLedger:
    """The failures of one process. In the script's process it also keeps those that nobody handled."""

    def __init__(self, *, at_script: bool) -> None:
        self._at_script = at_script
        self._open: dict[Key, tuple[MeshFailure, bool]] = {}
        """What the script must be notified of, and whether its next waiting call does that."""
        self._told: set[Key] = set()
        self._last: MeshFailure | None = None
        """The failure that was due last. All calls waiting at that moment raise it, each in its own thread."""
        self._raised_in: set[int] = set()
        """The threads that raised it."""
        self._waiting: dict[PolicyRun, None] = {}
        """The script's policies that have put off failures."""

    @property
    def due(self) -> bool:
        """Whether the script's next waiting call raises a failure."""
        return any(due and key not in self._told for key, (_, due) in self._open.items())

    def forget(self, keys: Iterable[Key]) -> None:
        """Forget that the script was told of these failures: what failed was made again, and may fail again."""
        self._told.difference_update(keys)

    def on(self, event: Event) -> list[Action]:
        """Handle an event; return the actions to carry out, in order."""
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
        # For an owner of actors in the process one death is one failure: the mesh of processes is named only if there are no
        # actors. In any case a policy is asked about the mesh that it was given for.
        with_actors = {owner for owner, holding, _ in struck if holding.actor_id}
        # A policy of actors covers their processes, even if one dies while its actor, which had failed, is being restarted.
        with_actors |= {owner for owner, holding, _ in event.places if holding.actor_id and holding.policy}
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
                # The mesh as its owner knows it.
                failure = dataclasses.replace(failure, mesh=holding.mesh)
        return self._reach(owner, holding, failure)

    def _reach(
        self, owner: int, holding: Holding | None, failure: MeshFailure, *, awaited: bool = False
    ) -> list[Action]:
        if holding is not None and (run := holding.policy) is not None:
            from mesh_core._failures.policy_run import failed

            return [Consult(owner, holding, run, failed(failure, holding.mesh._name), awaited)]
        if owner == 0 and not self._at_script:
            return [PassOn(SCRIPT, failure)]
        return [Ask(owner, failure, awaited)]

    def _decided(self, asked: Consult, decision: Decision) -> list[Action]:
        if asked.owner == 0 and self._at_script:
            self._waiting.pop(asked.run, None)
            if asked.run.put_off:
                self._waiting[asked.run] = None
        by = f"the policy of {asked.holding.mesh._name!r}"
        actions: list[Action] = [Note(failure, True, by) for failure in decision.handled]
        if decision.stop or decision.repairs or decision.timers:
            # No call waits for the result of a repair.
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
            # This thread may still be woken for it, but was notified now.
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
        # Nobody will decide about these.
        for run in self._waiting:
            for failure in run.put_off:
                left.setdefault(failure._key, failure)
        self._open, self._waiting, self._last = {}, {}, None
        return [Tell(failure) for key, failure in left.items() if key not in self._told]


def _ended(holding: Holding, rank: int) -> PolicyEvent:
    # Only needed if there is a policy; otherwise the module is not imported.
    from mesh_core._failures.policies import Ended

    return Ended(holding.mesh._name, holding.mesh._root.point_of(rank).rank)
