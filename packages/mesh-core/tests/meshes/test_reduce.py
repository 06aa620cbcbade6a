"""Calls whose replies are combined on the way up."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from port_samples import Opener, Summand, counts

from mesh_core import (
    ActorError,
    ActorTimeout,
    ProcMesh,
    SupervisionError,
    Undeliverable,
    as_endpoint,
    this_host,
    this_proc,
)
from mesh_core._actors.reducers import combine, first_share, result
from mesh_core._meshes.reduce import FAN_OUT, Plan, place_of

pytestmark = pytest.mark.usefixtures("runtime")

SOON = 30.0
COUNT = 40  # three levels: 1, 16, 23


@pytest.fixture(scope="module")
def wide(runtime: None) -> Iterator[ProcMesh]:
    """Enough processes for ranks that have others both above and below them."""
    with this_host().spawn_procs(per_host={"hosts": 8, "gpus": 5}, name="wide") as procs:
        procs.initialized.get()
        yield procs


@pytest.fixture(scope="module")
def openers(wide: ProcMesh) -> Any:
    return wide.spawn("openers", Opener)


@pytest.fixture(scope="module")
def all_summands(wide: ProcMesh) -> Any:
    return wide.spawn("summands", Summand)


@pytest.fixture
def summands(all_summands: Any, openers: Any) -> Iterator[Any]:
    """Whatever happened, no rank keeps anything."""
    yield all_summands
    all_summands.nothing.call().get(timeout=SOON)
    nothing_is_gathered(openers)
    assert counts()["calls"] == 0


def nothing_is_gathered(openers: Any) -> None:
    """No rank keeps a part of a result."""
    # A failure wakes its caller before the ranks are told; each look is a round trip later.
    left = [1]
    for _ in range(100):
        left = openers.gathering.call().get(timeout=SOON).values()
        if not any(left):
            break
    assert not any(left)


# The tree.


@pytest.mark.parametrize("count", [1, 2, 16, 17, 18, 40, 256, 300, 1000])
def test_every_rank_is_in_the_tree_once_and_in_order(count: int) -> None:
    below = {index: place_of(index, count).below for index in range(count)}

    def run(index: int) -> list[int]:
        return [index, *(each for child in below[index] for each in run(child))]

    assert run(0) == list(range(count))
    assert max(map(len, below.values())) <= FAN_OUT
    for index in range(count):
        assert all(place_of(child, count).above == index for child in below[index])
    assert place_of(0, count).above is None


def test_ranks_of_a_slice_are_found() -> None:
    from mesh_core import Extent, Region
    from mesh_core._native import Placement

    region = Region.whole(Extent.of(a=4, b=3, c=2)).slice(a=slice(1, 4, 2), c=1)
    plan = Plan((7, Placement.on(0), "sum", region.offset, *region.sizes, *region.strides))
    assert (plan.mesh, plan.count()) == (7, len(region))
    assert [plan.rank(index) for index in range(len(region))] == region.ranks()


# How values are combined.


def test_sums() -> None:
    assert combine("sum", [1, 2.5, 3]) == 6.5
    assert combine("sum", [{"a": 1, "b": {"c": 2}}, {"b": {"c": 3}, "a": 4}]) == {"a": 5, "b": {"c": 5}}
    with pytest.raises(ValueError, match="'b' is missing from some of them"):
        combine("sum", [{"a": 1}, {"a": 1, "b": 2}])


def test_means() -> None:
    shares = [first_share("mean", value) for value in (1, 2, 6)]
    assert result("mean", combine("mean", shares)) == 3.0
    dicts = [first_share("mean", {"loss": float(n)}) for n in (1, 3)]
    assert result("mean", combine("mean", dicts)) == {"loss": 2.0}


def test_concats() -> None:
    assert combine("concat", [[1], [], [2, 3]]) == [1, 2, 3]
    assert combine("concat", ["a", "b"]) == "ab"
    assert combine("concat", [b"a", b"b"]) == b"ab"
    assert combine("concat", [(1,), (2,)]) == (1, 2)
    with pytest.raises(TypeError, match="returned int; return a list"):
        combine("concat", [1, 2])


@pytest.mark.beside
def test_arrays_and_tensors() -> None:
    numpy = pytest.importorskip("numpy")
    ones = [numpy.full(3, n) for n in (1, 2)]
    assert combine("sum", ones).tolist() == [3, 3, 3]
    assert combine("concat", ones).tolist() == [1, 1, 1, 2, 2, 2]
    assert result("mean", combine("mean", [first_share("mean", one) for one in ones])).tolist() == [1.5] * 3


@pytest.mark.beside
def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    ones = [torch.ones(2), torch.zeros(2)]
    assert combine("sum", ones).tolist() == [1, 1]
    assert combine("concat", ones).tolist() == [1, 1, 0, 0]


# The call.


@pytest.mark.parametrize("name", ["rank", "rank_async"])
def test_sum_and_mean(summands: Any, name: str) -> None:
    endpoint = getattr(summands, name)
    total = endpoint.with_options(reduce="sum")
    assert total.call(2).get(timeout=SOON) == COUNT * (COUNT - 1)
    assert total.call().get(timeout=SOON) == COUNT * (COUNT - 1) // 2
    assert endpoint.with_options(reduce="mean").call(1).get(timeout=SOON) == (COUNT - 1) / 2


def test_the_order_of_ranks_is_kept(summands: Any) -> None:
    """RED-1: shares are combined in the order of ranks, though concatenation does not commute."""
    expected = [rank for rank in range(COUNT) for _ in range(1 + rank % 3)]
    assert summands.listed.with_options(reduce="concat").call().get(timeout=SOON) == expected
    text = "".join(f"<{rank}>" for rank in range(COUNT))
    assert summands.text.with_options(reduce="concat").call().get(timeout=SOON) == text
    # Associative is enough; it need not be commutative.
    assert (
        summands.text.with_options(reduce=lambda left, right: left + right).call().get(timeout=SOON) == text
    )


def test_dicts_of_numbers(summands: Any) -> None:
    mean = summands.losses.with_options(reduce="mean").call().get(timeout=SOON)
    assert mean == {"loss": (COUNT - 1) / 2, "by": {"n": 1.0}}


def test_a_function(summands: Any) -> None:
    assert summands.rank.with_options(reduce=max).call(3).get(timeout=SOON) == 3 * (COUNT - 1)


def test_large_parts(summands: Any) -> None:
    size = 100_000
    whole = summands.block.with_options(reduce="concat").call(size).get(timeout=SOON)
    assert len(whole) == COUNT * size
    assert [whole[rank * size] for rank in range(COUNT)] == list(range(COUNT))


@pytest.mark.beside
def test_arrays(summands: Any) -> None:
    numpy = pytest.importorskip("numpy")
    total = summands.array.with_options(reduce="sum").call(50_000).get(timeout=SOON)
    assert numpy.array_equal(total, numpy.full(50_000, COUNT * (COUNT - 1) / 2))


def test_slices_and_single_ones(summands: Any) -> None:
    part = summands.slice(hosts=slice(1, 8, 2), gpus=4)
    assert part.text.with_options(reduce="concat").call().get(timeout=SOON) == "<0><1><2><3>"
    one = summands.slice(hosts=0, gpus=0)
    assert one.rank.with_options(reduce="mean").call(5).get(timeout=SOON) == 0.0
    reduced = one.rank.with_options(reduce="sum")
    assert reduced.call_one(5).get(timeout=SOON) == 0  # the other adverbs are unchanged
    assert reduced.choose(5).get(timeout=SOON) == 0


def test_many_at_once(summands: Any) -> None:
    total = summands.rank.with_options(reduce="sum")
    futures = [total.call(n) for n in range(50)]
    assert [future.get(timeout=SOON) for future in futures] == [
        n * COUNT * (COUNT - 1) / 2 for n in range(50)
    ]


def test_awaited(summands: Any) -> None:
    async def main() -> Any:
        return await summands.rank.with_options(reduce="sum").call(1)

    assert asyncio.run(main()) == COUNT * (COUNT - 1) / 2


def test_from_a_worker(wide: ProcMesh, summands: Any) -> None:
    from core_samples import Echo

    echo: Any = wide.slice(hosts=3, gpus=3).spawn("echo", Echo)
    assert echo.call.call_one(total_of, summands).get(timeout=SOON) == COUNT * (COUNT - 1) / 2
    with pytest.raises(ValueError, match="rank 7"):
        echo.call.call_one(failure_of, summands).get(timeout=SOON)
    echo.stop().get()


def total_of(mesh: Any) -> Any:
    return mesh.rank.with_options(reduce="sum").call(1).get(timeout=SOON)


def failure_of(mesh: Any) -> Any:
    return mesh.raises_at.with_options(reduce="sum").call([7]).get(timeout=SOON)


def test_in_this_process() -> None:
    here: Any = this_proc().spawn("here", Summand)
    assert here.rank.with_options(reduce="sum").call(1).get(timeout=SOON) == 0
    here.stop().get()


# Failures.


@pytest.mark.parametrize("rank", [0, 1, 5, COUNT - 1])
def test_one_exception_fails_the_call_and_names_its_rank(summands: Any, rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} has no result") as caught:
        summands.raises_at.with_options(reduce="sum").call([rank]).get(timeout=SOON)
    assert isinstance(caught.value, ActorError)
    assert caught.value.rank == rank


def test_all_raise(summands: Any) -> None:
    for _ in range(20):
        with pytest.raises(ValueError, match="has no result"):
            summands.raises_at.with_options(reduce="sum").call(list(range(COUNT))).get(timeout=SOON)


def test_a_failure_that_nobody_waits_for_leaves_nothing(summands: Any) -> None:
    summands.raises_at.with_options(reduce="sum").call([3])


def test_the_function_raises(summands: Any) -> None:
    def refuse(left: Any, right: Any) -> Any:
        raise LookupError("cannot be combined")

    with pytest.raises(LookupError, match="cannot be combined") as caught:
        summands.rank.with_options(reduce=refuse).call(1).get(timeout=SOON)
    assert isinstance(caught.value, ActorError)


def test_what_cannot_be_added(summands: Any) -> None:
    with pytest.raises(TypeError, match="return a list"):
        summands.rank.with_options(reduce="concat").call(1).get(timeout=SOON)


def test_cancelled_while_ranks_work(summands: Any, openers: Any) -> None:
    future = summands.wait_at.with_options(reduce="sum").call([0, 9])
    others = summands.flatten("all").slice(all=slice(10, 40))
    others.nothing.call().get(timeout=SOON)  # these have passed their shares on
    assert future.cancel()
    openers.open.call().get()
    with pytest.raises(asyncio.CancelledError):
        future.get()


def test_coroutines_are_cancelled_by_a_deadline(summands: Any) -> None:
    with pytest.raises(ActorTimeout):
        summands.hang_at.with_options(reduce="sum", timeout=0.1).call([4]).get()
    assert summands.rank_async.with_options(reduce="sum").call(1).get(timeout=SOON) > 0


def test_an_actor_that_was_stopped(wide: ProcMesh, openers: Any) -> None:
    """RED-2: one failure is the outcome, and nothing that was gathered is kept."""
    mesh: Any = wide.spawn("partly", Summand)
    mesh.flatten("all").slice(all=17).stop().get()
    with pytest.raises(Undeliverable, match="rank 17"):
        mesh.rank.with_options(reduce="sum").call(1).get(timeout=SOON)
    mesh.stop().get()
    nothing_is_gathered(openers)


def test_a_death_fails_the_call(runtime: None) -> None:
    """RED-2, for a death."""
    with this_host().spawn_procs(per_host={"gpus": 20}) as procs:
        mesh: Any = procs.spawn("summands", Summand)
        openers: Any = procs.spawn("openers", Opener)
        future = mesh.wait_at.with_options(reduce="sum").call([19])
        mesh.slice(gpus=slice(0, 19)).nothing.call().get(timeout=SOON)
        pid = procs.pids[19]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SupervisionError) as caught:
            future.get(timeout=SOON)
        assert caught.value.failure is not None
        assert caught.value.failure.rank == 19
        alive = slice(0, 19)
        mesh.slice(gpus=alive).nothing.call().get(timeout=SOON)
        nothing_is_gathered(openers.slice(gpus=alive))
        assert mesh.slice(gpus=alive).rank.with_options(reduce="sum").call(1).get(timeout=SOON) == 171
        with pytest.raises(SupervisionError):
            mesh.rank.with_options(reduce="sum").call(1).get(timeout=SOON)


# What is refused before anything is sent.


def test_bad_reducers(summands: Any) -> None:
    with pytest.raises(ValueError, match="did you mean 'mean'"):
        summands.rank.with_options(reduce="maen")
    with pytest.raises(TypeError, match="a function of two results"):
        summands.rank.with_options(reduce=3)
    with pytest.raises(ValueError, match="answers by a port"):
        summands.by_port.with_options(reduce="sum")
    with pytest.raises(TypeError, match="takes at most 1"):
        summands.rank.with_options(reduce="sum").call(1, 2)
    with pytest.raises(ValueError, match="Accumulator"):
        summands.rank.with_options(reduce="sum").stream(1)
    assert (
        as_endpoint(summands.plain).with_options(reduce="sum").call(0, more=2).get(timeout=SOON) == 2 * COUNT
    )
