"""Pipelines that are interrupted, run out of time, or have results that cannot be unpickled here."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_pipeline import WITHIN, Worker
from core_pool import Gate, join_pool_thread
from core_processes import Script

from mesh_core import ActorTimeout, Channel, Pipeline, Pool, ProcMesh, Stage, StageError

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
def gate(tmp_path: Path, workers: Any) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.open()
    # Wait until cancelled calls have passed through the workers.
    workers.pid.call().get(WITHIN)
    made.close()


# Ctrl-C.


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_in_the_loop_cancels_running_calls(workers: Any) -> None:
    port, told = Channel[str].open()
    pipeline = Pipeline(Stage(workers.wait_unless_none))

    def when_begun() -> None:
        assert told.recv().get(WITHIN) == "begun"
        interrupt()

    thread = threading.Thread(target=when_begun)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        list(pipeline.run([None, port]))
    thread.join()
    assert told.recv().get(WITHIN) == "cancelled"
    assert list(pipeline.run([None])) == [None]
    join_pool_thread()
    assert not pipeline._replicas


def test_ctrl_c_while_the_source_blocks(workers: Any) -> None:
    ended = []

    def source() -> Iterator[int]:
        yield 1
        try:
            threading.Timer(0, interrupt).start()
            threading.Event().wait()
        finally:
            ended.append("source")

    pipeline = Pipeline(Stage(workers.double))
    with pytest.raises(KeyboardInterrupt):
        list(pipeline.run(source()))
    assert ended == ["source"]
    assert list(pipeline.run([2])) == [4]


@pytest.mark.full
@pytest.mark.slow
def test_ctrl_c_at_any_moment(script: Callable[..., Script]) -> None:
    run = script(
        """
        import os, random, signal, threading
        from core_pipeline import Worker
        from mesh_core import Pipeline, Stage, this_host

        if __name__ == "__main__":
            chance = random.Random(1)
            with this_host().spawn_procs({"gpus": 2}) as procs:
                workers = procs.spawn("workers", Worker)
                pipelines = [
                    Pipeline(Stage(workers.count), Stage(workers.data), Stage(workers.measure), max_bytes=20_000),
                    Pipeline(Stage(workers.increment), Stage(workers.double), ordered=True),
                ]
                for turn in range(30):
                    pipeline = pipelines[turn % 2]
                    timer = threading.Timer(chance.random() / 40, os.kill, (os.getpid(), signal.SIGINT))
                    try:
                        timer.start()
                        for _ in pipeline.run(iter(lambda: 4, None)):
                            pass
                    except KeyboardInterrupt:
                        pass
                    timer.join()
                    assert sorted(pipeline.run([1, 2]).results(timeout=30)) == [[0, 0, 1], [4, 6]][turn % 2]
            print("done")
        """
    )
    assert run.finish() == ("done\n", "")


def test_cancelled_loop_with_an_async_source(workers: Any) -> None:
    ended = []

    async def source(waits: asyncio.Event) -> AsyncIterator[int]:
        yield 1
        waits.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("source")

    async def main() -> list[int]:
        waits = asyncio.Event()
        pipeline = Pipeline(Stage(workers.double))

        async def loop() -> None:
            async for _ in pipeline.run(source(waits)):
                pass

        task = asyncio.ensure_future(loop())
        await waits.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [n async for n in pipeline.run([2])]

    assert asyncio.run(main()) == [4]
    assert ended == ["source"]


@pytest.mark.parametrize("kind", [SystemExit, GeneratorExit, MemoryError])
def test_the_source_may_raise_any_exception(workers: Any, kind: type[BaseException]) -> None:
    def source() -> Iterator[int]:
        yield 1
        raise kind

    pipeline = Pipeline(Stage(workers.double), on_error="quarantine")
    with pytest.raises(kind):
        list(pipeline.run(source()))
    assert list(pipeline.run([2])) == [4]


# Time.


def test_item_that_takes_too_long_fails(workers: Any, gate: Gate) -> None:
    one = workers.slice(hosts=0)
    pipeline = Pipeline(Stage(one.block, timeout=0.1), on_error="quarantine")
    run = pipeline.run([(1, gate.path)])
    assert list(run) == []
    (bad,) = run.quarantined
    assert isinstance(bad.error, ActorTimeout)
    assert "its deadline of 0.1 s" in str(bad.error)


def test_deadline_passes_while_another_pool_waits_without_one(workers: Any, gate: Gate) -> None:
    first, second = workers.slice(hosts=0), workers.slice(hosts=1)
    port, told = Channel[str].open()
    with Pool(first) as pool:
        # The thread that follows futures is waiting by now, and knows of no deadline.
        waiting = pool.submit(first.wait, port)
        assert told.recv().get(WITHIN) == "begun"
        with Pool(second, timeout=0.1) as other, pytest.raises(ActorTimeout, match=r"deadline of 0\.1 s"):
            other.submit(second.block, (1, gate.path)).get(WITHIN)
        waiting.cancel()
        assert told.recv().get(WITHIN) == "cancelled"


@pytest.mark.full
@pytest.mark.slow
def test_waiting_for_room_does_not_count_towards_the_timeout(workers: Any) -> None:
    one, other = workers.slice(hosts=0, gpus=0), workers.slice(hosts=1, gpus=0)
    port, told = Channel[str].open()
    # The time that they take to start would count.
    workers.initialized.get(WITHIN)
    run = Pipeline(Stage(one.fountain, timeout=2.0), max_bytes=300_000).run([20])
    assert len(next(run)) == 100_000
    # Nobody takes results for longer than an item may take.
    waiting = other.wait.call_one(port)
    with pytest.raises(ActorTimeout):
        waiting.get(2.1)
    waiting.cancel()
    assert [told.recv().get(WITHIN) for _ in range(2)] == ["begun", "cancelled"]
    assert len(run.results(timeout=WITHIN)) == 19


# Results that cannot be unpickled here.


@pytest.mark.parametrize("name", ["for_actors_only", "for_actors_only_each"])
@pytest.mark.parametrize("with_ref", [False, True])
def test_a_result_that_cannot_be_unpickled_here_fails(workers: Any, name: str, with_ref: bool) -> None:
    stage = Stage(getattr(workers, name))
    with pytest.raises(StageError, match="cannot rebuild a message") as raised:
        Pipeline(stage).run([(1, with_ref)]).results(timeout=WITHIN)
    assert raised.value.index == 0
    run = Pipeline(stage, on_error="quarantine", ordered=True).run([(0, False), (1, with_ref), (0, False)])
    assert run.results(timeout=WITHIN) == [None, None]
    assert [bad.index for bad in run.quarantined] == [1]
    assert run.stats.results == 2


def test_items_that_cannot_be_unpickled_here_pass_between_stages(workers: Any) -> None:
    pipeline = Pipeline(Stage(workers.for_actors_only), Stage(workers.is_for_actors))
    assert list(pipeline.run([(1, False)])) == [True]
