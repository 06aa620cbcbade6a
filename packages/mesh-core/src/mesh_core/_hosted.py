"""One actor in its process: its object, its queue, and the one who works through it.

An actor whose endpoints are all coroutines is worked for by the process's event loop. One with a sync endpoint has a
thread of its own. Where it has both, the inbox goes back and forth: whoever comes upon a message for the other hands
over the inbox with it, so that a run of calls of one kind is as fast as in an actor that has only that kind.

STG-1: an actor handles one message at a time, in the order of arrival; only ``concurrent`` endpoints overlap.
STG-2: every call gets exactly one reply, whatever its endpoint does.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from mesh_core import _context
from mesh_core._context import Context, Instance
from mesh_core._endpoint import EndpointProperty
from mesh_core._errors import ActorTimeout, MeshError, SupervisionError, Undeliverable
from mesh_core._failure import MeshFailure
from mesh_core._nearest import did_you_mean
from mesh_core._respond import MARKS, marked
from mesh_core._serialize import explain_load_failure
from mesh_core._traces import notice

if TYPE_CHECKING:
    from mesh_core._native import Inbox, Message
    from mesh_core._stage import Stage

_BURST = 256
_GRACE_S = 0.1
"""A caller that waits keeps its deadline itself, and can say more about it; this process does where none waits."""
_EXPIRED = "the call's deadline has passed"

CallKey = tuple[tuple[int, int, int], int]
"""A call's caller and its number there."""


class Hosted:
    """One actor: its object, its queue, and the one who works through it."""

    __slots__ = (
        "_abandoned",
        "_args",
        "_at",
        "_behind",
        "_burst",
        "_cls",
        "_downfall",
        "_errands",
        "_handed_back",
        "_ident",
        "_kwargs",
        "_loops",
        "_runner",
        "_running",
        "_skipped",
        "_spawned",
        "_starting",
        "_thread",
        "broken",
        "ending",
        "gone",
        "inbox",
        "instance",
        "object",
        "over",
        "owner",
        "stage",
        "table",
    )

    def __init__(
        self,
        stage: Stage,
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
        self.stage = stage
        self.inbox = inbox
        self.instance = instance
        self._cls = cls
        self._spawned: Message | None = spawned
        self._args = args
        self._kwargs = kwargs or {}
        self.object: Any = None
        self.broken = broken
        """Why there is no object."""
        self.table: dict[str, EndpointProperty[..., Any]] = stage.table(cls) if cls is not None else {}
        self.owner = owner
        """Who hears of its failures: the process it lives in, and its id there."""
        self.over = False
        """Whether it has ended: stopped, not merely failed."""
        self.ending = False
        """Whether what it owns has been stopped, or is being."""
        self._abandoned = False
        """Whether its thread did not come back from a ``__cleanup__``, so that the loop answers in its place."""
        self._behind: list[Message] = []
        """What was taken from the inbox together with the stop, from behind it."""
        self._burst: list[Message] = []
        """What the actor's thread has taken from the inbox, and how far it is with that: the rest is the loop's when the
        thread does not come back."""
        self._at = 0
        self._errands: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        """What the actor's own thread is to do between two messages."""
        self._downfall: concurrent.futures.Future[None] | None = None
        """What follows the actor's failure; an end waits for it."""
        self.gone: asyncio.Future[None] | None = None
        """Done when the actor has ended; made when somebody waits for that."""
        self._runner: asyncio.Task[None] | None = None
        self._running: dict[CallKey, asyncio.Task[Any]] = {}
        self._skipped: set[CallKey] = set()
        self._starting: set[Message] = set()
        self._ident = 0
        self._thread = any(not spec.is_async for spec in self.table.values())
        self._loops = not self._thread
        """Whether the loop takes from the inbox just now, rather than the actor's thread."""
        self._handed_back: queue.SimpleQueue[list[Message]] = queue.SimpleQueue()

    def start(self) -> None:
        """Construct the object and begin to work."""
        if self._thread:
            name = f"mesh-{self.instance.name}"
            thread = threading.Thread(target=self._serve, name=name, daemon=True)
            self.stage.threads.add(thread)
            thread.start()
        else:
            self._construct()
            self.inbox.attach(self.stage.waker, self.instance.actor_id)

    def _construct(self) -> None:
        spawned, self._spawned = self._spawned, None
        if self.broken is None:
            _context.enter(Context(self.instance, None))
            try:
                assert self._cls is not None
                notice(self.stage.process)
                tracer = self.stage.process.tracer
                make: Callable[..., Any] = self._cls
                if tracer is not None and spawned is not None:
                    make = tracer.handling(None, make, spawned, self.instance)
                self.object = make(*self._args, **self._kwargs)
                # The constructor may be what sets a provider.
                notice(self.stage.process)
            except BaseException as error:  # noqa: BLE001 - it is the spawner's to hear
                self._examine(error)
                self.broken = error
        self._args, self._kwargs = (), {}
        if spawned is None:
            return
        if self.broken is None:
            spawned.reply(None)
        else:
            self.stage.reply_error(spawned, self.broken, self.instance.name, dead=True)

    # On a thread of its own.

    def _serve(self) -> None:
        self._ident = threading.get_ident()
        self.inbox.worked_by(self._ident)
        self._construct()
        burst = self.inbox.take(_BURST)
        while burst:
            left = self._handle_all(burst)
            if left is None:
                return
            if left:
                burst = self._lend(left)
                continue
            # The last references must not outlive the handling: they hold buffers, and replies not given.
            burst.clear()
            self._forget_skipped()
            burst = self.inbox.take(_BURST)

    def _handle_all(self, burst: list[Message]) -> list[Message] | None:
        """Handle messages up to the first that is the loop's; what is left is returned, ``None`` after the last."""
        self._burst = burst
        for index, message in enumerate(burst):
            if self.broken is None:
                self._at = index
            elif self._left_behind(index):
                return None
            spec = self.table.get(message.name) or self._unmarked(message)
            if spec is not None and not spec.is_async and not self._skipped and self.broken is None:
                self._run(message, spec)
            elif message.kind == "stop_actor":
                self._behind = burst[index + 1 :]
                self._stop_thread(message)
                return None
            elif message.kind == "failure":
                self._run_errands()
            elif not self._given_up(message) and not self._refused(message, spec):
                assert spec is not None
                if spec.is_async:
                    return burst[index:]
                self._run(message, spec)
        return []

    def _left_behind(self, index: int) -> bool:
        """Say, to the thread of an actor that has failed, whether the loop has gone on without it."""
        with self.stage.failing:
            if not self._abandoned:
                self._at = index
            return self._abandoned

    def _run(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        if message.left is not None and self._too_late(message):
            return
        _context.enter(Context(self.instance, message))
        args = None
        try:
            args, kwargs = message.load()
            function = self._function(message, spec)
            if spec.respond is None:
                message.reply(function(self.object, *args, **kwargs))
            else:
                function(args, kwargs)
        except BaseException as error:  # noqa: BLE001 - it is the caller's to hear
            if args is None:
                self._refuse(message, _unreadable(error))
            else:
                self._failed(message, error)

    def _lend(self, messages: list[Message]) -> list[Message]:
        """Leave the inbox to the loop until it comes upon a message for this thread; returns from that one on."""
        self.stage.loop.call_soon_threadsafe(self._borrow, messages)
        return self._handed_back.get()

    def _stop_thread(self, message: Message) -> None:
        error: BaseException | None = None
        overdue = self._watch_cleanup(message)
        try:
            if self._downfall is not None:
                with self.stage.failing:
                    # From here on errands run on the loop: this thread waits.
                    self._loops = True
                self._run_errands()
                self._await_here(self._downfall)
            self._close_estate()
            cleanup = self._cleanup(None)
            if cleanup is not None:
                ended = asyncio.run_coroutine_threadsafe(_guarded(cleanup), self.stage.loop)
                failed = self._await_here(ended)
                if failed is not None:
                    raise failed
        except BaseException as failed:  # noqa: BLE001 - it is the stopper's to hear
            error = failed
        self.stage.loop.call_soon_threadsafe(overdue.set)
        self._ended(message, error)

    def _await_here(self, ending: concurrent.futures.Future[Any]) -> Any:
        """Wait on the actor's thread for what the loop does for its end, within the limit."""
        try:
            return ending.result(self.stage.stop_limit)
        except TimeoutError:
            if ending.done():
                raise
            ending.cancel()
            raise self._overdue() from None

    def _close_estate(self) -> None:
        self.ending = True
        estate = self.stage.process.estates.leave(self.instance.actor_id)
        if estate is not None:
            estate.close(self.stage.stop_limit)

    def _watch_cleanup(self, message: Message) -> asyncio.Event:
        """Answer the stopper if the actor's thread does not come to an end; set the event once it does."""
        ended = asyncio.Event()

        async def watch() -> None:
            try:
                await asyncio.wait_for(ended.wait(), 2 * self.stage.stop_limit)
            except TimeoutError:
                self._ended(message, self._overdue())

        self.stage.loop.call_soon_threadsafe(lambda: self.stage.keep(self.stage.loop.create_task(watch())))
        return ended

    def _overdue(self) -> MeshError:
        return MeshError(
            f"the __cleanup__ of {self.describe()} has not come to an end within {self.stage.stop_limit:g} s; "
            "it is left to itself (stop_timeout in the settings is the limit)"
        )

    def _run_errands(self) -> None:
        _context.enter(Context(self.instance, None))
        errands, self._errands = self._errands, []
        for errand, answer in errands:
            result: Any = None
            error: BaseException | None = None
            try:
                result = errand()
            except BaseException as raised:  # noqa: BLE001 - the asker's to hear
                error = raised
            self.stage.loop.call_soon_threadsafe(_answer, answer, result, error)

    # On the loop.

    def pump(self) -> None:
        """Messages have come for an actor whose inbox is the loop's."""
        if self._runner is None and self._loops:
            self._runner = self.stage.loop.create_task(self._work([]))

    def _borrow(self, messages: list[Message]) -> None:
        """Take the inbox over from the actor's thread, with what that had taken from it already."""
        self._loops = True
        self.inbox.attach(self.stage.waker, self.instance.actor_id)
        # Of its own: the thread must not hold on to messages, and the buffers in them, while it waits.
        mine = messages.copy()
        messages.clear()
        self._runner = self.stage.loop.create_task(self._work(mine))

    def _hand_back(self, messages: list[Message]) -> None:
        self._loops = False
        self._runner = None
        self.inbox.detach()
        self._handed_back.put(messages)

    def release(self) -> None:
        """The loop ends: let the actor's thread go, should it wait to get its inbox back."""
        if self._thread:
            self._handed_back.put([])

    async def _work(self, burst: list[Message]) -> None:
        while burst or (burst := self.inbox.take_nowait(_BURST)):
            for index, message in enumerate(burst):
                spec = self.table.get(message.name) or self._unmarked(message)
                mine = self._abandoned or message.kind == "failure" or (spec is not None and spec.is_async)
                if self._thread and not mine:
                    self._hand_back(burst[index:])
                    return
                if message.kind == "stop_actor":
                    self._behind = burst[index + 1 :]
                    await self._stop_async(message)
                    return
                if message.kind == "failure":
                    self._run_errands()
                    continue
                if self._given_up(message) or self._refused(message, spec):
                    continue
                assert spec is not None
                if spec.concurrent:
                    self._starting.add(message)
                    self.stage.keep(self.stage.loop.create_task(self._run_async(message, spec)))
                else:
                    await self._run_async(message, spec)
            burst = []
            del message
            self._forget_skipped()
        # Nothing was awaited since the queue was seen empty: a message that comes now starts another runner.
        self._runner = None

    async def _run_async(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        self._starting.discard(message)
        if self._given_up(message) or (self.broken is not None and self._refused(message, spec)):
            # Between whoever took the message and its turn on the loop.
            return
        # A broadcast has no number, and nobody who could cancel it; but the actor's failure ends it too.
        key = (message.src, message.call or -id(message))
        task = asyncio.current_task()
        assert task is not None
        limit = None
        if (left := message.left) is not None:
            if self._too_late(message):
                return
            limit = self.stage.loop.call_later(left + _GRACE_S, task.cancel, _EXPIRED)
        _context.enter(Context(self.instance, message))
        self._running[key] = task
        try:
            await self._perform(message, spec)
        except asyncio.CancelledError as error:
            self._cut_short(message, error)
            # The call was cancelled, not the actor: its runner goes on with the next message.
            if task.cancelling():
                task.uncancel()
        finally:
            if limit is not None:
                limit.cancel()
            self._running.pop(key, None)

    async def _perform(self, message: Message, spec: EndpointProperty[..., Any]) -> None:
        args = None
        try:
            args, kwargs = message.load()
            function = self._function(message, spec)
            if spec.respond is None:
                message.reply(await function(self.object, *args, **kwargs))
            else:
                await function(args, kwargs)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - it is the caller's to hear
            if args is None:
                self._refuse(message, _unreadable(error))
            else:
                self._failed(message, error)

    def _cut_short(self, message: Message, error: asyncio.CancelledError) -> None:
        if self.broken is not None:
            self._refuse(message, self.broken)
        elif _EXPIRED in error.args:
            self._refuse(message, _expired(message))
        elif message.call:
            self._refuse(message, error)
        else:
            self._failed(message, error)

    async def _stop_async(self, message: Message) -> None:
        error: BaseException | None = None
        try:
            if self._downfall is not None:
                await asyncio.wrap_future(self._downfall)
            await self._close_estate_async()
            cleanup = self._cleanup(None)
            if cleanup is not None:
                await self._in_time(cleanup)
        except BaseException as failed:  # noqa: BLE001 - it is the stopper's to hear
            error = failed
        self._ended(message, error)

    async def _close_estate_async(self) -> None:
        self.ending = True
        estate = self.stage.process.estates.leave(self.instance.actor_id)
        if estate is not None:
            await estate.close_async(self.stage.stop_limit)

    async def _in_time(self, cleanup: Coroutine[Any, Any, object]) -> None:
        limit = asyncio.timeout(self.stage.stop_limit)
        try:
            async with limit:
                await cleanup
        except TimeoutError:
            if limit.expired():
                raise self._overdue() from None
            raise

    async def _apart(self, errand: Callable[[], Any]) -> Any:
        """Run something between two messages: on the actor's thread if it has one, else here and now."""
        answer: asyncio.Future[Any] = self.stage.loop.create_future()
        with self.stage.failing:
            here = not self._thread or self._loops or self.over
            if not here:
                self._errands.append((errand, answer))
        if here:
            return errand()
        self.inbox.nudge()
        return await answer

    async def _cleanup_in_time(self, error: BaseException) -> Coroutine[Any, Any, object] | None:
        """Run ``__cleanup__`` after a failure; should the actor's thread not come back, the loop answers in its place."""

        def clean_up() -> Any:
            try:
                return self._cleanup(error)
            except BaseException as raised:  # noqa: BLE001 - some would end the loop, if a task raised them
                return raised

        done = self.stage.loop.create_task(self._apart(clean_up))
        self.stage.keep(done)
        finished, _ = await asyncio.wait([done], timeout=self.stage.stop_limit)
        if finished:
            cleanup: Coroutine[Any, Any, object] | BaseException | None = done.result()
            if isinstance(cleanup, BaseException):
                raise cleanup
            return cleanup
        with self.stage.failing:
            self._abandoned = self._loops = True
            left = self._burst[self._at + 1 :]
        self.inbox.attach(self.stage.waker, self.instance.actor_id)
        self._runner = self.stage.loop.create_task(self._work(left))
        raise self._overdue()

    async def _tear_down(self, error: BaseException) -> None:
        """What follows a failure: what the actor owns ends, children first, then ``__cleanup__`` runs."""
        try:
            await self._close_estate_async()
            cleanup = await self._cleanup_in_time(error)
            if cleanup is not None:
                await self._in_time(cleanup)
        except BaseException:
            logging.getLogger("mesh").exception("the __cleanup__ of %s raised", self.describe())
        self.object = None

    # Both.

    def describe(self) -> str:
        """Name the actor for people."""
        return self.instance.describe()

    def _cleanup(self, error: BaseException | None) -> Coroutine[Any, Any, object] | None:
        """Run ``__cleanup__`` if there is one; a coroutine is returned to be awaited."""
        cleanup = getattr(self.object, "__cleanup__", None)
        if cleanup is None:
            return None
        _context.enter(Context(self.instance, None))
        done = cleanup(error)
        return done if asyncio.iscoroutine(done) else None

    async def supervise(self, failure: MeshFailure) -> bool | None:
        """Ask the actor about a failure of something that it owns; ``None`` if it has no ``__supervise__``."""
        method = getattr(self._cls, "__supervise__", None)
        if method is None or self.broken is not None:
            return None

        def ask() -> Any:
            # A constructor may have failed, or the actor ended, while this had to wait.
            return None if self.object is None else self.object.__supervise__(failure)

        _context.enter(Context(self.instance, None))
        if self.object is not None and inspect.iscoroutinefunction(method):
            verdict = ask()
        else:
            # Its endpoints and this share the object.
            verdict = await self._apart(ask)
        if inspect.isawaitable(verdict):
            verdict = await verdict
        return bool(verdict)

    def fail(self, error: BaseException, because: MeshFailure | None = None) -> None:
        """The actor has failed: with nobody to tell, its owner is told. Its process, and its neighbours, live on."""
        with self.stage.failing:
            if self.broken is not None or self.over:
                return
            failure = self._failure(error, because)
            self.broken = SupervisionError(failure=failure)
        for key, task in list(self._running.items()):
            self.stage.loop.call_soon_threadsafe(self._interrupt, key, task)
        process = self.stage.process
        process.faults.pass_on(self.owner, failure)
        self._downfall = asyncio.run_coroutine_threadsafe(self._tear_down(error), self.stage.loop)

    def _interrupt(self, key: CallKey, task: asyncio.Task[Any]) -> None:
        # One task works through the inbox: by now it may be at another message, even the stop.
        if self._running.get(key) is task:
            task.cancel()

    def _failure(self, error: BaseException, because: MeshFailure | None) -> MeshFailure:
        from mesh_core._exceptions import decode_exception, encode_exception

        me, rank = self.stage.process.identity, self.instance.rank
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
            _key=(me.mesh_id, me.rank, self.instance.actor_id),
        )

    def cancel(self, key: CallKey) -> None:
        """A caller has given up: cancel the coroutine that works for it, or skip its message when it comes up."""
        running = self._running.get(key)
        if running is not None:
            running.cancel()
        else:
            self._skipped.add(key)

    def _function(self, message: Message, spec: EndpointProperty[..., Any]) -> Callable[..., Any]:
        """What is to be called for a message; see ``_respond`` and ``_tracer`` for what may stand around it."""
        function, tracer = spec.function, self.stage.process.tracer
        if spec.respond is not None:
            function = partial(spec.respond, self, message)
        if tracer is not None:
            function = tracer.handling(spec, function, message, self.instance)
        return function

    def _too_late(self, message: Message) -> bool:
        """Answer a message whose deadline has passed; whoever called has given up."""
        self.stage.process.deadlines = True
        if (message.left or 0.0) > 0:
            return False
        self._refuse(message, _expired(message))
        return True

    def is_thread(self, ident: int) -> bool:
        """Whether this is the actor's own thread, which handles a message whenever it runs anything."""
        return self._thread and self._ident == ident

    def is_handled_by(self, task: asyncio.Task[Any] | None) -> bool:
        """Whether this is the task in which the actor handles one message after the other."""
        return task is not None and self._runner is task

    def needs_loop(self, endpoint: str) -> bool:
        """Whether the process's loop has to run for that endpoint to be called."""
        spec = self.table.get(endpoint)
        return self._loops or (spec is not None and spec.is_async)

    def _given_up(self, message: Message) -> bool:
        if self._skipped:
            key = (message.src, message.call)
            if key in self._skipped:
                self._skipped.discard(key)
                return True
        return False

    def _forget_skipped(self) -> None:
        # With the queue empty and everything begun, what is left was for calls that were over already.
        if self._skipped and len(self.inbox) == 0 and not self._starting:
            self._skipped.clear()

    def _unmarked(self, message: Message) -> EndpointProperty[..., Any] | None:
        """The endpoint of a call that is to be answered in another way than by its result; see ``_respond``."""
        if message.name[:1] not in MARKS or self._cls is None:
            return None
        return marked(self.table, self._cls, message.name, threaded=self._thread)

    def _refused(self, message: Message, spec: EndpointProperty[..., Any] | None) -> bool:
        if self.broken is not None:
            # Of a failure the owner was told, once, and not with every message that nobody waits for.
            if message.call or not isinstance(self.broken, SupervisionError):
                self.stage.reply_error(message, self.broken, self.instance.name, dead=True)
            return True
        if spec is None:
            missing = AttributeError(
                f"{self.instance.class_name} has no endpoint {message.name!r}{did_you_mean(message.name, self.table)}; "
                "the caller and this process have different versions of the class"
            )
            self._refuse(message, missing)
            return True
        return False

    def _examine(self, error: BaseException) -> None:
        if self.stage.process.settings.post_mortem:
            self.stage.breakpoints.examine(error)

    def _failed(self, message: Message, error: BaseException) -> None:
        """An endpoint has raised: its caller's to hear, or, where nobody waits, the owner's."""
        self._examine(error)
        if message.call:
            self.stage.reply_error(message, error, self.instance.name)
        else:
            message.failed()
            self.fail(error)

    def _refuse(self, message: Message, error: BaseException) -> None:
        """A message that the actor cannot be blamed for."""
        self.stage.reply_error(message, error, self.instance.name)

    def _ended(self, message: Message, error: BaseException | None) -> None:
        with self.stage.failing:
            if self.over:
                return
            self.over = True
        self.object = None
        behind, self._behind, self._burst = self._behind, [], []
        for _, answer in self._errands:
            self.stage.loop.call_soon_threadsafe(_answer, answer, None, None)
        self.stage.process.runtime.close_inbox(self.instance.actor_id)
        if error is not None:
            self._examine(error)
            self.stage.reply_error(message, error, self.instance.name)
        elif message.call:
            message.reply(None)
        for late in behind:
            if late.kind == "stop_actor" and late.call:
                late.reply(None)
            elif late.call:
                self._refuse(late, Undeliverable(f"{self.describe()} stopped before it came to this message"))
        self.stage.loop.call_soon_threadsafe(self.stage.forget, self)


async def _guarded(cleanup: Coroutine[Any, Any, object]) -> BaseException | None:
    """Await it; what it raises, even what would end the loop, is returned."""
    try:
        await cleanup
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        return error
    return None


def _answer(answer: asyncio.Future[Any], verdict: Any, error: BaseException | None) -> None:
    if not answer.done():
        if error is None:
            answer.set_result(verdict)
        else:
            answer.set_exception(error)


def _expired(message: Message) -> ActorTimeout:
    return ActorTimeout(
        f"the deadline of {message.name} passed before it had returned; it was not run to its end"
    )


def _unreadable(error: BaseException) -> BaseException:
    """What the caller hears of arguments that could not be rebuilt here."""
    if isinstance(error, (MemoryError, MeshError)) or not isinstance(error, Exception):
        return error
    explained = explain_load_failure(error)
    explained.__cause__ = error
    return explained
