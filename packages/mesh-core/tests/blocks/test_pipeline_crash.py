"""Pipelines whose replicas die."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_pipeline import Worker
from core_pool import join_pool_thread

from mesh_core import Pipeline, ProcMesh, Stage, StageError, SupervisionError, this_host

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.slow]


@pytest.fixture
def procs() -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        yield procs
    join_pool_thread()


def test_crash_is_retried_on_another_replica(procs: ProcMesh, tmp_path: Path) -> None:
    workers: Any = procs.spawn("workers", Worker)
    mark = str(tmp_path / "mark")
    pipeline = Pipeline(Stage(workers.die_once, retries=1, on_crash="retry"), ordered=True)
    run = pipeline.run([(n, mark) for n in range(10)])
    assert list(run) == list(range(10))
    assert run.stats.stages[0].retried == 1


def test_crash_is_quarantined_and_the_replica_respawned(procs: ProcMesh) -> None:
    workers: Any = procs.spawn("workers", Worker)
    pipeline = Pipeline(
        Stage(workers.die, retries=1, on_crash="respawn"), on_error="quarantine", ordered=True
    )
    run = pipeline.run(range(10))
    assert list(run) == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    (bad,) = run.quarantined
    assert (bad.item, bad.attempts) == ("3", 2)
    assert isinstance(bad.error, SupervisionError)
    # Now with all replicas again.
    assert list(pipeline.run([5, 6])) == [5, 6]


def test_a_dead_generator_is_not_restarted_once_it_was_read(procs: ProcMesh) -> None:
    workers: Any = procs.spawn("workers", Worker)
    pipeline = Pipeline(
        Stage(workers.yield_and_die, retries=5, on_crash="respawn"), on_error="quarantine", ordered=True
    )
    run = pipeline.run([2, 3, 4])
    found = list(run)
    assert [n for n in found if n // 10 != 3] == [20, 21, 40, 41]
    assert [n for n in found if n // 10 == 3] == [30, 31]
    assert [bad.item for bad in run.quarantined] == ["3"]


def test_stage_without_replicas_ends_the_run(procs: ProcMesh) -> None:
    workers: Any = procs.spawn("workers", Worker)
    one = procs.slice(gpus=0).spawn("one", Worker)
    pipeline = Pipeline(
        Stage(workers.increment, on_crash="retry"), Stage(one.die, on_crash="retry"), on_error="quarantine"
    )
    with pytest.raises(StageError, match=r"stage 'one\.die' has lost all"):
        list(pipeline.run(itertools.chain([1, 2], itertools.repeat(5))))
    join_pool_thread()
    assert not pipeline._replicas


def test_an_idle_replica_is_killed(procs: ProcMesh) -> None:
    workers: Any = procs.spawn("workers", Worker)
    pid = workers.pid.call().get()
    pipeline = Pipeline(Stage(workers.double, retries=2, on_crash="respawn"), ordered=True)
    with pipeline.run(range(40)) as run:
        assert next(run) == 0
        os.kill(pid.values()[0], signal.SIGKILL)
        assert list(run) == [2 * n for n in range(1, 40)]
