"""Calls that survive the restart of their actor: endpoints marked ``on_restart="wait"`` or ``"retry"``.

LST-1: a call is sent again only if it certainly did not run, or if its endpoint is declared idempotent.
LST-2: calls that wait for one actor are sent in the order in which they were made, before later calls.

Each message is a separate call, an *attempt*. The caller's future is a promise of the outcome of the last attempt, so a late
reply to an earlier attempt is dropped. A call whose attempt was lost waits in the line of its actor. The line asks the actor's
owner once, for all of its calls, whether the actor comes back (``_failures.returns``).
"""

from __future__ import annotations

import bisect
import enum
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from mesh_core._common.codes import MessageKind, Request, Undelivered
from mesh_core._common.control import Control
from mesh_core._common.errors import MeshError, SupervisionError, Undeliverable
from mesh_core._failures.returns import NOT_BEGUN
from mesh_core._futures.deadlines import inherited
from mesh_core._futures.future import _DONE, Future
from mesh_core._futures.output import caught_up
from mesh_core._futures.promise import Promise, _Promised
from mesh_core._meshes.adverbs import Endpoint
from mesh_core._meshes.outcomes import error_of, load
from mesh_core._native import Lost, Placement, Target, learn_moves
from mesh_core._serialize.exceptions import actor_error

if TYPE_CHECKING:
    from mesh_core._actors.reducers import Reducer
    from mesh_core._futures.awaited import Awaited
    from mesh_core._native import Call, Completion, Message
    from mesh_core._process.process import Process
    from mesh_core._serialize.exceptions import ActorError

P = ParamSpec("P")
R = TypeVar("R")


class Fate(enum.Enum):
    """How an attempt ended."""

    ANSWERED = enum.auto()
    """It has an outcome, a result or an error."""
    UNDER_WAY = enum.auto()
    """It may have run."""
    NOT_RUN = enum.auto()
    """It did not run, and its actor or process has failed."""
    NOBODY = enum.auto()
    """It did not run: the actor did not exist, which does not mean that anything has failed."""
    STOPPED = enum.auto()
    """It may have run: its actor was stopped, and has not failed."""
    BROKEN = enum.auto()
    """It did not run: the actor's constructor raised an exception."""


_MAY_HAVE_RUN = (Fate.UNDER_WAY, Fate.STOPPED)
_IN_ORDER = (Fate.NOBODY, Fate.STOPPED, Fate.BROKEN)
_CAME_BACK = {
    Undelivered.NO_ACTOR: Fate.NOBODY,
    Undelivered.NEVER_SPAWNED: Fate.NOBODY,
    Undelivered.ACTOR_STOPPED: Fate.NOBODY,
    Undelivered.ENDED: Fate.UNDER_WAY,
}


class _Outcome(_Promised[Any]):
    """The future of a call that survives restarts."""

    __slots__ = ("work",)

    work: _Work

    def _give_up(self, error: BaseException) -> bool:
        given_up = super()._give_up(error)
        if given_up:
            self.work.given_up()
        return given_up

    def _settle(self) -> None:
        super()._settle()
        with self._process.settling:
            if self._state == _DONE and self.work.reply is not None:
                reply, self.work.reply = self.work.reply, None
                try:
                    self._value = load(reply)
                except BaseException as error:  # noqa: BLE001 - kept, and raised at every get()
                    self._fail(error)

    def _is_behind(self) -> bool:
        answered = self.work.answered
        return answered is not None and answered.is_behind()

    def _catch_up(self, limit: float) -> list[Completion]:
        answered = self.work.answered
        return [] if answered is None else caught_up(self._process, cast("Call", answered), limit)

    # Deadlocks and late calls are described by the attempt in progress.

    def _refuse_wait(self, *, awaited: bool) -> None:
        attempt = self.work.attempt
        if attempt is not None and not attempt.done():
            try:
                attempt._refuse_wait(awaited=awaited)
            except MeshError as error:
                # The waiting caller gets the error; it is not reported anywhere else.
                self._give_up(error)
                raise

    def _late(self, waited: float | None, chain: str | None) -> tuple[str, dict[str, Any]]:
        attempt = self.work.attempt
        if attempt is None or attempt.done():
            return " (waiting for its actor to be respawned)", {"actor": self.work.endpoint._who.name}
        return attempt._late(waited, chain)


class _Asked(Promise[Any]):
    """The promise of the outcome of such a call."""

    __slots__ = ()
    _kind = _Outcome


class _Work:
    """One call, until it has its outcome."""

    __slots__ = (
        "__weakref__",
        "answered",
        "args",
        "attempt",
        "endpoint",
        "error",
        "fate",
        "future",
        "is_last",
        "kwargs",
        "life",
        "limit",
        "line",
        "number",
        "promise",
        "reply",
        "until",
    )

    def __init__(
        self,
        line: _Line,
        endpoint: LastingEndpoint[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        limit: float | None,
    ) -> None:
        self.line = line
        self.endpoint = endpoint
        self.args = args
        self.kwargs = kwargs
        self.promise: _Asked | None = _Asked()
        future = cast("_Outcome", self.promise.future)
        future.work = self
        future._what, future._limit = endpoint._what, limit
        self.limit = limit
        self.until = future._deadline = None if limit is None else time.monotonic() + limit
        # Weakly: the two refer to each other until the outcome is there.
        self.future = weakref.ref(future)
        self.number = 0
        self.life = -1
        """The latest life of the actor that is known not to have answered it."""
        self.fate = Fate.ANSWERED
        self.error: BaseException | None = None
        self.reply: Message | None = None
        self.attempt: Future[Any] | None = None
        self.answered: Awaited | None = None
        """The last attempt, once the call has its outcome."""
        self.is_last = False
        """The actor does not come back: the call fails like any other."""

    def __lt__(self, other: _Work) -> bool:
        return self.number < other.number

    def send(self) -> None:
        """Send a message. Raises the same errors as a call."""
        endpoint: Endpoint[..., Any] = self.endpoint
        if self.until is not None:
            left = self.until - time.monotonic()
            if left <= 0:
                future = self.future()
                if future is not None:
                    future._expire()
                self.line.over(self)
                return
            endpoint = Endpoint(
                endpoint._mesh, endpoint._name, endpoint._arity, left, endpoint._block, endpoint._keeps
            )
        attempt: Future[Any] = endpoint._begin("call_one", Future, self._look, self.args, self.kwargs)
        self.attempt = attempt
        attempt._limit = self.limit
        if self.promise is None or self.promise.cancelled:
            attempt.cancel()
        attempt.add_done_callback(self._done)

    def _look(self, call: Call) -> Message | None:
        outcome = call.outcomes()[0]
        error = error_of(outcome, 0, self.endpoint._who)
        if error is None:
            return outcome  # type: ignore[return-value]  # an outcome without an error is a message
        self.fate = _fate(outcome, error, self.endpoint)
        raise error

    def _done(self, attempt: Future[Any]) -> None:
        # `unseen` does not count as looking at the outcome: the caller must still be notified of a failure.
        self.error = attempt.unseen()
        if self.error is None:
            self.fate, self.reply = Fate.ANSWERED, attempt._value
        elif attempt._value is self.error and isinstance(self.error, _cancelled()):
            self.fate = Fate.ANSWERED
        self.line.came(self)

    def wants_another(self) -> bool:
        """Whether the call may be sent again."""
        if self.fate is Fate.ANSWERED or self.is_last or self.promise is None or self.promise.cancelled:
            return False
        return self.fate not in _MAY_HAVE_RUN or self.endpoint._arity.on_restart == "retry"

    def finish(self) -> None:
        """Set the outcome of the caller's future."""
        promise, self.promise = self.promise, None
        if self.attempt is not None:
            self.answered = self.attempt._call
        self.args, self.kwargs, self.attempt = (), {}, None
        if promise is None:
            return
        if self.error is None:
            promise.set_result(None)
        else:
            error, self.error = self.error, None
            # Each get() shows where it was called, and not where the error was found.
            promise.set_exception(error.with_traceback(None))

    def given_up(self) -> None:
        """The caller no longer wants an outcome."""
        attempt, self.promise = self.attempt, None
        if attempt is not None:
            attempt.cancel()
        self.line.over(self)


class _Line:
    """The calls to one actor: those in progress, and those that wait until the actor is respawned."""

    def __init__(self, endpoint: LastingEndpoint[..., Any]) -> None:
        mesh = endpoint._mesh
        self._process: Process = mesh._process
        self._location = mesh._location
        self._procs_id = mesh._procs_id
        self._actor_id = mesh._actor_id
        self._rank = mesh._view.rank_at(0)
        self._place = mesh._root.position(self._rank) or 0
        self._owner = mesh._owner
        self._lock = threading.RLock()
        # Held while a message is sent, to keep the order. This can take long if the actor's mailbox is full.
        self._sending = threading.RLock()
        self._life = 0
        """The latest life of the actor that is known here."""
        self._last = 0
        self._question: Future[Any] | None = None
        self._asks = False
        """The owner was just asked, and nothing waits for its answer yet."""
        self._waiting: list[_Work] = []
        self._under_way: dict[int, _Work] = {}

    def begin(self, work: _Work) -> None:
        """Send a call now, or let it wait."""
        with self._sending:
            with self._lock:
                self._last += 1
                work.number = self._last
                waits = bool(self._waiting) or self._question is not None
                if not waits and self._is_gone():
                    waits, work.life, work.fate = True, self._life, Fate.NOT_RUN
                if waits:
                    self._waiting.append(work)
                else:
                    work.life = self._life
                    self._under_way[work.number] = work
            if not waits:
                try:
                    work.send()
                except BaseException:
                    self.over(work)
                    work.promise = None
                    raise
                return
        self.go_on()

    def _is_gone(self) -> bool:
        return self._process.runtime.is_gone(*self._location.addr(self._procs_id, self._rank))

    def came(self, work: _Work) -> None:
        """An attempt has its outcome."""
        with self._lock:
            self._under_way.pop(work.number, None)
            again = work.wants_another()
            if again:
                work.attempt = None
                bisect.insort(self._waiting, work)
        if not again:
            work.finish()
        self.go_on()

    def over(self, work: _Work) -> None:
        """Forget a call that was given up."""
        with self._lock:
            self._under_way.pop(work.number, None)
            if work in self._waiting:
                self._waiting.remove(work)

    def go_on(self) -> None:
        """Send the calls that may be sent now; if none may, ask the owner."""
        question = None
        with self._lock:
            if not self._waiting:
                # Return before taking `_sending`: its holder may be waiting for room in the mailbox.
                return
        with self._sending:
            while (work := self._next()) is not None:
                try:
                    work.send()
                except BaseException as error:  # noqa: BLE001 - it goes to the caller's future
                    self.over(work)
                    work.error = error
                    work.finish()
            with self._lock:
                if self._asks:
                    self._asks, question = False, self._question
        if question is not None:
            question.add_done_callback(self._answered)

    def _next(self) -> _Work | None:
        """The call to send now, if any."""
        with self._lock:
            if self._question is not None or not self._waiting:
                return None
            work = self._waiting[0]
            if not work.is_last:
                if any(number < work.number for number in self._under_way):
                    # A call that was made earlier is in progress; its outcome will arrive soon.
                    return None
                if work.life < self._life and self._is_gone():
                    work.life, work.fate = self._life, Fate.NOT_RUN
                if work.fate is not Fate.ANSWERED and work.life >= self._life and self._ask(work):
                    return None
            del self._waiting[0]
            self._under_way[work.number] = work
            work.life, work.fate = self._life, Fate.ANSWERED
            return work

    def _ask(self, work: _Work) -> bool:
        """Ask the owner for a later life of the actor; false if it cannot be asked."""
        assert self._owner is not None
        mesh, rank, host = self._owner
        process = self._process
        sender = process.runtime.sender(
            Target.one(mesh, rank, Placement.on(host)), 0, Control.RETURNS, Request.EXTENSION
        )
        what = work.endpoint._what
        try:
            call = sender.call((self._actor_id, self._place, self._life, work.fate in _IN_ORDER))
        except MeshError:
            # The runtime has been shut down. The call fails like any other.
            work.is_last = True
            return False
        self._question = Future(process, call, _answer, lambda: f"the question whether {what()} comes back")
        self._asks = True
        return True

    def _answered(self, question: Future[Any]) -> None:
        error = question.unseen()
        answer = None if error is not None else question._value
        with self._lock:
            self._question = None
            if answer is None:
                for each in self._waiting:
                    each.is_last = True
            else:
                life, moves = answer
                if moves is not None:
                    learn_moves(self._process.runtime, self._procs_id, *moves)
                self._life = max(self._life, life)
            told = [each for each in self._waiting if each.is_last and each.error is not None]
            for each in told:
                self._waiting.remove(each)
        for each in told:
            each.finish()
        self.go_on()


def _answer(call: Call) -> Any:
    outcome = call.outcomes()[0]
    if (
        outcome is None
        or isinstance(outcome, Lost)
        or outcome.kind is MessageKind.UNDELIVERABLE
        or outcome.is_error
    ):
        return None
    return load(outcome)


def _cancelled() -> type[BaseException]:
    from asyncio import CancelledError

    return CancelledError


def _fate(outcome: Message | Lost | None, error: BaseException, endpoint: Endpoint[..., Any]) -> Fate:
    """How an attempt ended, according to its error."""
    if outcome is None:
        return Fate.ANSWERED
    if isinstance(outcome, Lost):
        if outcome.holder is not None:
            return Fate.ANSWERED
        return Fate.NOT_RUN if outcome.never_ran else Fate.UNDER_WAY
    if outcome.kind is MessageKind.UNDELIVERABLE:
        why, _ = outcome.undelivered() or (Undelivered.UNKNOWN, "")
        return _CAME_BACK.get(why, Fate.ANSWERED)
    return _fate_of(actor_error(error), endpoint, is_dead=outcome.is_dead)


def _fate_of(error: ActorError | None, endpoint: Endpoint[..., Any], *, is_dead: bool) -> Fate:
    """How an attempt ended that the actor's process answered with an error."""
    original = None if error is None else error.original
    if isinstance(original, SupervisionError) and not isinstance(original, Undeliverable):
        mesh, failure = endpoint._mesh, original.failure
        # Not the failure of another actor that the endpoint has called.
        if failure is not None and failure._key[2] == mesh._actor_id:
            return Fate.NOT_RUN if is_dead else Fate.UNDER_WAY
        return Fate.ANSWERED
    if is_dead:
        return Fate.BROKEN
    if isinstance(original, Undeliverable) and error is not None and error._told.get("cut_short"):
        return Fate.NOBODY if original.reason == NOT_BEGUN else Fate.STOPPED
    return Fate.ANSWERED


class _Lines:
    """The lines of one process. Each exists while somebody can call its actor or waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: weakref.WeakValueDictionary[tuple[int, int, int], _Line] = weakref.WeakValueDictionary()

    def of(self, endpoint: LastingEndpoint[..., Any]) -> _Line:
        mesh = endpoint._mesh
        key = (mesh._procs_id, mesh._actor_id, mesh._view.rank_at(0))
        with self._lock:
            found = self._lines.get(key)
            if found is None:
                found = self._lines[key] = _Line(endpoint)
            return found


class LastingEndpoint(Endpoint[P, R]):
    """An endpoint whose calls to one actor may wait until it is respawned; see ``on_restart`` of ``endpoint``."""

    __slots__ = ("_line",)

    _line: _Line

    def call_one(self, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call exactly one actor. Raises ``ValueError`` for a mesh of several: slice it first."""
        if not self._one:
            return super().call_one(*args, **kwargs)
        if not self._arity.fits(args, kwargs):
            raise self._refuse(args, kwargs)
        process = self._mesh._process
        limit = inherited(self._limit) if process.deadlines else self._limit
        try:
            line = self._line
        except AttributeError:
            line = self._line = process.slots.of(_Lines).of(self)
        work = _Work(line, self, args, kwargs, limit)
        assert work.promise is not None
        future: Future[R] = work.promise.future
        line.begin(work)
        return future

    def _single(self, index: int) -> Endpoint[P, R]:
        return LastingEndpoint(
            self._mesh._at(index), self._name, self._arity, self._limit, self._block, self._keeps
        )

    def _plain(self) -> Endpoint[P, R]:
        return Endpoint(self._mesh, self._name, self._arity, self._limit, self._block, self._keeps)

    def _like(self, limit: float | None, block: bool, reducer: Reducer | None) -> Endpoint[P, R]:
        if reducer is not None:
            return super()._like(limit, block, reducer)
        return LastingEndpoint(self._mesh, self._name, self._arity, limit, block, self._keeps)
