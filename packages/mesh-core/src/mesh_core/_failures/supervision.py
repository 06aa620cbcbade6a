"""Passes events to the failure ledger, and carries out its actions.

A failure reaches the owner's process as a notice: a process's end from the host's agent, an actor's failure from its
process. The script's policies and handlers run on the thread that takes the controller's notices, all others on the
event loop of actors. :mod:`mesh_core._failures.ledger` says who is asked in which order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from mesh_core._common.codes import FailureKind, MessageKind, Request
from mesh_core._common.context import current_instance
from mesh_core._common.current import holder
from mesh_core._common.errors import MeshError, SupervisionError, first_line
from mesh_core._failures import ledger
from mesh_core._failures.failure import MeshFailure, error_of, of_loss
from mesh_core._failures.given_up import GivenUp
from mesh_core._failures.host_reasons import Explained
from mesh_core._failures.patience import Question
from mesh_core._futures import unseen
from mesh_core._geometry.location import is_guest_mesh
from mesh_core._native import Placement, Target, exit_with, locate, seat

if TYPE_CHECKING:
    import asyncio

    from mesh_core._common.interrupts import Interrupts
    from mesh_core._failures.owned_meshes import Holding
    from mesh_core._failures.policies import Later, RepairEvent
    from mesh_core._failures.policy_run import Decision, PolicyRun
    from mesh_core._futures.future import Future
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._native import Lost, Message
    from mesh_core._process.process import Process
    from mesh_core._serialize.exceptions import ActorError

_MOMENT = 0.2
_REMEMBERED = 1024
"""For how many failures the reasons are remembered."""


class Supervision:
    """The thread-safe shell around one process's failure ledger."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._at_script = process.identity.is_script
        self._lock = threading.Lock()
        self._ledger = ledger.FailureLedger(at_script=self._at_script)
        self._turns: weakref.WeakValueDictionary[int, asyncio.Lock] = weakref.WeakValueDictionary()
        """One for each actor here whose policies are being asked."""
        self._repairs: weakref.WeakKeyDictionary[PolicyRun, asyncio.Lock] = weakref.WeakKeyDictionary()
        """One for each policy with a repair under way."""
        self._late_handler: Callable[[MeshFailure], object] | None = None
        """The fault handler, as long as it was passed over and has not returned."""
        self._given_up: dict[ledger.Key, tuple[str, ...]] = {}
        """Why policies passed failures on, latest last."""
        self._stopped = GivenUp(process)
        self.explained = Explained(self._on_time)

    # Notices.

    def on_notice(self, message: Message) -> None:
        """Handle a notice; one of an actor's failure may also come from an owner in another process."""
        if message.kind is MessageKind.DOWN:
            self._on_down(message)
        elif (failed := message.load()) is None:
            self._process.notices.pass_barrier()
        else:
            self._on_failure(message.actor, *failed)

    def _on_down(self, message: Message) -> None:
        process = self._process
        process.on_down(message)
        down = message.down()
        # At the end of the script everything ends in order, and no policy is asked to respawn it.
        if down is None or (down[2].orderly and process.ending):
            return
        procs_id, rank, lost, calls = down
        if lost.kind is FailureKind.BOOTSTRAP_FAILED and process.owners.boots(procs_id):
            return  # the spawn raised this to its owner
        places = process.owners.places(procs_id, rank)

        def died() -> None:
            self._on(
                ledger.Died(
                    lost.process,
                    places,
                    None if lost.orderly else lambda holding, at: failure_of(holding, at, lost),
                    replaced=locate(process.runtime, procs_id, rank, 0)[:2] != lost.process,
                    awaited=calls > 0,
                )
            )

        if not self._at_script or process.ending or not self.explained.hold(lost, died):
            died()

    def _on_time(self, late: Callable[[], object]) -> None:
        """Handle what was held back where the script's notices are handled."""
        try:
            self._process.notices.barrier(late)
        except MeshError:
            late()  # the runtime has been shut down: nobody takes notices any longer

    def _on_failure(self, owner: int, key: ledger.Key, failure: MeshFailure) -> None:
        owners = self._process.owners
        if failure.unmade:
            # Its process may not know the owner, and the spawner may have been told.
            owner, holding = owners.who_has(key[2])
            if holding is None or not holding.hears():
                return
        elif (holding := owners.of(owner).actors(key[2])) is None and owners.of(owner).leaves_alone(key[2]):
            return
        procs_id, rank, _ = seat(self._process.runtime, key[0], key[1], 0)
        at = None if holding is None else holding.place(procs_id, rank)
        self._on(ledger.ActorFailed(owner, failure, holding, at))

    # Calls report and ask.

    def told(self, error: MeshError) -> None:
        """Record what a call raises: a failure that was raised to the script needs no other handling (SUP-1)."""
        if current_instance() is not None:
            return  # an actor's owner is asked in any case
        cells = [] if error.results is None else error.results._cells
        errors = (each for each in (error, *cells) if isinstance(each, SupervisionError))
        keys = [each.failure._key for each in errors if each.failure is not None]
        for key in (*error._deaths, *keys):
            self._on(ledger.Raised(key, threading.get_ident()))

    def with_reasons(self, failure: MeshFailure, mesh: Any) -> MeshFailure:
        """Return the failure with the reasons why a policy passed it on or stopped the mesh for it, for later calls."""
        chain = self._given_up.get(failure._key)
        if chain is None and (stopped := self.stopped_for(mesh)) is not None and stopped._key == failure._key:
            chain = stopped.chain
        return failure if chain is None else dataclasses.replace(failure, chain=chain)

    def stopped_for(self, mesh: Any) -> MeshFailure | None:
        """Return the failure for which a policy stopped a mesh of actors, or their processes, for calls that come later."""
        return self._stopped.of(mesh)

    def _remember(self, given_up: Iterable[MeshFailure]) -> None:
        for failure in given_up:
            if failure.chain:
                self._given_up[failure._key] = failure.chain
        while len(self._given_up) > _REMEMBERED:
            del self._given_up[next(iter(self._given_up))]

    def take_back(self, error: SupervisionError) -> None:
        """Record that the script could not catch what was raised."""
        if error.failure is not None:
            self._on(ledger.TakenBack(error.failure))

    def alarm(self) -> SupervisionError | None:
        """Return what a waiting call raises when a failure reached the script.

        Returns ``None`` while an actor waits: actors of the script's process have owners that are notified separately.
        """
        if current_instance() is not None:
            return None
        return next(map(error_of, self._on(ledger.Waits(threading.get_ident()))), None)

    def hear_spawns(self) -> None:
        """Take what constructors raised as failures, where the actors have been stopped and nobody has looked at their spawns (CON-1)."""
        owner = current_instance()
        owner_id = 0 if owner is None else owner.actor_id
        for mesh, error in self._process.owners.of(owner_id).left_unheard():
            self._on(ledger.ActorFailed(owner_id, never_made(mesh, error)))

    def catch_up(self) -> BaseException | None:
        """Return what a waiting call of the script would raise after handling the notices that arrived."""
        if current_instance() is not None or self._process.notices.is_current():
            return None
        self._process.notices.catch_up(_MOMENT)
        return self.alarm() if self._process.alarmed else None

    def unheard(self) -> list[MeshFailure]:
        """Return and forget the failures that nobody was notified of."""
        return self._on(ledger.ScriptEnds())

    def regain(self, holding: Holding, ranks: Iterable[int]) -> None:
        """Record that nothing at these ranks of a mesh is lost any longer."""
        runtime, ranks = self._process.runtime, list(ranks)
        addrs = (locate(runtime, *holding.mesh._location.addr(holding.procs_id, rank)) for rank in ranks)
        keys = [(*addr[:2], holding.actor_id) for addr in addrs] if holding.actor_id else []
        with self._lock:
            holding.regain(ranks)
            # An actor that is made again in the same process may fail again.
            self._ledger.forget(keys)

    def own_again(self, owner: int, holding: Holding, ranks: Iterable[int]) -> None:
        """Record that ranks of a mesh are being respawned: its owner owns it again, even if all were lost."""
        self.regain(holding, ranks)
        self._process.owners.of(owner).add(holding)

    # Actions of the ledger.

    def _on(self, event: ledger.Event) -> list[MeshFailure]:
        """Pass an event to the ledger and carry out the actions; return the failures that the caller must report."""
        process = self._process
        with self._lock:
            actions = self._ledger.on(event)
            if isinstance(event, ledger.Died) and event.failure is not None:
                process.owners.forget_lost(event.places)
            if any(isinstance(action, ledger.Interrupt) for action in actions):
                # Under the lock: a thread that is notified meanwhile could otherwise cancel the alarm before it is set.
                process.alarmed = True
                process.runtime.alarm()
            if process.alarmed and not self._ledger.due:
                process.alarmed = False
                process.runtime.calm()
        return self._carry_out(actions)

    def _carry_out(self, actions: Iterable[ledger.Action]) -> list[MeshFailure]:
        process, tell = self._process, []
        for action in actions:
            match action:
                case ledger.Tell(failure):
                    tell.append(failure)
                case ledger.Note(failure, handled, by):
                    process.hooks.failed(failure, handled=handled, by=by)
                case ledger.PassOn(to, failure):
                    self.pass_on(to, failure)
                case ledger.Interrupt():
                    process.alarm_loops()
                case ledger.CarryOut(asked, decision):
                    self._do(asked, decision)
                case ledger.Consult() | ledger.Ask():
                    self._ask(action)
        return tell

    def pass_on(self, to: ledger.Owner, failure: MeshFailure) -> None:
        """Notify an owner, wherever it is."""
        (mesh, rank, host), actor = self._script() if to == ledger.SCRIPT else to
        if is_guest_mesh(mesh):
            # All scripts that join such a job are incarnations of one rank: the current one is notified.
            mesh, rank, _ = seat(self._process.runtime, mesh, rank, host)
        target = Target.one(mesh, rank, Placement.on(host))
        sender = self._process.runtime.sender(target, actor, "", Request.FAILURE)
        sender.tell((failure._key, failure))

    def _script(self) -> ledger.Owner:
        """The script as an owner: this process, if it runs a script."""
        return (self._process.runtime.me, 0) if self._at_script else ledger.SCRIPT

    def _ask(self, action: ledger.Consult | ledger.Ask) -> None:
        if action.owner != 0 or not self._at_script:
            self._on_loop(lambda: self._start(self._ask_on_loop(action)))
        elif not self._process.notices.is_current():
            with contextlib.suppress(Exception):  # the runtime was shut down
                self._process.notices.barrier(lambda: self._ask(action))
        elif isinstance(action, ledger.Consult):
            self._consult(action)
        else:
            self._ask_handler(action)

    def _consult(self, action: ledger.Consult) -> None:
        """Ask a policy of the script, where all other meshes of the script wait meanwhile."""
        run, event = action.run, action.event
        if run.overdue:
            self._decided(action, run.pass_over(event, run.overdue))
            return

        def late(why: str) -> None:
            run.overdue = why

        def pass_over(why: str) -> None:
            decision = run.pass_over(event, why)
            self._process.notices.succeed()
            self._decided(action, decision)

        answer = self._process.notices.patience.answer(
            Question(
                f"the policy of {action.holding.mesh._name!r}",
                lambda: run.answer(event, time.monotonic(), _now),
                late,
                pass_over,
                "a policy must return at once, and use Later() to wait",
            )
        )
        if answer is not None:
            self._decided(action, answer[0]())

    def _ask_handler(self, action: ledger.Ask) -> None:
        """Ask the script's fault handler; like a policy, it is passed over if it does not return."""
        handler = holder().fault_handler

        def ask() -> bool:
            if handler is None:
                return False
            try:
                _now(handler(action.failure))
            except BaseException:
                logging.getLogger("mesh").exception(
                    "the fault handler raised; the failure counts as unhandled"
                )
                return False
            return True

        def late(why: str) -> None:
            self._late_handler = handler if why else None

        def pass_over(_why: str) -> None:
            self._process.notices.succeed()
            self._on(ledger.Answered(action, False, "the fault handler"))

        answer: tuple[bool] | None = (False,)
        if handler is not None and handler is not self._late_handler:
            advice = "a fault handler must return soon: let another thread do what takes long"
            answer = self._process.notices.patience.answer(
                Question("the fault handler", ask, late, pass_over, advice)
            )
        if answer is not None:
            self._on(ledger.Answered(action, answer[0], "the fault handler"))

    async def _ask_on_loop(self, action: ledger.Consult | ledger.Ask) -> None:
        """Ask an actor here, or a policy of its meshes; failures of actors that are being stopped concern nobody."""
        import asyncio

        cell = self._process.actor_host().actors.get(action.owner)
        if action.owner != 0 and (cell is None or cell.over):
            return
        if isinstance(action, ledger.Consult):
            turn = self._turns.get(action.owner)
            if turn is None:
                turn = self._turns[action.owner] = asyncio.Lock()
            async with turn:
                if cell is not None and cell.ending:
                    return
                decision = await action.run.decide_async(action.event, time.monotonic())
            told = self._prepare(action, decision)
            if told is not None and not self._at_script:
                # The controller tells all hosts before any of them can hear of the stop from here. Only then is the mesh stopped, and after
                # that its owner asked: calls that follow from what the owner does find no actor, and know why.
                with contextlib.suppress(MeshError):
                    await told
            self._on(ledger.Decided(action, decision))
        elif cell is not None and not cell.ending:
            try:
                verdict = await cell.supervise(action.failure)
            except BaseException as error:  # noqa: BLE001 - now the owner itself fails
                cell.fail(error, because=action.failure)
                return
            if verdict is not None or not cell.ending:
                self._on(ledger.Answered(action, bool(verdict), cell.describe(), cell.owner))

    def _decided(self, asked: ledger.Consult, decision: Decision) -> None:
        """Carry out what a policy of the script decided."""
        self._prepare(asked, decision)
        self._on(ledger.Decided(asked, decision))

    def _prepare(self, asked: ledger.Consult, decision: Decision) -> Future[None] | None:
        """Note what a policy decided; if it stops its mesh for a failure, return what is done when all others are being told."""
        self._remember(decision.passed_on)
        told = None
        if decision.stop and decision.passed_on:
            mesh_id = asked.holding.actor_id or asked.holding.procs_id
            told = self._stopped.note(mesh_id, decision.passed_on[-1])
        _note(asked, decision)
        return told

    def _on_loop(self, work: Callable[[], object]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop ended meanwhile
            self._process.actor_host().loop.call_soon_threadsafe(work)

    def start_on_loop(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a coroutine on the event loop of actors."""
        self._on_loop(lambda: self._start(work()))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        actor_host = self._process.actor_host()
        actor_host.loop.keep(actor_host.loop.create_task(work))

    # Actions of policies.

    def _do(self, asked: ledger.Consult, decision: Decision) -> None:
        if decision.stop:
            _stop(asked.holding.mesh)
        if self._process.closed:
            return
        if decision.repairs:
            self._on_loop(lambda: self._start(self._repair(asked, decision)))
        for later in decision.timers:
            self._on_loop(partial(self._start_timer, asked, later))

    async def _repair(self, asked: ledger.Consult, decision: Decision) -> None:
        """Carry out repairs; ask the policy again about what they did not repair, or else its owner."""
        import asyncio

        from mesh_core._failures.policies import Repaired, RepairFailed
        from mesh_core._failures.policy_run import Decision
        from mesh_core._failures.repairs import carry_out

        holding, run = asked.holding, asked.run
        returns, name = holding.returns, holding.mesh._name
        was = {} if returns is None else returns.before(_ranks(decision.repaired), decision.repairs)
        turn = self._repairs.get(run)
        if turn is None:
            turn = self._repairs[run] = asyncio.Lock()
        repair, lost = decision.repairs[0], False
        event: RepairEvent | None = None
        outcome: Decision | None = None
        try:
            # One after the other: what one repair stops on purpose is not a failure to the next.
            async with turn:
                for repair in decision.repairs:
                    await carry_out(holding.mesh, repair)
        except Exception as error:  # noqa: BLE001 - the owner is notified of any error
            if run.closed or self._process.ending:
                return  # its mesh is being stopped, or everything is at the end of the script
            said = first_line(error)
            reason = f"{type(repair).__name__} did not succeed: {said}"
            failures = tuple(run.passed_on(failure, reason) for failure in decision.repaired)
            if run.hears_repairs:
                event = RepairFailed(name, repair, said, failures)
            else:
                outcome, lost = Decision(passed_on=failures), True
        else:
            outcome = Decision(handled=decision.repaired)
            if run.hears_repairs:
                event = Repaired(name, decision.repairs, decision.repaired)
        if returns is not None:
            returns.repaired(was, event, lost=lost)
        if outcome is not None:
            self._remember(outcome.passed_on)
            self._on(ledger.Decided(asked, outcome))
        if event is not None:
            self._ask(asked._replace(event=event))

    def _start_timer(self, asked: ledger.Consult, later: Later) -> None:
        """Send an event to a policy later; runs on the event loop."""
        run = asked.run
        if run.closed:
            return
        loop, timers = self._process.actor_host().loop, run.timers

        def due() -> None:
            timers.discard(timer)
            if not run.closed:
                self._ask(asked._replace(event=later.event))

        timer = loop.call_later(later.seconds, due)
        timers.add(timer)
        if run.on_close is None:
            run.on_close = lambda: loop.call_soon_threadsafe(_cancel, timers)


def _stop(mesh: Any) -> None:
    try:
        mesh.stop()
    except Exception:
        logging.getLogger("mesh").exception("failed to stop %r, as its policy asked", mesh._name)


def _note(asked: ledger.Consult, decision: Decision) -> None:
    """Report a decision to those who hold calls back."""
    returns, event = asked.holding.returns, asked.event
    if returns is None:
        return
    from mesh_core._failures.policies import Ended

    left = _ranks(decision.handled)
    if isinstance(event, Ended) and not (decision.repairs or decision.timers):
        left.add(event.rank)
    returns.decided(
        event,
        gone=_ranks(decision.passed_on),
        left=left,
        timers=[each.event for each in decision.timers],
        put_off=bool(asked.run.put_off),
        repairs=bool(decision.repairs),
    )


def _ranks(failures: Iterable[MeshFailure]) -> set[int]:
    return {failure.rank for failure in failures if failure.rank is not None}


def _cancel(timers: set[asyncio.TimerHandle]) -> None:
    for each in timers:
        each.cancel()
    timers.clear()


def failure_of(holding: Holding, rank: int, lost: Lost) -> MeshFailure:
    """Return the failure that a process's end means for a mesh it was in."""
    mesh = holding.mesh
    point = mesh._root.point_of(rank)
    return of_loss(
        lost,
        mesh,
        name=mesh._name,
        host=mesh._location.name_now(mesh._process.runtime, mesh._procs_id, rank),
        point=point,
        rank=point.rank,
    )


def never_made(mesh: ActorMesh[Any], error: ActorError) -> MeshFailure:
    """Return the failure that a constructor's exception means for the owner of its actor."""
    return MeshFailure(
        mesh=mesh,
        mesh_name=mesh._name,
        rank=error.rank,
        point=error.point,
        host=error.host,
        pid=error.pid,
        exception=error,
        since=time.time(),
        kind=FailureKind.ACTOR_FAILED,
        unmade=True,
        _key=next(iter(error._deaths), (0, 0, 0)),
    )


def _now(verdict: Any) -> Any:
    """Return the value of something that may be awaitable, outside of an event loop."""
    if inspect.isawaitable(verdict):
        import asyncio

        async def wait() -> Any:
            return await verdict

        return asyncio.run(wait())
    return verdict


def stop_and_report(process: Process, interrupts: Interrupts) -> list[str]:
    """Stop everything at the script's end; return the reports of failures that nobody was notified of (SUP-2)."""
    owned_meshes = process.owners.of(0)
    process.end(interrupts)
    unseen.report_left(process)
    # Only now: a constructor may have been running until here.
    broken = [str(error) for _, error in (*owned_meshes.left_unheard(), *owned_meshes.broken())]
    return [failure.report() for failure in process.supervision.unheard()] + broken


def leave_with(unheard: list[str], status: int | None) -> None:
    """Report failures that nobody was notified of, and set the exit status if given (SUP-2)."""
    for report in unheard:
        sys.stderr.write(f"mesh: nobody handled this failure:\n{report}\n")
    if status is not None:
        # The interpreter ends as usual but can no longer change the status.
        exit_with(status)


def set_fault_handler(
    handler: Callable[[MeshFailure], object] | None,
) -> Callable[[MeshFailure], object] | None:
    """Call ``handler`` with every failure that no owner handled; return the previous handler.

    Without a handler, a failure is raised as :class:`SupervisionError` by the script's next waiting call. A failure
    that no call raised is reported when the script ends, and the exit status is 1. The handler runs on a separate
    thread and may be async; if it raises, or has not returned after a minute, the failure counts as unhandled. ``None``
    removes it.

    >>> from mesh_core import set_fault_handler
    >>> lost = []
    >>> set_fault_handler(lost.append)
    >>> _ = set_fault_handler(None)
    """
    at = holder()
    if handler is not None and not callable(handler):
        raise TypeError(f"a fault handler must be a function of one argument, the failure, got {handler!r}")
    before, at.fault_handler = at.fault_handler, handler
    return before
