"""Pipelines whose stages are on different hosts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from core_hosts import cluster, hosts, runtime  # noqa: F401 - fixtures
from core_pipeline import WITHIN, Worker
from core_pool import join_pool_thread

from mesh_core import Pipeline, Stage, StageError, SupervisionError
from mesh_core.testing import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("runtime", "fault_tolerant")]


@pytest.fixture
def workers(hosts: Any) -> Iterator[Any]:  # noqa: F811
    """One on each host."""
    with hosts.spawn_procs({"gpus": 1}, name="stages") as procs:
        yield procs.spawn("workers", Worker)
        join_pool_thread()


def test_each_stage_has_a_host(workers: Any) -> None:
    first, second = workers.slice(hosts=1), workers.slice(hosts=2)
    pipeline = Pipeline(Stage(first.count), Stage(second.increment), ordered=True, max_bytes=3_000)
    assert pipeline.run([30, 4]).results(WITHIN) == [*range(1, 31), *range(1, 5)]


def test_kept_results_are_read_by_the_stage_of_another_host(workers: Any) -> None:
    first, second = workers.slice(hosts=1), workers.slice(hosts=2)
    pipeline = Pipeline(
        Stage(first.data.with_options(keep=True)), Stage(second.measure), ordered=True, max_bytes=4_000
    )
    assert pipeline.run([100_000] * 12).results(WITHIN) == [100_000] * 12
    pipeline = Pipeline(Stage(first.put_two), Stage(second.measure_all), ordered=True)
    assert pipeline.run([100_000] * 4).results(WITHIN) == [[100_000, 200_000]] * 4


def test_host_that_dies_in_the_middle(workers: Any, cluster: LocalCluster) -> None:  # noqa: F811
    first, last = workers.slice(hosts=1), workers.slice(hosts=2)
    stages = (
        Stage(workers.double, retries=3, on_crash="retry"),
        Stage(first.increment, name="increment"),
    )
    run = Pipeline(*stages, ordered=True).run(range(100))
    found = [next(run)]
    os.kill(cluster.pids[2], signal.SIGKILL)
    # The rest may be done before the death is known: what counts is that all of it arrives.
    assert found + run.results(WITHIN) == [2 * n + 1 for n in range(100)]
    assert run.stats.stages[0].replicas in {2, 3}
    # Work that only that host could do ends a run, and the next one.
    pipeline = Pipeline(Stage(first.double), Stage(last.increment, on_crash="retry"), on_error="quarantine")
    for _ in range(2):
        with pytest.raises(StageError, match=r"stage 'workers\.increment' has lost all") as raised:
            pipeline.run(range(100)).results(WITHIN)
        assert isinstance(raised.value.__cause__, SupervisionError)
