"""Queues between processes."""

from __future__ import annotations

import asyncio
import gc
import os
import queue as queues
import signal
import threading
from itertools import chain
from typing import Any

import pytest
from core_owners import suspend

from mesh_core import (
    Actor,
    ChannelClosed,
    MailboxFull,
    MeshError,
    Promise,
    Queue,
    QueueClosed,
    QueueEmpty,
    QueueFull,
    QueueItem,
    QueueItemError,
    SerializationError,
    SupervisionError,
    endpoint,
    this_host,
)

pytestmark = pytest.mark.usefixtures("runtime", "started")

SOON = 30.0


class User(Actor):
    def __init__(self) -> None:
        self.kept: list[Any] = []

    @endpoint
    def put(self, queue: Queue[Any], values: list[Any], version: Any = None) -> None:
        queue.put_many(values, version=version).get(timeout=SOON)

    @endpoint
    def drain(self, queue: Queue[Any], n: int) -> list[Any]:
        got: list[Any] = []
        while True:
            try:
                got += queue.take(n).get(timeout=SOON)
            except QueueClosed:
                return got

    @endpoint
    async def pass_on(self, source: Queue[int], to: Queue[int]) -> int:
        count = 0
        async for value in source:
            await to.put(value * 10)
            count += 1
        return count

    @endpoint
    def keep(self, queue: Queue[Any], n: int, lease: float | None) -> list[Any]:
        self.kept = queue.take(n, lease=lease, items=True).get(timeout=SOON)
        return [item.value for item in self.kept]

    @endpoint
    def begin(self, queue: Queue[Any], n: int) -> None:
        """Take, and do not look at the result."""
        self.kept = [queue.take(n)]
        queue.stats().get(timeout=SOON)

    @endpoint
    def look(self) -> Any:
        """Look at what was taken."""
        return self.kept[0].get(timeout=SOON)

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def started(runtime: None) -> None:
    """Start the thread that is notified of what was put, which lives as long as the runtime."""
    told = threading.Event()
    promise = Promise[None]()
    promise.future.add_done_callback(lambda _: told.set())
    promise.set_result(None)
    assert told.wait(SOON)


def left(queue: Queue[Any]) -> list[Any]:
    """Everything that can be taken at the moment."""
    found = []
    while True:
        try:
            found += queue.take_nowait(1000).get(timeout=SOON)
        except QueueEmpty:
            return found


def test_items_are_taken_in_the_order_in_which_they_were_put() -> None:
    with Queue[int]() as queue:
        for n in range(2_000):
            queue.put(n)
        got: list[int] = []
        while len(got) < 2_000:
            got += queue.take(300).get(timeout=SOON)
        assert got == list(range(2_000))


def test_a_taker_waits_for_the_first_item_only() -> None:
    with Queue[str]() as queue:
        waiting = queue.take(5)
        assert not waiting.done()
        queue.put("a")
        assert waiting.get(timeout=SOON) == ["a"]
        queue.put_many("bc").get(timeout=SOON)
        assert queue.take(5).get(timeout=SOON) == ["b", "c"]
        queue.put("d")
        assert queue.take().get(timeout=SOON) == "d"


def test_many_producers_and_takers_share_a_queue() -> None:
    with Queue[tuple[int, int]](max_items=50) as queue, this_host().spawn_procs({"users": 6}) as procs:
        users = procs.spawn("users", User)
        taking = users.slice(users=slice(3, 6)).drain.call(queue, 7)
        puts = [
            users.slice(users=producer).put.call_one(queue, [(producer, n) for n in range(400)])
            for producer in range(3)
        ]
        for put in puts:
            put.get(timeout=SOON)
        queue.close().get(timeout=SOON)
        taken = taking.get(timeout=SOON).values()
        assert sorted(chain.from_iterable(taken)) == [
            (producer, n) for producer in range(3) for n in range(400)
        ]
        for each in taken:
            for producer in range(3):
                mine = [n for p, n in each if p == producer]
                assert mine == sorted(mine)


def test_large_items_arrive_whole_and_unaffected_by_later_changes() -> None:
    with Queue[bytearray]() as queue:
        data = bytearray(os.urandom(300_000))
        before = bytes(data)
        queue.put(data)
        data[:] = bytes(len(data))
        assert bytes(queue.take().get(timeout=SOON)) == before


# Room.


def test_put_waits_while_the_queue_is_full() -> None:
    with Queue[int](max_items=2) as queue:
        first, second = queue.put(1), queue.put(2)
        first.get(timeout=SOON), second.get(timeout=SOON)
        third = queue.put(3)
        assert queue.stats().get(timeout=SOON).putters == 1
        assert not third.done()
        assert queue.take().get(timeout=SOON) == 1
        third.get(timeout=SOON)
        assert queue.stats().get(timeout=SOON).ready == 2


def test_a_thread_waits_while_many_of_its_items_wait() -> None:
    with Queue[int](max_items=100) as queue:
        done = threading.Event()

        def put() -> None:
            for n in range(3_000):
                queue.put(n)
            done.set()

        thread = threading.Thread(target=put)
        thread.start()
        got = [queue.take().get(timeout=SOON)]
        assert not done.is_set()
        while len(got) < 3_000:
            got += queue.take(100).get(timeout=SOON)
        thread.join(SOON)
        assert got == list(range(3_000))
        assert done.is_set()


def test_a_queue_is_bounded_in_bytes() -> None:
    with Queue[bytes](max_bytes=10_000) as queue:
        for _ in range(2):
            queue.put(bytes(4_000)).get(timeout=SOON)
        late = queue.put(bytes(4_000))
        # Leased items count.
        queue.take(lease=SOON).get(timeout=SOON)
        stats = queue.stats().get(timeout=SOON)
        assert (stats.ready, stats.leased, stats.putters) == (1, 1, 1)
        assert stats.bytes <= 10_000
        assert not late.done()


def test_put_nowait_raises_if_the_queue_is_full() -> None:
    with Queue[int](max_items=1) as queue:
        queue.put_nowait(1).get(timeout=SOON)
        with pytest.raises(QueueFull, match="is full; put\\(\\) waits for room") as caught:
            queue.put_nowait(2).get(timeout=SOON)
        assert isinstance(caught.value, queues.Full)
        assert left(queue) == [1]


def test_put_does_not_block_an_event_loop() -> None:
    async def run(queue: Queue[int]) -> list[int]:
        async def produce() -> None:
            for n in range(100):
                await queue.put(n)

        producing = asyncio.create_task(produce())
        got = [await queue.take() for _ in range(100)]
        await producing
        return got

    with Queue[int](max_items=3) as queue:
        assert asyncio.run(run(queue)) == list(range(100))


# Undoing a take.


def test_an_empty_queue_raises_queue_empty() -> None:
    with Queue[int]() as queue:
        with pytest.raises(QueueEmpty) as caught:
            queue.take_nowait().get(timeout=SOON)
        assert isinstance(caught.value, queues.Empty)
        with pytest.raises(QueueEmpty):
            queue.take(timeout=0.05).get(timeout=SOON)
        # Takers that gave up take nothing from later ones.
        queue.put(1)
        assert queue.take(timeout=SOON).get(timeout=SOON) == 1


def test_a_cancelled_or_dropped_take_loses_no_items() -> None:
    """QCL-2: items that nobody has looked at go back."""
    with Queue[int]() as queue:
        waiting = queue.take()
        assert waiting.cancel()
        queue.put_many(range(3)).get(timeout=SOON)
        come = queue.take(2)
        while not come.done():
            queue.stats().get(timeout=SOON)
        del come
        gc.collect()
        assert left(queue) == [0, 1, 2]


def test_a_task_cancelled_while_taking_loses_no_items() -> None:
    async def run(queue: Queue[int]) -> list[int]:
        got = []
        for n in range(30):
            task = asyncio.create_task(_take(queue))
            await queue.put(n)
            if n % 3:
                await asyncio.sleep(0)
            task.cancel()
            try:
                got.append(await task)
            except asyncio.CancelledError:
                continue
        return got

    with Queue[int]() as queue:
        got = asyncio.run(run(queue))
        assert sorted(got + left(queue)) == list(range(30))


async def _take(queue: Queue[int]) -> int:
    return await queue.take()


def test_items_that_a_dead_taker_has_not_looked_at_go_back() -> None:
    with Queue[int]() as queue, this_host().spawn_procs() as procs:
        user = procs.spawn("user", User)
        queue.put_many(range(4)).get(timeout=SOON)
        user.begin.call_one(queue, 3).get(timeout=SOON)
        assert queue.stats().get(timeout=SOON).leased == 3
        with pytest.raises(SupervisionError):
            user.die.call_one().get(timeout=SOON)
        # They may come back after the remaining one was taken.
        assert sorted(queue.take(timeout=SOON).get(timeout=SOON) for _ in range(4)) == [0, 1, 2, 3]
        assert queue.stats().get(timeout=SOON).leased == 0


# Leases.


def test_leases_outlive_the_client() -> None:
    """QUE-1: each call brings the queue to the process again, which has dropped it meanwhile."""
    with Queue[int](name="leases") as queue, this_host().spawn_procs() as procs:
        first = procs.spawn("user", User)
        queue.put_many(range(4)).get(timeout=SOON)
        assert [first.keep.call_one(queue, 1, SOON).get(timeout=SOON) for _ in range(3)] == [[0], [1], [2]]
        stats = queue.stats().get(timeout=SOON)
        assert (stats.leased, stats.ready) == (3, 1)


def test_acknowledged_items_are_gone() -> None:
    with Queue[str]() as queue:
        queue.put_many("abc").get(timeout=SOON)
        items = queue.take(2, lease=SOON).get(timeout=SOON)
        assert [item.value for item in items] == ["a", "b"]
        third = queue.take(lease=SOON).get(timeout=SOON)
        assert queue.ack([*items, third]).get(timeout=SOON) == 3
        assert queue.ack(items).get(timeout=SOON) == 0
        stats = queue.stats().get(timeout=SOON)
        assert (stats.ready, stats.leased, stats.bytes) == (0, 0, 0)


def test_items_of_an_expired_lease_go_to_the_next_taker() -> None:
    with Queue[str]() as queue:
        queue.put("a")
        first = queue.take(lease=0.05).get(timeout=SOON)
        second = queue.take(lease=SOON, timeout=SOON).get(timeout=SOON)
        assert (second.value, first.deliveries, second.deliveries) == ("a", 0, 1)
        # It belongs to another taker by now.
        assert queue.ack(first).get(timeout=SOON) == 0
        assert not queue.renew(first, 1.0).get(timeout=SOON)
        assert queue.ack(second).get(timeout=SOON) == 1


@pytest.mark.full
@pytest.mark.slow
def test_a_lease_can_be_renewed_and_items_given_back() -> None:
    with Queue[str]() as queue:
        queue.put_many("ab").get(timeout=SOON)
        items = queue.take(2, lease=2.0).get(timeout=SOON)
        assert queue.renew(items[0], 600.0).get(timeout=SOON)
        with pytest.raises(QueueEmpty):
            queue.take(timeout=2.5).get(timeout=SOON)
        assert queue.give_back(items[1]).get(timeout=SOON) == 1
        assert queue.take().get(timeout=SOON) == "b"
        assert queue.ack(items[0]).get(timeout=SOON) == 1


def test_leased_items_of_a_dead_taker_go_back() -> None:
    with Queue[int]() as queue, this_host().spawn_procs() as procs:
        user = procs.spawn("user", User)
        queue.put_many(range(3)).get(timeout=SOON)
        assert user.keep.call_one(queue, 2, 600.0).get(timeout=SOON) == [0, 1]
        assert queue.take().get(timeout=SOON) == 2
        waiting = queue.take(lease=SOON)
        with pytest.raises(SupervisionError):
            user.die.call_one().get(timeout=SOON)
        item = waiting.get(timeout=SOON)
        assert (item.value, item.deliveries) == (0, 1)
        assert queue.take().get(timeout=SOON) == 1


def test_items_that_were_looked_at_are_never_delivered_again() -> None:
    with Queue[int]() as queue, this_host().spawn_procs() as procs:
        user = procs.spawn("user", User)
        queue.put_many(range(3)).get(timeout=SOON)
        assert user.keep.call_one(queue, 2, None).get(timeout=SOON) == [0, 1]
        with pytest.raises(SupervisionError):
            user.die.call_one().get(timeout=SOON)
        assert left(queue) == [2]


def test_acknowledgements_before_a_takers_end_count() -> None:
    quiet: Any = {"supervise": lambda failure: True}
    with this_host().spawn_procs() as home, this_host().spawn_procs(**quiet) as procs:
        queue = Queue[int](on=home)
        user = procs.spawn("user", User, **quiet)
        queue.put_many(range(2)).get(timeout=SOON)
        user.begin.call_one(queue, 2).get(timeout=SOON)
        suspend(home.pids[0])
        # The queue has much to do before it handles the taker's messages.
        asked = [queue.stats() for _ in range(2000)]
        assert user.look.call_one().get(timeout=SOON) == [0, 1]
        with pytest.raises(SupervisionError):
            user.die.call_one().get(timeout=SOON)
        os.kill(home.pids[0], signal.SIGCONT)
        assert [each.get(timeout=SOON).leased for each in asked] == [2] * len(asked)
        assert left(queue) == []
        stats = queue.stats().get(timeout=SOON)
        assert (stats.leased, stats.given_back) == (0, 0)


def test_only_leased_items_can_be_acknowledged() -> None:
    with Queue[int]() as queue:
        queue.put(1)
        item = queue.take(items=True).get(timeout=SOON)
        with pytest.raises(ValueError, match="was not leased"):
            queue.ack(item)
        with pytest.raises(ValueError, match="was not leased"):
            queue.renew(item, 1.0)


def test_items_have_producer_time_and_version() -> None:
    with Queue[str]() as queue, this_host().spawn_procs({"gpus": 2}, name="makers") as procs:
        users = procs.spawn("users", User)
        users.slice(gpus=1).put.call_one(queue, ["a"], 7).get(timeout=SOON)
        queue.put("b")
        one, two = (queue.take(items=True).get(timeout=SOON) for _ in range(2))
        assert isinstance(one, QueueItem)
        assert (one.value, one.producer, one.version, one.deliveries) == ("a", "makers[1]", 7, 0)
        assert (two.value, two.producer, two.version) == ("b", "controller", None)
        assert two.made >= one.made - 60


# The end.


def test_a_closed_queue_is_emptied_before_it_ends() -> None:
    with Queue[int]() as queue:
        for n in range(500):
            queue.put(n)
        queue.close().get(timeout=SOON)
        with pytest.raises(QueueClosed, match="nothing more can be put"):
            queue.put(1).get(timeout=SOON)
        with pytest.raises(QueueClosed, match="nothing more can be put"):
            queue.put_nowait(1).get(timeout=SOON)
        assert list(queue) == list(range(500))
        with pytest.raises(QueueClosed, match="is closed and empty"):
            queue.take().get(timeout=SOON)
        with pytest.raises(QueueClosed):
            queue.take(timeout=SOON).get(timeout=SOON)


def test_closing_notifies_waiters() -> None:
    with Queue[int](max_items=1) as queue:
        queue.put(1).get(timeout=SOON)
        late = queue.put(2)
        assert queue.stats().get(timeout=SOON).putters == 1
        waiting: list[Any] = []
        with this_host().spawn_procs() as procs:
            # From another process: close() in this one waits for what this process has put itself.
            closer = procs.spawn("closer", Closer)
            closer.close.call_one(queue).get(timeout=SOON)
        with pytest.raises(QueueClosed):
            late.get(timeout=SOON)
        waiting += [queue.take().get(timeout=SOON)]
        with pytest.raises(QueueClosed):
            queue.take().get(timeout=SOON)
        assert waiting == [1]


class Closer(Actor):
    @endpoint
    def close(self, queue: Queue[Any]) -> None:
        queue.close().get(timeout=SOON)


def test_closing_can_discard_remaining_items() -> None:
    with Queue[int]() as queue:
        queue.put_many(range(3)).get(timeout=SOON)
        queue.close(discard=True).get(timeout=SOON)
        assert list(queue) == []


def test_actors_iterate_over_a_queue_asynchronously() -> None:
    with Queue[int]() as source, Queue[int]() as to, this_host().spawn_procs({"users": 2}) as procs:
        users = procs.spawn("users", User)
        passing = users.pass_on.call(source, to)
        source.put_many(range(50)).get(timeout=SOON)
        source.close().get(timeout=SOON)
        assert sum(passing.get(timeout=SOON).values()) == 50
        assert sorted(left(to)) == [n * 10 for n in range(50)]


def test_users_of_a_dead_queue_get_an_error() -> None:
    with this_host().spawn_procs(supervise=lambda failure: True) as home:
        queue = Queue[int](on=home, max_items=1)
        queue.put(1).get(timeout=SOON)
        waiting, late = queue.take(lease=SOON), queue.put(2)
        waiting.get(timeout=SOON)
        killer = home.spawn("killer", User, supervise=lambda failure: True)
        killer.die.broadcast()
        with pytest.raises((SupervisionError, ConnectionError)):
            queue.take().get(timeout=SOON)
        with pytest.raises(MeshError):
            late.get(timeout=SOON)
        with pytest.raises(MeshError, match="cannot put into queue 'queue'"):
            queue.put(3).get(timeout=SOON)


def test_invalid_arguments_are_explained() -> None:
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="must be at least 1"):
            Queue(max_items=wrong)
    with pytest.raises(TypeError, match="must be a whole number"):
        Queue(max_bytes=1.5)  # type: ignore[arg-type]
    with (
        this_host().spawn_procs({"gpus": 2}) as procs,
        pytest.raises(ValueError, match="must be one process"),
    ):
        Queue(on=procs)
    with Queue[int]() as queue:
        with pytest.raises(ValueError, match="from 1"):
            queue.take(0)
        with pytest.raises(ValueError, match="positive"):
            queue.take(lease=0)
        with pytest.raises(ValueError, match="positive"):
            queue.take(timeout=-1e-300)
        with pytest.raises(QueueEmpty):
            queue.take(1, timeout=0).get(timeout=SOON)


def test_an_unpicklable_item_is_refused_by_put() -> None:
    with Queue[Any]() as queue:
        with pytest.raises(MeshError, match="lock"):
            queue.put(threading.Lock())
        queue.put(1)
        assert queue.take().get(timeout=SOON) == 1


class Unreadable:
    """Can be pickled but not unpickled."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Producer(Actor):
    @endpoint
    def put(self, queue: Queue[Any]) -> None:
        queue.put_many([1, Unreadable(), 2, Unreadable()]).get(timeout=SOON)


def test_an_item_that_cannot_be_unpickled_affects_no_other() -> None:
    with Queue[Any]() as queue, this_host().spawn_procs({"gpus": 1}) as procs:
        procs.spawn("producer", Producer).put.call_one(queue).get(timeout=SOON)
        with pytest.raises(
            QueueItemError, match=r"item 2 .* put by .*, cannot be unpickled here: .*ValueError"
        ) as caught:
            queue.take(10).get(timeout=SOON)
        assert caught.value.rest == [1, 2]
        bad = caught.value.items
        assert len({item.producer for item in bad}) == 1
        assert bad[0].producer in str(caught.value)
        assert isinstance(caught.value.__cause__, SerializationError)
        queue.put_many([Unreadable(), 3]).get(timeout=SOON)
        # One at a time: the next one comes with the next take.
        with pytest.raises(QueueItemError):
            queue.take().get(timeout=SOON)
        assert queue.take().get(timeout=SOON) == 3
        assert queue.stats().get(timeout=SOON).ready == 0


def test_a_leased_item_that_cannot_be_unpickled_can_be_acknowledged() -> None:
    with Queue[Any]() as queue:
        queue.put_many([1, Unreadable(), 2]).get(timeout=SOON)
        with pytest.raises(QueueItemError, match=r"ack\(\)") as caught:
            queue.take(3, lease=SOON).get(timeout=SOON)
        assert [item.value for item in caught.value.rest] == [1, 2]
        assert queue.ack(caught.value.items).get(timeout=SOON) == 1
        assert queue.give_back(caught.value.rest).get(timeout=SOON) == 2
        assert queue.take(3).get(timeout=SOON) == [1, 2]


def test_an_item_that_nobody_acknowledges_is_dropped_eventually() -> None:
    """QUE-5."""
    with Queue[int](most_deliveries=3) as queue:
        queue.put_many([1, 2]).get(timeout=SOON)
        for _ in range(20):
            # Nobody has looked at it, so it does not count as delivered.
            queue.take(lease=SOON).cancel()
        for _ in range(3):
            item = queue.take(lease=SOON).get(timeout=SOON)
            assert item.value == 1
            queue.give_back(item).get(timeout=SOON)
        item = queue.take(lease=SOON).get(timeout=SOON)
        assert item.value == 2
        stats = queue.stats().get(timeout=SOON)
        assert (stats.dropped, stats.leased, stats.ready) == (1, 1, 0)
    with pytest.raises(ValueError, match="most_deliveries"):
        Queue(most_deliveries=0)


def test_errors_of_queues_are_subclasses_of_the_standard_ones() -> None:
    assert issubclass(QueueClosed, EOFError)
    assert not issubclass(QueueClosed, ChannelClosed)


# Faults.


class Leaver(Actor):
    @endpoint
    def put(self, queue: Queue[int], count: int) -> None:
        for n in range(count):
            queue.put(n)


def test_items_are_sent_before_an_orderly_end() -> None:
    with Queue[int]() as queue:
        with this_host().spawn_procs() as procs:
            procs.spawn("leaver", Leaver).put.broadcast(queue, 900)
        assert left(queue) == list(range(900))


def test_a_taker_that_ends_during_delivery_affects_no_other() -> None:
    with Queue[int]() as queue, this_host().spawn_procs({"users": 4}) as procs:
        users = procs.spawn("users", User, supervise=lambda failure: True)
        killers = procs.spawn("killers", User, supervise=lambda failure: True)
        for each in range(4):
            users.slice(users=each).drain.broadcast(queue, 1)
        for each in range(4):
            queue.put_many(range(each * 100, each * 100 + 100))
            with pytest.raises((SupervisionError, ConnectionError)):
                killers.slice(users=each).die.call_one().get(timeout=SOON)
        queue.put(1_000).get(timeout=SOON)
        assert 1_000 in left(queue)


def test_put_without_await_raises_when_too_much_waits() -> None:
    """QCL-1: the next batch waits here until the queue has accepted the one before."""
    put: list[int] = []

    async def flood(queue: Queue[bytes]) -> None:
        for n in range(200):
            queue.put(bytes(1 << 20))
            put.append(n)

    with Queue[bytes](max_items=1) as queue:
        with pytest.raises(MailboxFull, match=r"await what put\(\) returns"):
            asyncio.run(flood(queue))
        # 64 MiB wait in this process, besides what is in transit.
        assert len(put) > 60
        queue.close(discard=True)
