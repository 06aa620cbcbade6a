"""Pipelines: what passes through stages, in which order, and within which limits."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_pipeline import WITHIN, Marked, User, Worker
from core_pool import Gate, join_pool_thread

from mesh_core import ActorTimeout, Channel, Pipeline, ProcMesh, Stage, StageError, put

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture(autouse=True)
def no_thread() -> Iterator[None]:
    yield
    join_pool_thread()


@pytest.fixture(scope="module")
def workers(procs: ProcMesh) -> Iterator[Any]:
    mesh = procs.spawn("workers", Worker)
    yield mesh
    mesh.stop().get()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


def test_items_go_through_all_stages(workers: Any) -> None:
    pipeline = Pipeline(Stage(workers.double), Stage(workers.increment))
    assert sorted(pipeline.run(range(100))) == [2 * n + 1 for n in range(100)]
    assert pipeline.run([]).results() == []
    assert pipeline.run([3]).results() == [7]


def test_an_endpoint_is_a_stage_without_options(workers: Any) -> None:
    pipeline = Pipeline(workers.double, Stage(workers.increment, per_rank=2), ordered=True)
    assert list(pipeline.run([1, 2])) == [3, 5]
    assert pipeline.stages[0].name == Stage(workers.double).name


def test_kept_results_arrive_at_the_next_stage(workers: Any) -> None:
    data = workers.data.with_options(keep=True)
    assert list(Pipeline(Stage(data), Stage(workers.measure), ordered=True).run([7, 0, 1 << 20])) == [
        7,
        0,
        1 << 20,
    ]
    assert [len(ref.get()) for ref in Pipeline(Stage(data), ordered=True).run([7, 1 << 20])] == [7, 1 << 20]
    assert list(Pipeline(Stage(workers.measure)).run([put(bytearray(1 << 20))])) == [1 << 20]
    counts = workers.count.with_options(keep=True)
    assert list(Pipeline(Stage(counts), Stage(workers.double), ordered=True).run([3, 2])) == [0, 2, 4, 0, 2]


def test_references_within_items_keep_their_values_alive(workers: Any) -> None:
    pipeline = Pipeline(Stage(workers.put_two), Stage(workers.measure_all), ordered=True)
    sizes = [100_000, 5, 1 << 20]
    assert list(pipeline.run(sizes)) == [[n, 2 * n] for n in sizes]
    assert list(workers.kept.call().get().values()) == [0] * len(workers)


def test_ordered_results_have_the_order_of_the_source(workers: Any) -> None:
    pipeline = Pipeline(Stage(workers.double), Stage(workers.increment), ordered=True)
    assert list(pipeline.run(range(100))) == [2 * n + 1 for n in range(100)]


@pytest.mark.parametrize("name", ["count", "count_async"])
def test_each_value_of_a_generator_is_an_item(workers: Any, name: str) -> None:
    pipeline = Pipeline(Stage(getattr(workers, name)), Stage(workers.double), ordered=True)
    assert list(pipeline.run([3, 0, 2])) == [0, 2, 4, 0, 2]


def test_consecutive_stages_may_be_generators(workers: Any) -> None:
    pipeline = Pipeline(Stage(workers.count), Stage(workers.count_async), ordered=True)
    assert list(pipeline.run([4, 1, 3])) == [0, 0, 1, 0, 1, 2, 0, 0, 1]


def test_values_are_not_unpickled_between_stages(workers: Any) -> None:
    pipeline = Pipeline(Stage(workers.mark), Stage(workers.pass_on))
    (marked,) = pipeline.run([5])
    assert isinstance(marked, Marked)
    # At the second stage, and here where the result is taken.
    assert marked.n == 5
    assert len(marked.seen) == 2
    assert marked.seen[-1] == os.getpid()


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_a_stage_may_change_its_input(workers: Any, size: int) -> None:
    pipeline = Pipeline(Stage(workers.data), Stage(workers.grow))
    assert list(pipeline.run([size] * 5)) == [size] * 5


def test_the_source_may_be_endless(workers: Any) -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for n in itertools.count():
            taken.append(n)
            yield n

    with Pipeline(Stage(workers.double), ordered=True).run(source()) as run:
        assert [next(run) for _ in range(10)] == [2 * n for n in range(10)]
    assert list(run) == []


def test_nothing_is_read_before_the_loop(workers: Any) -> None:
    def source() -> Iterator[int]:
        raise AssertionError
        yield 0

    run = Pipeline(Stage(workers.double)).run(source())
    assert run.stats.held == 0
    run.close()


def test_the_source_is_not_read_while_no_results_are_taken(workers: Any) -> None:
    taken = 0

    def source() -> Iterator[int]:
        nonlocal taken
        for n in range(200):
            taken += 1
            yield n

    pipeline = Pipeline(Stage(workers.pad), max_bytes=1_000_000)
    with pipeline.run(source()) as run:
        next(run)
        # Half a budget for items that are not begun, all of it for results, and one output of each of the four replicas.
        assert taken <= 30
        for _ in range(199):
            next(run)
        stats = run.stats
    assert stats.most_held <= 1_000_000 + 5 * 101_000
    assert stats.results == 200


def test_an_item_larger_than_the_budget_passes(workers: Any) -> None:
    pipeline = Pipeline(Stage(workers.data), Stage(workers.measure), Stage(workers.double), max_bytes=10)
    assert list(pipeline.run([500_000, 3])) in ([1_000_000, 6], [6, 1_000_000])


def test_a_slow_item_delays_others_only_if_ordered(workers: Any, gate: Gate) -> None:
    given = [(0, gate.path), (1, ""), (2, "")]
    with Pipeline(Stage(workers.block)).run(given) as run:
        assert {next(run), next(run)} == {1, 2}
        gate.open()
        assert list(run) == [0]
    with Pipeline(Stage(workers.block), ordered=True).run(given) as run:
        gate.open()
        assert list(run) == [0, 1, 2]


def test_a_generator_that_nobody_reads_is_stopped(workers: Any) -> None:
    one = workers.slice(hosts=0, gpus=0)
    others = workers.slice(hosts=1)
    pipeline = Pipeline(Stage(one.fountain), Stage(others.measure), max_bytes=1_000_000)
    with pipeline.run([2_000]) as run:
        assert [next(run) for _ in range(200)] == [100_000] * 200
        assert run.stats.held <= 1_600_000
    made, log = one.state.call_one().get(WITHIN)
    # The budget, what the generator may be ahead, and what it may send before its first value has arrived: 33 together. The rest
    # is for what it sends until it is told that nobody reads. With an actor's budget it would be 640 ahead.
    assert made <= 400
    assert log[-1] == "fountain over"


@pytest.mark.slow
def test_leaving_the_loop_cancels_running_calls(workers: Any) -> None:
    port, told = Channel[str].open()
    pipeline = Pipeline(Stage(workers.wait))
    workers.initialized.get(WITHIN)
    run = pipeline.run([port])
    with pytest.raises(ActorTimeout, match=r"the slowest is workers\.wait: its replicas were busy"):
        run.results(timeout=2.0)
    assert [told.recv().get(WITHIN) for _ in range(2)] == ["begun", "cancelled"]
    join_pool_thread()
    assert not pipeline._replicas


def test_a_cancelled_loop_cancels_running_calls(workers: Any) -> None:
    port, told = Channel[str].open()
    pipeline = Pipeline(Stage(workers.wait))

    async def drop() -> None:
        run = pipeline.run([port])
        waiting = asyncio.ensure_future(anext(run))
        assert await told.recv() == "begun"
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(drop())
    assert told.recv().get(WITHIN) == "cancelled"


def test_a_dropped_run_cancels_running_calls(workers: Any) -> None:
    port, told = Channel[str].open()
    run = Pipeline(Stage(workers.wait_unless_none)).run([None, port])
    assert next(run) is None
    assert told.recv().get(WITHIN) == "begun"
    del run
    assert told.recv().get(WITHIN) == "cancelled"


def test_async_loop_and_async_source(workers: Any) -> None:
    async def source() -> AsyncIterator[int]:
        for n in range(20):
            await asyncio.sleep(0)
            yield n

    async def main() -> list[int]:
        pipeline = Pipeline(Stage(workers.double), Stage(workers.increment), ordered=True)
        return [n async for n in pipeline.run(source())]

    assert asyncio.run(main()) == [2 * n + 1 for n in range(20)]
    with pytest.raises(TypeError, match="use `async for`"):
        list(Pipeline(Stage(workers.double)).run(source()))


@pytest.mark.parametrize("name", ["run", "run_async"])
def test_pipelines_in_actors(procs: ProcMesh, workers: Any, name: str) -> None:
    users = procs.spawn("users", User)
    found = getattr(users, name).call(workers, 10).get(WITHIN)
    assert found.values() == [[2 * n for n in range(10)]] * 4
    users.stop().get()


def test_results_of_one_pipeline_are_the_source_of_another(workers: Any) -> None:
    first, second = Pipeline(Stage(workers.double)), Pipeline(Stage(workers.increment))
    assert sorted(second.run(first.run(range(10)))) == [2 * n + 1 for n in range(10)]

    async def main() -> list[int]:
        return sorted([n async for n in second.run(first.run(range(10)))])

    assert asyncio.run(main()) == [2 * n + 1 for n in range(10)]


def test_runs_at_the_same_time_share_the_replicas(workers: Any) -> None:
    pipeline = Pipeline(Stage(workers.double), Stage(workers.increment), ordered=True)
    found: dict[int, list[int]] = {}

    def run(i: int) -> None:
        found[i] = list(pipeline.run(range(i, i + 40)))

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
    assert found == {i: [2 * n + 1 for n in range(i, i + 40)] for i in range(4)}
    assert not pipeline._replicas


def test_slowest_stage_is_named(workers: Any, gate: Gate) -> None:
    one, others = workers.slice(hosts=0, gpus=0), workers.slice(hosts=1)
    pipeline = Pipeline(Stage(others.pass_on, name="first"), Stage(one.block, name="second"))
    run = pipeline.run([(n, gate.path) for n in range(3)])
    threading.Timer(0.2, gate.open).start()
    assert len(run.results(WITHIN)) == 3
    assert run.stats.slowest == "second"
    assert "slowest: second" in repr(run)
    first, second = run.stats.stages
    assert (first.taken, first.made, second.taken, second.made) == (3, 3, 3, 3)
    assert second.busy > first.busy
    assert "slowest: second (its replicas were busy" in str(run.stats)


def test_slow_source_and_slow_loop_are_named(workers: Any) -> None:
    asleep = threading.Event()

    def source() -> Iterator[int]:
        asleep.wait(0.2)
        yield 1

    pipeline = Pipeline(Stage(workers.double))
    run = pipeline.run(source())
    assert run.results() == [2]
    assert run.stats.slowest == "the source"
    with pipeline.run([1, 2]) as run:
        for _ in run:
            asleep.wait(0.2)
            assert run.stats.slowest == "the loop over the results"


def test_source_that_raises_ends_the_run(workers: Any) -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    pipeline = Pipeline(Stage(workers.double), on_error="quarantine")
    run = pipeline.run(source())
    with pytest.raises(OSError, match="no more"):
        list(run)
    assert list(run) == []


def test_wrong_stages_are_refused(workers: Any) -> None:
    with pytest.raises(TypeError, match="takes an endpoint"):
        Stage(len)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="one item"):
        Stage(workers.state)
    with pytest.raises(ValueError, match="names of their own"):
        Pipeline(Stage(workers.double), Stage(workers.double))
    with pytest.raises(TypeError, match="takes stages"):
        Pipeline(len)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes stages"):
        Pipeline()
    with pytest.raises(ValueError, match="on_error"):
        Pipeline(Stage(workers.double), on_error="ignore")  # type: ignore[arg-type]
    for options in ({"per_rank": 0}, {"retries": -1}, {"timeout": 0}):
        with pytest.raises(ValueError, match=rf"Stage\({next(iter(options))}=\)"):
            Stage(workers.double, **options)  # type: ignore[arg-type]
    for options in ({"max_bytes": 0}, {"most_quarantined": -1}):
        with pytest.raises(ValueError, match=rf"Pipeline\({next(iter(options))}=\)"):
            Pipeline(Stage(workers.double), **options)  # type: ignore[arg-type]
    least = Pipeline(Stage(workers.double, per_rank=1, retries=0), max_bytes=1, most_quarantined=0)
    assert list(least.run([1, 2])) == [2, 4]


def test_first_error_ends_the_run(workers: Any) -> None:
    run = Pipeline(Stage(workers.increment), Stage(workers.divide)).run([1, -1, 3])
    with pytest.raises(
        StageError, match=r"workers\.divide failed on 0 \(item 1 of the source\): .*division"
    ) as caught:
        list(run)
    assert (caught.value.stage, caught.value.item, caught.value.index) == ("workers.divide", "0", 1)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert list(run) == []


def test_quarantine_sets_items_aside(workers: Any) -> None:
    pipeline = Pipeline(Stage(workers.divide), on_error="quarantine", ordered=True)
    run = pipeline.run([3, 0, 4, 0])
    assert list(run) == [4.0, 3.0]
    assert sorted((bad.stage, bad.item, bad.index, bad.attempts, bad.value()) for bad in run.quarantined) == [
        ("workers.divide", "0", 1, 1, 0),
        ("workers.divide", "0", 3, 1, 0),
    ]
    assert isinstance(run.quarantined[0].error, ZeroDivisionError)
    assert run.stats.stages[0].quarantined == 2


def test_too_many_quarantined_items_end_the_run(workers: Any) -> None:
    run = Pipeline(Stage(workers.divide), on_error="quarantine", most_quarantined=1).run([0, 0, 0])
    with pytest.raises(StageError, match="most_quarantined"):
        list(run)


def test_values_yielded_before_an_error_count(workers: Any) -> None:
    pipeline = Pipeline(Stage(workers.count_to_error), on_error="quarantine", ordered=True)
    run = pipeline.run([2, 3, 1])
    assert list(run) == [0, 1, 0, 1, 2, 0]
    (bad,) = run.quarantined
    assert (bad.item, bad.index) == ("3", 1)
    assert isinstance(bad.error, ValueError)


def test_an_unpicklable_item_is_quarantined(workers: Any) -> None:
    run = Pipeline(Stage(workers.double), on_error="quarantine").run([1, threading.Lock(), 2])
    assert sorted(run) == [2, 4]
    (bad,) = run.quarantined
    assert (bad.stage, bad.index) == ("the source", 1)
    with pytest.raises(LookupError):
        bad.value()
