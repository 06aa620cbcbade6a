"""Moving tensors between meshes: values, gradients, what does not fit, and deaths on either side."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_core import DeviceMeshError, ProcMesh, set_fault_handler, this_host

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    CaptureError,
    Mesh,
    RemoteException,
    activate,
    capture,
    distribute,
    fetch,
    fetch_shard,
    rank_tensor,
    reduce,
    remote,
    share,
    slice_mesh,
    to_mesh,
    usage,
)

# Importing PyTorch takes a busy machine its time.
pytestmark = [pytest.mark.beside, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def others(runtime: None, preload: list[str]) -> Iterator[ProcMesh]:
    """Two processes beside the pair."""
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="others") as procs:
        yield procs


def values(tensor: Any) -> list[Any]:
    return [each.tolist() for each in fetch(tensor).values()]


def test_from_rank_to_rank_of_another_mesh(procs: ProcMesh, others: ProcMesh) -> None:
    x = rank_tensor(procs, "gpus").view(1) + torch.tensor([1, 2]).sum()
    moved = to_mesh(x * 2, others)
    assert moved.procs == others
    assert values(moved + 1) == [[7], [9]]
    assert values(to_mesh(moved, procs)) == [[6], [8]]


def test_dimensions_of_other_names(grid: ProcMesh, others: ProcMesh) -> None:
    column = grid.slice(model=1)
    moved = to_mesh(rank_tensor(column, "data") * 10, others)
    assert values(moved) == [0, 10]
    assert values(to_mesh(moved, column)) == [0, 10]


def test_copies_along_new_dimensions(grid: ProcMesh) -> None:
    row = slice_mesh(rank_tensor(grid, "model") + 5, data=0)
    assert values(to_mesh(row, grid)) == [5, 6, 5, 6]
    one = slice_mesh(row, model=1)
    assert values(to_mesh(one, grid)) == [6, 6, 6, 6]
    assert values(to_mesh(slice_mesh(rank_tensor(grid, "model"), data=slice(1, 2)), grid)) == [0, 1, 0, 1]


def test_a_mesh_in_another_order_of_its_dimensions(grid: ProcMesh) -> None:
    turned = grid.flatten("all").split(all=("model", "data"), model=2)
    x = rank_tensor(grid, "data") * 10 + rank_tensor(grid, "model")
    assert values(to_mesh(x, turned)) == [0, 10, 1, 11]


def test_on_the_mesh_where_it_is_it_stays(procs: ProcMesh) -> None:
    x = share(torch.ones(2), procs)
    assert to_mesh(x, procs) is x


def test_lists_and_dicts_of_tensors(procs: ProcMesh, others: ProcMesh) -> None:
    state = {"weights": [share(torch.ones(2, 2), procs), share(torch.zeros(3), procs)], "step": 7}
    state["there"] = there = share(torch.ones(1), others)
    moved: Any = to_mesh(state, others)
    assert moved["step"] == 7
    assert moved["there"] is there
    assert values(moved["weights"][0]) == [[[1.0, 1.0], [1.0, 1.0]]] * 2
    assert moved["weights"][1].procs == others


def test_forms_and_types(procs: ProcMesh, others: ProcMesh) -> None:
    kinds = [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64]
    for dtype in kinds:
        whole = torch.arange(6).view(2, 3).to(dtype)
        moved = to_mesh(share(whole, procs).t()[1:], others)
        assert moved.dtype == dtype
        assert moved.stride() == (2, 1)
        assert torch.equal(fetch_shard(moved, gpus=1), whole.t()[1:])
    assert fetch_shard(to_mesh(share(torch.empty(0, 4), procs), others)).shape == (0, 4)


def test_what_was_moved_is_another_tensor(procs: ProcMesh, others: ProcMesh) -> None:
    """Also on the same process, and where it came by shared memory."""
    x = share(torch.zeros(100_000), procs)
    moved, again = to_mesh(x, others), to_mesh(x, procs.slice(gpus=slice(0, 2)).rename(gpus="g"))
    x += 1
    moved += 2
    again += 3
    found = [fetch_shard(each).unique().tolist() for each in (x, moved, again)]
    assert found == [[1.0], [2.0], [3.0]]


def test_gradients_go_back(procs: ProcMesh, others: ProcMesh) -> None:
    w = (rank_tensor(procs, "gpus") + torch.tensor(1.0)).requires_grad_()
    v = share(torch.tensor(2.0), procs).requires_grad_()
    a, b = to_mesh((w * 2, v), others)
    (a * a * b).backward()
    assert values(w.grad) == [16.0, 32.0]
    assert values(v.grad) == [4.0, 16.0]
    with torch.no_grad():
        assert not to_mesh(w, others).requires_grad


def test_a_gradient_that_only_one_of_several_has(procs: ProcMesh, others: ProcMesh) -> None:
    w, v = (share(torch.tensor(3.0), procs).requires_grad_() for _ in range(2))
    a, _ = to_mesh([w, v], others)
    (a * 5).backward()
    assert values(w.grad) == [5.0, 5.0]
    assert v.grad is None


def test_gradients_of_copies_are_summed(grid: ProcMesh) -> None:
    w = share(torch.ones(2), grid.slice(data=0)).requires_grad_()
    copied = to_mesh(w, grid)
    (copied * (rank_tensor(grid, "data") * 10 + rank_tensor(grid, "model"))).sum().backward()
    assert values(w.grad) == [[10.0, 10.0], [12.0, 12.0]]


def test_a_module_in_two_parts_learns_as_in_one_process(procs: ProcMesh, others: ProcMesh) -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    x = torch.randn(6, 4)
    with activate(procs):
        one = torch.nn.Linear(4, 8)
    with activate(others):
        two = torch.nn.Linear(8, 1)
    with torch.no_grad():
        for here, there, mesh in ((first, one, procs), (second, two, others)):
            for mine, its in zip(here.parameters(), there.parameters(), strict=True):
                its.copy_(share(mine.detach(), mesh))
    local = torch.optim.SGD([*first.parameters(), *second.parameters()], 0.1)
    spread = torch.optim.SGD([*one.parameters(), *two.parameters()], 0.1)
    given = share(x, procs)
    for _ in range(3):
        expected = second(first(x).relu()).square().mean()
        found = two(to_mesh(one(given).relu(), others)).square().mean()
        assert values(found.detach()) == pytest.approx([expected.item()] * 2)
        for optimizer, loss in ((local, expected), (spread, found)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def test_nothing_is_kept_of_what_was_moved(procs: ProcMesh, others: ProcMesh) -> None:
    x = share(torch.ones(100_000), procs)
    before = usage(others).values()
    for _ in range(3):
        moved = to_mesh(x, others)
        fetch_shard(moved)
    del moved
    assert usage(others).values() == before


def test_what_does_not_fit(procs: ProcMesh, grid: ProcMesh, others: ProcMesh) -> None:
    x = share(torch.ones(3), grid)  # the line that made it
    with pytest.raises(ValueError, match=r"'data', with 2 processes, is not a dimension of") as caught:
        to_mesh(x, others)
    assert "# the line that made it" in str(caught.value)
    assert "slice_mesh()" in str(caught.value)
    with pytest.raises(ValueError, match=r"'gpus', with 2 processes, has 1 in"):
        to_mesh(share(torch.ones(3), procs), others.slice(gpus=slice(0, 1)))
    with pytest.raises(TypeError, match=r"one of this process.*share\(\)"):
        to_mesh(torch.ones(3), others)
    with pytest.raises(TypeError, match="mesh of processes, got"):
        to_mesh(x, "cpu")  # type: ignore[arg-type]
    with Mesh((2,), ("gpus",), procs) as mesh, pytest.raises(TypeError, match="per-rank view"):
        to_mesh(distribute(torch.ones(3), mesh), others)


def test_a_captured_step_moves_nothing(procs: ProcMesh, others: ProcMesh) -> None:
    @capture
    def step(x: Any) -> Any:
        return to_mesh(x + 1, others)

    with pytest.raises(CaptureError, match="move tensors to another mesh"):
        step(share(torch.ones(3), procs))


def test_a_failure_moves_along(procs: ProcMesh, others: ProcMesh) -> None:
    where = rank_tensor(procs, "gpus").view(1) * 5
    y = share(torch.ones(3), procs)[where]
    moved = to_mesh([y, where], others)
    assert fetch_shard(moved[0], gpus=0).tolist() == [1.0]
    with pytest.raises(RemoteException, match="index 5 is out of bounds") as caught:
        fetch(moved[0] + 1)  # what depends on it
    assert "gpus=1" in str(caught.value)
    assert "moved = to_mesh" in str(caught.value)
    assert values(moved[1]) == [[0], [5]]


# Deaths.


def _pass(gate: str) -> None:
    """Wait until the test lets one more through."""
    with Path(gate).open("rb", buffering=0) as file:
        file.read(1)


@remote(propagate=lambda x, rank, gate: x)
def dies(x: Any, rank: Any, gate: str) -> Any:
    """Wait for the gate, and then, on one process, end."""
    if int(rank) == 1:
        _pass(gate)
        os.kill(os.getpid(), signal.SIGKILL)
    return x


@pytest.fixture
def mortals(runtime: None, preload: list[str]) -> Iterator[ProcMesh]:
    """Two processes that may end without the script's being stopped by that."""
    set_fault_handler(lambda failure: None)
    with this_host().spawn_procs({"gpus": 2}, preload=preload, name="mortals") as procs:
        yield procs
    set_fault_handler(None)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "gate"
    os.mkfifo(path)
    held = os.open(path, os.O_RDWR)  # so that neither end waits for the other
    yield str(path)
    os.close(held)


def test_the_death_of_a_process_that_was_to_send(mortals: ProcMesh, others: ProcMesh, gate: str) -> None:
    """ARV-1."""
    bad = dies(share(torch.ones(2), mortals), rank_tensor(mortals, "gpus"), gate)
    moved = to_mesh(bad, others)
    after = moved + 1
    Path(gate).write_bytes(b"x")
    with pytest.raises(RemoteException, match="has ended before it could send its part") as caught:
        fetch(after)
    assert "gpus=1" in str(caught.value)
    assert "'mortals'" in str(caught.value)
    assert fetch_shard(after, gpus=0).tolist() == [2.0, 2.0]
    with pytest.raises(DeviceMeshError, match="gpus=1"):
        to_mesh(bad, others)
    mortals.respawn().get(timeout=150)
    again = share(torch.ones(2), mortals)
    assert values(to_mesh(again * 3, others)) == [[3.0, 3.0]] * 2
    assert values(to_mesh(to_mesh(again, others) * 4, mortals)) == [[4.0, 4.0]] * 2


def test_the_death_of_a_process_that_was_to_receive(mortals: ProcMesh, others: ProcMesh, gate: str) -> None:
    x = share(torch.ones(2), others)
    dies(share(torch.ones(2), mortals), rank_tensor(mortals, "gpus"), gate)
    moved = to_mesh(x, mortals)
    Path(gate).write_bytes(b"x")
    with pytest.raises(DeviceMeshError, match="gpus=1"):
        fetch(moved)
    assert values(x + 1) == [[2.0, 2.0]] * 2
    mortals.respawn().get(timeout=150)
    assert values(to_mesh(x, mortals)) == [[1.0, 1.0]] * 2
    assert values(reduce(to_mesh(x, mortals))) == [[2.0, 2.0]] * 2


def test_moves_round_and_round_over_meshes_that_share_processes(grid: ProcMesh) -> None:
    """No process waits for what is behind it in the messages to another mesh (STM-6)."""
    parts = [
        grid.slice(data=0, model=0),
        grid.slice(data=0),
        grid.slice(data=0, model=1),
        grid.slice(data=1, model=1),
        grid,
    ]
    x = share(torch.zeros(()), parts[0])
    for _ in range(3):
        y = x
        for part in (*parts[1:], *reversed(parts[1:-1]), parts[0]):
            # A part of what is spread over several processes goes on.
            y = to_mesh(slice_mesh(y, **dict.fromkeys(y.procs.sizes, 0)), part) + 1
        x = y
    assert fetch_shard(x, timeout=60).item() == 24.0


def test_moves_there_and_back_between_two_meshes_are_sent_together(procs: ProcMesh) -> None:
    first, second = procs.slice(gpus=0), procs.slice(gpus=1)
    x = share(torch.zeros(()), first)
    for _ in range(400):
        x = to_mesh(to_mesh(x, second) + 1, first)
    assert fetch_shard(x, timeout=60).item() == 400.0
