"""Pools that are sent to other processes: all holders share the replicas (SHR-1)."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_owners import slay
from core_pool import WITHIN, Gate, User, Worker, join_pool_thread

from mesh_core import Channel, MeshError, Pool, PoolLost, ProcMesh, SupervisionError, gather, this_host
from mesh_core._blocks.pool.sharing import Desk

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture(autouse=True)
def no_thread() -> Iterator[None]:
    yield
    join_pool_thread()


@pytest.fixture
def workers(procs: ProcMesh) -> Iterator[Any]:
    mesh = procs.slice(hosts=0).spawn("workers", Worker)
    yield mesh
    mesh.stop().get()


@pytest.fixture
def users(procs: ProcMesh) -> Iterator[Any]:
    mesh = procs.slice(hosts=1).spawn("users", User)
    yield mesh
    mesh.stop().get()


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    made = Gate(tmp_path / "gate")
    yield made
    made.close()


def test_several_actors_use_a_pool(workers: Any, users: Any) -> None:
    with Pool(workers) as pool:
        sync, coroutines = users.double.call(pool, 60), users.double_async.call(pool, 60)
        here = list(pool.map(workers.double, range(60)))
        expected = [2 * n for n in range(60)]
        assert [*sync.get(WITHIN).values(), *coroutines.get(WITHIN).values(), here] == [expected] * 5


def test_all_users_together_keep_to_per_rank(workers: Any, users: Any) -> None:
    with Pool(workers, per_rank=2) as pool:
        there = users.most.call(pool, 100)
        here = max(pool.map_unordered(workers.overlap, range(100)))
        assert max([here, *there.get(WITHIN).values()]) <= 2


def test_turns_of_a_dead_user_come_back(workers: Any, tmp_path: Path, fault_tolerant: None) -> None:
    gate = Gate(tmp_path / "gate")
    port, begun = Channel[int].open()
    with this_host().spawn_procs({"users": 1}) as procs, Pool(workers) as pool:
        user = procs.spawn("user", User)
        pid = user.hold.call_one(pool, gate.path, port, 4).get(WITHIN)
        assert sorted(begun.recv().get(WITHIN) for _ in range(2)) == [0, 1]
        mine = [pool.submit(workers.double, n) for n in range(2)]
        os.kill(pid, signal.SIGKILL)
        gate.open()
        assert [future.get(WITHIN) for future in mine] == [0, 2]
        assert len(set(pool.map_unordered(workers.who, range(30)))) == 2
    gate.close()


def test_user_of_a_closed_pool_is_told(workers: Any, users: Any) -> None:
    one = users.slice(gpus=0)
    with Pool(workers) as pool:
        assert one.keep.call_one(pool).get(WITHIN) is False
        assert one.keep.call_one(pool).get(WITHIN) is True, "one pool is one object there"
        assert one.double.call_one(pool, 3).get(WITHIN) == [0, 2, 4]
        kept = pool
    with pytest.raises(MeshError, match="closed"):
        one.keep.call_one(kept).get(WITHIN)
    with pytest.raises(MeshError, match="closed, or has ended, where it was made"):
        one.double_kept.call_one(3).get(WITHIN)


def test_pool_cannot_be_sent_on(workers: Any, users: Any) -> None:
    with Pool(workers) as pool, pytest.raises(MeshError, match="made in another process"):
        users.slice(gpus=0).send_on.call_one(pool, users.slice(gpus=1)).get(WITHIN)


def test_pool_sent_to_its_own_process_is_the_same(workers: Any) -> None:
    from mesh_core import this_proc

    user = this_proc().spawn("user", User)
    with Pool(workers) as pool:
        user.keep.call_one(pool).get(WITHIN)
        assert user.keep.call_one(pool).get(WITHIN) is True
    user.stop().get()


def test_a_turn_comes_back_as_often_as_it_was_taken() -> None:
    came: list[int] = []
    desk: Any = object.__new__(Desk)
    desk._lock = threading.Lock()
    desk._turns = SimpleNamespace(back=lambda place, lost: came.append(place))
    user, other = (1, 0, 0), (1, 1, 0)
    desk._held = {user: Counter({4: 1})}
    for addr, place in ((other, 4), (user, 5), (user, 4), (user, 4)):
        asyncio.run(desk.back(addr, place, None))
    assert came == [4]


def test_only_the_maker_manages_replicas(workers: Any, users: Any) -> None:
    with Pool(workers) as pool:
        error = users.slice(gpus=0).drain.call_one(pool).exception(WITHIN)
        assert isinstance(error, MeshError)
        assert "made in another process" in str(error)


def test_pool_of_an_actor_that_ends(procs: ProcMesh, workers: Any) -> None:
    user = procs.slice(hosts=1, gpus=0).spawn("user", User)
    assert user.make.call_one(workers).get(WITHIN) == [2 * n for n in range(8)]
    user.stop().get()
    # The replicas that it used are free.
    with Pool(workers) as pool:
        assert len(set(pool.map_unordered(workers.who, range(30)))) == 2


def test_replica_that_dies_under_a_user(users: Any, fault_tolerant: None, tmp_path: Path) -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        workers = procs.spawn("workers", Worker, str(tmp_path / "log"))
        with Pool(workers, on_crash="retry", retries=1) as pool:
            mark = str(tmp_path / "mark")
            assert users.slice(gpus=0).die_once.call_one(pool, mark).get(WITHIN) == 7
            assert pool.progress.lost == 1
        with Pool(workers, on_crash="retry") as pool:
            assert pool.submit(workers.double, 1).get(WITHIN) == 2
            error = users.slice(gpus=0).die.call_one(pool).exception(WITHIN)
            assert isinstance(error, SupervisionError)


def test_users_are_notified_of_the_end_of_the_process_that_made_the_pool(
    workers: Any, users: Any, gate: Gate, fault_tolerant: None
) -> None:
    with this_host().spawn_procs({"makers": 1}) as procs:
        maker = procs.spawn("maker", User)
        pool = maker.make_for_all.call_one(workers).get(WITHIN)
        port, begun = Channel[int].open()
        running = [pool.submit(workers.block, gate.path, port) for _ in range(2)]
        for _ in running:
            begun.recv().get(WITHIN)
        waiting = pool.submit(workers.double, 1)
        maker.have_begun.call_one(users.slice(gpus=0), 2).get(WITHIN)
        slay(procs)
        error = waiting.exception(WITHIN)
        assert isinstance(error, PoolLost)
        assert "the pool of 'workers' is lost with the process that made it" in str(error)
        assert error.failure is not None
        assert users.slice(gpus=0).outcomes.call_one().get(WITHIN) == ["PoolLost"] * 2
        assert isinstance(pool.submit(workers.double, 1).exception(WITHIN), PoolLost)
        # The replicas do not belong to the pool.
        gate.open()
        assert sorted(future.get(WITHIN) for future in running) == [0, 1]
        with Pool(workers) as another:
            assert another.submit(workers.double, 1).get(WITHIN) == 2


def test_users_share_the_replicas(workers: Any, users: Any) -> None:
    with Pool(workers) as pool:
        found = gather(*(users.double.call(pool, 20) for _ in range(3))).get(WITHIN)
    assert [list(each.values()) for each in found] == [[[2 * n for n in range(20)]] * 2] * 3
