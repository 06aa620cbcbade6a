"""Tasks and the room for them, with turns that a test gives (TSK-1..3)."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from core_pool import WITHIN, join_pool_thread

from mesh_core import Future, MeshError, Promise, SupervisionError
from mesh_core._blocks.pool.following import Following
from mesh_core._blocks.pool.tasks import Call, Runner, Task
from mesh_core._common.current import current
from mesh_core._common.errors import NotBegun
from mesh_core._futures.promise import _Promised

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture(autouse=True)
def no_thread() -> Iterator[None]:
    yield
    join_pool_thread()


class Turns:
    """Gives turns when a test says so."""

    def __init__(self) -> None:
        self.asking: list[Any] = []
        self.held: Counter[int] = Counter()
        self.ahead: dict[int, Any] = {}
        self.lost: list[int] = []

    def ask(self, asker: Any, *, first: bool = False) -> None:
        self.asking.insert(0 if first else len(self.asking), asker)

    def ask_all(self, askers: Sequence[Any]) -> None:
        self.asking += askers

    def drop(self, asker: Any) -> bool:
        if asker not in self.asking:
            return False
        self.asking.remove(asker)
        return True

    def leave(self, place: int, asker: Any, lost: BaseException | None) -> bool:
        return self.ahead.pop(place, None) is asker

    def sent_back(self) -> None:
        """Nothing is sent ahead here."""

    def back(self, place: int, lost: BaseException | None) -> None:
        assert self.held[place] > 0, "a turn was given back twice"
        self.held[place] -= 1
        if lost is not None:
            self.lost.append(place)


class Replica:
    """Answers when a test says so. Of tasks that are taken back, every other one has run to its end; the rest has not begun."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.calls: list[tuple[int, Answer]] = []
        self.ran: list[int] = []
        self.taken_back = 0
        self.run = self
        self._view = self._senders = None

    def _plain(self) -> Replica:
        return self

    def with_options(self, timeout: float | None, keep: bool) -> Replica:
        return self

    def _sender(self, view: object, request: object) -> None:
        """As an endpoint has."""

    def call_one(self, n: int) -> Future[int]:
        promise = Answer()
        assert isinstance(promise.future, Coming)
        promise.future.take_back = lambda: self._take_back(n, promise)
        self.calls.append((n, promise))
        self.ran.append(n)
        return promise.future

    def _take_back(self, n: int, promise: Answer) -> None:
        if (n, promise) not in self.calls:
            return
        self.taken_back += 1
        if self.taken_back % 2:
            self.calls.remove((n, promise))
            self.ran.remove(n)
            promise.set_exception(NotBegun("taken back"))


class Coming(_Promised[int]):
    """What a replica will answer."""

    take_back: Callable[[], None]

    def _take_back(self, *, begun: bool) -> None:
        self.take_back()


class Answer(Promise[int]):
    _kind = Coming


def a_task(runner: Runner, endpoint: str, args: tuple[Any, ...], retries: int) -> Task:
    unchecked: Any = None
    call = Call(endpoint, is_orderly=True, limit=None, keep=False, checked=unchecked)
    return Task(runner, call, args, {}, retries=retries, name="a task")


class Schedule:
    """A runner that is driven at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.turns = Turns()
        process = current()
        self.following = process.slots.of(Following, lambda: Following(process))
        self.retries = self.random.randint(0, 2)
        self.runner = Runner("the pool", self.turns, self.following, 3)
        self.replicas = [Replica(place) for place in range(3)]
        self.futures: list[Future[int]] = []
        self.cancelled: set[int] = set()

    def settle(self) -> None:
        """Wait until the thread has done everything that was requested before."""
        done: Promise[None] = Promise()
        self.following.soon(lambda: self.following.soon(lambda: done.set_result(None)))
        done.future.get(WITHIN)

    def submit(self) -> None:
        if self.runner._waiting < 3:
            assert self.runner.room(wait=True) is None
            self.runner.begin(self.task())

    def submit_several(self) -> None:
        room = max(0, 3 - self.runner._waiting)
        wanted = self.random.randint(1, 4)
        assert self.runner.rooms(wanted) == min(wanted, room)
        tasks = [self.task() for _ in range(min(wanted, room))]
        # Room that was taken for more tasks than there are.
        assert self.runner.rooms(1) == (room > wanted)
        self.runner.leave_rooms(int(room > wanted))
        self.runner.begin_all(tasks)

    def task(self) -> Task:
        """The next task."""
        task = a_task(self.runner, "run", (len(self.futures),), self.retries)
        self.futures.append(task.future)
        return task

    def give(self) -> None:
        if self.turns.asking:
            replica = self.random.choice(self.replicas)
            self.turns.held[replica.place] += 1
            self.turns.asking.pop(0).got(replica.place, replica)

    def end(self, *, crash: bool = False) -> None:
        busy = [replica for replica in self.replicas if replica.calls]
        if busy:
            n, promise = self.random.choice(busy).calls.pop(0)
            if crash:
                promise.set_exception(SupervisionError("dead"))
            else:
                promise.set_result(n)

    def crash(self) -> None:
        self.end(crash=True)

    def cancel(self) -> None:
        if self.futures:
            n = self.random.randrange(len(self.futures))
            if self.futures[n].cancel():
                self.cancelled.add(n)


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("seed", range(25))
def test_random_schedules(seed: int) -> None:
    schedule = Schedule(seed)
    steps = ["submit", "submit_several", "give", "give", "end", "crash", "cancel"]
    for _ in range(120):
        getattr(schedule, schedule.random.choice(steps))()
        schedule.settle()
        assert 0 <= schedule.runner._waiting == len(schedule.turns.asking)
    while schedule.turns.asking or any(replica.calls for replica in schedule.replicas):
        schedule.give()
        schedule.end()
        schedule.settle()
    runs = Counter(n for replica in schedule.replicas for n in replica.ran)
    for n, future in enumerate(schedule.futures):
        assert future.done(), "TSK-1: each has an outcome"
        error = future.exception() if n not in schedule.cancelled else None
        assert error is None or isinstance(error, SupervisionError)
        assert runs[n] <= 1 + schedule.retries, "TSK-1: no more often than allowed"
    assert not any(schedule.turns.held.values()), "each turn was given back"
    assert len(schedule.runner) == schedule.runner._waiting == 0


def test_waiters_for_room_are_served_in_order() -> None:
    schedule = Schedule(0)
    for _ in range(3):
        schedule.submit()
    first, second = schedule.runner.room(wait=True), schedule.runner.room(wait=True)
    assert first is not None
    assert second is not None
    schedule.give()
    assert (first.done(), second.done()) == (True, False)
    # A waiter that has left is skipped.
    schedule.runner.leave_room(second)
    third = schedule.runner.room(wait=True)
    assert third is not None
    schedule.give()
    assert third.done()
    schedule.runner.leave_room(first)
    schedule.runner.leave_room(third)
    while schedule.turns.asking or any(replica.calls for replica in schedule.replicas):
        schedule.give()
        schedule.end()
    schedule.settle()
    assert schedule.runner._waiting == 0


def test_a_failed_call_gives_its_turn_back() -> None:
    schedule = Schedule(0)
    assert schedule.runner.room(wait=True) is None
    task = a_task(schedule.runner, "missing", (), 2)
    schedule.runner.begin(task)
    schedule.give()
    assert isinstance(task.future.exception(WITHIN), AttributeError)
    assert not any(schedule.turns.held.values())


def test_a_closed_runner_accepts_nothing() -> None:
    schedule = Schedule(0)
    schedule.runner.close()
    with pytest.raises(MeshError, match="closed"):
        schedule.runner.room(wait=True)
    assert schedule.runner.rooms(2) == 0


def test_tasks_that_are_begun_as_a_pool_closes_give_their_room_back() -> None:
    schedule = Schedule(0)
    assert schedule.runner.rooms(2) == 2
    tasks = [schedule.task(), schedule.task()]
    schedule.runner.close()
    with pytest.raises(MeshError, match="closed"):
        schedule.runner.begin_all(tasks)
    assert (schedule.runner._waiting, schedule.turns.asking, len(schedule.runner)) == (0, [], 0)


def test_lists_of_followed_futures_stay_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_core._blocks.pool.following._LONGEST", 10)
    schedule = Schedule(0)
    for n in range(100):
        done: Promise[int] = Promise()
        schedule.following.follow(done.future, lambda: None)
        done.set_result(n)
        schedule.settle()
        assert schedule.following._followers.list.arrived() <= 20


def test_what_may_come_later_is_done_once_for_all_work_that_is_there() -> None:
    schedule = Schedule(0)
    following = schedule.following
    done: list[int] = []

    def settle() -> None:
        done.append(len(done))

    settle()
    following.settle(settle)
    assert done == [0, 1], "at once, on a thread that does not do the work"

    def work() -> None:
        following.settle(settle)
        following.settle(settle)
        assert done == [0, 1]

    following.soon(work)
    schedule.settle()
    deadline = time.monotonic() + WITHIN
    while len(done) < 3:
        assert time.monotonic() < deadline
    assert done == [0, 1, 2]


def test_what_may_come_later_does_not_wait_for_the_end_of_all_work() -> None:
    following, done = Schedule(0).following, threading.Event()

    def work() -> None:
        # Until then there is always more.
        following.settle(done.set)
        if not done.is_set():
            following.soon(work)

    following.soon(work)
    assert done.wait(WITHIN)
