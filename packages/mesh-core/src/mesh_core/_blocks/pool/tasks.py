"""Tasks: each waits for a turn, runs on the replica that it gets, and has its outcome in a promise.

TSK-1: a task has one outcome, and runs once, unless its replica was lost and it may be run again.
TSK-2: at most so many tasks wait for a turn as have room; who submits another waits for room, in the order of asking.
TSK-3: a task that is cancelled, or too late, gives its place up: in the queue at once, at the replica when that has answered: that
it has not begun, that its coroutine was cancelled, or, of what cannot be interrupted, its result.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from mesh_core._common.codes import Request
from mesh_core._common.errors import MailboxFull, MeshError, NotBegun, SupervisionError, Undeliverable
from mesh_core._futures.promise import Promise, _Promised
from mesh_core._meshes.adverbs import Endpoint
from mesh_core._meshes.outcomes import value_of
from mesh_core._serialize.exceptions import ActorError

if TYPE_CHECKING:
    from mesh_core._actors.endpoint import Arity
    from mesh_core._blocks.pool.following import Following
    from mesh_core._blocks.pool.turns import Turns
    from mesh_core._futures.future import Future
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._native import Call as Native
    from mesh_core._native import Completion


class Step(Enum):
    """How far a task is."""

    WAITING = 0
    RUNNING = 1
    OVER = 2


class Call(NamedTuple):
    """What a replica is to be asked."""

    endpoint: str
    is_orderly: bool
    """Whether its replica begins nothing else before it has answered."""
    limit: float | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keep: bool = False
    """Whether the result is to stay where it is made."""
    checked: Arity | None = None
    """What the arguments are known to fit."""


class _Outcome(_Promised[Any]):
    """The future of a task: giving it up gives up the task."""

    __slots__ = ("task",)

    task: Task | None

    def _give_up(self, error: BaseException) -> bool:
        given_up = super()._give_up(error)
        task = self.task
        if given_up and task is not None:
            # Elsewhere: this may be a collection of garbage, in the middle of anything.
            with contextlib.suppress(MeshError):
                task.runner.following.soon(task.given_up)
        return given_up


class _Asked(Promise[Any]):
    """The promise of a task's outcome."""

    __slots__ = ()
    _kind = _Outcome


class Work(ABC):
    """One call that some replica is to answer."""

    __slots__ = (
        "_call",
        "_context",
        "_endpoint",
        "_inner",
        "_native",
        "_place",
        "_retries",
        "_step",
        "_until",
        "_wanted_back",
        "may_go_ahead",
        "runner",
    )

    def __init__(self, runner: Runner, call: Call, retries: int) -> None:
        self.runner = runner
        self._call = call
        self._retries = retries
        # Deadlines and spans are those of whoever has submitted it.
        self._context = contextvars.copy_context()
        self._step = Step.WAITING
        self._place = -1
        self._inner: Future[Any] | None = None
        self._native: Native | None = None
        """The call itself, where no future was needed for it."""
        self._endpoint: Endpoint[..., Any] | None = None
        self._until: float | None = None
        self._wanted_back = False
        # Time limits are for running alone.
        self.may_go_ahead = call.is_orderly and call.limit is None

    # Where the outcome goes; whoever calls these has seen to it that there is none yet.

    @abstractmethod
    def _keep(self, value: Any) -> None:
        """The outcome is a result."""

    @abstractmethod
    def _break(self, error: BaseException) -> None:
        """The outcome is an error."""

    @abstractmethod
    def _dropped(self) -> None:
        """It was given up."""

    @abstractmethod
    def cancel(self) -> None:
        """Give it up; from any place, a collection of garbage included."""

    # As an asker.

    def got(self, place: int, replica: ActorMesh[Any], *, ahead: bool = False) -> None:
        """Run on this replica."""
        runner = self.runner
        with runner.lock:
            wanted = self._step is Step.WAITING
            if wanted:
                self._step = Step.RUNNING
                self._place = place
            admits = runner.leaves_queue()
        if admits:
            runner.admit()
        if not wanted:
            if not (ahead and runner.turns.leave(place, self, None)):
                runner.turns.back(place, None)
            return
        try:
            inner = self._context.run(self._send, replica, ahead)
        except BaseException as error:  # noqa: BLE001 - it is the task's outcome
            failed = error
            # Elsewhere: a queue of tasks that all fail at once would nest as deep as it is long.
            runner.following.soon(lambda: self._over(failed, None))
            return
        if inner is None:
            runner.following.follow(self, self._answered)
        else:
            self._follow(inner)
        if self._step is Step.OVER:
            self._have_back(begun=True)
        elif self._wanted_back:
            self._have_back(begun=False)

    def _follow(self, inner: Future[Any]) -> None:
        runner = self.runner
        until = self._until = inner._deadline
        # The call goes on until the replica has answered, whatever becomes of the task.
        inner._deadline = None
        self._inner = inner
        if until is None:
            runner.following.follow(inner, self._done)
        else:
            runner.following.follow(inner, self._done, until, self._late)

    def _send(self, replica: ActorMesh[Any], ahead: bool) -> Future[Any] | None:
        name, _, limit, args, kwargs, keep, checked = self._call
        endpoint = _as_task(replica, name, limit, ahead, keep)
        if limit is None and type(endpoint) is Endpoint and not endpoint._attends():
            # Nobody sees a future of this call, and nothing but its reply ends it.
            if endpoint._arity is not checked and not endpoint._arity.fits(args, kwargs):
                raise endpoint._refuse(args, kwargs)
            self._endpoint = endpoint
            self._native = endpoint._senders.call((args, kwargs), False, None)
            return None
        future: Future[Any] = endpoint.call_one(*args, **kwargs)
        return future

    def take_back(self) -> None:
        """It is ahead, and better off elsewhere."""
        self._wanted_back = True
        self._have_back(begun=False)

    def _have_back(self, *, begun: bool) -> None:
        native, inner = self._native, self._inner
        if native is not None:
            native.take_back(begun)
        elif inner is not None:
            inner._take_back(begun=begun)

    def refused(self, error: BaseException) -> None:
        """No replica will ever take it."""
        runner = self.runner
        with runner.lock:
            wanted = self._step is Step.WAITING
            self._step = Step.OVER
        runner.left_queue()
        if wanted:
            self._fail(error)

    def end(self, error: BaseException) -> None:
        """The process's part in the mesh ends, and nobody does any more what is to be done."""
        with self.runner.lock:
            wanted = self._step is not Step.OVER
            self._step = Step.OVER
        if wanted:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.runner.over(self, failed=True)
        self._break(error)

    # As what is followed, in place of a future of the call.

    _deadline: float | None = None

    def _listen(self, listener: Completion, token: int) -> None:
        native = self._native
        if native is not None:
            native.note(listener, token)

    def _forget(self, listener: Completion) -> None:
        native = self._native
        if native is not None:
            native.forget(listener)

    def _progress(self) -> bool:
        return self._native is None or self._native.done()

    def _expire(self) -> None:
        raise AssertionError("it has no deadline")

    def _answered(self) -> None:
        native, endpoint = self._native, self._endpoint
        assert native is not None
        assert endpoint is not None
        self._native = None
        value, error = None, None
        try:
            value = value_of(native.outcomes()[0], 0, endpoint._who)
        except BaseException as raised:  # noqa: BLE001 - it is the task's outcome
            # Where it was raised is of no interest, and would keep what was going on here.
            error = raised.with_traceback(None)
            if isinstance(error, MeshError):
                endpoint._mesh._process.told(error)
        self._over(error, value)

    # As a call.

    def _done(self) -> None:
        inner = self._inner
        assert inner is not None
        # For its words, if the replica was the first to see that it has passed.
        inner._deadline = self._until
        error = inner.exception()
        self._over(error, None if error is not None else inner.get())

    def _late(self) -> None:
        """Its deadline has passed; the replica may still be busy with it."""
        inner = self._inner
        assert inner is not None
        error = inner._too_late()
        with self.runner.lock:
            wanted = self._step is Step.RUNNING
            self._step = Step.OVER
        if wanted:
            self._fail(error)
        inner._take_back(begun=True)

    def _over(self, error: BaseException | None, value: Any) -> None:
        """Its replica has answered, or was lost."""
        runner, place = self.runner, self._place
        lost = None
        was_ahead = False
        has_begun = True
        if error is None:
            # Its turn came, as the reply before it did.
            again = False
        else:
            lost = error if _is_crash(error) and not isinstance(error, NotBegun) else None
            was_ahead = runner.turns.leave(place, self, lost)
            has_begun = not isinstance(error, NotBegun) and not (was_ahead and lost is not None)
            again = not has_begun or (lost is not None and self._retries > 0)
            if isinstance(error, NotBegun) and not self._wanted_back and self._step is not Step.OVER:
                runner.turns.sent_back()
        with runner.lock:
            was_over = self._step is Step.OVER
            again = again and not was_over
            self._step = Step.WAITING if again else Step.OVER
        if again:
            self._inner = None
            self._wanted_back = False
            self._retries -= has_begun
            runner.again(self, retried=has_begun)
            if not was_ahead:
                runner.turns.back(place, lost)
            runner.turns.ask(self, first=not has_begun)
            return
        # The replica first: it has the next task while this one's outcome is looked at.
        if not was_ahead:
            runner.turns.back(place, lost)
        if was_over:
            return
        if error is not None:
            self._fail(error)
            return
        runner.over(self, failed=False)
        self._keep(value)

    def given_up(self) -> None:
        """It is no longer wanted."""
        runner = self.runner
        with runner.lock:
            before, self._step = self._step, Step.OVER
        if before is Step.OVER:
            return
        runner.over(self, failed=True)
        self._dropped()
        if before is Step.WAITING:
            if runner.turns.drop(self):
                runner.left_queue()
        else:
            self._have_back(begun=True)


class Task(Work):
    """One whose outcome is in a promise."""

    __slots__ = ("_promise", "future")

    def __init__(self, runner: Runner, name: str, call: Call, retries: int) -> None:
        super().__init__(runner, call, retries)
        self._promise = _Asked(name)
        self.future: Future[Any] = self._promise.future
        self._set_owner(self)

    def _set_owner(self, task: Task | None) -> None:
        assert isinstance(self.future, _Outcome)
        self.future.task = task

    def _keep(self, value: Any) -> None:
        self._set_owner(None)
        self._promise.set_result(value)

    def _break(self, error: BaseException) -> None:
        self._set_owner(None)
        self._promise.set_exception(error)

    def _dropped(self) -> None:
        self._set_owner(None)

    def cancel(self) -> None:
        self.future.cancel()


class Runner:
    """What the tasks of one pool in one process have in common."""

    def __init__(self, name: str, turns: Turns, following: Following, room: int) -> None:
        self.name = name
        self.turns = turns
        self.following = following
        self.lock = threading.Lock()
        self.closed = False
        self._room = room
        self._queue: deque[Promise[bool]] = deque()
        self._open: dict[Work, None] = {}
        self._waiting = 0
        self._done = self._failed = self._retried = 0
        self._marks: deque[list[int]] = deque(maxlen=_SECONDS)
        """Outcomes by second."""
        self._mark = [0, 0]
        self._next_mark = 0
        """The last of these, and when the next begins."""
        self._idle: list[Promise[None]] = []
        following.join(self)

    # Room (TSK-2).

    @property
    def is_full(self) -> bool:
        """Whether there is no room just now: a look without the lock, for those who can come back."""
        return self._waiting >= self._room or bool(self._queue)

    def set_room(self, room: int) -> None:
        """So many tasks may wait from now on."""
        with self.lock:
            self._room = room
        self.admit()

    def room(self, *, wait: bool) -> Future[bool] | None:
        """Take room for a task that waits: at once, or when the future is done. Without ``wait`` a full queue raises."""
        if self.closed:
            self.check_open()
        with self.lock:
            if self._room > self._waiting and not self._queue:
                self._waiting += 1
                return None
            if not wait:
                raise MailboxFull(
                    f"{self.name} has {self._waiting} tasks waiting for a replica, as many as it has room for, and submit() "
                    "must not block an event loop; use `await pool.submit_async(...)`"
                )
            promise: Promise[bool] = Promise(f"room in {self.name}")
            self._queue.append(promise)
        return promise.future

    def leave_room(self, room: Future[bool]) -> None:
        """It is no longer wanted, whether it has come or not."""
        if not room.cancel() and room.exception() is None:
            self.left_queue()

    def left_queue(self) -> None:
        """A task waits no more."""
        with self.lock:
            admits = self.leaves_queue()
        if admits:
            self.admit()

    def leaves_queue(self) -> bool:
        """The same under the lock; whether there is somebody to admit now."""
        self._waiting -= 1
        return bool(self._queue)

    def admit(self) -> None:
        """Let those in who wait for room."""
        while True:
            with self.lock:
                if not self._queue or (self._waiting >= self._room and not self.closed):
                    return
                promise = self._queue.popleft()
                self._waiting += 1
            # Who was to have it may have gone.
            if not promise.set_result(True):
                with self.lock:
                    self._waiting -= 1

    def check_open(self) -> None:
        if self.closed:
            raise MeshError(f"{self.name} is closed, and accepts no more tasks")

    # Tasks.

    def begin(self, task: Work) -> None:
        """Room was taken for it: have it run."""
        with self.lock:
            closed = self.closed
            if not closed:
                self._open[task] = None
        if closed:
            self.left_queue()
            self.check_open()
        self.turns.ask(task)

    def again(self, task: Work, *, retried: bool) -> None:
        """It is to be run elsewhere: it waits, whether there is room or not."""
        with self.lock:
            self._waiting += 1
            self._retried += retried

    def over(self, task: Work, *, failed: bool) -> None:
        """It has its outcome."""
        now = time.monotonic()
        idle: Sequence[Promise[None]] = ()
        with self.lock:
            self._open.pop(task, None)
            if failed:
                self._failed += 1
            else:
                self._done += 1
            if now >= self._next_mark:
                self._mark = [int(now), 0]
                self._next_mark = self._mark[0] + 1
                self._marks.append(self._mark)
            self._mark[1] += 1
            if self._idle and not self._open:
                idle, self._idle = self._idle, []
        for each in idle:
            each.set_result(None)

    def idle(self) -> Future[None]:
        """Done when no task is left."""
        promise: Promise[None] = Promise(f"the end of the tasks of {self.name}")
        with self.lock:
            wait = bool(self._open)
            if wait:
                self._idle.append(promise)
        if not wait:
            promise.set_result(None)
        return promise.future

    def close(self) -> None:
        """Take no more tasks; who waits for room is told."""
        with self.lock:
            self.closed = True
        self.admit()

    def cancel_all(self) -> None:
        """Give up all tasks."""
        with self.lock:
            tasks = list(self._open)
        for task in tasks:
            task.cancel()

    def end(self) -> None:
        """The process's part in the mesh ends."""
        self.close()
        with self.lock:
            tasks = list(self._open)
        for task in tasks:
            task.end(MeshError(f"{self.name} has ended with this process's part in the mesh (shutdown())"))

    def counts(self) -> tuple[int, int, int, int, int, float]:
        """Waiting, running, done, failed, retried; outcomes per second of late."""
        now = time.monotonic()
        with self.lock:
            marks = [(second, n) for second, n in self._marks if second > now - _SECONDS]
            waiting = self._waiting
            running = len(self._open) - waiting
            counts = (waiting, max(0, running), self._done, self._failed, self._retried)
        if not marks:
            return (*counts, 0.0)
        return (*counts, sum(n for _, n in marks) / max(now - marks[0][0], 1e-3))

    def __len__(self) -> int:
        return len(self._open)


_SECONDS = 10
_MOST_KEPT = 64


def _as_task(
    replica: ActorMesh[Any], name: str, limit: float | None, ahead: bool, keep: bool
) -> Endpoint[..., Any]:
    """An endpoint of a replica whose calls can be taken back."""
    kept: dict[Any, Endpoint[..., Any]] = replica.__dict__.setdefault("_as_tasks", {})
    found = kept.get((name, limit, ahead, keep))
    if found is None:
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        # Another object than the mesh's own.
        found = getattr(replica, name).with_options(timeout=limit, keep=keep)._plain()
        request = Request.TASK_AHEAD if ahead else Request.TASK
        found._senders = found._sender(replica._view, request=request)
        kept[name, limit, ahead, keep] = found
    return found


def _is_crash(error: BaseException | None) -> bool:
    """Whether it tells of the end of the replica, and not of somebody's whom the endpoint has called."""
    return isinstance(error, (SupervisionError, Undeliverable)) and not isinstance(error, ActorError)
