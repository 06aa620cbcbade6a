"""Large collectives of processes on one machine go through memory that they share (WIN-1)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mesh_core import Actor, DeviceMeshError, ProcMesh, endpoint, this_host

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    all_gather,
    fetch,
    fetch_shard,
    rank_tensor,
    reduce,
    remote,
    share,
)
from mesh_tensor._windows import HALF, LEAST, Window, is_for  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow]

SEVERAL = HALF // 4 + 3
"""Numbers of four bytes that take more than one turn, and cannot be divided among processes."""


class Windows(Actor):
    """Tells of a process."""

    @endpoint
    def mapped(self) -> int:
        """Return how many windows it has."""
        return Path("/proc/self/maps").read_text().count("/memfd:mesh-tensor-")

    @endpoint
    def descriptors(self) -> int:
        """Return how many windows are open as files."""
        found = 0
        for each in Path("/proc/self/fd").iterdir():
            try:
                found += "mesh-tensor-" in str(each.readlink())
            except FileNotFoundError:  # of the listing itself
                continue
        return found


@pytest.fixture(scope="module")
def trio(runtime: None, preload: list[str]) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 3}, preload=preload, name="trio") as procs:
        yield procs


def wide(procs: ProcMesh, numbers: int = SEVERAL, dtype: Any = torch.float32) -> list[Any]:
    """Return a tensor of a mesh, and what each process has of it."""
    base = (torch.arange(numbers) % 7 + 1).to(dtype)
    rank = rank_tensor(procs, "gpus").to(dtype)
    return [share(base, procs) + rank, *(base + each for each in range(3))]


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("op", ["sum", "avg", "product", "min", "max", "band", "bor", "bxor"])
def test_large_reductions(trio: ProcMesh, op: Any) -> None:
    for dtype in [torch.int32] if op.startswith("b") else [torch.int64, torch.float32, torch.float16]:
        x, *each = wide(trio, LEAST // dtype.itemsize + 2, dtype)
        whole = torch.stack([one.long() for one in each])
        joined = {
            "sum": lambda whole: whole.sum(0),
            "avg": lambda whole: whole.sum(0) / 3,
            "product": lambda whole: whole.prod(0),
            "min": lambda whole: whole.amin(0),
            "max": lambda whole: whole.amax(0),
            "band": lambda whole: whole[0] & whole[1] & whole[2],
            "bor": lambda whole: whole[0] | whole[1] | whole[2],
            "bxor": lambda whole: whole[0] ^ whole[1] ^ whole[2],
        }[op](whole)
        for got in fetch(reduce(x, op=op), timeout=60).values():
            torch.testing.assert_close(got, joined.to(dtype))


def test_the_argument_stays_and_lengths_need_not_be_divisible(trio: ProcMesh) -> None:
    x, *each = wide(trio)
    total = each[0] + each[1] + each[2]
    assert all(torch.equal(got, total) for got in fetch(reduce(x), timeout=60).values())
    assert all(torch.equal(a, b) for a, b in zip(fetch(x, timeout=60).values(), each, strict=True))


def test_other_strides(trio: ProcMesh) -> None:
    rank = rank_tensor(trio, "gpus")
    x = (share(torch.arange(LEAST // 4).view(512, -1), trio) * (rank + 1)).t()
    expected = (torch.arange(LEAST // 4).view(512, -1) * 6).t()
    assert torch.equal(fetch_shard(reduce(x), gpus=1, timeout=60), expected)


def test_scattered_and_gathered(trio: ProcMesh) -> None:
    rows = torch.arange(3.0 * SEVERAL).view(3, SEVERAL)
    x = share(rows, trio) * (rank_tensor(trio, "gpus") + 1.0)
    scattered = fetch(reduce(x, scatter=True), timeout=60).values()
    gathered = fetch(all_gather(x[0]), timeout=60).values()
    for rank in range(3):
        assert torch.equal(scattered[rank], rows[rank : rank + 1] * 6)
        assert torch.equal(gathered[rank], torch.stack([rows[0], rows[0] * 2, rows[0] * 3]))


def test_a_list_is_reduced_in_place_of_its_copy(trio: ProcMesh) -> None:
    x, *each = wide(trio)
    first, second = reduce([x, x[:5] * 2])
    total = each[0] + each[1] + each[2]
    assert torch.equal(fetch_shard(first, gpus=2, timeout=60), total)
    assert torch.equal(fetch_shard(second, gpus=2, timeout=60), total[:5] * 2)
    assert torch.equal(fetch_shard(x, gpus=2, timeout=60), each[2])


def test_a_process_that_dies_in_a_large_reduction_keeps_nobody_waiting(preload: list[str]) -> None:
    @remote(propagate=lambda x, rank: x)
    def mortal(x: Any, rank: Any) -> Any:
        if rank == 1:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        return x + 0

    with this_host().spawn_procs({"gpus": 3}, preload=preload, name="mortals") as procs:
        x, rank = share(torch.ones(LEAST), procs), rank_tensor(procs, "gpus")
        fetch(reduce(x), timeout=60)
        with pytest.raises(DeviceMeshError):
            fetch(reduce(mortal(x, rank)), timeout=60)
        procs.respawn().get(timeout=60)
        again = share(torch.ones(LEAST), procs)
        assert fetch_shard(reduce(again), gpus=1, timeout=60)[0] == 3


def test_windows_are_mapped_where_all_can_and_by_nobody_where_one_cannot(preload: list[str]) -> None:
    @remote(propagate=lambda x: x)
    def refuse(rank: Any) -> Any:
        import os

        def none(*_: Any) -> int:
            raise OSError("not allowed here")

        if rank == 1:
            os.memfd_create = none
        return rank

    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="seeing") as procs:
        windows = procs.spawn("windows", Windows)
        x = share(torch.ones(LEAST), procs)
        assert fetch_shard(reduce(x[:8]), gpus=1, timeout=60)[0] == 2
        assert list(windows.mapped.call().get(timeout=60).values()) == [0, 0]
        assert fetch_shard(reduce(x), gpus=1, timeout=60)[0] == 2
        assert list(windows.mapped.call().get(timeout=60).values()) == [2, 2]
        assert list(windows.descriptors.call().get(timeout=60).values()) == [0, 0]
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="blind") as procs:
        windows = procs.spawn("windows", Windows)
        fetch(refuse(rank_tensor(procs, "gpus")), timeout=60)
        x = share(torch.ones(LEAST), procs)
        assert fetch_shard(reduce(x), gpus=1, timeout=60)[0] == 2
        assert fetch_shard(all_gather(x), gpus=0, timeout=60).shape == (2, LEAST)
        assert list(windows.mapped.call().get(timeout=60).values()) == [0, 0]
        assert list(windows.descriptors.call().get(timeout=60).values()) == [0, 0]


class OneBehind:
    """A barrier of two, whose second rank goes on only when the first has come to the next one, or is done."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=60)
        self._ahead = threading.Semaphore(0)

    def first(self, what: str, *_: Any) -> None:
        assert what == "barrier"
        self._ahead.release()
        self._barrier.wait()

    def done(self) -> None:
        self._ahead.release()

    def second(self, what: str, *_: Any) -> None:
        assert what == "barrier"
        self._barrier.wait()
        # Its own arrival was one; the other is that at the next barrier.
        for _ in range(2):
            assert self._ahead.acquire(timeout=60)
        self._ahead.release()


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("name", ["reduce", "reduce_scatter", "all_gather"])
def test_one_process_may_be_as_far_ahead_as_the_barrier_lets_it(name: str, ahead: int) -> None:
    memories = [torch.zeros(2 * HALF, dtype=torch.uint8) for _ in range(2)]
    given = [torch.arange(2.0 * SEVERAL) + rank * 1000 for rank in range(2)]
    between = OneBehind()
    rounds = 3

    def work(rank: int) -> list[Any]:
        window, results = Window(rank, memories), []
        do: Callable[..., None] = between.first if rank == ahead else between.second
        for count in range(rounds):
            mine = given[rank] + count
            if name == "all_gather":
                results.append(torch.empty(2, len(mine)))
                window.all_gather(do, mine, results[-1])
            elif name == "reduce_scatter":
                results.append(torch.empty(len(mine) // 2))
                window.reduce_scatter(do, mine, results[-1], "sum")
            else:
                results.append(torch.empty(len(mine)))
                window.reduce(do, mine, results[-1], "sum")
        if rank == ahead:
            between.done()
        return results

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(work, range(2)))
    for count in range(rounds):
        total = given[0] + given[1] + 2 * count
        for rank in range(2):
            expected = {
                "reduce": total,
                "reduce_scatter": total.chunk(2)[rank],
                "all_gather": torch.stack([each + count for each in given]),
            }[name]
            assert torch.equal(found[rank][count], expected)


def test_types_that_gloo_does_not_take_are_left_to_it() -> None:
    large = torch.zeros(LEAST)
    assert is_for(large, "sum")
    assert not is_for(large[:10], "sum")
    assert not is_for(large, "band")
    assert not is_for(large.to(torch.complex64), "sum")
    assert not is_for(large.bool().expand(4, LEAST).contiguous(), "bor")
