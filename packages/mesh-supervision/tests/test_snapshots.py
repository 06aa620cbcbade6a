"""Actors that are killed, and go on from what was kept of them."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from kept import Counter, Half, Later, Never
from supervised import WITHIN, Heard

from mesh_core import MeshError, ProcMesh, SupervisionError, this_host
from mesh_core.extensions import uninstall
from mesh_supervision import Ignore, OneForAll, OneForOne, Snapshots, Version, keep_snapshots, snapshot

pytestmark = [pytest.mark.slow]

Slay = Callable[[ProcMesh, int], int]


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    with contextlib.suppress(MeshError):
        uninstall(Snapshots.name)


def policy() -> Heard:
    return Heard(OneForOne(intensity=100, period=60.0))


@pytest.mark.python
def test_a_replacement_continues_from_the_last_snapshot(slay: Slay, told: Any) -> None:
    snapshots, heard = keep_snapshots(), policy()
    with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
        counters: Any = procs.spawn("counters", Counter, 100_000, supervise=heard)
        counters.add.call(5).get(timeout=WITHIN)
        assert snapshots.newest(counters) == [None, None]
        assert snapshots.take(counters).get(timeout=WITHIN).values() == [Version(1, 1)] * 2
        assert counters.slice(gpus=1).add_and_keep.call_one(1).get(timeout=WITHIN) == (6, 2)
        counters.add.call(10).get(timeout=WITHIN)  # lost with the process
        for _ in range(2):
            slay(procs, 1)
            heard.repaired()
            assert counters.slice(gpus=1).tell.call_one().get(timeout=WITHIN) == (
                6,
                ["constructed", "restored"],
            )
            assert counters.slice(gpus=0).tell.call_one().get(timeout=WITHIN) == (15, ["constructed"])
        taken = snapshots.take(counters.slice(gpus=1)).get(timeout=WITHIN).item()
        assert taken == Version(3, 1)
        assert snapshots.newest(counters) == [Version(1, 1), taken]
        snapshots.forget(counters)
        assert snapshots.newest(counters) == [None, None]
    assert told.empty()


def test_without_a_snapshot_the_constructor_runs(slay: Slay, told: Any) -> None:
    keep_snapshots()
    heard = policy()
    with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=heard)
        counters.add.call(5).get(timeout=WITHIN)
        slay(procs, 1)
        heard.repaired()
        assert counters.add.call(0).get(timeout=WITHIN).values() == [5, 0]
    assert told.empty()


def test_all_are_restored_where_all_are_restarted(slay: Slay, told: Any) -> None:
    snapshots, heard = keep_snapshots(), Heard(OneForAll(intensity=3, period=60.0, settle=0.0))
    with this_host().spawn_procs({"gpus": 3}, supervise=Ignore()) as procs:
        counters: Any = procs.spawn("counters", Later, supervise=heard)
        counters.add.call(5).get(timeout=WITHIN)
        snapshots.take(counters).get(timeout=WITHIN)
        counters.add.call(1).get(timeout=WITHIN)
        slay(procs, 0)
        heard.repaired()
        assert counters.add.call(0).get(timeout=WITHIN).values() == [5, 5, 5]
    assert told.empty()


def test_snapshots_are_taken_at_intervals(slay: Slay, told: Any) -> None:
    snapshots, heard = keep_snapshots(every=0.01), policy()
    with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
        counters: Any = procs.spawn("counters", Later, supervise=heard)
        counters.add.call(5).get(timeout=WITHIN)
        before = snapshots.newest(counters)
        while (now := snapshots.newest(counters))[1] in (None, before[1]) or now[1] < Version(1, 3):
            pass
        slay(procs, 1)
        heard.repaired()
        assert counters.add.call(0).get(timeout=WITHIN).values() == [5, 5]
    assert told.empty()


def test_a_snapshot_that_raises_leaves_the_one_before(slay: Slay, told: Any) -> None:
    snapshots, heard = keep_snapshots(), policy()
    with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=heard)
        counters.add.call(5).get(timeout=WITHIN)
        snapshots.take(counters).get(timeout=WITHIN)
        counters.slice(gpus=1).object_to.call_one("snapshot").get(timeout=WITHIN)
        with pytest.raises(RuntimeError, match="not now"):
            snapshots.take(counters).get(timeout=WITHIN)
        with pytest.raises(RuntimeError, match="not now"):
            counters.slice(gpus=1).add_and_keep.call_one(1).get(timeout=WITHIN)
        slay(procs, 1)
        heard.repaired()
        assert counters.slice(gpus=1).add.call_one(0).get(timeout=WITHIN) == 5
    assert told.empty()


def test_one_that_cannot_be_restored_is_a_crash_loop(slay: Slay, told: Any) -> None:
    snapshots = keep_snapshots()
    with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=OneForOne(intensity=2, period=60.0))
        counters.object_to.call("restore").get(timeout=WITHIN)
        snapshots.take(counters).get(timeout=WITHIN)
        slay(procs, 1)
        assert "could not be restarted: cannot go back" in told.next().report()
    assert told.empty()


def test_classes_that_could_not_be_restored_are_refused() -> None:
    snapshots = keep_snapshots()
    with this_host().spawn_procs() as procs:
        with pytest.raises(TypeError, match="has __snapshot__ and no __restore__"):
            procs.spawn("half", Half)
        never: Any = procs.spawn("never", Never)
        never.initialized.get(timeout=WITHIN)
        with pytest.raises(TypeError, match="must be a plain method"):
            snapshots.take(never).get(timeout=WITHIN)


def test_what_is_said_where_nothing_is_kept() -> None:
    with pytest.raises(MeshError, match=r"call keep_snapshots\(\) in the script"):
        snapshot()
    with pytest.raises(ValueError, match="every must be a positive number"):
        keep_snapshots(every=0)
    with this_host().spawn_procs() as procs:
        counters: Any = procs.spawn("counters", Counter)
        with pytest.raises(MeshError, match=r"call keep_snapshots\(\) in the script"):
            counters.add_and_keep.call_one(1).get(timeout=WITHIN)


def test_those_that_die_while_they_keep_leave_whole_snapshots(slay: Slay, told: Any) -> None:
    """SNP-1, SNP-3: killed at any moment; `__restore__` looks whether the block is of one piece."""
    chance = random.Random(14)
    snapshots, heard = keep_snapshots(), policy()
    with this_host().spawn_procs(supervise=Ignore()) as procs:
        counters: Any = procs.spawn("counters", Counter, 50_000, supervise=heard)
        counters.add_and_keep.call_one(1).get(timeout=WITHIN)
        for _ in range(6):
            (before,) = snapshots.newest(counters)
            flood = counters.flood.call_one()
            for _ in range(chance.randrange(1, 4)):
                (now,) = snapshots.newest(counters)
                while snapshots.newest(counters) == [now]:
                    pass
            slay(procs, 0)
            assert isinstance(flood.exception(timeout=WITHIN), SupervisionError)
            heard.repaired()
            count, lives = counters.tell.call_one().get(timeout=WITHIN)
            assert lives[-1] == "restored"
            (after,) = snapshots.newest(counters)
            assert after > before
            assert count > 1
    assert told.empty()
