"""Parameters, gradients and the state of optimizers in the memory of the hosts, beside devices that compute."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from mesh_core import MeshError, ProcMesh

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from mesh_tensor import (  # noqa: E402
    CaptureError,
    ColumnParallel,
    FullyShard,
    Mesh,
    RowParallel,
    capture,
    distribute,
    fetch,
    module_to_mesh,
    usage,
)

OFFLOADS = ("state", "parameters")
PLANS: dict[str, Any] = {
    "copies": None,
    "fully sharded": {"*": FullyShard("gpus")},
    "freed": {"*": FullyShard("gpus", reshard_after_forward=True)},
    "tensor parallel": {"blocks.*.0": ColumnParallel("gpus"), "blocks.*.2": RowParallel("gpus")},
}


@pytest.fixture(scope="module")
def mesh(shared: ProcMesh, kind: str) -> Iterator[Mesh]:
    """Two processes that share one device."""
    if kind == "cpu":
        pytest.skip("on CPUs nothing is offloaded")
    try:
        made = Mesh((2,), ("gpus",), shared, device=kind)
    except MeshError as error:
        if "needs PyTorch" not in str(error):
            raise
        pytest.skip(str(error))
    with made:
        yield made


class Model(nn.Module):
    """Blocks in a list, a parameter of its own, and a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.ones(8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Any) -> Any:
        x = self.norm(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return (x * self.scale) @ self.first.weight.T


def steps(model: nn.Module, batches: list[Any], optimizer: Any, *, parts: int = 1) -> list[Any]:
    """Train, and return losses: of each step the gradients of so many batches are added up."""
    found = []
    for at, batch in enumerate(batches):
        loss = nn.functional.cross_entropy(model(batch), batch)
        loss.backward()
        found.append(loss.detach())
        if at % parts == parts - 1:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return found


def batches() -> list[Any]:
    made = torch.Generator().manual_seed(1)
    return [torch.randint(0, 12, (8,), generator=made) for _ in range(6)]


def compared(
    mesh: Mesh, offload: Any, plan: str, make: Any, *, sharding: Any, parts: int = 1
) -> tuple[nn.Module, Any]:
    """Train here and there, and compare losses and parameters."""
    torch.manual_seed(0)
    here = Model()
    model = module_to_mesh(copy.deepcopy(here), mesh, PLANS[plan], offload=offload)
    want = steps(here, batches(), make(here.parameters()), parts=parts)
    optimizer = make(model.parameters())
    got = steps(model, [distribute(each, mesh, sharding) for each in batches()], optimizer, parts=parts)
    torch.testing.assert_close(
        torch.stack([fetch(each) for each in got]), torch.stack(want), rtol=1e-4, atol=1e-5
    )
    for one, other in zip(model.parameters(), here.parameters(), strict=True):
        torch.testing.assert_close(fetch(one.detach()), other.detach(), rtol=1e-3, atol=1e-4)
    return model, optimizer


def adamw(parameters: Any) -> Any:
    return torch.optim.AdamW(parameters, lr=0.01)


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_model_learns_as_in_one_process(mesh: Mesh, offload: Any, plan: str) -> None:
    sharding = [None] if plan == "tensor parallel" else ["gpus"]
    model, optimizer = compared(mesh, offload, plan, adamw, sharding=sharding)
    # OFF-1: and all that the optimizer uses is in the hosts' memory.
    cpu = torch.device("cpu")
    for parameter in model.parameters():
        assert parameter.device == cpu
        assert {each.device for each in optimizer.state[parameter].values()} == {cpu}


@pytest.mark.parametrize("offload", OFFLOADS)
def test_gradients_are_added_up(mesh: Mesh, offload: Any) -> None:
    compared(mesh, offload, "fully sharded", adamw, sharding=["gpus"], parts=3)


@pytest.mark.parametrize("each", ["SGD", "foreach", "fused", "for each by itself"])
def test_optimizers_of_all_kinds(mesh: Mesh, each: str) -> None:
    def make(parameters: Any) -> Any:
        if each == "SGD":
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        how = {"foreach": {"foreach": True}, "fused": {"fused": True}}.get(each, {"foreach": False})
        return torch.optim.AdamW(parameters, lr=0.01, **how)

    compared(mesh, "state", "fully sharded", make, sharding=["gpus"])


def kind_here(x: Any) -> str:
    """Where a process has its part."""
    return str(x.to_local().device.type)


@pytest.mark.parametrize("offload", OFFLOADS)
def test_what_is_on_the_device(mesh: Mesh, kind: str, offload: Any) -> None:
    model = module_to_mesh(nn.Sequential(nn.Linear(4, 4)), mesh, {"*": FullyShard("gpus")}, offload=offload)
    x = distribute(torch.ones(2, 4), mesh, ["gpus", None])
    before = usage(mesh.procs).item(gpus=0).nbytes
    with torch.no_grad():
        y = model(x)
        assert y.device.type == kind
    assert fetch(y).shape == (2, 4)
    assert mesh.execute(kind_here, x) == kind
    if offload == "parameters":
        # Nothing but the result.
        assert usage(mesh.procs).item(gpus=0).nbytes - before == 4 * 4
    weight = model[0].weight
    assert weight.mesh.execute(kind_here, weight) == "cpu"
    # What was not changed is not copied again, and what was changed is.
    with torch.no_grad():
        weight.zero_()
        model[0].bias.fill_(3.0)
        assert fetch(model(x)).tolist() == [[3.0] * 4] * 2
        weight.data.mul_(2.0)
        torch._foreach_add_([weight], 1.0)  # which PyTorch does not count as a change
        assert fetch(model(x)).tolist() == [[7.0] * 4] * 2
        weight.data = distribute(torch.eye(4), weight.mesh, ["gpus", None])
        assert fetch(model(x)).tolist() == [[4.0] * 4] * 2
    state = model.state_dict()
    assert fetch(state["0.weight"]).tolist() == torch.eye(4).tolist()
    model.load_state_dict({"0.weight": torch.zeros(4, 4), "0.bias": torch.ones(4)})
    assert fetch(model(x)).tolist() == [[1.0] * 4] * 2


def test_gradients_are_read_before_the_step(mesh: Mesh) -> None:
    """Their copies are late: whoever reads them waits."""
    for number in range(1, 4):
        model = module_to_mesh(nn.Linear(3, 1, bias=False), mesh, offload="state")
        x = distribute(torch.full((2, 3), float(number)), mesh, ["gpus", None])
        model(x).sum().backward()
        assert fetch(model.weight.grad).tolist() == [[2.0 * number] * 3]


def test_a_module_without_values_gets_them(mesh: Mesh) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 2), nn.LayerNorm(2))
    module_to_mesh(model, mesh, {"0": FullyShard("gpus")}, offload="parameters")
    x = distribute(torch.ones(2, 4), mesh)
    assert fetch(model(x)).isfinite().all()
    assert model[0].weight.device.type == "cpu"


def test_what_is_refused(mesh: Mesh) -> None:
    model = module_to_mesh(nn.Linear(2, 2), mesh, offload="state")
    x = distribute(torch.ones(2, 2), mesh)
    with pytest.raises(ValueError, match=r"in the hosts' memory.*while its module computes"):
        x @ model.weight
    with pytest.raises(ValueError, match="offload must be 'state' or 'parameters', got 'disk'"):
        module_to_mesh(nn.Linear(2, 2), mesh, offload="disk")  # type: ignore[arg-type]
    model(x)
    for step in (lambda: model(x).sum(), lambda: model.weight.detach().add_(1)):
        run = capture(step)
        with pytest.raises(CaptureError, match=r"cannot use parameters in the memory of the hosts"):
            _ = [run() for _ in range(4)]
    (first,) = torch.autograd.grad(model(x).square().sum(), model.weight, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        first.sum().backward()
