"""What a dead host ran, respawned on a spare one."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from core_processes import Watch, family
from core_repair import WITHIN, Asker, Counter, Losses, ranks

from mesh_core import MeshError, ProcMesh, SupervisionError, inspect
from mesh_core.testing import LocalCluster

pytestmark = pytest.mark.slow


def spawn(procs: ProcMesh) -> Any:
    return procs.spawn("counters", Counter, supervise=lambda failure: True)


def where(mesh: Any) -> list[int]:
    return [rank for rank, *_ in mesh.who.call().get(timeout=WITHIN).values()]


def test_ranks_of_a_dead_host_are_restarted_on_a_spare() -> None:
    losses = Losses()
    with LocalCluster(hosts=3) as cluster:
        hosts = cluster.attach()
        hosts.initialized.get(timeout=WITHIN)
        used, spare = hosts.slice(hosts=slice(0, 2)), hosts.slice(hosts=2)
        procs = used.spawn_procs({"gpus": 2}, name="workers", supervise=losses)
        counters = spawn(procs)
        before = counters.slice(hosts=0)
        asker = procs.slice(hosts=0, gpus=0).spawn("asker", Asker, counters)
        assert [rank for rank, *_ in asker.who.call_one().get(timeout=WITHIN)] == [0, 1, 2, 3]
        dying = Watch(family(cluster.pids[1]))
        cluster.kill(1, signal.SIGKILL)
        assert dying.wait() == []
        assert {losses.next().rank, losses.next().rank} == {2, 3}
        assert ranks(procs.failed()) == [2, 3]
        with pytest.raises(SupervisionError):
            counters.hear.call(1).get(timeout=WITHIN)
        with pytest.raises(
            ValueError,
            match=r"cannot respawn rank 2 on its host .*, which is dead or stopped; name another host",
        ):
            procs.respawn()
        procs.respawn(on=spare).get(timeout=WITHIN)
        counters.respawn().get(timeout=WITHIN)
        assert where(counters) == [0, 1, 2, 3]
        assert where(before) == [0, 1]
        assert [rank for rank, *_ in asker.who.call_one().get(timeout=WITHIN)] == [0, 1, 2, 3]
        assert set(procs.pids[2:]) <= family(cluster.pids[2]).keys()
        # The new ones are reported like any other, with the rank that they have.
        failure = losses.slay(procs, 3)
        assert (failure.rank, failure.point and dict(failure.point)) == (3, {"hosts": 1, "gpus": 1})
        assert failure.host == "host-2"
        procs.stop().get(timeout=WITHIN)
        assert not family(cluster.pids[2]).keys() & set(procs.pids)
        hosts.stop().get(timeout=WITHIN)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_prepared_spare_forks_later_processes() -> None:
    losses = Losses()
    with LocalCluster(hosts=3) as cluster:
        hosts = cluster.attach()
        hosts.initialized.get(timeout=WITHIN)
        procs = hosts.slice(hosts=0).spawn_procs({"gpus": 2}, preload=["fractions"], supervise=losses)
        counters = spawn(procs)
        spares = hosts.slice(hosts=slice(1, None))
        procs.prepare(spares).get(timeout=WITHIN)
        waiting = family(cluster.pids[2])
        assert waiting, "a fork server waits there"
        cluster.kill(0)
        losses.next()
        losses.next()
        procs.respawn(on=hosts.slice(hosts=2)).get(timeout=WITHIN)
        counters.respawn().get(timeout=WITHIN)
        assert where(counters) == [0, 1]
        assert {parent(pid) for pid in procs.pids if pid is not None} <= waiting.keys()
        # It is a member of no mesh.
        assert len(inspect.snapshot(pss=False).procs) == 3
        cluster.kill(1)
        with pytest.raises(MeshError, match="host-1"):
            procs.prepare(hosts.slice(hosts=1)).get(timeout=WITHIN)
        assert where(counters) == [0, 1]
