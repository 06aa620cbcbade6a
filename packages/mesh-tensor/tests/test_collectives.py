"""What crosses the processes of a mesh."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    activate,
    all_gather,
    all_to_all,
    fetch,
    fetch_shard,
    rank_tensor,
    reduce,
    share,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]


def ranks(grid: ProcMesh) -> Any:
    return rank_tensor(grid, "model") + 2 * rank_tensor(grid, "data")


def lists(tensor: Any) -> list[Any]:
    return [each.tolist() for each in fetch(tensor, timeout=60).values()]


def test_rank_tensor(grid: ProcMesh) -> None:
    assert lists(rank_tensor(grid, "data")) == [0, 0, 1, 1]
    assert lists(ranks(grid)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("op", "whole", "model"),
    [
        ("sum", 10, [3, 3, 7, 7]),
        ("product", 24, [2, 2, 12, 12]),
        ("min", 1, [1, 1, 3, 3]),
        ("max", 4, [2, 2, 4, 4]),
        ("band", 0, [0, 0, 0, 0]),
        ("bor", 7, [3, 3, 7, 7]),
        ("bxor", 4, [3, 3, 7, 7]),
        ("avg", 2, [1, 1, 3, 3]),
    ],
)
def test_reduce(grid: ProcMesh, op: Any, whole: int, model: list[int]) -> None:
    x = ranks(grid) + 1
    assert lists(reduce(x, op=op)) == [whole] * 4
    assert lists(reduce(x, "model", op)) == model
    assert lists(reduce(x, ["data", "model"], op)) == [whole] * 4
    assert lists(x) == [1, 2, 3, 4]


def test_averages_of_floats(grid: ProcMesh) -> None:
    assert lists(reduce(ranks(grid).float(), "data", "avg")) == [1.0, 2.0, 1.0, 2.0]


def test_reduce_and_scatter(grid: ProcMesh) -> None:
    x = share(torch.arange(8).view(4, 2), grid) * (ranks(grid) + 1)
    assert lists(reduce(x, scatter=True)) == [[[0, 10]], [[20, 30]], [[40, 50]], [[60, 70]]]
    assert lists(reduce(x, "model", scatter=True))[1] == [[12, 15], [18, 21]]


def test_stack_and_gather(grid: ProcMesh) -> None:
    assert lists(reduce(ranks(grid), "model", "stack")) == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert lists(all_gather(ranks(grid).view(1, 1).t()))[2] == [[[0]], [[1]], [[2]], [[3]]]


def test_all_to_all(grid: ProcMesh) -> None:
    x = share(torch.arange(4), grid) + 10 * ranks(grid)
    assert lists(all_to_all(x)) == [[n, 10 + n, 20 + n, 30 + n] for n in range(4)]


def test_gradients_flow(grid: ProcMesh) -> None:
    x = (ranks(grid) + 1.0).requires_grad_()
    reduce(x * x, "model").backward()
    # The square of each is in the sums of two processes.
    assert lists(x.grad) == [4.0, 8.0, 12.0, 16.0]
    y = share(torch.ones(4), grid).requires_grad_()
    (reduce(y, "data", "avg", scatter=True) * (ranks(grid) + 1.0)).sum().backward()
    assert lists(y.grad)[0] == [0.5, 0.5, 1.5, 1.5]
    z = share(torch.ones(1), grid).requires_grad_()
    (all_gather(z, "model").flatten() * share(torch.tensor([1.0, 5.0]), grid)).sum().backward()
    assert lists(z.grad) == [[2.0], [10.0], [2.0], [10.0]]


def test_within_activate(grid: ProcMesh) -> None:
    with activate(grid):
        assert lists(reduce(torch.ones(2), "data")) == [[2.0, 2.0]] * 4


def test_impossible_requests_are_errors(grid: ProcMesh) -> None:
    x = share(torch.ones(3), grid)
    with pytest.raises(ValueError, match="no dimension 'gpus'; it has 'data', 'model'"):
        reduce(x, "gpus")
    with pytest.raises(ValueError, match="multiple of 4 elements"):
        reduce(x, scatter=True)
    with pytest.raises(ValueError, match="multiple of 2 elements"):
        all_to_all(x, "data")
    with pytest.raises(ValueError, match="cannot be scattered"):
        reduce(x, op="stack", scatter=True)
    with pytest.raises(ValueError, match="no gradient flows"):
        reduce(share(torch.ones(2), grid).requires_grad_(), op="max")
    with pytest.raises(TypeError, match="in this process"):
        reduce(torch.ones(2))


def test_a_list_is_reduced_at_once(procs: ProcMesh) -> None:
    rank = rank_tensor(procs, "gpus")
    given = [rank + torch.tensor(1.0), (rank * 10).expand(2, 2).t(), rank.double().view(1)]
    average, counted, wide = reduce(given, "gpus", "avg")
    assert fetch_shard(average, gpus=1).item() == 1.5
    assert fetch_shard(counted, gpus=0).tolist() == [[5, 5], [5, 5]]
    assert (wide.dtype, fetch_shard(wide).tolist()) == (torch.float64, [0.5])
    assert [fetch_shard(each).tolist() for each in reduce(given, op="max")] == [
        2.0,
        [[10, 10], [10, 10]],
        [1.0],
    ]
    assert reduce([]) == []
    with pytest.raises(ValueError, match="neither scattered nor stacked"):
        reduce(given, op="stack")
    with pytest.raises(ValueError, match="no gradient flows through"):
        reduce([given[0].requires_grad_()])


def test_names_of_reductions(grid: ProcMesh) -> None:
    x = ranks(grid).float() + 1
    assert lists(reduce(x, op="mean")) == lists(reduce(x, op="avg")) == [2.5] * 4
    assert lists(reduce([x], op="prod")[0]) == lists(reduce(x, op="product")) == [24.0] * 4
    for given in (x, [x]):
        with pytest.raises(
            ValueError,
            match=r"op must be 'sum', 'avg', .* or 'stack', got 'average'; 'mean' stands for 'avg'",
        ):
            reduce(given, op="average")  # type: ignore[call-overload]
