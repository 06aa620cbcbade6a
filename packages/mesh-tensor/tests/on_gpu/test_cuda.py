"""Tensors on CUDA devices, their collectives and streams."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    Stream,
    activate,
    all_gather,
    all_to_all,
    fetch,
    fetch_shard,
    rank_tensor,
    reduce,
    remote,
)
from mesh_tensor._tensor import issuer_of  # noqa: E402


def lists(tensor: Any) -> list[Any]:
    return [each.tolist() for each in fetch(tensor, timeout=60).values()]


@remote(propagate=lambda x: torch.zeros(2, dtype=torch.int64))
def device_and_stream(x: Any) -> Any:
    """Return which device a process has, and whether it is on CUDA's default stream."""
    is_default = torch.cuda.current_stream() == torch.cuda.default_stream()
    return torch.tensor([x.device.index, int(is_default)])


def test_tensors_are_made_moved_and_fetched(shared: ProcMesh) -> None:
    with activate(shared, device="cuda"):
        x = torch.arange(4.0) * (rank_tensor(shared, "gpus").cuda() + 1)
        assert x.device == torch.device("cuda")
        assert lists(x) == [[0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 4.0, 6.0]]
    with activate(shared):
        assert lists(torch.ones(2, device="cuda") + 1) == [[2.0, 2.0]] * 2
        assert lists(torch.ones(2).to("cuda").cpu() + 1) == [[2.0, 2.0]] * 2
    assert fetch_shard(x).device.type == "cpu"


def test_processes_that_share_a_gpu_meet_by_gloo(shared: ProcMesh) -> None:
    assert issuer_of(shared).stream.groups.backend("cuda") == "gloo"
    collectives(shared)


@pytest.mark.two_gpus
def test_processes_with_a_gpu_each_meet_by_nccl(apart: ProcMesh) -> None:
    assert issuer_of(apart).stream.groups.backend("cuda") == "nccl"
    with activate(apart, device="cuda"):
        assert [each[0] for each in lists(device_and_stream(torch.ones(1)))] == [0, 1]
    collectives(apart)


def collectives(procs: ProcMesh) -> None:
    with activate(procs, device="cuda"):
        rank = rank_tensor(procs, "gpus").cuda() + 1.0
        x = torch.arange(4.0) * rank
        assert lists(reduce(x)) == [[0.0, 3.0, 6.0, 9.0]] * 2
        assert lists(reduce(x, op="avg")) == [[0.0, 1.5, 3.0, 4.5]] * 2
        assert lists(reduce(x, scatter=True)) == [[0.0, 3.0], [6.0, 9.0]]
        assert lists(all_gather(rank)) == [[1.0, 2.0]] * 2
        assert lists(all_to_all(x)) == [[0.0, 1.0, 0.0, 2.0], [2.0, 3.0, 4.0, 6.0]]
        assert [lists(each)[0] for each in reduce([x, rank])] == [[0.0, 3.0, 6.0, 9.0], 3.0]


def test_a_network_learns_as_on_the_cpu(shared: ProcMesh) -> None:
    found = []
    for device in ("cpu", "cuda"):
        with activate(shared, device=device):
            layer = torch.nn.Linear(3, 1)
            with torch.no_grad():
                layer.weight.fill_(0.5)
                layer.bias.zero_()
            optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
            x = torch.arange(12.0).view(4, 3)
            for _ in range(3):
                optimizer.zero_grad()
                layer(x).square().mean().backward()
                for each in layer.parameters():
                    each.grad = reduce(each.grad, op="avg")
                optimizer.step()
            found.append(fetch_shard(layer.weight.detach(), gpus=1))
    torch.testing.assert_close(found[0], found[1])


def test_streams_are_cudas(shared: ProcMesh) -> None:
    side = Stream("side")
    with activate(shared, device="cuda"):
        assert [each[1] for each in lists(device_and_stream(torch.ones(1)))] == [1, 1]
        with side.activate():
            assert [each[1] for each in lists(device_and_stream(torch.ones(1)))] == [0, 0]


def test_streams_wait_where_a_tensor_is_lent(shared: ProcMesh) -> None:
    side = Stream("side")
    with activate(shared, device="cuda"):
        x = torch.zeros(1 << 22)
        busy = torch.eye(2048)
        for round_ in range(1, 6):
            for _ in range(10):
                busy = busy @ busy
            x += busy[0, 0]
            lent, borrow = side.borrow(x, mutable=True)
            with side.activate():
                for _ in range(20):
                    lent += 1
            borrow.drop()
            assert fetch_shard(x.amin()).item() == fetch_shard(x.amax()).item() == 21.0 * round_


def test_memory_made_on_one_stream_outlives_its_use_on_another(shared: ProcMesh) -> None:
    side = Stream("side")
    totals = []
    with activate(shared, device="cuda"):
        for n in range(20):
            x = torch.full((1 << 20,), float(n))
            lent, borrow = side.borrow(x)
            del x
            junk = torch.full((1 << 20,), -1.0)
            with side.activate():
                totals.append(lent.sum())
            borrow.drop()
            del junk, lent
    assert [lists(each)[1] for each in totals] == [float(n << 20) for n in range(20)]


def test_gradients_flow_between_streams(shared: ProcMesh) -> None:
    side = Stream("side")
    with activate(shared, device="cuda"):
        weight = torch.full((3,), 2.0, requires_grad=True)
        lent, borrow = side.borrow(weight * 1)
        with side.activate():
            total = reduce(lent * lent).sum()
        total.backward()
        borrow.drop()
        assert lists(weight.grad) == [[8.0] * 3] * 2


def test_autocast(shared: ProcMesh) -> None:
    with activate(shared, device="cuda"), torch.autocast("cuda", dtype=torch.bfloat16):
        x = torch.ones(4, 4)
        assert fetch_shard(x @ x).dtype == torch.bfloat16
