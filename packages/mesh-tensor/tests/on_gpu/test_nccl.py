"""NCCL with one rank, which is what one GPU can have: that groups are made, called and left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mesh_core import ProcMesh, this_host

torch = pytest.importorskip("torch")

from mesh_tensor import activate, all_gather, fetch, rank_tensor, reduce, spmd  # noqa: E402
from mesh_tensor._tensor import issuer_of  # noqa: E402


@pytest.fixture(scope="module")
def single(runtime: None) -> Iterator[ProcMesh]:
    """One process with the GPU to itself."""
    with this_host().spawn_procs({"gpus": 1}, preload=["torch"], name="single") as procs:
        yield procs


def lists(tensor: Any) -> list[Any]:
    return [each.tolist() for each in fetch(tensor, timeout=60).values()]


def test_collectives_of_one_rank(single: ProcMesh, kind: str) -> None:
    wanted = "gloo" if kind == "cpu" else "nccl"
    assert issuer_of(single).stream.groups.backend(kind) == wanted
    with activate(single, device=kind):
        x = torch.arange(4.0) + rank_tensor(single, "gpus").to(kind)
        assert lists(reduce(x)) == [[0.0, 1.0, 2.0, 3.0]]
        assert lists(reduce(x, op="avg")) == [[0.0, 1.0, 2.0, 3.0]]
        assert lists(reduce(x, scatter=True)) == [[0.0, 1.0, 2.0, 3.0]]
        assert lists(all_gather(x)) == [[[0.0, 1.0, 2.0, 3.0]]]
        assert lists(reduce(x.half())) == [[0.0, 1.0, 2.0, 3.0]]


def all_reduced(kind: str) -> list[float]:
    """As programs for torchrun do it."""
    x = torch.ones(3, device=kind)
    torch.distributed.all_reduce(x)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1).to(kind))
    model(x[None]).sum().backward()
    return x.tolist()


def test_programs_for_torchrun(single: ProcMesh, kind: str) -> None:
    ranks = spmd.setup(single)
    assert list(ranks.run(all_reduced, kind).get(timeout=60).values()) == [[1.0, 1.0, 1.0]]
