"""What a device lacks: memory, a kind of numbers. And values that travel between its memory and the host's, late."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from mesh_core import MeshError, ProcMesh

torch = pytest.importorskip("torch")

import late_device  # noqa: E402
from mesh_tensor import (  # noqa: E402
    Mesh,
    RemoteException,
    activate,
    distribute,
    fetch,
    fetch_shard,
    rank_tensor,
    share,
)


@pytest.fixture(scope="module")
def mesh(shared: ProcMesh, kind: str) -> Iterator[Mesh]:
    """Two processes that share one device."""
    try:
        made = Mesh((2,), ("gpus",), shared, device=kind)
    except MeshError as error:
        if "needs PyTorch" not in str(error):
            raise
        pytest.skip(str(error))
    with made:
        yield made


def of_the_first(x: Any, name: str, told: Any, most: int) -> None:
    """Have the devices of the first processes lack something."""
    if x.device_mesh.get_rank() < most:
        getattr(torch.ops.late, name)(told)


@contextmanager
def lacking(mesh: Mesh, name: str, told: Any, nothing: Any, *, most: int = 1) -> Iterator[None]:
    """Have the first process's device lack something for a while, or those of more."""
    x = distribute(torch.zeros(2), mesh)
    mesh.execute(of_the_first, x, name, told, most)
    try:
        yield
    finally:
        mesh.execute(of_the_first, x, name, nothing, most)


needs_late = pytest.mark.skipif(
    late_device.VARIABLE not in os.environ, reason="other devices cannot be told to lack something"
)


@needs_late
def test_a_device_that_is_full_is_named_and_the_others_do_not_wait(mesh: Mesh) -> None:
    x = distribute(torch.ones(4), mesh, ["gpus"])
    with lacking(mesh, "limit", 1 << 10, -1):
        much = distribute(torch.ones(1 << 12), mesh, ["gpus"])
        with pytest.raises(
            RemoteException, match=r"(?s)distribute failed at .*float32, 16,384 bytes.*out of memory"
        ):
            fetch_shard(much, gpus=0)
        # The other process has its part, and meets this one.
        assert fetch_shard(much, gpus=1).sum().item() == 1 << 11
        with pytest.raises(RemoteException, match=r"(?s)gpus=0.*out of memory"):
            fetch((much + 1).sum())
        with activate(mesh), pytest.raises(RemoteException, match=r"(?s)gpus=0.*out of memory"):
            fetch(torch.zeros(1 << 12).sum())
        assert fetch(x + 1).tolist() == [2.0] * 4
    assert fetch(distribute(torch.ones(1 << 12), mesh, ["gpus"]).sum()).item() == 1 << 12


@needs_late
def test_numbers_that_a_device_does_not_have_are_named(mesh: Mesh) -> None:
    with lacking(mesh, "lacks", torch.float64, None, most=2):
        wide = distribute(torch.ones(4, dtype=torch.float64), mesh, ["gpus"])
        with pytest.raises(
            RemoteException, match=r"(?s)distribute failed at .*gpus=0.*torch.float64.*no numbers of Double"
        ):
            fetch(wide)
        with pytest.raises(RemoteException, match=r"(?s)gpus=0.*no numbers of Double"):
            fetch(distribute(torch.ones(4), mesh, ["gpus"]).double())
        assert fetch(distribute(torch.ones(4), mesh, ["gpus"])).tolist() == [1.0] * 4


@needs_late
def test_the_same_in_the_per_rank_view(shared: ProcMesh, mesh: Mesh, kind: str) -> None:
    with lacking(mesh, "limit", 1 << 10, -1), activate(shared, device=kind):
        with pytest.raises(RemoteException, match=r"(?s)gpus=0.*out of memory"):
            fetch_shard(torch.ones(1 << 12))
        assert fetch_shard(torch.ones(1 << 12), gpus=1).sum().item() == 1 << 12
        assert fetch_shard(torch.ones(2)).tolist() == [1.0, 1.0]


def test_a_device_that_has_much_less_than_was_asked_for(mesh: Mesh, shared: ProcMesh, kind: str) -> None:
    with activate(shared, device=kind), pytest.raises(RemoteException, match=r"memory"):
        fetch_shard(torch.empty(1 << 46)[:1])
    x = distribute(torch.ones(2), mesh)
    with pytest.raises(RemoteException, match=r"memory"):
        fetch(x.expand(1 << 45, 2).contiguous()[0])
    assert fetch(x).tolist() == [1.0, 1.0]


def test_copies_that_nobody_is_to_wait_for_have_their_values(shared: ProcMesh, kind: str) -> None:
    rank = rank_tensor(shared, "gpus") + 1.0
    for number in range(1, 4):
        given = share(torch.full((1 << 15,), float(number)), shared) * rank
        there = given.to(kind, non_blocking=True)
        given.zero_()
        back = there.to("cpu", non_blocking=True)
        other = torch.zeros_like(back)
        other.copy_(there, non_blocking=True)
        assert [each.unique().tolist() for each in fetch(back).values()] == [[number], [2.0 * number]]
        assert [each.unique().tolist() for each in fetch(other).values()] == [[number], [2.0 * number]]
        there.copy_(other.neg_(), non_blocking=True)
        other.zero_()
        assert [each.unique().tolist() for each in fetch(there).values()] == [[-number], [-2.0 * number]]


def test_what_is_distributed_may_change_at_once(mesh: Mesh) -> None:
    """Parts of rows and of columns, small ones and large ones."""
    for size in (8, 512):
        for sharding in (["gpus", None], [None, "gpus"], None):
            mine = torch.arange(float(size * size)).view(size, size)
            want = mine.clone()
            x = distribute(mine, mesh, sharding)
            mine.zero_()
            assert torch.equal(fetch(x), want)
            assert torch.equal(fetch(x.T), want.T)


def test_memory_is_the_process_s(mesh: Mesh) -> None:
    """The bytes of a fetched tensor are not those that the device writes next."""
    x = distribute(torch.zeros(1 << 16), mesh, ["gpus"])
    found = []
    for _ in range(3):
        x += 1
        found.append(fetch(x))
    assert [each.unique().tolist() for each in found] == [[1.0], [2.0], [3.0]]
