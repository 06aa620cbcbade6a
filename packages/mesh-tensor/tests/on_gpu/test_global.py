"""The global view on CUDA devices: two processes that share one, and one process by itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from mesh_core import MeshError, ProcMesh

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from mesh_tensor import (  # noqa: E402
    ColumnParallel,
    FullyShard,
    Mesh,
    RowParallel,
    activate,
    capture,
    distribute,
    fetch,
    fetch_shard,
    module_to_mesh,
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


def test_tensors_are_on_each_process_s_device(mesh: Mesh, kind: str) -> None:
    x = distribute(torch.arange(6.0).view(3, 2), mesh, ["gpus", None])
    assert x.device == torch.device(kind)
    assert fetch(x).device.type == fetch_shard(x, gpus=1).device.type == "cpu"
    assert fetch(x @ x.T).tolist() == [[1.0, 3.0, 5.0], [3.0, 13.0, 23.0], [5.0, 23.0, 41.0]]
    with activate(mesh):
        assert torch.ones(2).device == torch.zeros(2, device=kind).device == torch.device(kind)
    seen = mesh.execute(lambda x: str(x.to_local().device.type), x)
    assert seen == kind


def test_layouts_change(mesh: Mesh) -> None:
    want = torch.arange(30.0).view(5, 6)
    x = distribute(want, mesh, ["gpus", None])
    for sharding in ([None, "gpus"], None, ["gpus", None]):
        x = x.redistribute(sharding)
        assert torch.equal(fetch(x), want)
    assert torch.equal(fetch(x.sum(0)), want.sum(0))
    assert torch.equal(fetch(x.max(1).values), want.max(1).values)
    assert torch.equal(fetch(x[x > 7]), want[want > 7])
    assert torch.equal(fetch(x.to(torch.int16)), want.to(torch.int16))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.query, self.key, self.value, self.out = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Any) -> Any:
        normed = self.norm(x)
        heads = [
            each(normed).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.query, self.key, self.value)
        ]
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(x)))


def train(model: nn.Module, batch: Any, how: Any = lambda step: step) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    run = how(step)
    return run, [run(batch[:, :-1], batch[:, 1:]) for _ in range(6)]


SPLIT = {each: ColumnParallel("gpus") for each in ("*.query", "*.key", "*.value", "*.up")}
PLANS = {
    "copies": None,
    "fully sharded": {"*": FullyShard("gpus")},
    "tensor parallel": SPLIT | {"*.out": RowParallel("gpus"), "*.down": RowParallel("gpus")},
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("how", ["eager", "captured"])
def test_a_transformer_learns_as_one_process_does(mesh: Mesh, plan: str, how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), Block(), nn.Linear(16, 32))
    batch = (torch.randint(0, 32, (8, 1)) + torch.arange(9)) % 32
    _, want = train(copy.deepcopy(model), batch)
    there = module_to_mesh(model, mesh, PLANS[plan])
    spread = distribute(batch, mesh, [None if plan == "tensor parallel" else "gpus", None])
    with activate(mesh):
        run, got = train(there, spread, capture if how == "captured" else lambda step: step)
    torch.testing.assert_close(
        torch.stack([fetch(each) for each in got]), torch.stack(want), rtol=2e-3, atol=2e-3
    )
    if how == "captured":
        assert run.replays > 0, run.reasons


def test_random_numbers_do_not_depend_on_the_layout(mesh: Mesh) -> None:
    found = []
    for sharding in (["gpus", None], None):
        torch.manual_seed(3)
        x = distribute(torch.ones(8, 4), mesh, sharding)
        with activate(mesh):
            drawn = torch.randn(8, 4)
        found.append((fetch(functional.dropout(x, 0.5)), fetch(torch.rand_like(x)), fetch(drawn)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    assert len(found[0][1].unique()) > 16


def test_a_failure_is_told_and_the_mesh_goes_on(mesh: Mesh) -> None:
    x = distribute(torch.ones(4, 2), mesh, ["gpus", None])
    broken = torch.linalg.cholesky(x.T @ x - 100)
    with pytest.raises(Exception, match=r"cholesky"):
        fetch(broken)
    assert fetch(x.sum()).item() == 8.0


def test_tensors_do_not_leave_the_mesh_s_kind_of_device(mesh: Mesh, kind: str) -> None:
    x = distribute(torch.ones(4), mesh, ["gpus"])
    assert x.to(kind) is x
    assert x.cpu() is x
    with pytest.raises(ValueError, match=r"where its mesh has its tensors.*device='xpu'"):
        x.to("xpu")
    with pytest.raises(ValueError, match="has its tensors on"), activate(mesh, device="xpu"):
        pass


def test_autocast(mesh: Mesh, kind: str) -> None:
    if kind not in {"cpu", "cuda"}:
        pytest.skip(f"{kind} has no autocast")
    x = distribute(torch.ones(4, 4), mesh, ["gpus", None])
    with torch.autocast(kind, dtype=torch.bfloat16):
        y = x @ x.redistribute().T
    assert y.dtype == torch.bfloat16
    assert fetch(y).tolist() == [[4.0] * 4] * 4
