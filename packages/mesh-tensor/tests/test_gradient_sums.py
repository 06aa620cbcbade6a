"""Gradients that are summed up together are what they would be one by one, for whoever reads or changes them (SUM-1)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

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
    with Mesh((2,), ("data",), procs) as mesh:
        yield mesh


@pytest.fixture
def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4), nn.LayerNorm(4))


BATCH = torch.arange(18.0).view(6, 3) / 10


PLANS = pytest.mark.parametrize(
    "plan",
    [None, {"*": FullyShard("data")}, {"0.weight": [None, "data"], "2.weight": [None, "data"]}],
    ids=["copies", "split by rows", "split by columns"],
)
"""Of three columns two are on the first process, and of five rows three."""


def gradients(model: nn.Module) -> list[Any]:
    return [each.grad for each in model.parameters()]


def backward(model: nn.Module, batch: Any) -> None:
    model(batch).exp().sum().backward()


def on(mesh: Mesh, plain: nn.Module, plan: Any = None) -> tuple[nn.Module, Any]:
    return module_to_mesh(copy.deepcopy(plain), mesh, plan), distribute(BATCH, mesh, ["data", None])


def assert_same(here: list[Any], there: list[Any]) -> None:
    torch.testing.assert_close([fetch(each) for each in there], here)


def test_one_process_is_asked_for_its_copy(mesh: Mesh, plain: nn.Module) -> None:
    backward(plain, BATCH)
    model, batch = on(mesh, plain)
    backward(model, batch)
    for at in (1, 0):
        shards = [fetch_shard(each, data=at) for each in gradients(model)]
        torch.testing.assert_close(shards, gradients(plain))


@PLANS
def test_hooks_read_and_change_sums(mesh: Mesh, plain: nn.Module, plan: Any) -> None:
    model, batch = on(mesh, plain, plan)
    for each in (plain, model):
        each[0].weight.register_hook(lambda grad: grad.mul_(2))
        each[2].weight.register_hook(lambda grad: grad / grad.abs().max())
    backward(plain, BATCH)
    backward(model, batch)
    assert_same(gradients(plain), gradients(model))


@PLANS
def test_sums_are_changed_before_anyone_has_read_them(mesh: Mesh, plain: nn.Module, plan: Any) -> None:
    model, batch = on(mesh, plain, plan)
    for each, given in ((plain, BATCH), (model, batch)):
        backward(each, given)
        nn.utils.clip_grad_norm_(each.parameters(), 0.1)
        gradients(each)[0][1].zero_()
        # Added to what is there, one after the other.
        backward(each, given)
    assert_same(gradients(plain), gradients(model))


def test_the_source_of_a_gradient_is_changed_later(mesh: Mesh, plain: nn.Module) -> None:
    model, batch = on(mesh, plain)
    kept = []
    for each, given in ((plain, BATCH), (model, batch)):
        weight = each[0].weight
        seen = weight.view_as(weight)
        seen.register_hook(kept.append)
        (given @ seen.T).sum().backward()
        kept[-1].zero_()
    assert fetch(kept[1]).abs().sum() == 0
    model[0].weight.grad = None
    (batch @ model[0].weight.T).sum().backward()
    plain[0].weight.grad = None
    (BATCH @ plain[0].weight.T).sum().backward()
    assert_same([plain[0].weight.grad], [model[0].weight.grad])


def test_more_than_a_bucket(mesh: Mesh) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 1100), nn.Linear(1100, 1100), nn.Linear(1100, 4).double().float())
    model, batch = on(mesh, plain)
    backward(plain, BATCH)
    backward(model, batch)
    assert_same(gradients(plain), gradients(model))


@PLANS
def test_a_captured_step_returns_sums(mesh: Mesh, plain: nn.Module, plan: Any) -> None:
    model, batch = on(mesh, plain, plan)

    @capture
    def step(batch: Any) -> list[Any]:
        model.zero_grad()
        backward(model, batch)
        return [each.detach() for each in gradients(model)]

    backward(plain, BATCH)
    for _ in range(7):
        found = step(batch)
    assert step.replays >= 5
    assert_same(gradients(plain), found)


def test_a_failure_on_one_process_marks_the_sums_that_depend_on_it(mesh: Mesh) -> None:
    table = distribute(torch.ones(4, 2), mesh)
    rows = distribute(torch.tensor([0, 1, 2, 9]), mesh, ["data"])
    model = module_to_mesh(nn.Linear(2, 3), mesh)
    found = model(nn.functional.embedding(rows, table))
    # Of numbers of its own: what is like the failed result fails as well.
    found.backward(distribute(torch.ones(4, 3), mesh, ["data", None]))
    with pytest.raises(RemoteException, match="data=1"):
        fetch(model.weight.grad)
    # They have travelled together.
    assert fetch(model.bias.grad).tolist() == [4.0] * 3
