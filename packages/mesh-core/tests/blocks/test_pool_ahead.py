"""Tasks that are sent ahead to a busy replica (AHD-1..3, TAK-1, TAK-2), and the turns of tasks that are cancelled (TSK-3)."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_pool import WITHIN, Gate, Worker, join_pool_thread, lines

from mesh_core import ActorTimeout, Channel, Pool, ProcMesh, SupervisionError, this_host

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture(autouse=True)
def no_thread() -> Iterator[None]:
    yield
    join_pool_thread()


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """All tasks count as short: the next one is always sent ahead."""
    monkeypatch.setattr("mesh_core._blocks.pool.turns._RATHER", -50)
    monkeypatch.setattr("mesh_core._blocks.pool.turns._SHORT_S", 3600.0)


@pytest.fixture
def several(ready: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same, and as many are sent ahead as may be."""
    monkeypatch.setattr("mesh_core._blocks.pool.turns._AHEAD_S", 1e9)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.touch()
    return path


@pytest.fixture
def workers(procs: ProcMesh, log: Path) -> Iterator[Any]:
    mesh = procs.slice(hosts=0).spawn("workers", Worker, str(log))
    yield mesh
    mesh.stop().get()


@pytest.fixture
def mortals(log: Path, fault_tolerant: None) -> Iterator[Any]:
    """Workers whose processes may be killed."""
    with this_host().spawn_procs({"gpus": 2}) as procs:
        workers = procs.spawn("workers", Worker, str(log))
        workers.initialized.get()
        yield workers


@pytest.fixture
def gates(tmp_path: Path) -> Iterator[dict[int, Gate]]:
    """A gate for each of two replicas."""
    gates = {n: Gate(tmp_path / f"gate{n}") for n in range(2)}
    yield gates
    for gate in gates.values():
        gate.open()
        gate.close()


class Busy:
    """A pool of two replicas, each busy with a task that ends when its gate is opened, in the order in which they began."""

    def __init__(self, pool: Pool[Any], gates: dict[int, Gate], *, dies: bool = False) -> None:
        port, begun = Channel[int].open()
        actors = pool.actors
        self.tasks = [pool.submit(actors.block, gates[0].path, port)]
        self.ranks = [begun.recv().get(WITHIN)]
        if dies:
            self.tasks.append(pool.submit(actors.die_at, 99, gates[1].path, port))
        else:
            self.tasks.append(pool.submit(actors.block, gates[1].path, port))
        self.ranks.append(begun.recv().get(WITHIN))
        self.pool = pool

    @property
    def ahead(self) -> int:
        """How many were sent ahead."""
        own = self.pool._own
        assert own is not None
        with own._lock:
            return len(list(own._places.ahead()))


def test_a_task_sent_ahead_runs_next(ready: None, workers: Any, gates: dict[int, Gate]) -> None:
    with Pool(workers) as pool:
        busy = Busy(pool, gates)
        task = pool.submit(workers.who, 1)
        assert (busy.ahead, pool.progress.waiting) == (1, 0)
        gates[1].open()
        assert task.get(WITHIN) == busy.ranks[1]
        assert not busy.tasks[0].done()
        gates[0].open()


def test_a_task_sent_ahead_moves_to_an_idle_replica(
    ready: None, workers: Any, gates: dict[int, Gate]
) -> None:
    with Pool(workers) as pool:
        busy = Busy(pool, gates)
        task = pool.submit(workers.who, 1)
        assert busy.ahead == 1
        gates[0].open()
        assert task.get(WITHIN) == busy.ranks[0], "AHD-2"
        assert not busy.tasks[1].done()
        assert (busy.ahead, pool.progress.retried) == (0, 0)
        gates[1].open()


def test_a_task_taken_back_runs_before_later_tasks(
    ready: None, workers: Any, gates: dict[int, Gate], monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    with Pool(workers, waiting=8) as pool:
        busy = Busy(pool, gates)
        tasks = [pool.submit(workers.note, n) for n in range(5)]
        assert busy.ahead == 2
        monkeypatch.setattr("mesh_core._blocks.pool.turns._SHORT_S", 0.0)
        gates[0].open()
        assert [task.get(WITHIN) for task in tasks] == list(range(5))
        assert not busy.tasks[1].done()
        assert sorted(lines(log)) == list(range(5))
        gates[1].open()


def test_a_task_that_never_began_runs_elsewhere(
    ready: None, mortals: Any, gates: dict[int, Gate], log: Path
) -> None:
    with Pool(mortals) as pool:
        busy = Busy(pool, gates, dies=True)
        task = pool.submit(mortals.note, 7)
        assert busy.ahead == 1
        gates[1].open()
        assert isinstance(busy.tasks[1].exception(WITHIN), SupervisionError)
        gates[0].open()
        assert task.get(WITHIN) == 7, "AHD-3"
        assert (pool.progress.retried, pool.progress.failed) == (0, 1)
    assert sorted(lines(log)) == [7, 99]


def test_a_task_that_has_begun_is_not_run_again(
    ready: None, mortals: Any, gates: dict[int, Gate], log: Path
) -> None:
    with Pool(mortals) as pool:
        busy = Busy(pool, gates)
        task = pool.submit(mortals.die, 7)
        assert busy.ahead == 1
        gates[1].open()
        assert isinstance(task.exception(WITHIN), SupervisionError)
        assert busy.tasks[1].get(WITHIN) == busy.ranks[1]
        gates[0].open()
        assert pool.submit(mortals.double, 1).get(WITHIN) == 2
    assert list(lines(log)) == [7]


def test_nothing_begins_behind_a_reply_that_may_be_lost(ready: None, mortals: Any, log: Path) -> None:
    # Its caller would not know whether the next one has begun. What comes back runs later, and once.
    with Pool(mortals) as pool:
        found = list(pool.map(mortals.blob, range(60), [1 << 20] * 60))
        assert pool._own is not None
        assert pool._own._short < 0, "TAK-2: a task has come back"
    assert [(each[0], len(each)) for each in found] == [(n, 1 << 20) for n in range(60)]
    assert Counter(lines(log)) == Counter(range(60))


def warm_up(pool: Pool[Any]) -> None:
    """Let the pool learn how short its tasks are."""
    assert sum(pool.map(pool.actors.double, range(100))) == 9900


def test_several_are_sent_ahead_while_tasks_take_hardly_any_time(
    several: None, workers: Any, gates: dict[int, Gate], log: Path
) -> None:
    with Pool(workers, waiting=30) as pool:
        warm_up(pool)
        busy = Busy(pool, gates)
        tasks = [pool.submit(workers.note, n) for n in range(30)]
        assert (busy.ahead, pool.progress.waiting) == (16, 14), "AHD-1: eight at each"
        gates[0].open()
        gates[1].open()
        assert [task.get(WITHIN) for task in tasks] == list(range(30))
    assert Counter(lines(log)) == Counter(range(30))


def test_one_is_sent_ahead_while_several_would_take_long(
    ready: None, workers: Any, gates: dict[int, Gate]
) -> None:
    with Pool(workers, waiting=30) as pool:
        for _ in range(10):
            # The pool sees these take as long as it takes to open the gate.
            busy = Busy(pool, gates)
            time.sleep(0.003)
            gates[0].open()
            gates[1].open()
            for task in busy.tasks:
                task.get(WITHIN)
        busy = Busy(pool, gates)
        tasks = [pool.submit(workers.who, n) for n in range(6)]
        assert busy.ahead == 2, "AHD-1"
        gates[0].open()
        gates[1].open()
        for task in tasks:
            task.get(WITHIN)


def test_all_that_wait_behind_a_long_task_move_in_their_order(
    several: None, workers: Any, gates: dict[int, Gate], monkeypatch: pytest.MonkeyPatch, log: Path
) -> None:
    with Pool(workers, waiting=30) as pool:
        warm_up(pool)
        busy = Busy(pool, gates)
        tasks = [pool.submit(workers.note, n) for n in range(12)]
        assert busy.ahead == 12
        monkeypatch.setattr("mesh_core._blocks.pool.turns._SHORT_S", 0.0)
        gates[0].open()
        assert [task.get(WITHIN) for task in tasks] == list(range(12)), "AHD-2"
        assert not busy.tasks[1].done()
        assert Counter(lines(log)) == Counter(range(12))
        gates[1].open()


def test_of_several_ahead_at_a_replica_that_dies_none_has_begun(
    several: None, mortals: Any, gates: dict[int, Gate], log: Path
) -> None:
    with Pool(mortals, waiting=30) as pool:
        warm_up(pool)
        busy = Busy(pool, gates, dies=True)
        tasks = [pool.submit(mortals.note, n) for n in range(10)]
        assert busy.ahead == 10
        gates[1].open()
        assert isinstance(busy.tasks[1].exception(WITHIN), SupervisionError)
        gates[0].open()
        assert [task.get(WITHIN) for task in tasks] == list(range(10)), "AHD-3"
        assert (pool.progress.retried, pool.progress.failed) == (0, 1)
    assert Counter(lines(log)) == Counter([99, *range(10)])


def test_one_of_several_ahead_kills_the_replica_and_only_itself(
    several: None, mortals: Any, gates: dict[int, Gate], log: Path
) -> None:
    with Pool(mortals, waiting=30) as pool:
        warm_up(pool)
        busy = Busy(pool, gates)
        tasks = [pool.submit(mortals.note, n) for n in range(4)]
        fatal = pool.submit(mortals.die, 7)
        tasks += [pool.submit(mortals.note, n) for n in range(4, 9)]
        assert busy.ahead == 10
        gates[0].open()
        gates[1].open()
        assert isinstance(fatal.exception(WITHIN), SupervisionError)
        assert [task.get(WITHIN) for task in tasks] == list(range(9))
    assert Counter(lines(log)) == Counter([7, *range(9)])


def test_several_ahead_are_cancelled_one_by_one(
    several: None, workers: Any, gates: dict[int, Gate], log: Path
) -> None:
    with Pool(workers, waiting=30) as pool:
        warm_up(pool)
        busy = Busy(pool, gates)
        tasks = [pool.submit(workers.note, n) for n in range(12)]
        assert busy.ahead == 12
        for task in tasks[::2]:
            assert task.cancel()
        end = time.monotonic() + WITHIN
        while busy.ahead > 6:
            assert time.monotonic() < end
        gates[1].open()
        gates[0].open()
        assert [task.get(WITHIN) for task in tasks[1::2]] == list(range(1, 12, 2))
    assert sorted(lines(log)) == list(range(1, 12, 2))


def test_a_task_cancelled_after_it_was_sent_ahead_never_runs(
    ready: None, workers: Any, gates: dict[int, Gate], log: Path
) -> None:
    with Pool(workers) as pool:
        busy = Busy(pool, gates)
        task, after = pool.submit(workers.note, 1), pool.submit(workers.note, 2)
        assert busy.ahead == 2
        assert task.cancel()
        # A thread of the pool must tell the replica, which says that it has not begun.
        end = time.monotonic() + WITHIN
        while busy.ahead == 2:
            assert time.monotonic() < end
        gates[1].open()
        gates[0].open()
        assert after.get(WITHIN) == 2
    assert list(lines(log)) == [2]


def test_a_drained_replica_keeps_no_task_sent_ahead(
    ready: None, workers: Any, gates: dict[int, Gate]
) -> None:
    with Pool(workers) as pool:
        busy = Busy(pool, gates)
        task = pool.submit(workers.who, 1)
        drained = pool.drain(workers.slice(gpus=busy.ranks[1]))
        gates[0].open()
        assert task.get(WITHIN) == busy.ranks[0]
        assert not drained.done()
        gates[1].open()
        drained.get(WITHIN)


def test_nothing_is_sent_ahead_if_several_run_at_once(ready: None, workers: Any) -> None:
    with Pool(workers) as pool:
        assert max(pool.map_unordered(workers.overlap, range(60))) == 1
    with Pool(workers, per_rank=2) as pool:
        assert max(pool.map_unordered(workers.overlap, range(60))) <= 2


def test_nothing_is_sent_ahead_to_a_replica_of_two_pools(
    ready: None, workers: Any, gates: dict[int, Gate]
) -> None:
    with Pool(workers) as pool, Pool(workers):
        busy = Busy(pool, gates)
        task = pool.submit(workers.who, 1)
        assert (busy.ahead, pool.progress.waiting) == (0, 1)
        gates[0].open()
        gates[1].open()
        task.get(WITHIN)


@pytest.mark.slow
def test_killed_replicas_lose_and_repeat_no_task(several: None, log: Path, fault_tolerant: None) -> None:
    with this_host().spawn_procs({"gpus": 3}) as procs:
        workers: Any = procs.spawn("workers", Worker, str(log))
        workers.initialized.get()
        outcomes: Counter[int] = Counter()
        lost = []
        with Pool(workers, on_crash="respawn") as pool:
            for done, (n, future) in enumerate(pool.as_completed(workers.note, range(600))):
                outcomes[n] += 1
                error = future.exception()
                if error is not None:
                    assert isinstance(error, SupervisionError)
                    lost.append(n)
                if done % 60 == 30:
                    pid = procs.pids[done // 60 % 3]
                    if pid is not None:
                        os.kill(pid, signal.SIGKILL)
    assert outcomes == Counter(range(600))
    ran = Counter(lines(log))
    assert max(ran.values()) == 1
    assert set(range(600)) - set(ran) <= set(lost)
    assert len(lost) <= 10, "one for each kill, at most"


# Cancelling running tasks.


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("how", ["cancel", pytest.param("timeout", marks=pytest.mark.slow)])
def test_a_replica_that_is_still_busy_gets_no_task(how: str, workers: Any, gates: dict[int, Gate]) -> None:
    with Pool(workers) as pool:
        port, begun = Channel[int].open()
        # Long enough to begin before, once it is up.
        workers.initialized.get(WITHIN)
        block = workers.block.with_options(timeout=3.0) if how == "timeout" else workers.block
        task = pool.submit(block, gates[0].path, port)
        rank = begun.recv().get(WITHIN)
        if how == "timeout":
            error = task.exception(WITHIN)
            assert isinstance(error, ActorTimeout)
            assert "did not finish within its deadline of 3.0 s" in str(error)
        else:
            assert task.cancel()
        # The other replica does all tasks, and the first one gets another when it is done with its own.
        assert set(pool.map_unordered(workers.who, range(20))) == {1 - rank}
        gates[0].open()
        while len(set(pool.map_unordered(workers.who, range(20)))) < 2:
            pass


def test_cancelled_coroutine_gives_its_turn_back(procs: ProcMesh) -> None:
    workers = procs.slice(hosts=0, gpus=0).spawn("workers", Worker)
    told, heard = Channel[str].open()
    with Pool(workers) as pool:
        for _ in range(20):
            task = pool.submit(workers.wait, told)
            assert heard.recv().get(WITHIN) == "begun"
            task.cancel()
            assert pool.submit(workers.double_async, 2).get(WITHIN) == 4
            assert heard.recv().get(WITHIN) == "cancelled"
        # Cancelled at once: it may have begun or not.
        for n in range(100):
            pool.submit(workers.double_async, n).cancel()
            pool.submit(workers.double, n).cancel()
        assert pool.submit(workers.double, 2).get(WITHIN) == 4
    workers.stop().get()
