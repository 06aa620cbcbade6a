"""Requests to a dead host, and large results of a living one."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from core_processes import Watch

from mesh_core import Actor, SpawnError, SupervisionError, endpoint
from mesh_core.testing import LocalCluster

_LIMIT = 30.0
_LARGE = 4 << 20


class Far(Actor):
    @endpoint
    def hello(self) -> int:
        return 1

    @endpoint
    def give(self, fill: int, size: int) -> Any:
        import numpy

        return numpy.full(size, fill, dtype="uint8")

    @endpoint
    def spawn_on(self, hosts: Any) -> str:
        try:
            hosts.spawn_procs(per_host={"gpus": 1}).initialized.get(timeout=_LIMIT)
        except SpawnError:
            return "refused"
        return "spawned"


@pytest.mark.usefixtures("fault_tolerant")
def test_a_dead_host_takes_no_orders_and_delays_nobody() -> None:
    with LocalCluster(hosts=2) as cluster:
        hosts = cluster.attach()
        hosts.initialized.get(timeout=_LIMIT)
        dying, living = hosts.slice(hosts=slice(0, 1)), hosts.slice(hosts=slice(1, 2))
        lost = dying.spawn_procs(per_host={"gpus": 2})
        there = lost.spawn("there", Far)
        both = hosts.spawn_procs(per_host={"gpus": 1})
        kept = living.spawn_procs(per_host={"gpus": 1})
        neighbour = kept.spawn("neighbour", Far).slice(hosts=0, gpus=0)
        there.hello.call().get(timeout=_LIMIT)
        both.initialized.get(timeout=_LIMIT)
        assert neighbour.hello.call_one().get(timeout=_LIMIT) == 1
        cluster.kill(0, signal.SIGKILL)
        with pytest.raises(SupervisionError):
            there.hello.call().get(timeout=_LIMIT)
        with pytest.raises(SpawnError, match="host"):
            dying.spawn_procs(per_host={"gpus": 1}).initialized.get(timeout=_LIMIT)
        assert neighbour.spawn_on.call_one(dying).get(timeout=_LIMIT) == "refused"
        assert neighbour.spawn_on.call_one(living).get(timeout=_LIMIT) == "spawned"
        lost.stop().get(timeout=_LIMIT)
        both.stop().get(timeout=_LIMIT)
        kept.stop().get(timeout=_LIMIT)


@pytest.mark.beside
def test_large_results_of_another_host_can_be_written_to_and_their_memory_is_used_again() -> None:
    numpy = pytest.importorskip("numpy")
    with LocalCluster(hosts=1) as cluster:
        procs = cluster.attach().spawn_procs(per_host={"gpus": 2})
        far = procs.spawn("far", Far)
        one = far.slice(hosts=0, gpus=0)
        held = [one.give.call_one(fill, _LARGE).get(timeout=_LIMIT) for fill in (1, 2)]
        held[0][:3] = 9
        assert held[0][:4].tolist() == [9, 9, 9, 1]
        assert numpy.array_equal(held[1], numpy.full(_LARGE, 2, dtype="uint8"))
        addresses = set()
        for fill in range(20):
            result = one.give.call_one(fill, _LARGE).get(timeout=_LIMIT)
            assert numpy.array_equal(result, numpy.full(_LARGE, fill, dtype="uint8"))
            addresses.add(result.ctypes.data)
            del result
        assert len(addresses) < 8, "fresh memory for every result"
        assert held[0][0] == 9
        assert held[1][-1] == 2
        everybody = far.give.call(7, _LARGE).get(timeout=_LIMIT)
        assert all(
            numpy.array_equal(value, numpy.full(_LARGE, 7, dtype="uint8")) for value in everybody.values()
        )
        procs.stop().get(timeout=_LIMIT)


def test_a_clusters_agents_end_with_whoever_started_them(script: Any) -> None:
    run = script(
        """
        import sys
        from mesh_core.testing import LocalCluster

        with LocalCluster(hosts=2) as cluster:
            print(*cluster.pids)
            sys.stdin.read()
        """
    )
    agents = Watch([int(pid) for pid in run.line().split()])
    os.kill(run.process.pid, signal.SIGKILL)
    assert agents.wait(_LIMIT) == []
