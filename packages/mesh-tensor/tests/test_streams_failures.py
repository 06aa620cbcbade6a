"""What becomes of streams and loans where a process, or a mesh, ends."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from mesh_core import Actor, DeviceMeshError, ProcMesh, SupervisionError, endpoint, this_host
from mesh_tensor._streams._handover import Handover

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    RemoteException,
    Stream,
    activate,
    fetch,
    fetch_shard,
    rank_tensor,
    reduce,
    share,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]


class Victim(Actor):
    @endpoint
    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_handover_arrives_or_its_waiter_is_notified() -> None:
    """HND-1."""
    handover = Handover()
    giver = ((0, 0, 0), 1)
    found: list[Any] = []

    def take(number: int) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.append(handover.take(giver, number, "missing")))
        thread.start()
        return thread

    first = take(1)
    handover.put(giver, 1, "value")
    first.join(30)
    handover.put(giver, 4, "early")
    lost = take(3)
    lost.join(30)
    assert handover.take(giver, 4, "missing") == "early"
    passed = take(7)
    handover.pass_by(giver, 9)
    passed.join(30)
    last = take(100)
    handover.close()
    last.join(30)
    assert found == ["value", "missing", "missing", "missing"]


def lose(procs: ProcMesh) -> None:
    with pytest.raises(SupervisionError):
        procs.slice(gpus=1).spawn("victim", Victim).end.call().get(timeout=30)


GONE = "it was on a process of the mesh that has ended"


def test_loans_end_although_a_process_has_died(preload: list[str]) -> None:
    """STM-2 on each stream: what was on the process that ended is gone, the rest is there."""
    comm = Stream("comm")
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="mortal") as procs, activate(procs):
        x, y = rank_tensor(procs, "gpus") + torch.ones(2), torch.zeros(2)
        lent, borrow = comm.borrow(x, mutable=True)
        read, reading = comm.borrow(y)
        with comm.activate():
            lent.add_(read + 10)
            own = torch.full((2,), 7.0)
        assert fetch_shard(own).tolist() == [7.0, 7.0]
        lose(procs)
        with comm.activate():
            for work in (lambda: fetch(own), lambda: reduce(own), lambda: own + 1):
                with pytest.raises(DeviceMeshError, match="gpus=1"):
                    work()
        # What the processes still have is given back all the same, before they are made again and after.
        borrow.drop()
        procs.respawn().get(timeout=60)
        reading.drop()
        assert fetch_shard(x, gpus=0).tolist() == [11.0, 11.0]
        assert fetch_shard(own, gpus=0).tolist() == [7.0, 7.0]
        with comm.activate(), pytest.raises(RemoteException, match=GONE):
            fetch_shard(own + 1, gpus=1)


def test_streams_work_after_a_process_was_restarted(preload: list[str]) -> None:
    """HND-1: what is gone at its owner is gone for the borrower, and nobody waits for it."""
    comm = Stream("comm")
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="mortal") as procs, activate(procs):
        x = torch.ones(2)
        before, borrow = comm.borrow(x)
        with borrow, comm.activate():
            assert fetch_shard(reduce(before)).tolist() == [2.0, 2.0]
        lose(procs)
        procs.respawn().get(timeout=60)
        gone, borrow = comm.borrow(x)
        with borrow, comm.activate(), pytest.raises(RemoteException, match=GONE):
            fetch_shard(gone + 1, gpus=1)
        fresh = rank_tensor(procs, "gpus") + torch.ones(2)
        there, borrow = comm.borrow(fresh)
        with borrow, comm.activate():
            assert [each.tolist() for each in fetch(reduce(there)).values()] == [[3.0, 3.0]] * 2


def test_a_collective_of_one_stream_fails_and_the_other_goes_on(preload: list[str]) -> None:
    comm = Stream("comm")
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="pair") as procs, activate(procs):
        rank = rank_tensor(procs, "gpus")
        one, borrow = comm.borrow(rank)
        with comm.activate():
            bad = torch.ones(1)[one.view(1)]  # fails where the rank is 1
            total = reduce(bad)
            after = reduce(torch.ones(1))
        assert [each.item() for each in fetch(reduce(rank)).values()] == [1, 1]
        with pytest.raises(RemoteException, match=r"(could not take part|out of bounds)"):
            fetch(total)
        assert [each.item() for each in fetch(after).values()] == [2.0, 2.0]
        borrow.drop()


def test_a_mesh_that_was_stopped_with_loans(preload: list[str]) -> None:
    comm = Stream("comm")
    with this_host().spawn_procs({"gpus": 1}, preload=preload, name="stopped") as procs:
        x = share(torch.ones(2), procs)
        borrowed, borrow = comm.borrow(x)
        with comm.activate():
            kept = borrowed + 1
        fetch(kept)
    with pytest.raises((DeviceMeshError, SupervisionError), match="stopped"):
        fetch(kept)
    borrow.drop()
    assert borrow.dropped
