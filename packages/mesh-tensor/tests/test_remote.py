"""Functions of the user's own on the processes of a mesh, and parts of meshes."""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    RanksDisagree,
    RemoteException,
    activate,
    fetch,
    fetch_shard,
    rank_tensor,
    reduce,
    remote,
    share,
    slice_mesh,
    usage,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]


def lists(tensor: Any) -> list[Any]:
    return [each.tolist() for each in fetch(tensor, timeout=60).values()]


@remote
def scaled(x: Any, factor: float, *, shift: Any = None) -> Any:
    return x * factor if shift is None else x * factor + shift


def test_results_are_as_the_function_returns_them(procs: ProcMesh) -> None:
    @remote
    def parts(x: Any, names: list[str]) -> Any:
        low, high = x.chunk(2)
        return {names[0]: low, names[1]: [high, (high.sum(), "said here", None)]}

    found = parts(share(torch.arange(4.0), procs), ["low", "high"])
    assert list(found) == ["low", "high"]
    high, (total, text, nothing) = found["high"]
    assert (text, nothing) == ("said here", None)
    assert lists(found["low"] + high) == [[2.0, 4.0]] * 2
    assert lists(total) == [5.0] * 2


def test_each_process_has_its_own(procs: ProcMesh) -> None:
    x = rank_tensor(procs, "gpus")
    assert lists(scaled(x + 1, 2.0)) == [2.0, 4.0]
    assert lists(scaled(x, 1, shift=x * 10)) == [0, 11]


def test_arguments_that_are_no_tensors_may_change(procs: ProcMesh) -> None:
    """SIG-1: other arguments are another signature."""
    x = share(torch.ones(2), procs)
    assert [lists(scaled(x, factor))[0] for factor in (1.0, 2.0, 1, True, 2.0)] == [
        [1.0, 1.0], [2.0, 2.0], [1.0, 1.0], [1.0, 1.0], [2.0, 2.0],
    ]  # fmt: skip

    @remote
    def chosen(x: Any, places: Any) -> Any:
        return x[list(places["at"])]

    y = share(torch.arange(5), procs)
    assert lists(chosen(y, {"at": (0, 2)})) == [[0, 2]] * 2
    assert lists(chosen(y, {"at": (4,)})) == [[4]] * 2


def test_it_is_one_instruction_and_nothing_waits(procs: ProcMesh) -> None:
    order: list[Any] = []

    @remote
    def slow(x: Any) -> Any:
        for _ in range(20):
            x = x + 1
        return x

    x = share(torch.zeros(()), procs)
    stream = x.descriptor.stream
    slow(x)
    before = stream.issued + stream.waiting
    y = slow(slow(x) + 1)
    order.append(stream.issued + stream.waiting - before)
    assert lists(y) == [41.0] * 2
    assert order == [3]


def test_it_may_change_its_arguments_and_return_them(procs: ProcMesh) -> None:
    @remote
    def grown(x: Any) -> Any:
        return x.add_(1)

    @remote
    def add(x: Any) -> None:
        x.add_(10)

    x = share(torch.zeros(2), procs)
    y = grown(x)
    assert add(x) is None
    assert lists(x) == lists(y) == [[11.0, 11.0]] * 2


def test_the_same_without_tensors(procs: ProcMesh) -> None:
    @remote
    def where() -> Any:
        return torch.tensor(os.getpid())

    with activate(procs):
        pids = lists(where())
    assert pids == lists(where.on(procs)()) and len({*pids, os.getpid()}) == 3
    with pytest.raises(
        ValueError, match=r"got no tensor of a mesh, and no mesh is active.*where\.on\(procs\)"
    ):
        where()


def test_forms_are_given_or_asked_for(procs: ProcMesh) -> None:
    def positive(x: Any) -> Any:
        return {"found": x[x > 0], "count": int((x > 0).sum())}

    x = share(torch.tensor([1.0, -2.0, 3.0]), procs)
    with pytest.raises(ValueError, match=r"depend on values.*propagate='ask'"):
        remote(positive)(x)
    found = remote(positive, propagate="ask")(x)
    assert found["count"] == 2
    assert lists(found["found"] * 2) == [[2.0, 6.0]] * 2

    def in_c(x: Any) -> Any:
        return torch.from_numpy(x.numpy() * 2)  # no fake tensor has such

    assert lists(remote(in_c, propagate=torch.empty_like)(x)) == [[2.0, -4.0, 6.0]] * 2


def test_processes_that_would_disagree(procs: ProcMesh) -> None:
    first = remote(lambda x: x[: int(x[0])], propagate="ask")
    with pytest.raises(RanksDisagree):
        first(rank_tensor(procs, "gpus") + share(torch.ones(4), procs))


def test_shape_errors_are_raised_at_once(procs: ProcMesh) -> None:
    @remote
    def product(x: Any, y: Any) -> Any:
        return x @ y

    with pytest.raises(RuntimeError, match="reduction dim"):
        product(share(torch.ones(2, 3), procs), share(torch.ones(2, 3), procs))


def test_a_remote_error_has_its_line(procs: ProcMesh) -> None:
    @remote(propagate=lambda x: x)
    def fails(x: Any) -> Any:
        if x.item() == 1:
            raise RuntimeError("out of luck")
        return x

    x = rank_tensor(procs, "gpus")
    y = fails(x)  # this line
    assert fetch_shard(y, gpus=0).item() == 0
    with pytest.raises(RemoteException, match=r"fails failed at .*out of luck") as caught:
        fetch_shard(y + 1, gpus=1)
    assert "test_remote.py" in str(caught.value)
    assert "y = fails(x)  # this line" in str(caught.value)

    @remote(propagate=lambda x: (x, x))
    def fewer(x: Any) -> Any:
        return (x,)

    with pytest.raises(RemoteException, match="has returned 1 tensors here, and 2 where"):
        fetch(fewer(x)[0])


def test_bad_arguments_are_refused(procs: ProcMesh, grid: ProcMesh) -> None:
    x = share(torch.ones(2), procs)
    with pytest.raises(TypeError, match=r"a tensor of this process.*share"):
        scaled(torch.ones(2), 1.0)
    with pytest.raises(ValueError, match="works on one mesh"):
        scaled(x, 1.0, shift=share(torch.ones(2), grid))
    with pytest.raises(ValueError, match="no gradient flows through scaled"):
        scaled(x.clone().requires_grad_(), 1.0)
    with torch.no_grad():
        assert lists(scaled(x.clone().requires_grad_(), 2.0)) == [[2.0, 2.0]] * 2
    with pytest.raises(TypeError, match="takes a function, got 5"):
        remote(5)
    with pytest.raises(TypeError, match="propagate= must be"):
        remote(lambda: None, propagate="guess")


def test_results_are_freed(procs: ProcMesh) -> None:
    x = share(torch.ones(1000), procs)
    gc.collect()  # of tests before
    before = usage(procs).values()
    for _ in range(10):
        del_me = scaled(x, 3.0)
    del del_me
    asked = remote(lambda x: [x, x * 2], propagate="ask")(x)
    del asked
    gc.collect()
    assert usage(procs).values() == before


def test_parts_of_a_mesh(grid: ProcMesh) -> None:
    """STM-4, STM-1: both streams are one for their order."""
    x = rank_tensor(grid, "model") + 2 * rank_tensor(grid, "data") + share(torch.zeros(2, 3), grid)
    lower = slice_mesh(x, data=1)
    assert dict(lower.procs.sizes) == {"model": 2}
    assert lists(reduce(lower)[0, 0]) == [5.0, 5.0]
    # Both name the same memory, in one order; and either may be let go of first.
    lower.add_(10)
    twice = x * 2
    lower.sub_(1)
    x[0, 1] += 1
    assert [each[0][0] for each in lists(twice)] == [0.0, 2.0, 24.0, 26.0]
    assert [each[0][:2] for each in lists(lower)] == [[11.0, 12.0], [12.0, 13.0]]
    lower.add_(1)
    assert [each[0][0] for each in lists(x)] == [0.0, 1.0, 12.0, 13.0]
    del x
    assert [each[0][0] for each in lists(lower * 2)] == [24.0, 26.0]
    with pytest.raises(ValueError, match="one of its tensors"):
        lower + rank_tensor(grid, "data")
    one = slice_mesh(slice_mesh(rank_tensor(grid, "model"), model=1), data=0)
    assert lists(one) == [1]


def test_views_keep_their_form_on_a_part(grid: ProcMesh) -> None:
    x = share(torch.arange(12).view(3, 4), grid)
    part = slice_mesh(x.t()[1:, ::2], data=0)
    assert (tuple(part.shape), part.stride()) == ((3, 2), x.t()[1:, ::2].stride())
    assert lists(part) == [[[1, 9], [2, 10], [3, 11]]] * 2


@remote(propagate=lambda x: x.new_empty(5))
def shorter(x: Any) -> Any:
    return x[:3].clone()


@remote(propagate=lambda x: torch.empty_like(x, dtype=torch.int64))
def other_type(x: Any) -> Any:
    return x * 2


def test_a_propagate_that_is_wrong_is_noticed(procs: ProcMesh) -> None:
    x = share(torch.arange(5.0), procs)
    with pytest.raises(
        RemoteException,
        match=r"(?s)shorter failed.*is \(3,\) of torch.float32 here, and \(5,\) of .*propagate='ask'",
    ):
        fetch(reduce(shorter(x)))
    with pytest.raises(RemoteException, match=r"of torch.float32 here, and \(5,\) of torch.int64 where"):
        fetch(other_type(x))
    assert lists(x.sum()) == [10.0, 10.0]
