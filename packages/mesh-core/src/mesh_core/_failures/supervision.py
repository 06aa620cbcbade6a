"""Failures on their way: from what has died or failed to its owner, to the owner's owner, and to the script.

A failure reaches the process of the owner as a notice: of a process's end, from the host's agent; of an actor's, from
the process that it lives in. Asked in this order, the first to say yes has handled it:

1. the policy that the mesh was spawned with (``supervise=``), one event of an owner at a time;
2. ``__supervise__`` of the actor that owns the mesh;
3. the owner of that actor, and so on up to the script;
4. the script's fault handler; without one a failure is raised by the calls that the script waits for.

SUP-1: a failure that has been raised to the script by a call of its own needs no other answer.
SUP-2: no failure is lost: what nobody has heard of when the script ends is reported there, and its exit status is 1.
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
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from mesh_core._common.bypass import find_bypass
from mesh_core._common.codes import MessageKind, Request
from mesh_core._common.context import current_instance
from mesh_core._common.control import Control
from mesh_core._common.current import current, holder
from mesh_core._common.errors import SupervisionError
from mesh_core._failures.failure import FailureKind, MeshFailure, error_of, of_loss
from mesh_core._futures import unseen
from mesh_core._geometry.location import is_guest_mesh
from mesh_core._native import Placement, Target, exit_with, seat

if TYPE_CHECKING:
    import asyncio

    from mesh_core._common.interrupts import Interrupts
    from mesh_core._failures.owned_meshes import Holding
    from mesh_core._failures.policies import Event, Later, RepairEvent
    from mesh_core._failures.policy_run import Decision, PolicyRun
    from mesh_core._hosting.actor_cell import ActorCell
    from mesh_core._hosting.actor_host import ActorHost
    from mesh_core._native import Lost, Message
    from mesh_core._process.process import Process

Key = tuple[int, int, int]
"""What has failed: a mesh of processes, a rank in it, and an actor there; 0 for the whole process."""


class FailureLedger:
    """What one process knows of failures."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._pending: dict[Key, MeshFailure] = {}
        """At the script: what no call has raised so far."""
        self._due: dict[Key, MeshFailure] = {}
        """Those among them that no call of the script is about to raise anyway."""
        self._heard: set[Key] = set()
        self._last: MeshFailure | None = None
        self._raised_in: set[int] = set()
        """Threads that have raised the last one, which all that wait just then do."""
        self._thread: threading.Thread | None = None
        self._barriers: deque[Callable[[], object]] = deque()
        self._waiting: set[PolicyRun] = set()
        """At the script: policies that have put failures off."""
        self._turns: weakref.WeakValueDictionary[int, asyncio.Lock] = weakref.WeakValueDictionary()
        """One for each actor here whose policies are being asked just now."""
        self._repairs: weakref.WeakKeyDictionary[PolicyRun, asyncio.Lock] = weakref.WeakKeyDictionary()
        """One for each policy that has something made again."""

    # At the controller.

    def watch(self) -> None:
        """Have the controller's notices taken from now on."""
        process = self._process
        if not process.identity.is_script or self._thread is not None:
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="mesh-notices", daemon=True)
                self._thread.start()

    def _watch(self) -> None:
        # Here it is in nobody's way.
        for begin in self._process.hooks.noticing:
            begin()
        runtime = self._process.runtime
        inbox = runtime.notices()
        while True:
            runtime.wait_notices()
            batch = inbox.take_nowait(1_000)
            if not batch:
                return
            for message in batch:
                try:
                    self._on_notice(message)
                except BaseException:
                    # Whatever it is: those that follow are to be heard of.
                    logging.getLogger("mesh").exception("a notice of a failure could not be handled")
            batch.clear()
            del message

    def barrier(self, then: Callable[[], object]) -> None:
        """Call ``then`` (on another thread) once every notice that has come before now is on its way to its owner."""
        self._barriers.append(then)
        mesh, rank, host = self._process.runtime.me
        target = Target.one(mesh, rank, Placement.on(host))
        self._process.runtime.sender(target, 0, "", Request.FAILURE).tell(None)

    def catch_up(self) -> BaseException | None:
        """What a waiting call of the script would raise, once the notices that have come are looked at.

        Policies and handlers may take their time, or wait for this very thread, so that it waits for a moment only.
        """
        thread = self._thread
        if thread is None or thread is threading.current_thread() or current_instance() is not None:
            return None
        passed = threading.Event()
        self.barrier(passed.set)
        passed.wait(_MOMENT)
        return self.alarm() if self._process.alarmed else None

    def end(self, limit: float) -> None:
        """Wait for the thread of :meth:`watch`, once the runtime is closed: its last notices may be of failures."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            with contextlib.suppress(RuntimeError):  # Ctrl-C came between it and its start
                thread.join(limit)

    def _on_notice(self, message: Message) -> None:
        if message.kind is MessageKind.EXTENSION:
            self._on_extension(message)
        elif message.kind is MessageKind.DOWN:
            self._process.on_down(message)
            for owner, holding, failure, told in self.struck(message):
                self._at_controller(owner, holding, failure, told=told)
            for owner, holding, event in self.ended(message):
                self._consult(owner, holding, event)
        elif message.kind is MessageKind.FAILURE:
            told = message.load()
            if told is None:
                self._barriers.popleft()()
                return
            key, failure = told
            owner = message.actor
            owned_meshes = self._process.owners.of(owner)
            owned = owned_meshes.actors(key[2])
            if owned is not None:
                owned.fails(key)
            if owned is not None or not owned_meshes.leaves_alone(key[2]):
                self._at_controller(owner, owned, named(failure, owned), told=False)
        elif message.kind is MessageKind.TELL:
            self._process.host_registry()
        elif message.kind is MessageKind.UNSEEN:
            unseen.report(message)

    def _on_extension(self, message: Message) -> None:
        match message.name:
            case Control.INSPECT:
                self._process.hooks.knocked()
            case Control.BYPASS:
                find_bypass(self._process)
            case Control.HOSTS:
                hosts, carried, tell = message.load()
                self._process.host_procs.make(hosts, carried, tell=tell)
            case Control.RECORD:
                self._process.hooks.recorded(message)
            case Control.LOGS:
                meshes, flags, window, level = message.load()
                for mesh in meshes:
                    self._process.runtime.logs().set(mesh, flags, window, level)
            case Control.RETURNS:
                from mesh_core._failures.returns import on_question

                on_question(message, self._process)
            case _:
                self._process.extensions.on_message(message)

    def _at_controller(
        self, owner: int, holding: Holding | None, failure: MeshFailure, *, told: bool
    ) -> None:
        if owner != 0:
            # An actor of this very process.
            actor_host = self._process.actor_host()
            actor_host.loop.call_soon_threadsafe(actor_host.on_failure, owner, holding, failure)
        elif holding is not None and holding.policy is not None:
            self._consult_here(holding, _failed(holding, failure), told=told)
        else:
            self._at_root(failure, told=told)

    def _consult_here(self, holding: Holding, event: Event | RepairEvent, *, told: bool = False) -> None:
        """Ask a policy of the script's, on the thread that takes the controller's notices."""
        run = holding.policy
        assert run is not None
        decision = run.decide(event, time.monotonic(), _now)
        _note(holding, event, decision)
        with self._lock:
            if run.put_off:
                self._waiting.add(run)
            else:
                self._waiting.discard(run)
        self._carry_out(0, holding, decision)
        for failure in decision.passed_on:
            self._at_root(failure, told=told)

    def _at_root(self, failure: MeshFailure, *, told: bool) -> None:
        handler = holder().fault_handler
        if handler is not None:
            try:
                _now(handler(failure))
            except BaseException:
                logging.getLogger("mesh").exception(
                    "the fault handler raised; the failure counts as unhandled"
                )
            else:
                self._process.hooks.failed(failure, handled=True, by="the fault handler")
                return
        self._process.hooks.failed(failure, handled=False, by="the script")
        key = failure._key
        with self._lock:
            if key in self._heard:
                return
            self._pending[key] = failure
            if told:
                return
            self._due[key] = self._last = failure
            self._raised_in.clear()
            self._process.alarmed = True
            # Under the lock: who hears of it meanwhile would call it off before it is given.
            self._process.runtime.alarm()
        self._process.alarm_loops()

    def hear(self, key: Key) -> None:
        """Note that the script has been told of a failure: a call of its own raises it (SUP-1)."""
        if key == _NOBODY:
            return
        with self._lock:
            self._heard.add(key)
            self._pending.pop(key, None)
            self._due.pop(key, None)
            if self._last is not None and self._last._key == key:
                # The alarm for it may still be on its way to this thread, which has been told now.
                self._raised_in.add(threading.get_ident())
            self._calm()

    def unhear(self, failure: MeshFailure) -> None:
        """Take back :meth:`hear`: it was raised where nobody of the script's was to hear it."""
        with self._lock:
            self._heard.discard(failure._key)
            self._pending[failure._key] = failure

    def take(self) -> SupervisionError | None:
        """The error that a waiting call of the script is to raise in this thread."""
        me = threading.get_ident()
        with self._lock:
            if self._due:
                failure = self._last = next(iter(self._due.values()))
                self._raised_in.clear()
            elif self._last is None or me in self._raised_in:
                return None
            else:
                failure = self._last
            self._raised_in.add(me)
        self.hear(failure._key)
        return error_of(failure)

    def alarm(self) -> SupervisionError | None:
        """What a call that waits raises when a failure has come to the script.

        Nothing where an actor waits: those of the script's process have owners of their own, who are told apart.
        """
        return self.take() if current_instance() is None else None

    def unheard(self) -> list[MeshFailure]:
        """What nobody was told of; forgotten with that."""
        with self._lock:
            left = list(self._pending.values())
            # Nobody will decide about these any more.
            put_off = (failure for run in self._waiting for failure in run.put_off)
            left += [each for each in put_off if each._key not in self._heard | self._pending.keys()]
            self._waiting.clear()
            self._pending.clear()
            self._due.clear()
            self._last = None
            self._calm()
        return left

    def _calm(self) -> None:
        if self._process.alarmed and not self._due:
            self._process.alarmed = False
            self._process.runtime.calm()

    # Everywhere.

    def struck(self, message: Message) -> list[tuple[int, Holding, MeshFailure, bool]]:
        """What a process's end means for the owners in this process."""
        down = message.down()
        if down is None:
            return []
        procs_id, rank, lost, calls = down
        if lost.orderly:
            return []
        # The spawn has told its owner already.
        if lost.kind is FailureKind.BOOTSTRAP_FAILED and any(
            e.boots(procs_id) for _, e in self._process.owners.all()
        ):
            return []
        return [
            (owner, holding, failure_of(holding, at, lost), calls > 0)
            for owner, owned_meshes in self._process.owners.all()
            for holding, at in owned_meshes.struck(procs_id, rank, lost.process)
        ]

    def ended(self, message: Message) -> list[tuple[int, Holding, Event]]:
        """What an orderly end of a process means for the policies in this process."""
        down = message.down()
        # At the end of the script everything ends in order, which no policy is to make again.
        if down is None or not down[2].orderly or self._process.ending:
            return []
        procs_id, rank = down[:2]
        asked = [
            (owner, holding, at)
            for owner, owned_meshes in self._process.owners.all()
            for holding, at in owned_meshes.ended(procs_id, rank, down[2].process)
        ]
        if not asked:
            # Ends of the script come here too, and an import then would have a dataclass run `exec` beside Ctrl-C, after
            # which Python forgets that it is to die of SIGINT. Where there are policies all is imported already.
            return []
        from mesh_core._failures.policies import Ended

        return [
            (owner, each, Ended(each.mesh.name, each.mesh._root.point_of(at).rank))
            for owner, each, at in asked
        ]

    def pass_on(self, to: tuple[tuple[int, int, int], int], failure: MeshFailure) -> None:
        """Tell an owner, wherever it is: the process it lives in, and its id there."""
        (mesh, rank, host), actor = self._script() if to == _SCRIPT else to
        if is_guest_mesh(mesh):
            # All scripts that have come to such a job are lives of one rank: the one that is there now is told.
            mesh, rank, _ = seat(self._process.runtime, mesh, rank, host)
        target = Target.one(mesh, rank, Placement.on(host))
        sender = self._process.runtime.sender(target, actor, "", Request.FAILURE)
        sender.tell((failure._key, failure))

    def _script(self) -> tuple[tuple[int, int, int], int]:
        """The script, as an owner: this process, if it runs one."""
        return (self._process.runtime.me, 0) if self._process.identity.is_script else _SCRIPT

    async def ask(self, owner: ActorCell, holding: Holding | None, failure: MeshFailure) -> None:
        """Ask an owner that lives here, and those above it if it does not handle the failure.

        What is told of something whose owner is being stopped, or has failed, is nobody's any more: it ends with its
        owner.
        """
        if holding is not None and holding.policy is not None:
            await self.consult(owner, holding, _failed(holding, failure))
        else:
            await self._ask_owner(owner, failure)

    async def consult(self, owner: ActorCell | None, holding: Holding, event: Event | RepairEvent) -> None:
        """Ask a policy on the event loop; what it passes on goes to the owner, or to the script if no actor owns it."""
        import asyncio

        run = holding.policy
        assert run is not None
        owner_id = 0 if owner is None else owner.instance.actor_id
        turn = self._turns.get(owner_id)
        if turn is None:
            turn = self._turns[owner_id] = asyncio.Lock()
        async with turn:
            if owner is not None and owner.ending:
                return
            decision = await run.decide_async(event, time.monotonic())
            _note(holding, event, decision)
            self._carry_out(owner_id, holding, decision)
        for failure in decision.passed_on:
            if owner is None:
                self.pass_on(_SCRIPT, failure)
            else:
                await self._ask_owner(owner, failure)

    async def _ask_owner(self, owner: ActorCell, failure: MeshFailure) -> None:
        if owner.ending:
            return
        try:
            verdict = await owner.supervise(failure)
        except BaseException as error:  # noqa: BLE001 - it is the owner's own failure now
            owner.fail(error, because=failure)
            return
        if verdict:
            self._process.hooks.failed(failure, handled=True, by=owner.describe())
            return
        if verdict is None and owner.ending:
            return
        self.pass_on(owner.owner, dataclasses.replace(failure, chain=(*failure.chain, owner.describe())))

    def _carry_out(self, owner: int, holding: Holding, decision: Decision) -> None:
        """Do what a policy has decided, but for what it passes on."""
        for failure in decision.handled:
            self._process.hooks.failed(failure, handled=True, by=f"the policy of {holding.mesh.name!r}")
        if decision.stop:
            try:
                holding.mesh.stop()
            except Exception:
                logging.getLogger("mesh").exception(
                    "cannot stop %r, as its policy wants it", holding.mesh.name
                )
        if decision.repairs and not self._process.closed:
            actor_host = self._process.actor_host()
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                actor_host.loop.call_soon_threadsafe(
                    lambda: actor_host.keep(
                        actor_host.loop.create_task(self._repair(owner, holding, decision))
                    )
                )
        if decision.timers and not self._process.closed:
            actor_host = self._process.actor_host()
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                for each in decision.timers:
                    actor_host.loop.call_soon_threadsafe(self._start_timer, actor_host, owner, holding, each)

    async def _repair(self, owner: int, holding: Holding, decision: Decision) -> None:
        """Make again what a policy wants; what that does not mend goes to the owner."""
        import asyncio

        from mesh_core._failures.policies import Repaired, RepairFailed
        from mesh_core._failures.repairs import carry_out

        run, actor_host, returns = holding.policy, self._process.actor_host(), holding.returns
        assert run is not None
        was = {} if returns is None else returns.before(_ranks(decision.repaired), decision.repairs)
        turn = self._repairs.get(run)
        if turn is None:
            turn = self._repairs[run] = asyncio.Lock()
        action = decision.repairs[0]
        try:
            # One after the other: what one makes is not failed to the next.
            async with turn:
                for action in decision.repairs:
                    await carry_out(holding.mesh, action)
        except Exception as error:  # noqa: BLE001 - whatever it is, the owner is told
            if run.closed:
                return  # its mesh is being stopped
            said = str(error).partition("\n")[0]
            reason = f"{type(action).__name__} did not succeed: {said}"
            failures = tuple(run.passed_on(failure, reason) for failure in decision.repaired)
            if run.hears_repairs:
                failed = RepairFailed(holding.mesh.name, action, said, failures)
                _note_repair(holding, was, failed)
                self._consult(owner, holding, failed)
                return
            _note_repair(holding, was, None, lost=True)
            owning = actor_host.actors.get(owner)
            for told in failures:
                if owning is not None:
                    await self._ask_owner(owning, told)
                elif owner == 0:
                    self.pass_on(_SCRIPT, told)
        else:
            for failure in decision.repaired:
                self._process.hooks.failed(failure, handled=True, by=f"the policy of {holding.mesh.name!r}")
            repaired = Repaired(holding.mesh.name, decision.repairs, decision.repaired)
            _note_repair(holding, was, repaired if run.hears_repairs else None)
            if run.hears_repairs:
                self._consult(owner, holding, repaired)

    def _start_timer(self, actor_host: ActorHost, owner: int, holding: Holding, later: Later) -> None:
        """Have an event come to a policy; on the event loop."""
        run = holding.policy
        if run is None or run.closed:
            return

        def due() -> None:
            timers.discard(timer)
            if not run.closed:
                self._consult(owner, holding, later.event)

        timers = run.timers
        timer = actor_host.loop.call_later(later.seconds, due)
        timers.add(timer)
        if run.on_close is None:
            run.on_close = lambda: actor_host.loop.call_soon_threadsafe(_cancel, timers)

    def _consult(self, owner: int, holding: Holding, event: Event | RepairEvent) -> None:
        """Have a policy asked about an event, where its owner's policies are asked."""
        if owner == 0 and self._process.identity.is_script:
            with contextlib.suppress(Exception):  # the runtime is shut down
                self.barrier(lambda: self._consult_here(holding, event))
        else:
            actor_host = self._process.actor_host()
            actor_host.loop.call_soon_threadsafe(actor_host.on_event, owner, holding, event)


def _failed(holding: Holding, failure: MeshFailure) -> Event:
    from mesh_core._failures.policy_run import failed

    return failed(failure, holding.mesh.name)


def _note(holding: Holding, event: Event | RepairEvent, decision: Decision) -> None:
    """Have those who hold calls back hear what a decision means for them."""
    returns = holding.returns
    if returns is None:
        return
    from mesh_core._failures.policies import Ended

    left = _ranks(decision.handled)
    if isinstance(event, Ended) and not (decision.repairs or decision.timers):
        left.add(event.rank)
    run = holding.policy
    returns.decided(
        event,
        gone=_ranks(decision.passed_on),
        left=left,
        timers=[each.event for each in decision.timers],
        put_off=run is not None and bool(run.put_off),
        repairs=bool(decision.repairs),
    )


def _note_repair(
    holding: Holding, was: dict[int, int], more: RepairEvent | None, *, lost: bool = False
) -> None:
    if holding.returns is not None:
        holding.returns.repaired(was, more, lost=lost)


def _ranks(failures: Iterable[MeshFailure]) -> set[int]:
    return {failure.rank for failure in failures if failure.rank is not None}


def _cancel(timers: set[asyncio.TimerHandle]) -> None:
    for each in timers:
        each.cancel()
    timers.clear()


_SCRIPT = ((0, 0, 0), 0)
_NOBODY: Key = (0, 0, 0)
_MOMENT = 0.2


def failure_of(holding: Holding, rank: int, lost: Lost) -> MeshFailure:
    """What the end of a process means for a mesh that it was in."""
    mesh = holding.mesh
    point = mesh._root.point_of(rank)
    return of_loss(
        lost,
        mesh,
        name=mesh.name,
        host=mesh._location.name_now(mesh._process.runtime, mesh._procs_id, rank),
        point=point,
        rank=point.rank,
    )


def named(failure: MeshFailure, holding: Holding | None) -> MeshFailure:
    """A failure with the mesh that its owner knows it by."""
    if holding is None or failure.mesh is not None:
        return failure
    return dataclasses.replace(failure, mesh=holding.mesh)


def _now(verdict: Any) -> Any:
    """The value of something that may be awaitable, where no event loop runs."""
    if inspect.isawaitable(verdict):
        import asyncio

        async def wait() -> Any:
            return await verdict

        return asyncio.run(wait())
    return verdict


def alarm() -> BaseException | None:
    """What a call that waits raises when a failure has come to the script; the runtime asks for it."""
    return current().ledger.alarm()


def stop_and_report(process: Process, interrupts: Interrupts) -> list[str]:
    """Stop everything at the script's end; returns what nobody has heard of (SUP-2)."""
    owned_meshes = process.owners.of(0)
    process.end(interrupts)
    unseen.report_left(process)
    # Only now: a constructor may still have been at work.
    broken = [str(error) for error in owned_meshes.broken()]
    return [failure.report() for failure in process.ledger.unheard()] + broken


def leave_with(unheard: list[str], status: int | None) -> None:
    """Report failures that nobody has heard of, and have the process end with that status if there is one (SUP-2)."""
    for report in unheard:
        sys.stderr.write(f"mesh: nobody has handled this failure:\n{report}\n")
    if status is not None:
        # The interpreter comes to its end as ever, and has no way to change the status any more.
        exit_with(status)


def set_fault_handler(
    handler: Callable[[MeshFailure], object] | None,
) -> Callable[[MeshFailure], object] | None:
    """Have ``handler`` called with every failure that no owner has handled; returns the one before.

    Without a handler a failure is raised as :class:`SupervisionError` by the calls that the script waits for, and one
    that no call was there to raise ends the script with its report and exit status 1. The handler runs on a thread of
    its own, sync or async; if it raises, the failure counts as unhandled. ``None`` takes it away.

    >>> from mesh_core import set_fault_handler
    >>> lost = []
    >>> set_fault_handler(lost.append)
    >>> _ = set_fault_handler(None)
    """
    at = holder()
    if handler is not None and not callable(handler):
        raise TypeError(f"a fault handler is a function of one argument, the failure; not {handler!r}")
    before, at.fault_handler = at.fault_handler, handler
    return before
