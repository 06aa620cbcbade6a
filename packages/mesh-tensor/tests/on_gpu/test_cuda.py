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
    capture,
    default_stream,
    fetch,
    fetch_shard,
    rank_tensor,
    reduce,
    remote,
    share,
)
from mesh_tensor._tensor import issuer_of  # noqa: E402


def lists(tensor: Any) -> list[Any]:
    return [each.tolist() for each in fetch(tensor, timeout=60).values()]


@remote(propagate=lambda x: torch.zeros(2, dtype=torch.int64))
def device_and_stream(x: Any) -> Any:
    """Return which device a process has, and whether it is on CUDA's default stream."""
    is_default = torch.cuda.current_stream() == torch.cuda.default_stream()
    return torch.tensor([x.device.index, int(is_default)])


def test_tensors_are_made_moved_and_fetched(shared: ProcMesh, kind: str) -> None:
    with activate(shared, device=kind):
        x = torch.arange(4.0) * (rank_tensor(shared, "gpus").to(kind) + 1)
        assert x.device == torch.device(kind)
        assert lists(x) == [[0.0, 1.0, 2.0, 3.0], [0.0, 2.0, 4.0, 6.0]]
    with activate(shared):
        assert lists(torch.ones(2, device=kind) + 1) == [[2.0, 2.0]] * 2
        assert lists(torch.ones(2).to(kind).cpu() + 1) == [[2.0, 2.0]] * 2
    assert fetch_shard(x).device.type == "cpu"


def test_processes_that_share_a_gpu_meet_by_gloo(shared: ProcMesh, kind: str) -> None:
    assert issuer_of(shared).stream.groups.backend(kind) == "gloo"
    collectives(shared, kind)


@pytest.mark.two_gpus
def test_processes_with_a_gpu_each_meet_by_nccl(apart: ProcMesh) -> None:
    assert issuer_of(apart).stream.groups.backend("cuda") == "nccl"
    with activate(apart, device="cuda"):
        assert [each[0] for each in lists(device_and_stream(torch.ones(1)))] == [0, 1]
    collectives(apart, "cuda")


def collectives(procs: ProcMesh, kind: str) -> None:
    with activate(procs, device=kind):
        rank = rank_tensor(procs, "gpus").to(kind) + 1.0
        x = torch.arange(4.0) * rank
        assert lists(reduce(x)) == [[0.0, 3.0, 6.0, 9.0]] * 2
        assert lists(reduce(x, op="avg")) == [[0.0, 1.5, 3.0, 4.5]] * 2
        assert lists(reduce(x, scatter=True)) == [[0.0, 3.0], [6.0, 9.0]]
        assert lists(all_gather(rank)) == [[1.0, 2.0]] * 2
        assert lists(all_to_all(x)) == [[0.0, 1.0, 0.0, 2.0], [2.0, 3.0, 4.0, 6.0]]
        assert [lists(each)[0] for each in reduce([x, rank])] == [[0.0, 3.0, 6.0, 9.0], 3.0]


def test_a_network_learns_as_on_the_cpu(shared: ProcMesh, kind: str) -> None:
    found = []
    for device in ("cpu", kind):
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


@pytest.mark.cudas_own
def test_streams_are_cudas(shared: ProcMesh) -> None:
    side = Stream("side")
    with activate(shared, device="cuda"):
        assert [each[1] for each in lists(device_and_stream(torch.ones(1)))] == [1, 1]
        with side.activate():
            assert [each[1] for each in lists(device_and_stream(torch.ones(1)))] == [0, 0]


def test_streams_wait_where_a_tensor_is_lent(shared: ProcMesh, kind: str) -> None:
    side = Stream("side")
    with activate(shared, device=kind):
        x = torch.zeros(1 << 22)
        # Enough to keep a GPU busy; a processor would take minutes.
        busy = torch.eye(2048 if kind == "cuda" else 64)
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


def test_memory_made_on_one_stream_outlives_its_use_on_another(shared: ProcMesh, kind: str) -> None:
    side = Stream("side")
    totals = []
    with activate(shared, device=kind):
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


def test_gradients_flow_between_streams(shared: ProcMesh, kind: str) -> None:
    side = Stream("side")
    with activate(shared, device=kind):
        weight = torch.full((3,), 2.0, requires_grad=True)
        lent, borrow = side.borrow(weight * 1)
        with side.activate():
            total = reduce(lent * lent)
        back, other = default_stream().borrow(total)
        back.sum().backward()
        borrow.drop()
        other.drop()
        assert lists(weight.grad) == [[8.0] * 3] * 2


def test_autocast(shared: ProcMesh, kind: str) -> None:
    if kind not in {"cpu", "cuda"}:
        pytest.skip(f"{kind} has no autocast")
    with activate(shared, device=kind), torch.autocast(kind, dtype=torch.bfloat16):
        x = torch.ones(4, 4)
        assert fetch_shard(x @ x).dtype == torch.bfloat16


def attention(x: Any) -> Any:
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    seen = torch.nn.functional.scaled_dot_product_attention(heads, heads * 2, heads * 3, is_causal=True)
    return seen.transpose(1, 2).flatten(2)


def test_attention_and_its_gradients_are_those_of_one_process(shared: ProcMesh, kind: str) -> None:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    attention(x).square().sum().backward()
    y = share(x.detach(), shared).to(kind).requires_grad_()
    attention(y).square().sum().backward()
    torch.testing.assert_close(fetch_shard(y.grad), x.grad, rtol=1e-3, atol=1e-3)


def trained(procs: ProcMesh, kind: str, how: Any) -> tuple[Any, Any]:
    """Some steps; returns the weight, and what ran."""
    with activate(procs, device=kind):
        weight = torch.nn.Parameter(torch.ones(3, 3) / 2)
        optimizer = torch.optim.AdamW([weight], lr=0.1)

        def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = (x @ weight).square().mean()
            loss.backward()
            weight.grad = reduce(weight.grad, op="avg")
            optimizer.step()
            return loss.detach()

        run = how(step)
        x = torch.arange(6.0).view(2, 3)
        for _ in range(6):
            loss = run(x)
        assert fetch_shard(loss).isfinite()
        return fetch_shard(weight.detach(), gpus=1), run


def test_a_captured_step_is_replayed(shared: ProcMesh, kind: str) -> None:
    want, _ = trained(shared, kind, lambda step: step)
    got, run = trained(shared, kind, capture)
    assert run.replays > 0, run.reasons
    torch.testing.assert_close(want, got)


@pytest.mark.cudas_own
def test_a_dtype_that_is_not_there_and_too_much_memory_are_named(shared: ProcMesh, kind: str) -> None:
    with activate(shared, device=kind):
        much = torch.empty(1 << 46)
        with pytest.raises(Exception, match=r"out of memory"):
            fetch_shard(much[:1])
        # The device goes on.
        assert lists(torch.ones(2) + 1) == [[2.0, 2.0]] * 2
