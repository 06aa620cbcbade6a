"""Pools: which task goes to which replica, in which order results come, and how many tasks wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_pool import WITHIN, Gate, Worker, join_pool_thread, lines

from mesh_core import (
    ActorError,
    ActorTimeout,
    Channel,
    MailboxFull,
    MeshError,
    Pool,
    PoolProgress,
    ProcMesh,
    Ref,
)

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture(autouse=True)
def no_thread() -> Iterator[None]:
    yield
    join_pool_thread()


@pytest.fixture
def workers(procs: ProcMesh, tmp_path: Path) -> Iterator[Any]:
    mesh = procs.spawn("workers", Worker, str(tmp_path / "log"))
    yield mesh
    mesh.stop().get()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


def fill(pool: Pool[Any], gate: Gate, count: int = 4) -> list[Any]:
    """Keep this many replicas busy until the gate opens."""
    port, begun = Channel[int].open()
    futures = [pool.submit(pool.actors.block, gate.path, port) for _ in range(count)]
    for _ in futures:
        begun.recv().get(WITHIN)
    return futures


def test_submit(workers: Any) -> None:
    with Pool(workers) as pool:
        futures = [pool.submit(workers.double, n) for n in range(20)]
        assert [future.get(WITHIN) for future in futures] == [2 * n for n in range(20)]
        assert pool.submit(workers.add, 1, b=2).get(WITHIN) == 3


def test_map_returns_results_in_the_order_of_the_values(workers: Any) -> None:
    with Pool(workers) as pool:
        assert list(pool.map(workers.double, range(100))) == [2 * n for n in range(100)]
        assert list(pool.map(workers.double, [])) == []


def test_results_may_be_kept_where_they_are(workers: Any) -> None:
    with Pool(workers) as pool:
        refs = list(pool.map(workers.data.with_options(keep=True), [3, 1 << 20]))
        assert [type(ref) for ref in refs] == [Ref, Ref]
        assert "in rank" in repr(refs[1])
        assert list(pool.map(workers.measure, refs)) == [3, 1 << 20]
        assert pool.submit(workers.data, 5).get(WITHIN) == bytearray(5)


def test_map_takes_several_iterables(workers: Any) -> None:
    with Pool(workers) as pool:
        assert list(pool.map(workers.add, [1, 2, 3], (n for n in (10, 20)))) == [11, 22]


@pytest.mark.parametrize("ahead", [1, 3, 7, 100, None])
def test_of_a_list_no_more_tasks_are_submitted_than_may_be_ahead(workers: Any, ahead: int | None) -> None:
    # Values that are at hand are submitted many at a time.
    with Pool(workers) as pool:
        most = ahead or 4 * pool._turns
        for several in (pool.map, pool.map_unordered):
            results = several(workers.double, list(range(60)), ahead=ahead)
            found = []
            for each in results:
                found.append(each)
                assert len(pool) <= most
                assert len(results._open) < most
            assert sorted(found) == [2 * n for n in range(60)]
            assert pool.progress.waiting == 0


def test_map_reads_values_as_they_are_needed(workers: Any) -> None:
    taken: list[int] = []

    def endless() -> Iterator[int]:
        n = 0
        while True:
            taken.append(n)
            yield n
            n += 1

    with Pool(workers) as pool, pool.map(workers.double, endless(), ahead=3) as results:
        assert [next(results) for _ in range(10)] == [2 * n for n in range(10)]
        assert len(taken) <= 10 + 3


def test_first_error_ends_map(workers: Any) -> None:
    with Pool(workers) as pool:
        results = pool.map(workers.divide, [3, 0, 4])
        assert next(results) == 4.0
        with pytest.raises(ZeroDivisionError):
            next(results)
        assert list(results) == []


def test_slow_task_delays_no_other(workers: Any, gate: Gate) -> None:
    with Pool(workers) as pool:
        (slow,) = fill(pool, gate, 1)
        # As many as would wait behind it if each replica had got its share at the beginning.
        ranks = list(pool.map_unordered(workers.who, range(40)))
        assert not slow.done()
        gate.open()
        assert slow.get(WITHIN) not in ranks
        assert len(set(ranks)) == 3


def test_map_unordered_returns_results_as_they_arrive(workers: Any, gate: Gate) -> None:
    with Pool(workers) as pool:
        results = pool.as_completed(workers.block, [gate.path] * 3 + ["/dev/zero"])
        value, future = next(results)
        assert value == "/dev/zero"
        assert future.done()
        gate.open()
        assert [value for value, _ in results] == [gate.path] * 3


def test_as_completed_returns_values_and_futures(workers: Any) -> None:
    with Pool(workers) as pool:
        done = {
            n: future.exception() or future.get()
            for n, future in pool.as_completed(workers.divide, [3, 0, 4])
        }
        pairs = dict(pool.as_completed(workers.add, [1, 2], [3, 4]))
    assert (done[3], done[4]) == (4.0, 3.0)
    assert isinstance(done[0], ActorError)
    assert {values: future.get() for values, future in pairs.items()} == {(1, 3): 4, (2, 4): 6}


def test_async_iteration_and_values(workers: Any) -> None:
    async def numbers() -> AsyncIterator[int]:
        for n in range(20):
            await asyncio.sleep(0)
            yield n

    async def main() -> None:
        async with Pool(workers) as pool:
            assert [n async for n in pool.map(workers.double_async, numbers())] == [2 * n for n in range(20)]
            assert [n async for n in pool.map(workers.add, numbers(), [1, 2])] == [1, 3]
            assert sorted([n async for n in pool.map_unordered(workers.double, range(50))]) == [
                2 * n for n in range(50)
            ]
            found = [value async for value, _ in pool.as_completed(workers.double, range(5))]
            assert sorted(found) == list(range(5))

    asyncio.run(main())
    with Pool(workers) as pool, pytest.raises(TypeError, match="async for"):
        next(pool.map(workers.double, numbers()))


def test_submit_waits_if_the_pool_is_full(workers: Any, gate: Gate) -> None:
    with Pool(workers, waiting=2) as pool:
        running = fill(pool, gate)
        waiting = [pool.submit(workers.double, n) for n in range(2)]
        more: list[int] = []
        thread = threading.Thread(target=lambda: more.append(pool.submit(workers.double, 7).get(WITHIN)))
        thread.start()
        # It reserves the last place in the queue, so that the first place to become free is not this one.
        assert pool.progress.waiting == 2
        assert more == []
        gate.open()
        thread.join(WITHIN)
        assert more == [14]
        assert [future.get(WITHIN) for future in waiting] == [0, 2]
        assert sorted(future.get(WITHIN) for future in running) == [0, 1, 2, 3]


def test_a_coroutine_is_refused_or_waits_if_the_pool_is_full(workers: Any, gate: Gate) -> None:
    async def main() -> None:
        async with Pool(workers, waiting=1) as pool:
            running = await asyncio.to_thread(fill, pool, gate)
            first = await pool.submit_async(workers.double, 1)
            with pytest.raises(MailboxFull, match="submit_async"):
                pool.submit(workers.double, 2)
            given_up, second = (asyncio.ensure_future(pool.submit_async(workers.double, n)) for n in (3, 4))
            await asyncio.sleep(0)
            given_up.cancel()
            with pytest.raises(asyncio.CancelledError):
                await given_up
            assert not second.done()
            await asyncio.to_thread(gate.open)
            assert await (await second) == 8
            assert await first == 2
            assert len([await future for future in running]) == 4
            assert (pool.progress.waiting, pool.progress.done) == (0, 6)

    asyncio.run(main())


def test_per_rank_limits_the_tasks_of_a_replica(workers: Any) -> None:
    with Pool(workers, per_rank=3) as pool:
        assert 1 <= max(pool.map_unordered(workers.overlap, range(300), ahead=100)) <= 3


def test_timeout_ends_a_task(workers: Any) -> None:
    told, heard = Channel[str].open()
    with Pool(workers, timeout=0.1) as pool:
        with pytest.raises(ActorTimeout):
            pool.submit(workers.wait, told).get(WITHIN)
        # One that arrives too late does not begin.
        timeout, first = 0.1, heard.recv()
        while not first.done():
            timeout *= 2
            with pytest.raises(ActorTimeout):
                pool.submit(workers.wait.with_options(timeout=timeout), told).get(WITHIN)
            workers.double.call(1).get(WITHIN)
        assert (first.get(), heard.recv().get(WITHIN)) == ("begun", "cancelled")
        assert pool.submit(workers.double, 2).get(WITHIN) == 4
        assert pool.submit(workers.double.with_options(timeout=20), 2).get(WITHIN) == 4


def test_cancel_reaches_the_replica(workers: Any) -> None:
    told, heard = Channel[str].open()
    with Pool(workers) as pool:
        future = pool.submit(workers.wait, told)
        assert heard.recv().get(WITHIN) == "begun"
        assert future.cancel()
        assert heard.recv().get(WITHIN) == "cancelled"
        # Its turn comes back with the replica's answer, however many tasks the other replicas finish until then.
        seen: set[int] = set()
        while seen != {0, 1, 2, 3}:
            seen |= set(pool.map_unordered(workers.who, range(40)))


def test_a_task_cancelled_in_the_queue_never_runs(workers: Any, gate: Gate, tmp_path: Path) -> None:
    with Pool(workers) as pool:
        fill(pool, gate)
        dropped, kept = pool.submit(workers.note, 1), pool.submit(workers.note, 2)
        assert dropped.cancel()
        gate.open()
        assert kept.get(WITHIN) == 2
    assert list(lines(tmp_path / "log")) == [2]
    assert pool.progress.waiting == pool.progress.running == 0


def test_leaving_a_loop_cancels_the_rest(workers: Any) -> None:
    told, heard = Channel[str].open()
    with Pool(workers) as pool:
        results = pool.map_unordered(workers.wait, [told] * 3)
        thread = threading.Thread(target=lambda: list(results))
        thread.start()
        for _ in range(3):
            assert heard.recv().get(WITHIN) == "begun"
        results.close()
        for _ in range(3):
            assert heard.recv().get(WITHIN) == "cancelled"
        thread.join(WITHIN)
        for n in pool.map(workers.double, range(1000)):
            if n == 10:
                break
        assert pool.submit(workers.double, 1).get(WITHIN) == 2
    assert len(pool) == 0


def test_drain_resume_and_remove(workers: Any, gate: Gate) -> None:
    some, others = workers.slice(hosts=0), workers.slice(hosts=1)
    with Pool(workers) as pool:
        running = fill(pool, gate)
        drained = pool.drain(some)
        assert not drained.done()
        gate.open()
        drained.get(WITHIN)
        assert len({future.get(WITHIN) for future in running}) == 4
        assert pool.progress.replicas == 2
        assert set(pool.map(workers.who, range(20))) == set(others.who.call(0).get(WITHIN).values())
        pool.resume(some)
        assert len(set(pool.map(workers.who, range(40)))) == 4
        pool.remove(others).get(WITHIN)
        assert set(pool.map(workers.who, range(20))) == {0, 1}
        with pytest.raises(ValueError, match="not part of"):
            pool.remove(others)
        pool.add(others)
        assert pool.progress.replicas == 4
        pool.remove(workers).get(WITHIN)
        with pytest.raises(MeshError, match="has no replicas"):
            pool.submit(workers.double, 1).get(WITHIN)


def test_added_replicas_take_waiting_tasks(procs: ProcMesh, workers: Any, gate: Gate) -> None:
    with Pool(workers) as pool:
        fill(pool, gate)
        waiting = [pool.submit(workers.double, n) for n in range(4)]
        more = procs.spawn("more", Worker)
        pool.add(more)
        assert [future.get(WITHIN) for future in waiting] == [0, 2, 4, 6]
        gate.open()
    more.stop().get()


def test_closed_pool(workers: Any, gate: Gate) -> None:
    pool = Pool(workers)
    running = fill(pool, gate)
    closing = pool.close()
    assert not closing.done()
    for refused in (
        lambda: pool.submit(workers.double, 1),
        lambda: pool.add(workers),
        lambda: next(pool.map(workers.double, [1])),
    ):
        with pytest.raises(MeshError, match="closed"):
            refused()
    gate.open()
    closing.get(WITHIN)
    assert all(future.done() for future in running)
    assert "closed" in repr(pool)
    pool.close().get(WITHIN)


def test_closing_releases_submitters_that_wait_for_room(workers: Any, gate: Gate) -> None:
    pool = Pool(workers, waiting=1)
    fill(pool, gate)
    pool.submit(workers.double, 1)
    room = pool._runner.room(wait=True)
    assert room is not None
    pool._runner.leave_room(room)
    errors: list[BaseException] = []

    def late() -> None:
        try:
            pool.submit(workers.double, 2)
        except MeshError as error:
            errors.append(error)

    thread = threading.Thread(target=late)
    thread.start()
    closing = pool.close()
    thread.join(WITHIN)
    assert len(errors) == 1
    gate.open()
    closing.get(WITHIN)


def test_the_block_cancels_tasks_that_exceed_drain(workers: Any) -> None:
    told, heard = Channel[str].open()
    with Pool(workers, drain=0.05) as pool:
        future = pool.submit(workers.wait, told)
        assert heard.recv().get(WITHIN) == "begun"
    assert heard.recv().get(WITHIN) == "cancelled"
    with pytest.raises(asyncio.CancelledError):
        future.get(WITHIN)

    async def main() -> None:
        async with Pool(workers, drain=0.05) as pool:
            await pool.submit_async(workers.wait, told)

    asyncio.run(main())
    assert [heard.recv().get(WITHIN) for _ in range(2)] == ["begun", "cancelled"]


def test_error_in_block_cancels_tasks(workers: Any) -> None:
    told, heard = Channel[str].open()

    def fail() -> None:
        with Pool(workers) as pool:
            pool.submit(workers.wait, told)
            assert heard.recv().get(WITHIN) == "begun"
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert heard.recv().get(WITHIN) == "cancelled"


def test_progress(workers: Any, gate: Gate, capfd: pytest.CaptureFixture[str]) -> None:
    with Pool(workers) as pool:
        running = fill(pool, gate)
        pool.submit(workers.divide, 0).cancel()
        progress = pool.progress
        assert isinstance(progress, PoolProgress)
        assert (progress.running, progress.done, progress.replicas) == (4, 0, 4)
        assert bool(pool)
        gate.open()
        for future in running:
            future.get(WITHIN)
        assert len(list(pool.map(workers.double, range(5), bar=True))) == 5
        assert (pool.progress.done, pool.progress.failed) == (9, 1)
        assert "9 done" in repr(pool)
    assert "5/5" in capfd.readouterr().err


def test_misuse_is_explained(workers: Any) -> None:
    with pytest.raises(TypeError, match="mesh of actors"):
        Pool([1])
    for options in (
        {"per_rank": 0},
        {"retries": -1},
        {"timeout": 0},
        {"waiting": 0},
        {"drain": 0},
        {"on_crash": "maybe"},
    ):
        with pytest.raises(ValueError, match="Pool"):
            Pool(workers, **options)  # type: ignore[arg-type]
    with Pool(workers) as pool:
        with pytest.raises(TypeError, match="endpoint of its actors"):
            pool.submit(len, [])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="missing required argument 'b'"):
            pool.submit(workers.add, 1)
        with pytest.raises(ValueError, match="reduce="):
            pool.submit(workers.double.with_options(reduce="sum"), 1)
        with pytest.raises(TypeError, match="what to call it with"):
            pool.map(workers.double)
        with pytest.raises(ValueError, match="ahead="):
            pool.map(workers.double, [1], ahead=0)
        with pytest.raises(ZeroDivisionError):
            pool.submit(workers.divide, 0).get(WITHIN)
        # It belongs to the task alone.
        assert pool.submit(workers.divide, 1).get(WITHIN) == 12


def test_the_least_of_each_option_suffices(workers: Any) -> None:
    with Pool(workers, per_rank=1, retries=0, waiting=1) as pool:
        assert list(pool.map(workers.double, range(5), ahead=1)) == [0, 2, 4, 6, 8]


def test_many_threads_share_a_pool(workers: Any) -> None:
    found: list[int] = []
    with Pool(workers) as pool:
        threads = [
            threading.Thread(target=lambda: found.extend(pool.map_unordered(workers.double, range(100))))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WITHIN)
    assert sorted(found) == sorted(2 * n for n in range(100) for _ in range(4))
