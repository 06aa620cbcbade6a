"""Nobody waits in a collective for a process that cannot take part in it (COL-1)."""

from __future__ import annotations

import os
import random
import signal
import threading
from datetime import timedelta
from typing import Any

import pytest

from mesh_core import DeviceMeshError, ProcMesh, this_host
from mesh_core.extensions import current_proc

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    Mesh,
    RemoteException,
    activate,
    all_gather,
    all_to_all,
    capture,
    distribute,
    fetch,
    fetch_shard,
    rank_tensor,
    reduce,
    remote,
    share,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]

COLLECTIVES = {
    "reduce": reduce,
    "scatter": lambda x: reduce(x, scatter=True),
    "all_gather": all_gather,
    "all_to_all": all_to_all,
    "list": lambda x: reduce([x, x.long()])[1],
}


def bad_on(procs: ProcMesh, *ranks: int) -> Any:
    """Return a tensor that is there on all processes but these."""
    where = rank_tensor(procs, "gpus")
    at = share(torch.zeros(4, dtype=torch.long), procs)
    for each in ranks:
        at = at + (where == each).long() * 9
    return share(torch.ones(4), procs)[at]


@pytest.fixture(scope="module")
def three(runtime: None, preload: list[str]) -> Any:
    with this_host().spawn_procs({"gpus": 3}, preload=preload, name="three") as procs:
        yield procs


@pytest.mark.parametrize("name", COLLECTIVES)
def test_those_that_could_take_part_raise_and_say_who_could_not(procs: ProcMesh, name: str) -> None:
    collective = COLLECTIVES[name]
    fine = share(torch.ones(4), procs)
    assert fetch(collective(fine), timeout=60).item(gpus=1) is not None
    for broken, other in ((0, 1), (1, 0)):
        result = collective(bad_on(procs, broken))
        why = rf"at {broken} of 2 could not take part in it: aten\.index\.Tensor failed there: "
        with pytest.raises(RemoteException, match=why):
            fetch_shard(result, gpus=other, timeout=60)
        with pytest.raises(RemoteException, match="index 9 is out of bounds"):
            fetch_shard(result, gpus=broken, timeout=60)
        # What comes next is as if nothing had been.
        assert fetch(collective(fine), timeout=60).item(gpus=other) is not None


def test_all_fail(procs: ProcMesh) -> None:
    for _ in range(3):
        with pytest.raises(RemoteException, match="index 9 is out of bounds"):
            fetch(reduce(bad_on(procs, 0, 1)), timeout=60)
    assert fetch(reduce(share(torch.ones(1), procs)), timeout=60).item(gpus=0).tolist() == [2.0]


def test_what_depends_on_it_fails_as_it_does(procs: ProcMesh) -> None:
    total = reduce(bad_on(procs, 1)) + 1
    again = reduce(total)
    with pytest.raises(RemoteException, match=r"reduce failed at .*gpus=0.*at 1 of 2 could not take part"):
        fetch_shard(again, gpus=0, timeout=60)


def test_a_function_that_raises_before_a_collective(procs: ProcMesh) -> None:
    @remote(propagate=lambda x: x)
    def picky(x: Any) -> Any:
        if x[0] > 0:
            raise ValueError("not mine")
        return x

    with activate(procs):
        result = reduce(picky(rank_tensor(procs, "gpus").float().view(1)))
    with pytest.raises(
        RemoteException, match=r"at 1 of 2 could not .*picky failed there: ValueError: not mine"
    ):
        fetch_shard(result, gpus=0, timeout=60)


def test_groups_in_one_dimension_fail_alone(grid: ProcMesh) -> None:
    where = rank_tensor(grid, "model") + 2 * rank_tensor(grid, "data")
    x = share(torch.ones(1), grid)[((where == 3).long() * 5).view(1)]
    rows = reduce(x, "model")
    assert [fetch_shard(rows, data=0, model=each, timeout=60).tolist() for each in (0, 1)] == [[2.0], [2.0]]
    for model in (0, 1):
        with pytest.raises(RemoteException):
            fetch_shard(rows, data=1, model=model, timeout=60)
    assert fetch(reduce(share(torch.ones(1), grid), "model"), timeout=60).item(data=1, model=1).tolist() == [
        2.0
    ]


def test_a_captured_step_in_which_a_process_fails(procs: ProcMesh) -> None:
    four = share(torch.arange(4.0), procs)

    @capture
    def step(at: Any) -> Any:
        return reduce(four[at])

    def run(at: int) -> Any:
        return fetch(step(rank_tensor(procs, "gpus").view(1) * at), timeout=60).values()

    with torch.no_grad():
        assert [each.tolist() for each in run(1)] == [[1.0], [1.0]]
        for _ in range(2):
            assert [each.tolist() for each in run(2)] == [[2.0], [2.0]]
            with pytest.raises(RemoteException, match="out of bounds"):
                run(7)


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("seed", range(4))
def test_any_processes_fail_at_any_collectives(three: ProcMesh, seed: int) -> None:
    chance = random.Random(seed)
    expected: list[tuple[Any, bool]] = []
    for _ in range(40):
        broken = [each for each in range(3) if chance.random() < 0.15]
        expected.append((reduce(bad_on(three, *broken)), bool(broken)))
    for result, fails in expected:
        if fails:
            with pytest.raises(RemoteException, match=r"index 9 is out of bounds|could not take part"):
                fetch(result, timeout=60)
        else:
            assert fetch(result, timeout=60).item(gpus=2).tolist() == [3.0] * 4


def hurry() -> None:
    """Have processes connect within a second, or not at all."""
    from mesh_tensor import _groups

    _groups._CONNECT = timedelta(seconds=1)  # noqa: SLF001 - half a minute would be long for a test


def late(x: Any) -> Any:
    """Take longer than that, on the second process alone."""
    if current_proc().point.rank == 1:
        threading.Event().wait(2.5)
    return x


@pytest.mark.full
def test_a_rank_that_computes_for_long_before_a_collective_is_waited_for(preload: list[str]) -> None:
    """In both views: what limits the connecting is no limit for what comes later."""

    with this_host().spawn_procs({"gpus": 2}, bootstrap=hurry, preload=preload, name="slow") as procs:
        fetch(reduce(rank_tensor(procs, "gpus")), timeout=60)
        slow = remote(propagate=lambda x: x)(late)
        assert [
            int(each) for each in fetch(reduce(slow(rank_tensor(procs, "gpus"))), timeout=60).values()
        ] == [1, 1]
        with Mesh((2,), ("data",), procs) as mesh:
            whole = distribute(torch.ones(2), mesh, ["data"])
            assert float(whole.sum()) == 2.0
            mesh.execute(late, whole)
            assert float(whole.sum()) == 2.0


@pytest.mark.parametrize("connected", [True, False])
def test_nobody_waits_for_one_that_dies(three: ProcMesh, connected: bool) -> None:
    chance = random.Random(1)

    @remote(propagate=lambda x, _: x)
    def die(x: Any, after: float) -> Any:
        if int(x) == 2:
            threading.Event().wait(after)
            os.kill(os.getpid(), signal.SIGKILL)
        return x

    for _ in range(3):
        where = rank_tensor(three, "gpus")
        before = reduce(where) if connected else reduce(bad_on(three, 1))
        try:
            fetch(before, timeout=60)
        except RemoteException:
            assert not connected
        with pytest.raises(DeviceMeshError, match="gpus=2"):
            fetch(reduce(die(where, chance.random() / 20)), timeout=60)
        three.respawn().get(timeout=60)
        total = reduce(rank_tensor(three, "gpus"))
        assert [int(each) for each in fetch(total, timeout=60).values()] == [3, 3, 3]
