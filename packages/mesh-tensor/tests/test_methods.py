"""Functions of tensors of a mesh that are methods, too, and parts of whole structures."""

from __future__ import annotations

from typing import Any

import pytest

from mesh_core import ProcMesh, this_host

torch = pytest.importorskip("torch")

from mesh_tensor import Mesh, MeshTensor, distribute, fetch, fetch_shard, rank_tensor, share  # noqa: E402

# Importing PyTorch takes a busy machine its time.
pytestmark = [pytest.mark.beside, pytest.mark.slow, pytest.mark.timeout(180)]


def numbers(tensor: Any) -> list[Any]:
    return [each.tolist() for each in fetch(tensor).values()]


def test_a_tensor_is_reduced_by_its_method(procs: ProcMesh) -> None:
    x = rank_tensor(procs, "gpus") + 1
    assert isinstance(x, MeshTensor)
    assert numbers(x.reduce()) == numbers(x.reduce("gpus", reduction="sum")) == [3, 3]
    assert numbers(x.reduce(["gpus"], "max")) == [2, 2]
    assert numbers(share(torch.arange(4), procs).reduce("gpus", scatter=True)) == [[0, 2], [4, 6]]
    with pytest.raises(ValueError, match="op must be"):
        x.reduce("gpus", "median")  # type: ignore[arg-type]


def test_gradients_flow_through_the_method(procs: ProcMesh) -> None:
    x = share(torch.ones(2), procs).requires_grad_()
    (x * 3).reduce().sum().backward()
    assert x.grad is not None
    assert numbers(x.grad) == [[6.0, 6.0]] * 2


def test_a_tensor_goes_to_another_mesh_by_its_method(procs: ProcMesh, preload: list[str]) -> None:
    x = rank_tensor(procs, "gpus") + 5
    assert numbers(x.slice_mesh(gpus=1)) == [6]
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="others") as others:
        assert numbers(x.to_mesh(others)) == [5, 6]
        assert numbers(x.slice_mesh(gpus=0).to_mesh(others)) == [5, 5]


def test_the_parts_of_a_structure(procs: ProcMesh) -> None:
    x = rank_tensor(procs, "gpus")
    found = fetch_shard({"x": x, "more": [x + 1, "text"], "n": (3, x * 0)}, gpus=1)
    assert (int(found["x"]), int(found["more"][0]), found["more"][1]) == (1, 2, "text")
    assert (found["n"][0], int(found["n"][1])) == (3, 0)
    assert int(fetch_shard(x, shard={"gpus": 1})) == 1
    assert [int(each) for each in fetch_shard([x, x + 1])] == [0, 1]
    with pytest.raises(TypeError, match=r"takes tensors of a mesh, alone or in lists.*got \[3\]"):
        fetch_shard([3])
    with pytest.raises(TypeError, match="not a tensor of a mesh but Tensor"):
        fetch_shard([torch.ones(2)])


def test_the_parts_of_a_structure_in_the_global_view(procs: ProcMesh) -> None:
    with Mesh((2,), ("d",), procs) as mesh:
        x = distribute(torch.arange(4.0), mesh)
        found = fetch_shard({"x": x, "twice": x * 2}, d=1)
        assert found["x"].shape == found["twice"].shape
        assert torch.equal(found["x"] * 2, found["twice"])
