"""What goes wrong is told to who asks for it, with the line that it comes from."""

from __future__ import annotations

import os
import pickle
import re
import signal
from typing import Any

import pytest

from mesh_core import Actor, DeviceMeshError, ProcMesh, SupervisionError, endpoint, this_host

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    RanksDisagree,
    RemoteException,
    activate,
    fetch,
    fetch_shard,
    rank_tensor,
    reduce,
    share,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]


def test_a_failure_poisons_what_depends_on_it_and_nothing_else(procs: ProcMesh) -> None:
    x = share(torch.ones(3), procs)
    bad = x[share(torch.tensor([7]), procs)]  # the line that is wrong
    after = (bad + 1).sum()
    fine = x + 1
    for each in (bad, after):
        with pytest.raises(RemoteException, match="index 7 is out of bounds") as caught:
            fetch(each)
        assert "# the line that is wrong" in str(caught.value)
        assert re.search(r"index\.Tensor failed at Point\(gpus=0", str(caught.value))
        assert "Traceback" in caught.value.trace
        assert pickle.loads(pickle.dumps(caught.value)).operator == caught.value.operator
    assert fetch(fine).item(gpus=0).tolist() == [2.0, 2.0, 2.0]


def test_a_tensor_that_a_failure_was_to_change_is_poisoned(procs: ProcMesh) -> None:
    x = share(torch.zeros(3), procs)
    x.index_add_(0, share(torch.tensor([9]), procs), share(torch.ones(1), procs))
    with pytest.raises(RemoteException, match="index"):
        fetch(x)


def test_a_failure_on_one_process_only(procs: ProcMesh) -> None:
    where = rank_tensor(procs, "gpus").view(1) * 5
    y = share(torch.ones(3), procs)[where]
    assert fetch_shard(y, gpus=0).tolist() == [1.0]
    with pytest.raises(RemoteException, match="gpus=1"):
        fetch(y)


def test_a_failure_without_a_result_is_reported_to_whoever_asks_next(procs: ProcMesh) -> None:
    with activate(procs):
        torch.linalg.cholesky(-torch.eye(3))
        fine = torch.ones(2)
    with pytest.raises(RemoteException, match="positive-definite"):
        fetch(fine)
    assert fetch_shard(fine).tolist() == [1.0, 1.0]


def test_wrong_shapes_are_errors_at_once(procs: ProcMesh) -> None:
    with pytest.raises(RuntimeError, match=r"size|shape"):
        share(torch.ones(2), procs) + share(torch.ones(3), procs)
    with pytest.raises(IndexError):
        share(torch.ones(2), procs).sum(3)


def test_lists_of_what_all_have_alike(procs: ProcMesh) -> None:
    x = share(torch.tensor([1.0, float("nan")]), procs).requires_grad_()
    assert str(x.tolist()) == "[1.0, nan]"
    with pytest.raises(RanksDisagree, match=r"gpus=0 .*gpus=1 .*fetch_shard"):
        rank_tensor(procs, "gpus").tolist()


def test_ranks_that_disagree(procs: ProcMesh) -> None:
    x = rank_tensor(procs, "gpus")
    for work in (x.item, lambda: bool(x == 0), lambda: torch.nonzero(x.view(1))):
        with pytest.raises(RanksDisagree, match=r"Point\(gpus=0 of 2\) has .*, Point\(gpus=1 of 2\) has "):
            work()
    assert reduce(x).item() == 1


def test_tensors_of_this_process_and_of_other_meshes(procs: ProcMesh) -> None:
    x = share(torch.ones(2), procs)
    assert fetch_shard(x + torch.ones(2)).tolist() == [2.0, 2.0]
    with pytest.raises(ValueError, match=r"a tensor of this process, \(2,\) of torch\.float32"):
        x + torch.ones(2, requires_grad=True)
    assert fetch_shard(x + torch.tensor(2.0)).tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match="an operator works on one mesh"):
        x + share(torch.ones(2), procs.slice(gpus=1))
    with pytest.raises(TypeError, match="not a tensor of a mesh"):
        fetch(torch.ones(2))
    with pytest.raises(TypeError, match=r"is on a mesh already: .*<ProcMesh 'pair'"):
        share(x, procs)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(x)


class Victim(Actor):
    @endpoint
    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def lose(procs: ProcMesh, **place: int) -> None:
    with pytest.raises(SupervisionError):
        procs.slice(**place).spawn("victim", Victim).end.call().get(timeout=30)


@pytest.mark.parametrize(
    "change",
    [
        lambda mine, x: mine.add_(x),
        lambda mine, x: mine.copy_(x),
        lambda mine, x: torch.add(x, x, out=mine),
        lambda mine, x: torch._foreach_add_([mine], [x]),
        lambda mine, x: torch._foreach_mul_([x, mine], 2),
    ],
)
def test_a_tensor_of_this_process_is_not_changed_by_those_of_a_mesh(procs: ProcMesh, change: Any) -> None:
    mine, x = torch.tensor(3.0), share(torch.tensor(1.0), procs)
    with pytest.raises((ValueError, RuntimeError), match=r"a tensor of this process, \(\) of torch.float32"):
        change(mine, x)
    assert mine == 3.0
    assert fetch_shard(x * mine).tolist() == 3.0


def test_a_process_that_dies_and_is_restarted(preload: list[str]) -> None:
    """STM-2."""
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="mortal") as procs:
        x = rank_tensor(procs, "gpus") + share(torch.ones(2), procs)
        assert [each.tolist() for each in fetch(reduce(x)).values()] == [[3.0, 3.0]] * 2
        lose(procs, gpus=1)
        # At the latest when a value is asked for, and from then on at each operator.
        with pytest.raises(DeviceMeshError, match="gpus=1") as caught:
            fetch(x)
        assert caught.value.coordinates == ({"gpus": 1},)
        for work in (lambda: x + 1, lambda: share(torch.ones(1), procs), lambda: reduce(x)):
            with pytest.raises(DeviceMeshError, match="gpus=1"):
                work()
        procs.respawn().get(timeout=60)
        assert fetch_shard(x, gpus=0).tolist() == [1.0, 1.0]
        with pytest.raises(RemoteException, match="it was on a process of the mesh that has ended"):
            fetch_shard(x + 1, gpus=1)
        fresh = reduce(rank_tensor(procs, "gpus") + share(torch.ones(2), procs))
        assert [each.tolist() for each in fetch(fresh).values()] == [[3.0, 3.0]] * 2


def test_a_process_that_dies_in_a_collective(preload: list[str]) -> None:
    with this_host().spawn_procs({"gpus": 3}, preload=preload, name="mortal") as procs:
        ready = share(torch.ones(1), procs)
        fetch(reduce(ready))
        victim: Any = procs.slice(gpus=2)
        # One process never comes, as it has ended: the others are told, and do not wait for it.
        lose(procs, gpus=2)
        del victim
        with pytest.raises(DeviceMeshError, match="gpus=2"):
            fetch(reduce(ready))


def test_a_mesh_that_was_stopped(preload: list[str]) -> None:
    with this_host().spawn_procs({"gpus": 1}, preload=preload, name="stopped") as procs:
        x = share(torch.ones(2), procs)
        fetch(x)
    with pytest.raises((DeviceMeshError, SupervisionError), match="stopped"):
        fetch(x)
    del x
