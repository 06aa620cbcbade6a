"""How much memory processes need at a time: tensors are freed where the script frees them, and gradients where they have been sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from mesh_tensor import (  # noqa: E402
    FullyShard,
    Mesh,
    activate,
    capture,
    distribute,
    fetch_shard,
    module_to_mesh,
    remote,
    share,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]
BIG = 10_000_000
"""Numbers of which each tensor has its own pages: the C library returns more than 32 MiB as soon as they are freed."""
BYTES = 4 * BIG


def forget() -> None:
    """Let the most memory that this process has had be what it has."""
    Path("/proc/self/clear_refs").write_text("5")


def told(what: str) -> int:
    """Return what this process has resident now (VmRSS), or has had at the most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{what}:"))


@pytest.fixture(scope="module")
def mesh(procs: ProcMesh) -> Iterator[Mesh]:
    with Mesh((2,), ("data",), procs) as mesh:
        yield mesh


def most(mesh: Mesh, work: Callable[[], Any]) -> float:
    """Return how many of the big tensors a process has had at the most, besides those before."""

    def begin(x: Any) -> Any:
        forget()
        return x + told("VmRSS")

    def end(x: Any) -> Any:
        return x + told("VmHWM")

    def each(function: Callable[..., Any]) -> Any:
        zero = distribute(torch.zeros(2, dtype=torch.float64), mesh, ["data"])
        return mesh.execute(function, zero).full_tensor()

    before = each(begin)
    work()
    return float((each(end) - before).max()) / BYTES


def test_a_tensor_is_freed_before_the_next_instruction_of_the_script(procs: ProcMesh) -> None:
    """FRE-1."""

    @remote(propagate=lambda x: x.clone())
    def remember(x: torch.Tensor) -> torch.Tensor:
        import weakref

        torch._mesh_seen = weakref.ref(x)  # type: ignore[attr-defined]  # noqa: SLF001 - both functions find it there
        return x + 1

    @remote(propagate=lambda x: x.clone())
    def look(x: torch.Tensor) -> torch.Tensor:
        return x + (torch._mesh_seen() is not None)  # type: ignore[attr-defined]  # noqa: SLF001 - likewise

    one = share(torch.zeros(1), procs)
    x = one + 1
    remember(x)
    there = look(one)
    del x
    gone = look(one)
    assert [fetch_shard(each).item() for each in (there, gone)] == [1, 0]


def test_a_chain_of_operators_needs_two_tensors(mesh: Mesh) -> None:
    big = distribute(torch.zeros(2, BIG), mesh, ["data", None])

    def chain(x: Any) -> Any:
        for _ in range(8):
            x = x * 1.5
        return x.sum()

    chain(big)
    assert most(mesh, lambda: fetch_shard(chain(big))) < 3.5


def test_a_captured_chain_needs_two_tensors_from_its_first_replay_on(mesh: Mesh) -> None:
    """FRE-1."""
    big = distribute(torch.zeros(2, BIG), mesh, ["data", None])

    @capture
    def chain(x: Any) -> Any:
        for _ in range(8):
            x = x * 1.5
        return x.sum()

    with activate(mesh):
        chain(big)
        for _ in range(5):
            assert most(mesh, lambda: fetch_shard(chain(big))) < 3.5
    assert chain.replays >= 4, chain.reasons


def test_what_a_captured_step_makes_anew_makes_room(mesh: Mesh) -> None:
    weight = torch.nn.Parameter(distribute(torch.zeros(2, BIG), mesh, ["data", None]))

    @capture
    def step() -> Any:
        weight.grad = None
        loss = (weight * 2).sum()
        loss.backward()
        return loss.detach()

    with activate(mesh):
        for _ in range(3):
            step()
        # The gradient is there already. One more would be the old one, beside the new one.
        assert most(mesh, lambda: [fetch_shard(step()) for _ in range(4)]) < 1.5
    assert step.replays >= 4, step.reasons


@pytest.mark.full
def test_gradients_are_whole_for_one_unit_only(mesh: Mesh) -> None:
    side = 3200
    layers = torch.nn.ModuleList(torch.nn.Linear(side, side, bias=False) for _ in range(6))
    layers = module_to_mesh(layers, mesh, {"*": FullyShard("data", reshard_after_forward=True)})
    x = distribute(torch.ones(2, side), mesh, ["data", None])

    def step() -> None:
        y = x
        for each in layers:
            y = each(y)
        y.square().mean().backward()
        for each in layers.parameters():
            each.grad = None

    step()
    # Of six layers, of which half a gradient stays: 3. One layer's parameters and gradient, whole and in messages.
    assert most(mesh, step) < 8
