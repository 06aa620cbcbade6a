"""What goes wrong on some process of a mesh is told, and no process is left waiting for it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from mesh_core import (
    Actor,
    DeviceMeshError,
    MeshError,
    MeshFailure,
    ProcMesh,
    SupervisionError,
    endpoint,
    set_fault_handler,
    this_host,
)

torch = pytest.importorskip("torch")

from mesh_tensor import Mesh, RemoteException, distribute, fetch, fetch_shard, usage  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow]


@pytest.fixture(scope="module")
def mesh(procs: ProcMesh) -> Iterator[Mesh]:
    with Mesh((2,), ("data",), procs) as mesh:
        yield mesh


def test_a_pytorch_that_is_too_old_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.1+cpu")
    with pytest.raises(MeshError, match=r"needs PyTorch 2\.11, 2\.15 or newer, and this is 2\.14\.1"):
        Mesh((2,), ("data",))


@pytest.mark.full
def test_processes_that_start_too_slowly_are_an_error(procs: ProcMesh) -> None:
    told: list[MeshFailure] = []
    before = set_fault_handler(told.append)
    try:
        with (
            pytest.raises(MeshError, match=r"has not reported within 0\.05 s of its spawn"),
            Mesh((2,), ("data",), name="slow", start_timeout=0.05) as mesh,
        ):
            fetch(distribute(torch.ones(2), mesh))
    finally:
        set_fault_handler(before)
    with pytest.raises(ValueError, match="start_timeout= is for processes that the mesh spawns itself"):
        Mesh((2,), ("data",), procs, start_timeout=60.0)
    with pytest.raises(ValueError, match=r"start_timeout must be positive, got 0\.0"):
        Mesh((2,), ("data",), start_timeout=0.0)


def test_a_failure_poisons_what_depends_on_it_and_nothing_else(mesh: Mesh) -> None:
    x = distribute(torch.ones(4, 3), mesh, ["data", None])
    bad = x.index_select(1, distribute(torch.tensor([7]), mesh))  # the line that is wrong
    after = (bad.sum() * 2).redistribute()
    for each in (bad, after):
        with pytest.raises(RemoteException, match=r"id=7|index 7|out of range") as caught:
            fetch(each)
        assert "# the line that is wrong" in str(caught.value)
    assert fetch(x + 1).sum() == 24


def test_a_failure_on_one_process_leaves_no_other_waiting(mesh: Mesh) -> None:
    """STM-3."""
    table = distribute(torch.arange(6.0).view(3, 2), mesh)
    rows = distribute(torch.tensor([0, 1, 2, 9]), mesh, ["data"])
    found = torch.nn.functional.embedding(rows, table)
    assert fetch_shard(found, data=0).tolist() == [[0.0, 1.0], [2.0, 3.0]]
    # The other process goes on to collectives, in which the one that has failed takes its part.
    total = found.sum().redistribute()
    with pytest.raises(RemoteException, match="data=1"):
        fetch(total)
    with pytest.raises(RemoteException, match="data=1"):
        total.item()
    table += total
    with pytest.raises(RemoteException, match="data=1"):
        fetch(table)
    assert fetch(rows.sum()).item() == 12


def test_a_process_without_memory_leaves_no_other_waiting(mesh: Mesh) -> None:
    """Not even for zeros in place of the result."""
    one_row = distribute(torch.ones(1, 1), mesh, ["data", None])  # the first process's
    much = one_row.expand(1, 1 << 46).contiguous()
    with pytest.raises(RemoteException, match=r"(?s)data=0.*allocate"):
        fetch(much[:, :4].sum(), timeout=60)
    assert fetch(one_row.sum(), timeout=60).item() == 1.0


def test_a_failure_on_whole_tensors(mesh: Mesh) -> None:
    x = distribute(-torch.eye(4), mesh, ["data", None])
    torch.linalg.inv(x * 0)  # with a check that has no result: told to who asks next
    with pytest.raises(RemoteException, match="singular"):
        fetch(x)
    assert fetch(x.sum()).item() == -4


def test_a_function_that_fails(mesh: Mesh) -> None:
    x = distribute(torch.ones(4), mesh, ["data"])

    def fail(x: Any) -> None:
        raise ValueError(f"no such {x.shape}")

    with pytest.raises(RemoteException, match=r"no such torch\.Size"):
        mesh.execute(fail, x)
    with pytest.raises(RemoteException, match="tensor of one process"):
        mesh.execute(lambda x: x.to_local(), x)
    assert fetch(x).tolist() == [1.0] * 4


def test_tensors_are_freed_and_with_their_mesh(procs: ProcMesh) -> None:
    before = [each.tensors for each in usage(procs).values()]
    with Mesh((2,), procs=procs) as mesh:
        kept = [distribute(torch.ones(8), mesh, ["dim_0"]) for _ in range(3)]
        gone = kept[0] + 1
        fetch(gone)
        del gone
        fetch(kept[0])
        assert [each.tensors for each in usage(procs).values()] == [n + 3 for n in before]
        assert min(each.nbytes for each in usage(procs).values()) >= 3 * 16
    assert [each.tensors for each in usage(procs).values()] == before


class Victim(Actor):
    @endpoint
    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_dies_and_is_restarted(preload: list[str]) -> None:
    with this_host().spawn_procs({"data": 2}, preload=preload, name="mortal") as procs:
        mesh = Mesh((2,), ("data",), procs)
        x = distribute(torch.arange(4.0), mesh, ["data"])
        assert fetch(x.sum()).item() == 6
        with pytest.raises(SupervisionError):
            procs.slice(data=1).spawn("victim", Victim).end.call().get(timeout=30)
        with pytest.raises(DeviceMeshError, match="data=1"):
            fetch(x.redistribute())
        for work in (lambda: x + 1, lambda: distribute(torch.ones(2), mesh), x.sum):
            with pytest.raises(DeviceMeshError, match="data=1"):
                work()
        procs.respawn().get(timeout=60)
        fresh = distribute(torch.arange(4.0), mesh, ["data"])
        assert fetch((fresh * 2).sum()).item() == 12
        # No tensor from before is whole any longer.
        with pytest.raises(RemoteException, match="it was on a process of the mesh that has ended"):
            fetch(x + 1)
        mesh.stop()


def test_a_mesh_that_was_stopped() -> None:
    with Mesh((1,), name="stopped") as mesh:
        x = distribute(torch.ones(2), mesh)
        assert fetch(x).tolist() == [1.0, 1.0]
    for work in (lambda: fetch(x), lambda: x + 1, lambda: distribute(torch.ones(2), mesh)):
        with pytest.raises(MeshError, match=r"Mesh\(dim_0=1\) was stopped"):
            work()
    mesh.stop()
