"""Fetched values are the script's own, though they travel without a copy at the worker."""

from __future__ import annotations

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from mesh_tensor import Mesh, activate, distribute, fetch, fetch_shard, share  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow]

# Both ways that values travel: in the message, and in shared memory beside it.
SIZES = [3, 1 << 20]


@pytest.mark.parametrize("size", SIZES)
def test_later_writes_do_not_change_what_was_fetched(procs: ProcMesh, size: int) -> None:
    x = share(torch.zeros(size), procs)
    before = fetch(x).values()
    x += 1
    after = fetch(x).values()
    assert all(torch.equal(each, torch.zeros(size)) for each in before)
    assert all(torch.equal(each, torch.ones(size)) for each in after)


@pytest.mark.parametrize("size", SIZES)
def test_writes_to_fetched_values_stay_in_the_script(procs: ProcMesh, size: int) -> None:
    x = share(torch.zeros(size), procs)
    one, other = fetch_shard(x), fetch_shard(x)
    one += 1
    assert torch.equal(other, torch.zeros(size))
    assert torch.equal(fetch_shard(x), torch.zeros(size))


@pytest.mark.parametrize("size", SIZES)
def test_later_writes_do_not_change_what_was_fetched_of_a_global_tensor(procs: ProcMesh, size: int) -> None:
    with Mesh((2,), ("gpus",), procs) as mesh:
        x = distribute(torch.zeros(size), mesh)
        before, part = fetch(x), fetch_shard(x)
        x += 1
        assert torch.equal(fetch(x), torch.ones(size))
        assert torch.equal(before, torch.zeros(size))
        assert torch.equal(part, torch.zeros(size))


def test_views_are_fetched_without_the_memory_around_them(procs: ProcMesh) -> None:
    x = share(torch.arange(float(1 << 20)).view(1 << 10, 1 << 10), procs)
    for view in (x[3], x[:, 3], x.t(), x[0, 0].expand(5), x[::7, ::5], x[:0]):
        found = fetch_shard(view)
        assert found.shape == view.shape
        assert found.untyped_storage().nbytes() == found.numel() * 4
    assert torch.equal(fetch_shard(x.t()), fetch_shard(x).t())
    assert torch.equal(fetch_shard(x[::7, ::5]), fetch_shard(x)[::7, ::5])


def test_zeros_without_memory_are_fetched(procs: ProcMesh) -> None:
    x = share(torch.ones(3), procs).requires_grad_()
    with activate(procs):
        x.sgn().sum().backward()
        zeros = torch._efficientzerotensor((2, 3))  # noqa: SLF001 - the operator behind such gradients
    assert torch.equal(fetch_shard(x.grad), torch.zeros(3))
    assert torch.equal(fetch_shard(zeros), torch.zeros(2, 3))


def test_marks_of_views_are_resolved(procs: ProcMesh) -> None:
    x = share(torch.tensor([1 + 2j, 3 - 4j]), procs)
    assert torch.equal(fetch_shard(x.conj()), torch.tensor([1 - 2j, 3 + 4j]))
    assert torch.equal(fetch_shard(x.conj().imag), torch.tensor([-2.0, 4.0]))
