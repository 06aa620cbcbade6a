"""Meshes that are healed after deaths: HEA-1, HEA-2, HEA-3. Without PyTorch."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from healing import Fragile, Replica, Stateless
from supervised import WITHIN

from mesh_core import ActorError, DeviceMeshError, MeshError, ProcMesh, endpoint, this_host
from mesh_core.extensions import uninstall
from mesh_core.testing import LocalCluster
from mesh_supervision import Ignore, Snapshots, heal_mesh, keep_snapshots, whole
from namesakes import Namesakes

pytestmark = [pytest.mark.slow]

Slay = Callable[[ProcMesh, int], int]


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    for name in (Snapshots.name, "supervision.healed"):
        with contextlib.suppress(MeshError):
            uninstall(name)


def kill(mesh: Any, procs: ProcMesh, *ranks: int) -> None:
    """Kill processes, and wait until that is known."""
    for rank in ranks:
        pid = procs.pids[rank]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    while not {point.rank for point in procs.failed()} >= set(ranks):
        pass


@pytest.mark.python
def test_the_lost_are_replaced_with_the_state_of_one_that_lives(told: Any) -> None:
    """HEA-2."""
    snapshots = keep_snapshots()
    with this_host().spawn_procs({"gpus": 4}, supervise=Ignore()) as procs:
        replicas: Any = procs.spawn("replicas", Replica, supervise=Ignore())
        replicas.step.call().get(timeout=WITHIN)
        snapshots.take(replicas).get(timeout=WITHIN)
        replicas.step.call(6).get(timeout=WITHIN)
        # One of those that live has come further before it was noticed.
        replicas.slice(gpus=3).step.call_one().get(timeout=WITHIN)
        pids = procs.pids
        assert heal_mesh(replicas) is replicas, "nothing is lost"
        kill(replicas, procs, 0, 2)
        assert heal_mesh(replicas) is replicas
        told_now = replicas.told.call().get(timeout=WITHIN).values()
        assert [steps for steps, *_ in told_now] == [7] * 4
        assert [pid for _, pid, _ in told_now][1::2] == pids[1::2]
        donor = f"from {pids[1]}"
        assert [history[-1] for *_, history in told_now] == [donor] * 4
        assert replicas.step.call().get(timeout=WITHIN).values() == [8] * 4
    assert told.empty()


class NamedAlike(Namesakes, Replica):
    """Has endpoints called like what repairs a mesh."""

    @endpoint
    def procs(self) -> str:
        return "procs"


def test_endpoints_may_be_called_like_repairs(told: Any) -> None:
    """END-1"""
    snapshots = keep_snapshots()
    with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
        replicas: Any = procs.spawn("replicas", NamedAlike, supervise=Ignore())
        replicas.step.call(3).get(timeout=WITHIN)
        snapshots.take(replicas).get(timeout=WITHIN)
        kill(replicas, procs, 1)
        with (
            pytest.raises(DeviceMeshError, match="mesh 'replicas' has lost 1 of its 2 ranks"),
            whole(replicas),
        ):
            replicas.step.call().get(timeout=WITHIN)
        assert heal_mesh(replicas) is replicas
        assert len({steps for steps, *_ in replicas.told.call().get(timeout=WITHIN).values()}) == 1
        assert replicas.name.call().get(timeout=WITHIN).values() == ["name", "name"]


def test_without_survivors_the_last_snapshot_counts(told: Any) -> None:
    snapshots = keep_snapshots()
    with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
        replicas: Any = procs.spawn("replicas", Replica, supervise=Ignore())
        replicas.step.call(5).get(timeout=WITHIN)
        snapshots.take(replicas).get(timeout=WITHIN)
        replicas.slice(gpus=0).step.call_one().get(timeout=WITHIN)
        snapshots.take(replicas.slice(gpus=0)).get(timeout=WITHIN)
        kill(replicas, procs, 0, 1)
        heal_mesh(replicas)
        assert replicas.step.call(0).get(timeout=WITHIN).values() == [6, 6]
    assert told.empty()


def test_a_heal_that_could_not_restore_is_taken_up_by_the_next(tmp_path: Path) -> None:
    """HEA-3."""
    keep_snapshots()
    broken = tmp_path / "broken"
    with this_host().spawn_procs({"gpus": 3}, supervise=Ignore()) as procs:
        replicas: Any = procs.spawn("replicas", Fragile, broken, supervise=Ignore())
        replicas.step.call(4).get(timeout=WITHIN)
        broken.touch()
        kill(replicas, procs, 1)
        for _ in range(2):
            with pytest.raises(ActorError, match="the disk is full"):
                heal_mesh(replicas)
        broken.unlink()
        assert heal_mesh(replicas) is replicas
        assert replicas.step.call(1).get(timeout=WITHIN).values() == [5, 5, 5]
        before = procs.incarnations
        heal_mesh(replicas)
        assert procs.incarnations == before, "it is whole"


def test_what_are_no_replicas_have_their_own_state(told: Any) -> None:
    snapshots = keep_snapshots()
    with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
        replicas: Any = procs.spawn("replicas", Replica, supervise=Ignore())
        replicas.slice(gpus=1).step.call_one(5).get(timeout=WITHIN)
        snapshots.take(replicas).get(timeout=WITHIN)
        replicas.step.call(1).get(timeout=WITHIN)
        kill(replicas, procs, 1)
        heal_mesh(replicas, replicas=False)
        assert replicas.step.call(0).get(timeout=WITHIN).values() == [1, 5]
    assert told.empty()


def test_those_that_die_while_it_heals_are_healed_too(tmp_path: Path, told: Any) -> None:
    """HEA-1: whoever is restored first kills others, the one with the state among them."""
    keep_snapshots()
    victims = tmp_path / "victims"
    with this_host().spawn_procs({"gpus": 4}, supervise=Ignore()) as procs:
        replicas: Any = procs.spawn("replicas", Replica, victims, supervise=Ignore())
        replicas.step.call(3).get(timeout=WITHIN)
        victims.write_text(f"{procs.pids[0]} {procs.pids[3]}")
        kill(replicas, procs, 1)
        heal_mesh(replicas)
        assert replicas.step.call(0).get(timeout=WITHIN).values() == [3] * 4
        assert procs.incarnations == [1, 1, 0, 1]
    assert told.empty()


def test_what_is_left_is_a_mesh_without_gaps(told: Any) -> None:
    keep_snapshots()
    with this_host().spawn_procs({"gpus": 5}, supervise=Ignore()) as procs:
        replicas: Any = procs.spawn("replicas", Replica, supervise=Ignore())
        replicas.step.call(3).get(timeout=WITHIN)
        pids = procs.pids
        for lost, left in ((1, [0, 2, 3, 4]), (4, [0, 2, 3]), (0, [2, 3])):
            kill(replicas, procs, lost)
            replicas = heal_mesh(replicas, mode="shrink")
            assert replicas.sizes == {"gpus": len(left)}
            found = replicas.told.call().get(timeout=WITHIN)
            assert [pid for _, pid, _ in found.values()] == [pids[each] for each in left]
            assert replicas.slice(gpus=1).step.call_one(0).get(timeout=WITHIN) == 3
        # It can also be healed in its places.
        kill(replicas, procs, 3)
        again = heal_mesh(replicas)
        assert again.step.call(0).get(timeout=WITHIN).values() == [3, 3]
        assert again.sizes == {"gpus": 2}
        kill(replicas, procs, 2, 3)
        with pytest.raises(DeviceMeshError, match="has lost 2 of its 2 ranks"):
            heal_mesh(again, mode="shrink")
    assert told.empty()


@pytest.mark.parametrize(
    ("lost", "sizes", "left"),
    [((4,), {"hosts": 2, "gpus": 2}, [0, 2, 3, 5]), ((3, 5), {"hosts": 1, "gpus": 3}, [0, 1, 2])],
)
def test_a_grid_gives_up_what_costs_it_least(lost: Any, sizes: Any, left: Any, told: Any) -> None:
    with this_host().spawn_procs({"hosts": 2, "gpus": 3}, supervise=Ignore()) as procs:
        workers: Any = procs.spawn("workers", Stateless, supervise=Ignore())
        pids = workers.pid.call().get(timeout=WITHIN).values()
        kill(workers, procs, *lost)
        workers = heal_mesh(workers, "shrink")
        assert workers.sizes == sizes
        assert workers.pid.call().get(timeout=WITHIN).values() == [pids[each] for each in left]
    assert told.empty()


def test_processes_are_healed_without_actors(told: Any) -> None:
    with this_host().spawn_procs({"gpus": 3}, supervise=Ignore()) as procs:
        pids = procs.pids
        kill(procs, procs, 1)
        assert heal_mesh(procs) is procs
        assert procs.incarnations == [0, 1, 0]
        kill(procs, procs, 0)
        smaller = heal_mesh(procs, mode="shrink")
        assert smaller.pids == procs.pids[1:]
        assert smaller.pids[1] == pids[2]
    assert told.empty()


def test_the_lost_of_a_dead_host_are_made_on_spares(told: Any) -> None:
    keep_snapshots()
    with LocalCluster(hosts=3) as cluster, cluster.attach() as hosts:
        used, spare = hosts.slice(hosts=slice(0, 2)), hosts.slice(hosts=2)
        procs = used.spawn_procs({"gpus": 1}, supervise=Ignore())
        replicas: Any = procs.spawn("replicas", Replica, supervise=Ignore())
        replicas.step.call(2).get(timeout=WITHIN)
        cluster.kill(1)
        while not procs.failed():
            pass
        with pytest.raises(ValueError, match="name another host"):
            heal_mesh(replicas)
        heal_mesh(replicas, on=spare)
        assert replicas.step.call(1).get(timeout=WITHIN).values() == [3, 3]


def test_what_is_lost_is_said_by_its_coordinates(slay: Slay, told: Any) -> None:
    with this_host().spawn_procs({"gpus": 3}, supervise=Ignore()) as procs:
        replicas: Any = procs.spawn("replicas", Replica, supervise=Ignore())
        with pytest.raises(RuntimeError, match="out of luck"), whole(replicas):
            replicas.fail.call().get(timeout=WITHIN)
        with pytest.raises(KeyError), whole(replicas):
            raise KeyError("a bug")
        with pytest.raises(DeviceMeshError) as caught, whole(replicas):
            replicas.slice(gpus=2).die.call_one().get(timeout=WITHIN)
        assert caught.value.coordinates == ({"gpus": 2},)
        # An error of a rank that lives, with the news of a death on its way.
        slay(procs, 0)
        with pytest.raises(DeviceMeshError) as caught, whole(replicas.slice(gpus=slice(0, 2))):
            raise RuntimeError("connection closed by peer")
        assert caught.value.coordinates == ({"gpus": 0},)
    assert told.empty()


def test_what_cannot_be_healed_is_refused(told: Any) -> None:
    with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
        with pytest.raises(ValueError, match="'replace' or 'shrink', got 'mend'"):
            heal_mesh(procs, mode="mend")  # type: ignore[arg-type]
        workers: Any = procs.spawn("workers", Stateless, supervise=Ignore())
        workers.pid.call().get(timeout=WITHIN)
        workers.stop().get(timeout=WITHIN)
        with pytest.raises(MeshError, match="not known here"):
            heal_mesh(workers)
    assert told.empty()
