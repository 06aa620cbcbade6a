"""Pools over several hosts, some of which die."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_owners import slay
from core_pool import WITHIN, Gate, User, Worker, join_pool_thread, lines

from mesh_core import (
    Channel,
    HostMesh,
    Pool,
    PoolLost,
    SupervisionError,
    set_fault_handler,
    shutdown,
)
from mesh_core.testing import LocalCluster

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Two hosts, one of which will not survive the test."""
    with LocalCluster(hosts=2) as cluster:
        yield cluster
        shutdown()


@pytest.fixture
def hosts(cluster: LocalCluster) -> Iterator[HostMesh]:
    before = set_fault_handler(lambda failure: None)
    hosts = cluster.attach()
    hosts.initialized.get(timeout=WITHIN)
    yield hosts
    set_fault_handler(before)


def test_pool_goes_on_without_a_host_that_dies(
    cluster: LocalCluster, hosts: HostMesh, tmp_path: Path
) -> None:
    log, gate = tmp_path / "log", Gate(tmp_path / "gate")
    workers: Any = hosts.spawn_procs({"gpus": 2}).spawn("workers", Worker, str(log))
    port, begun = Channel[int].open()
    with Pool(workers, waiting=100) as pool:
        held = [pool.submit(workers.block, gate.path, port) for _ in range(4)]
        assert sorted(begun.recv().get(WITHIN) for _ in held) == [0, 1, 2, 3]
        waiting = [pool.submit(workers.note, n) for n in range(50)]
        cluster.kill(1)
        gate.open()
        errors = [future.exception(WITHIN) for future in held]
        assert sum(isinstance(error, SupervisionError) for error in errors) == 2
        assert [future.get(WITHIN) for future in waiting] == list(range(50))
        assert (pool.progress.replicas, pool.progress.lost) == (2, 2)
    assert sorted(lines(log)) == list(range(50)), "none is lost, none runs twice"
    gate.close()
    join_pool_thread()


def test_users_on_other_hosts_are_notified_of_the_end_of_a_pool(hosts: HostMesh, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    maker_procs = hosts.slice(hosts=0).spawn_procs()
    workers: Any = hosts.spawn_procs({"gpus": 1}).spawn("workers", Worker)
    user: Any = hosts.slice(hosts=1).spawn_procs().spawn("user", User)
    maker = maker_procs.spawn("maker", User)
    pool = maker.make_for_all.call_one(workers).get(WITHIN)
    port, begun = Channel[int].open()
    running = [pool.submit(workers.block, gate.path, port) for _ in range(2)]
    assert sorted(begun.recv().get(WITHIN) for _ in running) == [0, 1]
    maker.have_begun.call_one(user, 2).get(WITHIN)
    waiting = pool.submit(workers.double, 1)
    slay(maker_procs)
    assert isinstance(waiting.exception(WITHIN), PoolLost)
    assert user.outcomes.call_one().get(WITHIN) == ["PoolLost"] * 2
    gate.open()
    assert sorted(future.get(WITHIN) for future in running) == [0, 1]
    gate.close()
    join_pool_thread()
