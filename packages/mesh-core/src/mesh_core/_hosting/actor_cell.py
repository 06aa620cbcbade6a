"""One actor in its process: its object, its inbox, and what happens to a message.

Two executors drain an inbox: an event loop (``_hosting.loop_executor``) for coroutines, and a thread of the actor's own
(``_hosting.thread_executor``) for plain functions. An actor is constructed where its endpoints run, on its thread if it has one.
If an actor has both, they take turns: the inbox knows whose the next message is, and wakes that executor alone, once the other has
come back (TURN-1). ``_hosting.ending`` ends actors, and ``_hosting.actor_loops`` assigns them to event loops.

STG-1: an actor handles one message at a time, in the order of arrival; only ``concurrent`` endpoints overlap.
STG-2: every call gets exactly one reply, whatever its endpoint does.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from mesh_core._actors.endpoint import EndpointProperty
from mesh_core._common import context
from mesh_core._common.codes import FailureKind
from mesh_core._common.context import Instance
from mesh_core._common.errors import MeshError, SpawnError, Stopped, SupervisionError
from mesh_core._common.suggestions import did_you_mean
from mesh_core._common.tracing import notice
from mesh_core._failures.failure import MeshFailure
from mesh_core._futures.deadlines import expired
from mesh_core._futures.loop import settle
from mesh_core._hosting import ending as _ending
from mesh_core._hosting.cell_state import ENDING, LOOP, WORKING, CellState
from mesh_core._hosting.loop_executor import OnLoop
from mesh_core._hosting.responses import MARKS, marked
from mesh_core._hosting.thread_executor import OnThread
from mesh_core._serialize import explain_load_failure

if TYPE_CHECKING:
    import concurrent.futures

    from mesh_core._hosting.actor_host import ActorHost
    from mesh_core._hosting.actor_loops import ActorLoop
    from mesh_core._native import Inbox, Message

CallKey = tuple[tuple[int, int, int], int]
"""The caller of a call, and the number of the call there."""


class ActorCell(CellState):
    """One actor of this process: its object, its inbox, and its executors."""

    __slots__ = (
        "_args",
        "_cls",
        "_kwargs",
        "_maker",
        "_spawned",
        "actor_host",
        "broken",
        "disowned",
        "downfall",
        "errands",
        "gone",
        "inbox",
        "instance",
        "loop",
        "object",
        "on_loop",
        "on_thread",
        "owner",
        "skipped",
        "table",
    )

    def __init__(
        self,
        actor_host: ActorHost,
        inbox: Inbox,
        instance: Instance,
        spawned: Message | None,
        *,
        cls: type | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        broken: BaseException | None = None,
        owner: tuple[tuple[int, int, int], int] = ((0, 0, 0), 0),
    ) -> None:
        self.actor_host = actor_host
        self.loop: ActorLoop = actor_host.loop
        """The loop that runs its coroutines: the process's, if it has a thread for plain functions too."""
        self.inbox = inbox
        self.instance = instance
        self._cls = cls
        self._spawned: Message | None = spawned
        self._args = args
        self._kwargs = kwargs or {}
        self._maker = 0
        """The thread that runs the constructor, if it is not the actor's own."""
        self.object: Any = None
        self.broken = broken
        """Why there is no object."""
        if broken is not None:
            inbox.retire()
        self.table: dict[str, EndpointProperty[..., Any]] = (
            actor_host.process.table(cls) if cls is not None else {}
        )
        self.disowned = False
        """Whether the owner was notified that this actor failed, or that it could not be constructed."""
        self.owner = owner
        """Who is notified of its failures: the owner's process, and the owner's id there."""
        self.errands: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        """What is due between two messages, ahead of those that wait."""
        self.downfall: concurrent.futures.Future[None] | None = None
        """The work that follows the actor's failure; an end waits for it."""
        self.gone: asyncio.Future[None] | None = None
        """Done when the actor has ended; made when somebody waits for it."""
        self.skipped: dict[CallKey, bool] = {}
        """Calls whose callers gave up before they began, with whether they are answered all the same."""
        self.on_loop = OnLoop(self)
        threaded = any(not spec.is_async for spec in self.table.values())
        self.on_thread: OnThread | None = OnThread(self) if threaded else None
        super().__init__(threaded=threaded)

    def start(self, *, here: bool = False) -> None:
        """Construct the object and begin to work; with ``here``, coroutines run on the process's loop, which calls this."""
        if self.broken is None and self.on_thread is not None:
            if coroutines := [name for name, spec in self.table.items() if spec.is_async]:
                self.divide(coroutines)
            try:
                self.on_thread.start()
                return  # from here on the thread decides what is broken
            except RuntimeError as error:
                self.on_thread, self.drains = None, LOOP
                self.inbox.leave_to_loop()
                self.broken = SpawnError(
                    f"no thread can be started for {self.describe()}: {error}. Raise the limit on threads or memory "
                    "(ulimit -u, ulimit -v, the limits of the container), or use coroutines, which share threads"
                )
                self.inbox.retire()
        if self.broken is None and not here:
            self.actor_host.loops.construct(self)
        else:
            self.be_made()
            self.join()

    def be_made(self) -> None:
        """Construct an actor that runs on its loop; called there."""
        self._maker = threading.get_ident()
        self.inbox.worked_by(self._maker)
        try:
            self.construct()
        finally:
            self._maker = 0

    def join(self) -> None:
        """Attach the inbox to the loop, which drains it, once the actor is constructed."""
        if not self.over:
            self.inbox.attach(self.loop.waker, self.instance.actor_id)

    def divide(self, coroutines: list[str]) -> None:
        """Leave messages with these names to the loop, beside those named before; called by the actor's thread, or before it runs."""
        self.inbox.divide(coroutines, self.loop.waker, self.instance.actor_id)

    def lost(self, error: BaseException) -> None:
        """Fail the actor, because an error escaped while it was constructed; the loop answers for it."""
        self.advance(WORKING)
        self.fail(error)

    def construct(self) -> None:
        """Make the object, and answer the spawner."""
        made, error = None, self.broken
        if error is None:
            context.enter((self.instance, None))
            try:
                made = self._make()
            except BaseException as raised:  # noqa: BLE001 - reported to the spawner
                error = raised
                self.tell_raised("__init__", error)
        self._args, self._kwargs = (), {}
        with self.actor_host.failing:
            given_up = self.over
            spawned, self._spawned = self._spawned, None
            if not given_up:
                # Unless it was killed meanwhile.
                self.object, self.broken = made, self.broken or error
                if self.broken is not None:
                    self.inbox.retire()
                self.advance(WORKING)
        if given_up:
            _ending.clean_up_late(self, made)
        elif spawned is not None:
            if self.broken is None:
                spawned.reply(None)
            else:
                self.actor_host.reply_error(spawned, self.broken, self.instance.name, dead=True)

    def _make(self) -> Any:
        assert self._cls is not None
        process = self.actor_host.process
        notice(process)
        make: Callable[..., Any] = self._cls
        if self._spawned is not None and self._spawned.has_refs:
            from mesh_core._meshes.refs import arrive

            self._args, self._kwargs = arrive((self._args, self._kwargs))
        if process.tracer is not None and self._spawned is not None:
            make = process.tracer.handling(None, make, self._spawned, self.instance)
        construct = partial(make, *self._args, **self._kwargs)
        if process.hooks.making:
            from mesh_core._hosting.local_actor import made_by

            made = made_by(process.hooks.making, self, construct)
        else:
            made = construct()
        # The constructor may have set a tracing provider.
        notice(process)
        return made

    def take_spawn(self) -> Message | None:
        """Return the spawn message unless it was taken; the code that takes it answers it."""
        spawned, self._spawned = self._spawned, None
        return spawned

    def describe(self) -> str:
        """Describe the actor for people."""
        return self.instance.describe()

    def ends_quickly(self) -> bool:
        """Whether no user code runs before or at its end, so that nobody can tell whether it ends in turn."""
        return (
            self.made
            and self.on_thread is None
            and not hasattr(self.object, "__cleanup__")
            and len(self.inbox) == 0
            and self.on_loop.runner is None
            and not self.on_loop.busy
            and not self.actor_host.process.owners.has(self.instance.actor_id)
        )

    # Questions of other parts of the process.

    def is_thread(self, ident: int) -> bool:
        """Whether this thread constructs the actor, or handles a message whenever it runs anything."""
        return ident == self._maker or (self.on_thread is not None and self.on_thread.ident == ident)

    def is_handled_here(self) -> bool:
        """Whether this is called in the task in which the actor handles one message after the other."""
        runner, loop = self.on_loop.runner, self.loop
        # With the loop, which is this thread's, it need not be looked up.
        return runner is not None and loop.is_here and asyncio.current_task(loop) is runner

    def needs_loop(self, endpoint: str) -> bool:
        """Whether the actor's loop must run for that endpoint to be called."""
        spec = self.table.get(endpoint)
        return self.drains == LOOP or self.inbox.is_behind_loop() or (spec is not None and spec.is_async)

    def cancel(self, key: CallKey, *, answered: bool = False) -> None:
        """Cancel the coroutine that works for a caller who gave up, or skip the caller's message when it comes up.

        ``answered`` means that the caller waits to be told.
        """
        if self.loop.is_here:
            self._cancel_here(key, answered)
        else:
            # Between two steps of the coroutines there, one of which may be about to begin the call.
            self.loop.soon(self._cancel_here, key, answered)

    def _cancel_here(self, key: CallKey, answered: bool) -> None:
        running = self.on_loop.running.get(key)
        if running is not None:
            running[0].cancel()
        else:
            self.skipped[key] = answered

    # Messages.

    def function(self, message: Message, spec: EndpointProperty[..., Any]) -> Callable[..., Any]:
        """Return the function to call for a message, with what ``_hosting.responses`` and ``_common.tracing`` put around it."""
        function, around = spec.function, self.actor_host.process.around
        if spec.respond is not None:
            function = partial(spec.respond, self, message)
        if around is not None:
            function = around(spec, function, message, self.instance)
        return function

    def unmarked(self, message: Message) -> EndpointProperty[..., Any] | None:
        """Return the endpoint of a call that is answered in another way than by its result; see ``_hosting.responses``."""
        if message.name[:1] not in MARKS or self._cls is None:
            return None
        return marked(self.table, self._cls, message.name, threaded=self.on_thread is not None)

    def too_late(self, message: Message) -> bool:
        """Refuse a message if its deadline has passed, and return whether it has; its caller has given up."""
        self.actor_host.process.deadlines = True
        if (message.left or 0.0) > 0:
            return False
        self.refuse(message, expired(message))
        return True

    def given_up(self, message: Message) -> bool:
        """Return whether the caller cancelled the call before it began."""
        if self.skipped:
            answered = self.skipped.pop((message.src, message.call), None)
            if answered:
                self.refuse(message, asyncio.CancelledError(f"{message.name} was cancelled by its caller"))
            elif answered is not None:
                # Nobody waits for an answer, and the message no longer waits to be handled.
                message.failed()
            return answered is not None
        return False

    def forget_skipped(self) -> None:
        """Clear the skipped calls once the queue is empty and everything has begun: those that are left were already over."""
        if self.skipped and len(self.inbox) == 0 and not self.on_loop.starting:
            self.skipped.clear()

    def refused(self, message: Message, spec: EndpointProperty[..., Any] | None) -> bool:
        """Answer a message that no endpoint handles, because the actor failed or has none of that name; return whether it did."""
        if self.broken is not None:
            if message.call:
                self.actor_host.reply_error(message, self.broken, self.instance.name, dead=True)
            else:
                message.failed()
                self._never_made()
            return True
        if spec is None:
            missing = AttributeError(
                f"{self.instance.class_name} has no endpoint {message.name!r}{did_you_mean(message.name, self.table)}; "
                "the caller and this process have different versions of the class"
            )
            self.refuse(message, missing)
            return True
        return False

    def refuse(self, message: Message, error: BaseException) -> None:
        """Answer a message with an error for which the actor is not to blame."""
        self.actor_host.reply_error(message, error, self.instance.name)

    def stopped(self, message: Message) -> None:
        """Answer a message whose endpoint was not begun or not finished when the actor ended."""
        if isinstance(self.broken, SupervisionError):
            # It may have begun, so this is no refusal.
            if message.call:
                self.actor_host.reply_error(message, self.broken, self.instance.name)
        elif self.broken is not None:
            self.refused(message, None)
        elif message.call:
            self.refuse(message, self._stopped_during(message))
        else:
            message.failed()

    def _stopped_during(self, message: Message) -> Stopped:
        return Stopped(
            f"{self.describe()} was stopped before {message.name} had returned",
            actor=self.instance.name,
            rank=self.instance.rank.rank,
            host=self.actor_host.process.identity.host,
            reason="stopped",
        )

    def reason_for(self, message: Message, error: BaseException) -> BaseException:
        """Return what the caller of an interrupted endpoint is told instead of a cancellation that it did not ask for."""
        if not isinstance(error, asyncio.CancelledError) or not self.ending:
            return error
        return self.broken or self._stopped_during(message)

    def tell_raised(self, endpoint: str, error: BaseException) -> None:
        """Notify hooks that the actor's code raised, before anybody is answered: a debugger may stop here."""
        hooks = self.actor_host.process.hooks
        if hooks.raised:
            hooks.have_raised(self.instance, endpoint.lstrip("".join(MARKS)), error)

    def failed(self, message: Message, error: BaseException) -> None:
        """Report that an endpoint raised: to its caller or, if nobody waits, to the owner."""
        self.tell_raised(message.name, error)
        if message.call:
            self.actor_host.reply_error(message, error, self.instance.name)
        else:
            message.failed()
            self.fail(error)

    def unread(self, message: Message, error: BaseException) -> None:
        """Report to the caller that the arguments could not be unpickled here. This is nobody's failure."""
        self.refuse(message, unreadable(error))

    def escaped(self, message: Message, error: BaseException) -> None:
        """Answer a message whose error escaped an executor (STG-2)."""
        try:
            self.failed(message, error)
        except BaseException as worse:  # noqa: BLE001 - whatever it is, the caller must not wait forever
            said = MeshError(
                f"{message.name or 'an endpoint'} raised {type(error).__name__}, which cannot be reported"
            )
            said.__cause__ = worse
            try:
                self.refuse(message, said)
            finally:
                self.fail(said)

    # Failures.

    async def between_messages(self, errand: Callable[[], Any]) -> Any:
        """Run something ahead of the messages that wait: on the actor's thread if it has one, else on its loop, at once."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with self.actor_host.failing:
            now = self.over or (self.threadless and self.made)
            if not now:
                self.errands.append((errand, answer))
        if not now:
            self.inbox.nudge()
        elif self.over or self.loop.is_here:
            return errand()
        else:
            self.loop.call_soon_threadsafe(self._run_errand, errand, answer)
        return await answer

    def in_turn(self, errand: Callable[[], Any], over: Callable[[asyncio.Future[Any]], None]) -> bool:
        """Run something between two messages, even if the loop drains the inbox; return false if the actor is over.

        ``over`` is called on the loop afterwards, or when the actor has ended before its turn.
        """
        answer: asyncio.Future[Any] = self.actor_host.loop.create_future()
        answer.add_done_callback(over)
        with self.actor_host.failing:
            if self.over or self.broken is not None:
                return False
            self.errands.append((errand, answer))
        self.inbox.nudge()
        return True

    def run_errands(self) -> None:
        """Run what is due between two messages."""
        context.enter((self.instance, None))
        errands, self.errands = self.errands, []
        for errand, answer in errands:
            self._run_errand(errand, answer)

    def _run_errand(self, errand: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        result: Any = None
        error: BaseException | None = None
        try:
            result = errand()
        except BaseException as raised:  # noqa: BLE001 - reported to the asker
            error = raised
        answer.get_loop().call_soon_threadsafe(settle, answer, result, error)

    async def supervise(self, failure: MeshFailure) -> bool | None:
        """Ask the actor about a failure of something that it owns; ``None`` if it has no ``__supervise__``."""
        method = getattr(self._cls, "__supervise__", None)
        if method is None or self.broken is not None:
            return None
        if not self.loop.is_here:
            there = asyncio.run_coroutine_threadsafe(self.supervise(failure), self.loop)
            return await asyncio.wrap_future(there)

        def ask() -> Any:
            # A constructor may have failed, or the actor ended, while this waited.
            return None if self.object is None else self.object.__supervise__(failure)

        context.enter((self.instance, None))
        if self.object is not None and inspect.iscoroutinefunction(method):
            verdict = ask()
        else:
            # Its endpoints use the same object.
            verdict = await self.between_messages(ask)
        if inspect.isawaitable(verdict):
            verdict = await verdict
        return bool(verdict)

    def fail(self, error: BaseException, because: MeshFailure | None = None) -> None:
        """Fail the actor because of an error that has no caller, and notify its owner. Its process and its neighbours live on."""
        with self.actor_host.failing:
            if self.broken is not None or self.over:
                return
            failure = self._failure(error, because)
            self.broken, self.disowned = SupervisionError(failure=failure), True
            self.inbox.retire()
            self.advance(ENDING)
        self.actor_host.process.supervision.pass_on(self.owner, failure)
        self.downfall = asyncio.run_coroutine_threadsafe(_ending.tear_down(self, error), self.loop)

    def _never_made(self) -> None:
        """Notify the owner, once, that there is no actor to handle a message that nobody waits for (CON-1)."""
        with self.actor_host.failing:
            error = self.broken
            if error is None or self.disowned:
                return
            self.disowned = True
        failure = dataclasses.replace(self._failure(error, None), unmade=True)
        self.actor_host.process.supervision.pass_on(self.owner, failure)

    def _failure(self, error: BaseException, because: MeshFailure | None) -> MeshFailure:
        from mesh_core._serialize.exceptions import decode_exception, encode_exception

        me, rank = self.actor_host.process.identity, self.instance.rank
        data, buffers = encode_exception(
            error, actor=self.instance.name, rank=rank.rank, host=me.host, pid=os.getpid()
        )
        chain = () if because is None else (*because.chain, f"{because.headline()}; {self.describe()} raised")
        return MeshFailure(
            mesh_name=self.instance.name,
            rank=rank.rank,
            point=rank,
            host=me.host,
            pid=os.getpid(),
            exception=decode_exception(data, buffers, point=rank),
            chain=chain,
            since=time.time(),
            kind=FailureKind.ACTOR_FAILED,
            _key=(*self.actor_host.process.runtime.me[:2], self.instance.actor_id),
        )


def unreadable(error: BaseException) -> BaseException:
    """Return the error for arguments that could not be unpickled here."""
    if isinstance(error, (MemoryError, MeshError)) or not isinstance(error, Exception):
        return error
    explained = explain_load_failure(error)
    explained.__cause__ = error
    return explained
