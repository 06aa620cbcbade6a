"""DCN-1: operators give in the global view what they give without a mesh, also after workers keep how DTensor carries them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mesh_core import ProcMesh, this_host

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

import both_roads  # noqa: E402
from mesh_tensor import Mesh, RemoteException, activate, distribute, fetch, fetch_shard  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow, pytest.mark.timeout(180)]

OFTEN = 4
"""DTensor decides; that is noted; what was noted is carried out, and once more on what that has made."""


@pytest.fixture(scope="module")
def comparing(runtime: None, preload: list[str]) -> Iterator[Mesh]:
    """A mesh whose processes compare what they have kept with DTensor."""
    with (
        this_host().spawn_procs(
            {"data": 2}, preload=preload, name="both", bootstrap=both_roads.take
        ) as procs,
        Mesh((2,), ("data",), procs) as mesh,
    ):
        yield mesh


@pytest.fixture(scope="module")
def keeping(procs: ProcMesh) -> Iterator[Mesh]:
    with Mesh((2,), ("data",), procs) as mesh:
        yield mesh


@pytest.fixture(params=["keeping", "comparing"])
def mesh(request: pytest.FixtureRequest) -> Mesh:
    found: Mesh = request.getfixturevalue(request.param)
    return found


def values(*shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(mesh: Mesh, work: Callable[..., Any], *given: Any, layouts: list[Any]) -> None:
    """Do some work again and again, on a mesh and here."""
    for _ in range(OFTEN):
        here = [each.clone() for each in given]
        there = [distribute(each, mesh, layout) for each, layout in zip(given, layouts, strict=True)]
        want, got = work(*here), work(*there)
        assert got.dtype == want.dtype
        torch.testing.assert_close(fetch(got, timeout=60), want)
        for one, other in zip(there, here, strict=True):
            torch.testing.assert_close(fetch(one, timeout=60), other)


ROWS, COLUMNS, COPIES = ["data", None], [None, "data"], None


@pytest.mark.parametrize("layout", [ROWS, COLUMNS, COPIES])
def test_numbers_are_those_of_each_call(mesh: Mesh, layout: Any) -> None:
    x = values(5, 4)

    def work(x: Any) -> Any:
        made = [(x + n) * (n / 4) - n for n in (1, 2, 3.5, -0.0, 0.0, 7)]
        made += [torch.full_like(x, n) for n in (1.0, 2.0, -0.0)]
        made += [1 / torch.full_like(x, n) for n in (0.0, -0.0)]
        return torch.stack(made)

    same(mesh, work, x, layouts=[layout])


def test_the_kind_of_a_number_decides_what_the_result_consists_of(mesh: Mesh) -> None:
    x = torch.arange(8)
    same(mesh, lambda x: torch.stack([(x + 1).double(), x + 1.5, (x * 2).double()]), x, layouts=[["data"]])


@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_numbers_meet_summands(mesh: Mesh, layout: Any) -> None:
    def work(x: Any) -> Any:
        total = x.sum(0) + x.sum(1)
        for n in (1.0, 2.0, 0.5, -1.0):
            total = (x.sum(0) + n) * n + total / n
        return total.clamp(min=-3)

    same(mesh, work, values(4, 4), layouts=[layout])


@pytest.mark.parametrize("layout", [ROWS, COLUMNS])
def test_the_number_of_a_norm_decides_how_parts_are_put_together(mesh: Mesh, layout: Any) -> None:
    ends = (float("inf"), float("-inf"), 0, 1, 2, 3)

    def work(x: Any) -> Any:
        found = [x.norm(p) for p in (*ends, *ends)]
        found += [torch.linalg.vector_norm(x, p, dim=0).sum() for p in ends]
        return torch.stack(found)

    same(mesh, work, values(5, 4), layouts=[layout])


def test_a_tensor_that_meets_itself_is_not_two_tensors(mesh: Mesh) -> None:
    x, y = values(4, 4), values(4, 4, seed=1)
    same(mesh, lambda x, y: (x * x) + (x * y) + (y * x) + x @ x + x @ y, x, y, layouts=[ROWS, ROWS])


def test_layouts_in_turn(mesh: Mesh) -> None:
    x, y = values(6, 6), values(6, 6, seed=1)
    for first in (ROWS, COLUMNS, COPIES):
        for second in (COPIES, ROWS, COLUMNS):
            same(mesh, lambda x, y: (x @ y).relu() + y, x, y, layouts=[first, second])


def test_changes_in_place_are_seen_through_all_views(mesh: Mesh) -> None:
    def work(x: Any, y: Any) -> Any:
        alias, row, turned = x.detach(), x[1], x.t()
        for n in range(3):
            x.add_(y).mul_(n + 1)
            turned.sub_(1)
        row.fill_(4)
        return alias + turned.t() * 2 + x[0]

    for layout in (COPIES, ROWS, COLUMNS):
        same(mesh, work, values(4, 4), values(4, 4, seed=1), layouts=[layout, ROWS])


def test_how_a_tensor_lies_in_memory_makes_no_difference(mesh: Mesh) -> None:
    def work(x: Any) -> Any:
        made = x.sum()
        for each in (x, x.t(), x.contiguous(), x.t().contiguous().t(), x[:, ::2].repeat(1, 2)):
            flat = each.redistribute(COPIES) if hasattr(each, "redistribute") else each
            made = made + (flat * torch.pi).reshape(-1)[3] + each.reshape(-1)[5] + (each @ each).sum()
        return made

    same(mesh, work, values(4, 4), layouts=[ROWS])


@pytest.mark.parametrize(
    "of", [torch.linalg.det, lambda x: torch.linalg.slogdet(x)[1]], ids=["det", "slogdet"]
)
@pytest.mark.parametrize("form", [(5, 5), (4, 4), (3, 4, 4)], ids=str)
def test_a_gradient_is_of_the_matrix_that_was_factored(mesh: Mesh, of: Any, form: tuple[int, ...]) -> None:
    def everywhere(x: Any) -> Any:
        return x.redistribute(COPIES) if hasattr(x, "redistribute") else x

    def work(x: Any) -> Any:
        found = []
        # Of one layout, and in two orders in the memory of the processes.
        for each in (x, x.mT, everywhere(x.mT), everywhere(x).mT, x.mT.contiguous()):
            leaf = each.detach().requires_grad_()
            found.append(torch.autograd.grad(of(leaf).sum(), leaf)[0])
        return torch.stack(found)

    for dim in range(len(form)):
        layout: list[str | None] = [None] * len(form)
        layout[dim] = "data"
        same(mesh, work, values(*form), layouts=[layout])


@pytest.mark.parametrize("layout", [ROWS, COLUMNS, COPIES], ids=str)
@pytest.mark.parametrize(
    "of", [torch.linalg.pinv, lambda x: torch.linalg.lstsq(x, x.mH)[0]], ids=["pinv", "lstsq"]
)
def test_kernels_conjugate_each_time(mesh: Mesh, of: Any, layout: Any) -> None:
    # Well conditioned: the result does not depend on rounding.
    x = torch.complex(values(4, 4), values(4, 4, seed=1)) + 8 * torch.eye(4)
    same(mesh, lambda x: torch.view_as_real(of(x)), x, layouts=[layout])


def test_random_numbers_are_drawn_each_time(mesh: Mesh) -> None:
    x = distribute(torch.ones(64), mesh, ["data"])
    found = {tuple(fetch(functional.dropout(x, 0.5), timeout=60).tolist()) for _ in range(OFTEN)}
    assert len(found) == OFTEN


def test_results_are_as_long_as_values_say(mesh: Mesh) -> None:
    for n in range(OFTEN):
        x = torch.arange(8) + n
        there = distribute(x, mesh, ["data"])
        torch.testing.assert_close(fetch(there[there > 5] * 2, timeout=60), x[x > 5] * 2)


def test_results_can_be_looked_at_in_every_way(mesh: Mesh) -> None:
    def doubled(tensor: Any) -> Any:
        return tensor * 2

    x = values(4, 4)
    for _ in range(OFTEN):
        there = distribute(x, mesh, ROWS) + 1
        assert str(there.placements) == "(Shard(dim=0),)"
        torch.testing.assert_close(fetch_shard(there, data=1, timeout=60), (x + 1)[2:])
        torch.testing.assert_close(fetch(mesh.execute(doubled, there), timeout=60), (x + 1) * 2)
        assert (there.sum() + 1).item() == pytest.approx(float((x + 1).sum() + 1), rel=1e-5)
        del there


def test_steps_of_an_optimizer_with_a_schedule(mesh: Mesh) -> None:
    x, y = values(8, 4), values(8, 1, seed=1)

    def train(give: Callable[[Any], Any], where: Any) -> list[Any]:
        with where:
            weight = give(values(4, 1, seed=2)).requires_grad_()
            optimizer = torch.optim.AdamW([weight], lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = functional.mse_loss(give(x) @ weight, give(y))
            loss.backward()
            torch.nn.utils.clip_grad_norm_([weight], 0.5)
            optimizer.step()
            schedule.step()
            losses.append(loss.detach())
        return losses

    want = train(lambda value: value, torch.enable_grad())
    got = train(
        lambda value: distribute(value, mesh, ROWS if value.shape[0] == 8 else COPIES), activate(mesh)
    )
    torch.testing.assert_close(torch.stack([fetch(each, timeout=60) for each in got]), torch.stack(want))


def test_an_operator_that_fails_in_one_process_after_it_was_kept(mesh: Mesh) -> None:
    """STM-3: the others have the operator's result, meet it afterwards, and what depends on it has failed."""
    table = distribute(values(4, 4), mesh, COPIES)
    good, bad = (distribute(torch.tensor(each), mesh, ["data"]) for each in ([0, 1, 2, 3], [0, 1, 2, 9]))
    for _ in range(OFTEN):
        made = functional.embedding(good, table)
        torch.testing.assert_close(fetch(made.sum(0), timeout=60), values(4, 4).sum(0))
    for _ in range(OFTEN):
        broken = functional.embedding(bad, table)
        with pytest.raises(RemoteException, match="index out of range"):
            fetch(broken.sum(0) + 1, timeout=60)
        made.add_(broken * 0)
        with pytest.raises(RemoteException, match="index out of range"):
            fetch(made, timeout=60)
        made = functional.embedding(good, table)
        torch.testing.assert_close(fetch(made.sum(0) + 1, timeout=60), values(4, 4).sum(0) + 1)


def test_changes_in_place_by_what_has_failed_are_told_through_aliases(mesh: Mesh) -> None:
    table, bad = (
        distribute(values(4, 4), mesh, COPIES),
        distribute(torch.tensor([0, 1, 2, 9]), mesh, ["data"]),
    )
    for _ in range(OFTEN):
        x = distribute(values(4, 4), mesh, ROWS) + 1
        x.add_(1).mul_(2)
        x.add_(functional.embedding(bad, table))
        with pytest.raises(RemoteException, match="index out of range"):
            fetch(x * 2, timeout=60)
