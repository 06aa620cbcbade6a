"""Pools whose replicas die: no task is lost, and none runs twice unless it may (TSK-1)."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_pool import WITHIN, Gate, Worker, join_pool_thread, lines

from mesh_core import Channel, Pool, ProcMesh, SupervisionError, this_host

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.slow]


@pytest.fixture(autouse=True)
def no_thread() -> Iterator[None]:
    yield
    join_pool_thread()


@pytest.fixture
def mortals(tmp_path: Path) -> Iterator[tuple[ProcMesh, Any]]:
    """Workers whose processes may be killed."""
    with this_host().spawn_procs({"gpus": 3}) as procs:
        workers = procs.spawn("workers", Worker, str(tmp_path / "log"), str(tmp_path / "refuse"))
        workers.initialized.get()
        yield procs, workers


def await_replicas(pool: Pool[Any], count: int) -> None:
    """Wait until the pool has this many replicas; tasks that it finishes meanwhile show that time passes."""
    for _ in pool.map(pool.actors.double, iter(int, 1)):
        if pool.progress.replicas == count:
            return


@pytest.mark.parametrize("on_crash", ["raise", "retry", "respawn"])
def test_a_task_of_a_dead_replica_fails_without_retries(
    mortals: tuple[ProcMesh, Any], on_crash: Any, tmp_path: Path, fault_tolerant: None
) -> None:
    _, workers = mortals
    with Pool(workers, on_crash=on_crash) as pool:
        error = pool.submit(workers.die, 7).exception(WITHIN)
        assert isinstance(error, SupervisionError)
        assert error.failure is not None
        assert error.failure.signal == signal.SIGKILL
        # The others continue, and nothing goes to the dead one.
        assert list(pool.map(workers.double, range(30))) == [2 * n for n in range(30)]
        if on_crash == "respawn":
            await_replicas(pool, 3)
        assert (pool.progress.failed, pool.progress.retried) == (1, 0)
    assert list(lines(tmp_path / "log")) == [7]


def test_a_task_of_a_dead_replica_is_retried_elsewhere(mortals: tuple[ProcMesh, Any], tmp_path: Path) -> None:
    _, workers = mortals
    with Pool(workers, on_crash="retry", retries=1) as pool:
        assert pool.submit(workers.die_once, 7, str(tmp_path / "mark")).get(WITHIN) == 7
        progress = pool.progress
        assert (progress.done, progress.failed, progress.retried, progress.lost) == (1, 0, 1, 1)
    assert list(lines(tmp_path / "log")) == [7, 7]


def test_retries_are_counted(mortals: tuple[ProcMesh, Any], tmp_path: Path) -> None:
    _, workers = mortals
    with Pool(workers, on_crash="respawn", retries=2) as pool:
        assert isinstance(pool.submit(workers.die, 7).exception(WITHIN), SupervisionError)
        assert pool.progress.retried == 2
        assert pool.submit(workers.double, 1).get(WITHIN) == 2
    assert list(lines(tmp_path / "log")) == [7, 7, 7]


def test_all_replicas_dead(mortals: tuple[ProcMesh, Any], fault_tolerant: None) -> None:
    procs, workers = mortals
    with Pool(workers) as pool:
        for _ in range(3):
            pool.submit(workers.die).exception(WITHIN)
        with pytest.raises(SupervisionError, match="lost all of its 3 replicas") as caught:
            pool.submit(workers.double, 1).get(WITHIN)
        assert caught.value.failure is not None
        assert pool.progress.lost == 3
        # Once they have been respawned, they can be added again.
        procs.respawn().get(WITHIN)
        workers.respawn().get(WITHIN)
        pool.add(workers)
        assert list(pool.map(workers.double, range(10))) == [2 * n for n in range(10)]


def test_waiting_tasks_fail_with_the_last_replica(
    mortals: tuple[ProcMesh, Any], fault_tolerant: None
) -> None:
    _, workers = mortals
    with Pool(workers, waiting=10) as pool:
        futures = [pool.submit(workers.die) for _ in range(8)]
        errors = [future.exception(WITHIN) for future in futures]
    assert all(isinstance(error, SupervisionError) for error in errors)


def test_idle_replica_is_respawned(mortals: tuple[ProcMesh, Any]) -> None:
    procs, workers = mortals
    with Pool(workers, on_crash="respawn") as pool:
        (pid, *_) = procs.pids
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        # By itself, without a task that would notice.
        changed = threading.Event()
        resized = pool._own.resized  # type: ignore[union-attr]
        states: list[tuple[int, int]] = []

        def note() -> None:
            resized()
            states.append((pool.progress.replicas, pool.progress.lost))
            if states[-1] == (3, 0):
                changed.set()

        pool._own.resized = note  # type: ignore[union-attr]
        if not (procs.pids[0] not in (None, pid) and pool.progress.replicas == 3):
            assert changed.wait(WITHIN)
        assert pool.progress.replicas == 3
        assert sorted(set(pool.map_unordered(workers.who, range(30)))) == [0, 1, 2]


def test_a_replica_whose_constructor_fails_is_given_up(
    mortals: tuple[ProcMesh, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, workers = mortals
    (tmp_path / "refuse").touch()
    with Pool(workers.slice(gpus=slice(0, 1)), on_crash="respawn") as pool:
        pool.submit(workers.die).exception(WITHIN)
        with pytest.raises(SupervisionError, match="lost all of its 1 replicas"):
            pool.submit(workers.double, 1).get(WITHIN)
    assert "given up a replica: respawning it failed 3 times" in caplog.text
    assert "refused" in caplog.text


def test_supervised_actors_are_refused(tmp_path: Path) -> None:
    with this_host().spawn_procs({"gpus": 1}) as procs:
        workers = procs.spawn("workers", Worker, supervise=lambda failure: True)
        with pytest.raises(ValueError, match="supervise="):
            Pool(workers, on_crash="respawn")
        with Pool(workers, on_crash="retry") as pool:
            assert pool.submit(workers.double, 1).get(WITHIN) == 2


def test_closed_pool_leaves_failures_to_the_owner(mortals: tuple[ProcMesh, Any]) -> None:
    _, workers = mortals
    with Pool(workers, on_crash="respawn") as pool:
        pool.submit(workers.die).exception(WITHIN)
        await_replicas(pool, 3)
    assert workers._making.holding.policy is None
    with Pool(workers, on_crash="respawn") as pool:
        assert pool.submit(workers.double, 1).get(WITHIN) == 2


def test_a_replica_is_lost_while_draining(mortals: tuple[ProcMesh, Any], tmp_path: Path) -> None:
    procs, workers = mortals
    gate = Gate(tmp_path / "gate")
    port, begun = Channel[int].open()
    with Pool(workers, on_crash="retry") as pool:
        future = pool.submit(workers.block, gate.path, port)
        rank = begun.recv().get(WITHIN)
        part = workers.slice(gpus=slice(rank, rank + 1))
        drained = pool.drain(part)
        pid = procs.pids[rank]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        drained.get(WITHIN)
        assert isinstance(future.exception(WITHIN), SupervisionError)
        assert pool.progress.lost == 1
    gate.close()


@pytest.mark.parametrize("retries", [0, 2])
def test_repeatedly_killed_replicas_lose_no_task(
    mortals: tuple[ProcMesh, Any], tmp_path: Path, retries: int
) -> None:
    procs, workers = mortals
    count, kills = 600, 6
    with Pool(workers, on_crash="respawn", retries=retries) as pool:
        outcomes: dict[int, Any] = {}
        for done, (n, future) in enumerate(pool.as_completed(workers.note, range(count))):
            outcomes[n] = future.exception()
            if done % (count // kills) == count // kills // 2:
                pid = procs.pids[done % 3]
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
    runs = Counter(lines(tmp_path / "log"))
    assert sorted(outcomes) == list(range(count)), "each task has one outcome"
    lost = [n for n, error in outcomes.items() if error is not None]
    assert all(runs[n] == 1 or n in lost for n in range(count) if retries == 0)
    assert max(runs.values()) <= 1 + retries
    assert all(isinstance(outcomes[n], SupervisionError) for n in lost)
    if retries:
        assert not lost
