"""Captured steps of the global view, which processes carry out on their own parts of the tensors (FUS-1), and compile (RGN-1, RGN-2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from mesh_tensor import (  # noqa: E402
    FullyShard,
    Mesh,
    RemoteException,
    capture,
    distribute,
    fetch,
    fetch_shard,
    module_to_mesh,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]


@pytest.fixture(scope="module")
def mesh(procs: ProcMesh) -> Iterator[Mesh]:
    """Both processes, in one dimension."""
    with Mesh((2,), ("gpus",), procs) as mesh:
        yield mesh


def as_asked(step: Callable[..., Any], backend: str | bool | None) -> Any:
    """A step that is captured, or not."""
    return step if backend is None else capture(step, compile=backend)


def alike(run: Callable[[str | bool | None], list[Any]]) -> None:
    """Check that a step gives the same as it is, captured, and compiled."""
    want = run(None)
    for backend in (False, "aot_eager"):
        got = run(backend)
        assert len(got) == len(want)
        assert all(map(torch.equal, got, want)), backend


def train(mesh: Mesh, plan: Any, backend: str | bool | None) -> tuple[list[Any], Any]:
    """Losses and parameters of a network after some steps, and the step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 4)
    )
    x, y = torch.randn(6, 5), torch.randint(4, (6,))
    module_to_mesh(model, mesh, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    x, y = distribute(x, mesh, ["gpus", None]), distribute(y, mesh, ["gpus"])

    def train_on(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = as_asked(train_on, backend)
    losses = [step(x, y) for _ in range(8)]
    return [fetch(each.detach()) for each in (*losses, *model.parameters())], step


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("plan", [None, {"*": FullyShard("gpus")}], ids=["replicated", "fully sharded"])
def test_training_is_the_same_to_the_last_bit_with_pytorchs_own_operators(mesh: Mesh, plan: Any) -> None:
    want, _ = train(mesh, plan, None)
    for backend in (False, "aot_eager"):
        got, step = train(mesh, plan, backend)
        assert step.replays >= 5, step.reasons
        assert all(map(torch.equal, got, want)), backend
    for told in step.compilation(timeout=60).values():
        # Before the gradients are summed up, and the optimizer behind that.
        assert told.regions >= 2
        assert told.operators >= 20
        assert any("a collective is never compiled" in why for why in told.reasons), told
        assert not any("cannot" in why for why in told.reasons), told


@pytest.mark.parametrize("backend", [False, "aot_eager"])
def test_an_operator_that_fails_in_one_process_fails_alone(mesh: Mesh, backend: str | bool) -> None:
    def compute(x: Any, y: Any, table: Any) -> Any:
        return (x * 2 + 1).sum(), (functional.embedding(y, table) + 1).sum() * 2, x.exp().mean() * 3

    step = capture(compute, compile=backend)
    x = distribute(torch.arange(12.0).view(4, 3), mesh, ["gpus", None])
    table = distribute(torch.ones(3, 2), mesh)
    good = distribute(torch.tensor([0, 1, 2, 0]), mesh, ["gpus"])
    # Only the second process meets it.
    bad = distribute(torch.tensor([0, 1, 2, 7]), mesh, ["gpus"])
    wants = compute(fetch(x), fetch(good), fetch(table))
    for _ in range(5):
        step(x, good, table)
    for _ in range(2):
        first, broken, last = step(x, bad, table)
        assert torch.allclose(fetch(first, timeout=60), wants[0])
        with pytest.raises(
            RemoteException,
            match=r"(?s)embedding.*gpus=1.*index out of range.*recorded at .*embedding\(y, table\)",
        ):
            fetch(broken, timeout=60)
        assert torch.allclose(fetch(last, timeout=60), wants[2])
    for mine, theirs in zip(step(x, good, table), wants, strict=True):
        assert torch.allclose(fetch(mine, timeout=60), theirs)
    assert not backend or all(told.regions >= 1 for told in step.compilation(timeout=60).values())


@pytest.mark.parametrize("backend", [False, "aot_eager"])
def test_an_operator_that_meets_others_fails_in_one_process(mesh: Mesh, backend: str | bool) -> None:
    step = capture(
        lambda x, y: (x.sum() * 2, functional.cross_entropy(x, y) + 1, x.exp().mean()), compile=backend
    )
    x = distribute(torch.arange(12.0).view(4, 3), mesh, ["gpus", None])
    good = distribute(torch.tensor([0, 1, 2, 0]), mesh, ["gpus"])
    # Its sum is asked for by the others, after it has failed here.
    bad = distribute(torch.tensor([0, 1, 2, 7]), mesh, ["gpus"])
    for _ in range(5):
        wants = [fetch(each) for each in step(x, good)]
    for _ in range(2):
        first, broken, last = step(x, bad)
        with pytest.raises(RemoteException, match=r"(?s)nll_loss.*gpus=1.*recorded at .*cross_entropy"):
            fetch(broken, timeout=60)
        assert torch.equal(fetch(first, timeout=60), wants[0])
        assert torch.equal(fetch(last, timeout=60), wants[2])
    assert all(map(torch.equal, [fetch(each, timeout=60) for each in step(x, good)], wants))


@pytest.mark.parametrize("backend", [False, "aot_eager"])
def test_a_process_with_a_failed_input_meets_those_that_have_none(mesh: Mesh, backend: str | bool) -> None:
    def compute(x: Any, y: Any) -> Any:
        return (x * 2 + 1).sum() * 2, (y * 2 + 1).sum()

    x = distribute(torch.arange(12.0).view(4, 3), mesh, ["gpus", None])
    table = distribute(torch.ones(3, 2), mesh)
    bad = functional.embedding(distribute(torch.tensor([0, 1, 2, 7]), mesh, ["gpus"]), table)
    good = functional.embedding(distribute(torch.tensor([0, 1, 2, 1]), mesh, ["gpus"]), table)
    step = capture(compute, compile=backend)
    for given in (good, good, good, good, good, bad, bad):
        fine, broken = step(x, given)
    assert fetch(fine, timeout=60).item() == (fetch(x) * 2 + 1).sum().item() * 2
    with pytest.raises(RemoteException, match="embedding"):
        fetch(broken, timeout=60)


def test_writes_and_views_of_rows_that_dtensor_copies(mesh: Mesh) -> None:
    def run(backend: str | bool | None) -> list[Any]:
        state = distribute(torch.arange(12.0).view(4, 3), mesh, ["gpus", None])
        row = state[1]

        def write(x: Any) -> Any:
            y = x * 2 + 1
            state.add_(y)
            seen = row * 2 + 1
            state[2].mul_(0.5)
            row.add_(1)
            return seen, y + 1, state.t(), state * 2 + 1

        step = as_asked(write, backend)
        found = []
        for n in range(7):
            results = step(distribute(torch.full((4, 3), float(n)), mesh, ["gpus", None]))
            found += [fetch(each) for each in (*results, state, row)]
        if backend:
            assert step.replays >= 3, step.reasons
            told = step.compilation(timeout=60).item(gpus=0)
            assert told.regions >= 1
            assert any("values DTensor" in why for why in told.reasons), told
        return found

    alike(run)


def test_results_that_are_inputs_and_views_of_them(mesh: Mesh) -> None:
    def run(backend: str | bool | None) -> list[Any]:
        def write(x: Any, y: Any) -> Any:
            x.mul_(2)
            return x.redistribute(["gpus", None]), x.detach(), x[:, 1:], x.sum() + y.sum(), y.add_(1)

        x = distribute(torch.ones(4, 3), mesh, ["gpus", None])
        y = distribute(torch.ones(3, 2), mesh, [None, "gpus"])
        step = as_asked(write, backend)
        for _ in range(6):
            same, alias, part, total, second = step(x, y)
        with torch.no_grad():
            part.add_(1)
            alias[:, 0].zero_()
        return [fetch(each) for each in (x, y, same, alias, part, total, second)]

    alike(run)


def test_random_operators_draw_the_same_numbers(mesh: Mesh) -> None:
    def run(backend: str | bool | None) -> list[Any]:
        torch.manual_seed(3)
        step = as_asked(lambda x: functional.dropout(x * 2 + 1, 0.5) * 3 - 1, backend)
        x = distribute(torch.ones(10), mesh, ["gpus"])
        return [fetch(step(x)) for _ in range(7)]

    alike(run)


def test_uneven_parts_and_several_layouts_of_one_step(mesh: Mesh) -> None:
    def run(backend: str | bool | None) -> list[Any]:
        step = as_asked(
            lambda x: ((x @ x.t()).softmax(-1).sum(0), x.redistribute([None, None]) * 2 + 1), backend
        )
        found = []
        for rows in ("gpus", None, "gpus"):
            x = distribute(torch.linspace(0, 1, 15).view(5, 3), mesh, [rows, None])
            for _ in range(5):
                found += [fetch(each) for each in step(x)]
        return found

    alike(run)


def test_shards_are_where_they_are_without_compilation(mesh: Mesh) -> None:
    step = capture(lambda x: (x * 2 + 1, x.sum(0), x.t()), compile="aot_eager")
    x = distribute(torch.arange(8.0).view(4, 2), mesh, ["gpus", None])
    first = step(x)
    for _ in range(3):
        last = step(x)
    assert [each.placements for each in first] == [each.placements for each in last]
    assert torch.equal(fetch_shard(last[2], gpus=1), torch.arange(8.0).view(4, 2)[2:].t())


@pytest.mark.full
@pytest.mark.timeout(600)
def test_inductor_computes_the_same_up_to_rounding(mesh: Mesh) -> None:
    import shutil

    if shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler, and there is no g++ here")
    x = distribute(torch.linspace(-2, 2, 40).view(4, 10), mesh, ["gpus", None])

    def compute(x: Any) -> Any:
        y = functional.gelu(x) * 2 + x.sin()
        return y.softmax(-1), y.sum() * 2

    step = capture(compute, compile=True)
    for _ in range(4):
        got = step(x)
    for mine, theirs in zip(got, compute(fetch(x)), strict=True):
        torch.testing.assert_close(fetch(mine, timeout=500), theirs, rtol=1e-5, atol=1e-6)
    told = step.compilation(timeout=500).item(gpus=0)
    assert told.backend == "inductor"
    assert told.regions >= 1
