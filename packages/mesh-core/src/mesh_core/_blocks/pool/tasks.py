"""Tasks: each waits for a turn, runs on the replica that it gets, and puts its outcome into a promise.

TSK-1: a task has one outcome and runs once, unless its replica was lost and it may be run again.
TSK-2: the number of tasks that wait for a turn is limited; submitters of more tasks wait for room, in order.
TSK-3: a task that is cancelled or has timed out gives up its place: in the queue at once; at a replica when that has answered
that the task had not begun, or that its coroutine was cancelled, or, if it cannot be interrupted, with its result.
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
from mesh_core._futures.output import caught_up
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
    """The state of a task."""

    WAITING = 0
    RUNNING = 1
    OVER = 2


class Call(NamedTuple):
    """How replicas are called. The tasks of ``map`` share one, and differ in their arguments."""

    endpoint: str
    is_orderly: bool
    """Whether the replica begins nothing else before it has answered this call."""
    limit: float | None
    keep: bool
    """Whether the result stays where it is made (``keep=True``)."""
    checked: Arity
    """The endpoint's arity, which the arguments were checked against."""


class _Outcome(_Promised[Any]):
    """The future of a task. Cancelling the future cancels the task."""

    __slots__ = ("answered", "task")

    answered: Native | None
    """The call that gave the outcome, if what was printed in it is still to be shown."""
    task: Task | None

    def _is_behind(self) -> bool:
        return self.answered is not None and self.answered.is_behind()

    def _catch_up(self, limit: float) -> list[Completion]:
        return [] if self.answered is None else caught_up(self._process, self.answered, limit)

    def _give_up(self, error: BaseException) -> bool:
        given_up = super()._give_up(error)
        task = self.task
        if given_up and task is not None:
            # On another thread: this may run during a garbage collection, at any point.
            with contextlib.suppress(MeshError):
                task.runner.following.soon(task.given_up)
        return given_up


class _Asked(Promise[Any]):
    """The promise of a task's outcome."""

    __slots__ = ()
    _kind = _Outcome


class Work(ABC):
    """One call that some replica will answer."""

    __slots__ = (
        "_args",
        "_call",
        "_context",
        "_endpoint",
        "_inner",
        "_kwargs",
        "_native",
        "_place",
        "_retries",
        "_step",
        "_until",
        "_wanted_back",
        "may_go_ahead",
        "runner",
    )

    def __init__(
        self, runner: Runner, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], retries: int
    ) -> None:
        self.runner = runner
        self._call = call
        self._args = args
        self._kwargs = kwargs
        self._retries = retries
        # Deadlines and spans are those of the submitter.
        self._context = contextvars.copy_context()
        self._step = Step.WAITING
        self._place = -1
        self._inner: Future[Any] | None = None
        self._native: Native | None = None
        """The call itself, if it needed no future."""
        self._endpoint: Endpoint[..., Any] | None = None
        self._until: float | None = None
        self._wanted_back = False
        # Time limits apply only while the task runs.
        self.may_go_ahead = call.is_orderly and call.limit is None

    # Where the outcome goes. Callers of these have made sure that there is none yet.

    @abstractmethod
    def _keep(self, value: Any) -> None:
        """Set the outcome to a result."""

    @abstractmethod
    def _break(self, error: BaseException) -> None:
        """Set the outcome to an error."""

    @abstractmethod
    def _dropped(self) -> None:
        """It was given up."""

    @abstractmethod
    def _told_by(self, answered: Native) -> None:
        """Note which call gave the outcome that follows."""

    @abstractmethod
    def cancel(self) -> None:
        """Give up the task. May be called at any point, even during a garbage collection."""

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
            # On another thread: if all tasks of a queue failed at once, calls would nest as deeply as the queue is long.
            runner.following.soon(lambda: self._over(failed))
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
        # The call continues until the replica has answered, whatever happens to the task.
        inner._deadline = None
        self._inner = inner
        if until is None:
            runner.following.follow(inner, self._done)
        else:
            runner.following.follow(inner, self._done, until, self._late)

    def _send(self, replica: ActorMesh[Any], ahead: bool) -> Future[Any] | None:
        name, _, limit, keep, checked = self._call
        args, kwargs = self._args, self._kwargs
        endpoint = _as_task(replica, name, limit, ahead, keep)
        if limit is None and type(endpoint) is Endpoint and not endpoint._attends():
            # Nobody holds a future of this call, and only its reply ends it.
            if endpoint._arity is not checked and not endpoint._arity.fits(args, kwargs):
                raise endpoint._refuse(args, kwargs)
            self._endpoint = endpoint
            self._native = endpoint._senders.call((args, kwargs), False, None)
            return None
        future: Future[Any] = endpoint.call_one(*args, **kwargs)
        return future

    def take_back(self) -> None:
        """Take the task back from the replica to which it was sent ahead: another one is free."""
        self._wanted_back = True
        self._have_back(begun=False)

    def _have_back(self, *, begun: bool) -> None:
        native, inner = self._native, self._inner
        if native is not None:
            native.take_back(begun)
        elif inner is not None:
            inner._take_back(begun=begun)

    def refused(self, error: BaseException) -> None:
        """No replica can ever run the task."""
        runner = self.runner
        with runner.lock:
            wanted = self._step is Step.WAITING
            self._step = Step.OVER
        runner.left_queue()
        if wanted:
            self._fail(error)

    def end(self, error: BaseException) -> None:
        """The process leaves the mesh, and its pools do no more work."""
        with self.runner.lock:
            wanted = self._step is not Step.OVER
            self._step = Step.OVER
        if wanted:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.runner.over(self, failed=True)
        self._break(error)

    # What `Following` needs, in place of a future of the call.

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
        self._told_by(native)
        value, error = None, None
        try:
            value = value_of(native.outcomes()[0], 0, endpoint._who)
        except BaseException as raised:  # noqa: BLE001 - it is the task's outcome
            # Its traceback is of no use, and would keep the objects of these frames alive.
            error = raised.with_traceback(None)
            if isinstance(error, MeshError):
                endpoint._mesh._process.told(error)
        if error is None:
            self._succeeded(value)
        else:
            self._over(error)

    # As a call.

    def _done(self) -> None:
        inner = self._inner
        assert inner is not None
        # For the text of the error, if the replica was the first to notice that the deadline has passed.
        inner._deadline = self._until
        error = inner.exception()
        if error is None:
            self._succeeded(inner.get())
        else:
            self._over(error)

    def _late(self) -> None:
        """The deadline has passed. The replica may still be busy with the task."""
        inner = self._inner
        assert inner is not None
        error = inner._too_late()
        with self.runner.lock:
            wanted = self._step is Step.RUNNING
            self._step = Step.OVER
        if wanted:
            self._fail(error)
        inner._take_back(begun=True)

    def _succeeded(self, value: Any) -> None:
        """The replica has answered. It has got its turn, since the reply before it has arrived."""
        runner = self.runner
        idle: Sequence[Promise[None]] = ()
        with runner.lock:
            was_over = self._step is Step.OVER
            self._step = Step.OVER
            if not was_over:
                idle = runner.count(self, failed=False)
        # The replica first: it gets its next task while this outcome is processed.
        runner.turns.back(self._place, None)
        if was_over:
            return
        for each in idle:
            each.set_result(None)
        self._keep(value)

    def _over(self, error: BaseException) -> None:
        """The replica has answered with an error, or was lost."""
        runner, place = self.runner, self._place
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
        if not was_ahead:
            runner.turns.back(place, lost)
        if not was_over:
            self._fail(error)

    def given_up(self) -> None:
        """The task is no longer wanted."""
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
    """A task whose outcome goes into a promise."""

    __slots__ = ("_promise", "future")

    def __init__(
        self,
        runner: Runner,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        retries: int,
        name: str,
    ) -> None:
        super().__init__(runner, call, args, kwargs, retries)
        self._promise = _Asked(name)
        self.future: Future[Any] = self._promise.future
        assert isinstance(self.future, _Outcome)
        self.future.answered = None
        self._set_owner(self)

    def _told_by(self, answered: Native) -> None:
        assert isinstance(self.future, _Outcome)
        self.future.answered = answered

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
    """What the tasks of one pool in one process share."""

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
        """Number of outcomes in each of the last seconds."""
        self._mark = [0, 0]
        self._next_mark = 0
        """The latest of these seconds, and when the next one begins."""
        self._idle: list[Promise[None]] = []
        following.join(self)

    # Room (TSK-2).

    @property
    def is_full(self) -> bool:
        """Whether the queue is full now. This looks without the lock, for callers that can try again."""
        return self._waiting >= self._room or bool(self._queue)

    def set_room(self, room: int) -> None:
        """Set how many tasks may wait."""
        with self.lock:
            self._room = room
        self.admit()

    def room(self, *, wait: bool) -> Future[bool] | None:
        """Take room for a waiting task: at once, or when the returned future is done. Without ``wait``, a full queue raises."""
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

    def rooms(self, count: int) -> int:
        """Take room for up to so many waiting tasks, as much as there is now; returns for how many."""
        with self.lock:
            if self.closed or self._queue:
                return 0
            count = max(0, min(count, self._room - self._waiting))
            self._waiting += count
        return count

    def leave_rooms(self, count: int) -> None:
        """Give room back that was taken."""
        for _ in range(count):
            self.left_queue()

    def leave_room(self, room: Future[bool]) -> None:
        """The room is no longer wanted; give it back if it has arrived."""
        if not room.cancel() and room.exception() is None:
            self.left_queue()

    def left_queue(self) -> None:
        """A task no longer waits."""
        with self.lock:
            admits = self.leaves_queue()
        if admits:
            self.admit()

    def leaves_queue(self) -> bool:
        """The same, with the lock held. Returns whether somebody can be admitted now."""
        self._waiting -= 1
        return bool(self._queue)

    def admit(self) -> None:
        """Admit those who wait for room."""
        while True:
            with self.lock:
                if not self._queue or (self._waiting >= self._room and not self.closed):
                    return
                promise = self._queue.popleft()
                self._waiting += 1
            # The one who waited for it may have given up.
            if not promise.set_result(True):
                with self.lock:
                    self._waiting -= 1

    def check_open(self) -> None:
        if self.closed:
            raise MeshError(f"{self.name} is closed, and accepts no more tasks")

    # Tasks.

    def begin(self, task: Work) -> None:
        """Run a task for which room was taken."""
        with self.lock:
            closed = self.closed
            if not closed:
                self._open[task] = None
        if closed:
            self.left_queue()
            self.check_open()
        self.turns.ask(task)

    def begin_all(self, tasks: Sequence[Work]) -> None:
        """Run tasks for which room was taken."""
        with self.lock:
            closed = self.closed
            if not closed:
                self._open.update(dict.fromkeys(tasks))
        if closed:
            self.leave_rooms(len(tasks))
            self.check_open()
        self.turns.ask_all(tasks)

    def again(self, task: Work, *, retried: bool) -> None:
        """Run a task on another replica: it waits even if there is no room."""
        with self.lock:
            self._waiting += 1
            self._retried += retried

    def over(self, task: Work, *, failed: bool) -> None:
        """A task has its outcome."""
        with self.lock:
            idle = self.count(task, failed=failed)
        for each in idle:
            each.set_result(None)

    def count(self, task: Work, *, failed: bool) -> Sequence[Promise[None]]:
        """The same, with the lock held; returns promises to keep after it, to those who wait until there is no task."""
        now = time.monotonic()
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
        if not self._idle or self._open:
            return ()
        idle, self._idle = self._idle, []
        return idle

    def idle(self) -> Future[None]:
        """A future that is done when no task is left."""
        promise: Promise[None] = Promise(f"the end of the tasks of {self.name}")
        with self.lock:
            wait = bool(self._open)
            if wait:
                self._idle.append(promise)
        if not wait:
            promise.set_result(None)
        return promise.future

    def close(self) -> None:
        """Take no more tasks, and notify those who wait for room."""
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
        """The process leaves the mesh."""
        self.close()
        with self.lock:
            tasks = list(self._open)
        for task in tasks:
            task.end(MeshError(f"{self.name} has ended with this process's part in the mesh (shutdown())"))

    def counts(self) -> tuple[int, int, int, int, int, float]:
        """Numbers of tasks that are waiting, running, done, failed and retried, and the recent outcomes per second."""
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
    """An endpoint of a replica, with calls that can be taken back."""
    kept: dict[Any, Endpoint[..., Any]] = replica.__dict__.setdefault("_as_tasks", {})
    found = kept.get((name, limit, ahead, keep))
    if found is None:
        if len(kept) >= _MOST_KEPT:
            kept.clear()
        # Not the endpoint object that the mesh itself keeps.
        found = getattr(replica, name).with_options(timeout=limit, keep=keep)._plain()
        request = Request.TASK_AHEAD if ahead else Request.TASK
        found._senders = found._sender(replica._view, request=request)
        kept[name, limit, ahead, keep] = found
    return found


def _is_crash(error: BaseException | None) -> bool:
    """Whether an error reports the end of this replica, and not of an actor that the endpoint has called."""
    return isinstance(error, (SupervisionError, Undeliverable)) and not isinstance(error, ActorError)
