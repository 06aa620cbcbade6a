"""Modules on a mesh train as they do in one process, however their parameters lie."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.tensor import Replicate, Shard  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from mesh_tensor import (  # noqa: E402
    ColumnParallel,
    FullyShard,
    GlobalTensor,
    Mesh,
    RowParallel,
    Timeline,
    activate,
    capture,
    distribute,
    fetch,
    module_to_mesh,
    timeline,
    usage,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]

WORDS, PLACES, FEATURES, HEADS = 31, 6, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.query, self.key, self.value = (nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.out = nn.Linear(FEATURES, FEATURES)
        self.second_norm = nn.LayerNorm(FEATURES)
        self.up = nn.Linear(FEATURES, 4 * FEATURES)
        self.down = nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x: Any) -> Any:
        normed = self.norm(x)
        heads = [
            each(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        ]
        seen = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.second_norm(x))))


class Transformer(nn.Module):
    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, FEATURES)
        self.register_buffer("places", torch.randn(PLACES, FEATURES) / 10)
        self.block = Block()
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, WORDS, bias=False)
        self.again = again

    def forward(self, x: Any) -> Any:
        x = self.words(x) + self.places
        x = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
        return self.head(self.norm(x))


TENSOR_PARALLEL = {
    "words": RowParallel("model"),
    "block.query": ColumnParallel("model"),
    "block.key": ColumnParallel("model"),
    "block.value": ColumnParallel("model"),
    "block.out": RowParallel("model"),
    "block.up": ColumnParallel("model"),
    "block.down": RowParallel("model"),
    "head": ColumnParallel("model"),
}
PLANS = {
    "data parallel": None,
    "fully sharded": {"*": FullyShard("data")},
    "tensor parallel": TENSOR_PARALLEL,
    "both": {"*": FullyShard("data"), **TENSOR_PARALLEL},
}


@pytest.fixture(scope="module")
def mesh(grid: ProcMesh) -> Iterator[Mesh]:
    with Mesh((2, 2), ("data", "model"), grid) as mesh:
        yield mesh


@pytest.fixture(scope="module")
def batches() -> list[Any]:
    torch.manual_seed(1)
    # Five sequences: the mesh cannot split them evenly.
    return [torch.randint(0, WORDS, (5, PLACES + 1)) for _ in range(2)]


def train(model: nn.Module, batches: list[Any], steps: int, optimizer: Any = None) -> list[Any]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for step in range(steps):
        batch = batches[step % len(batches)]
        guess = model(batch[:, :-1])
        loss = functional.cross_entropy(guess.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    return losses


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Transformer()


@pytest.fixture(scope="module")
def curve(model: nn.Module, batches: list[Any]) -> list[float]:
    """The losses of the run in one process."""
    return [loss.item() for loss in train(copy.deepcopy(model), batches, 5)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_transformer_trains_as_in_one_process(
    mesh: Mesh, model: nn.Module, batches: list[Any], curve: list[float], plan: str
) -> None:
    spread = module_to_mesh(copy.deepcopy(model), mesh, PLANS[plan])
    losses = train(spread, [distribute(each, mesh, ["data", None]) for each in batches], 5)
    assert [fetch(each).item() for each in losses] == pytest.approx(curve, abs=2e-6)
    assert curve[-1] < curve[0] - 0.3


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2)])
def test_smaller_meshes(
    grid: ProcMesh, model: nn.Module, batches: list[Any], curve: list[float], shape: tuple[int, int]
) -> None:
    procs = grid.slice(data=slice(shape[0]), model=slice(shape[1]))
    with Mesh(shape, ("data", "model"), procs) as mesh:
        spread = module_to_mesh(copy.deepcopy(model), mesh, PLANS["both"])
        losses = train(spread, [distribute(each, mesh, ["data", None]) for each in batches], 3)
        assert [fetch(each).item() for each in losses] == pytest.approx(curve[:3], abs=2e-6)


def test_parameters_and_gradients_lie_as_the_plan_says(
    mesh: Mesh, model: nn.Module, batches: list[Any]
) -> None:
    plan = PLANS["both"] | {"words.weight": [None, "model"]}
    plan.pop("words")
    spread = module_to_mesh(copy.deepcopy(model), mesh, plan)
    assert all(isinstance(each, nn.Parameter) for each in spread.parameters())
    assert isinstance(spread.places, GlobalTensor)
    train(spread, [distribute(each, mesh, ["data", None]) for each in batches], 1)
    names = dict(spread.named_parameters())
    assert names.keys() == dict(model.named_parameters()).keys()
    for name, placements in {
        "words.weight": (Replicate(), Shard(1)),
        "block.up.weight": (Shard(1), Shard(0)),
        "block.down.weight": (Shard(0), Shard(1)),
        "block.down.bias": (Shard(0), Replicate()),
        "norm.weight": (Shard(0), Replicate()),
    }.items():
        assert names[name].placements == placements, name
        assert names[name].grad.placements == placements, name
    # While a module computes its parameters are whole, and only then.
    assert spread.block.up.weight is names["block.up.weight"]


@pytest.mark.full
def test_foreach_momentum_and_accumulated_gradients(mesh: Mesh, model: nn.Module, batches: list[Any]) -> None:
    def run(model: nn.Module, batches: list[Any]) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
        for batch in batches:
            for _ in range(2):
                model(batch[:, :-1]).square().mean().backward()
            optimizer.step()
        return model.block.up.weight.detach()

    want = run(copy.deepcopy(model), batches)
    spread = module_to_mesh(copy.deepcopy(model), mesh, PLANS["both"])
    got = run(spread, [distribute(each, mesh, ["data", None]) for each in batches])
    torch.testing.assert_close(fetch(got), want)


def test_mixed_precision_and_checkpointing(mesh: Mesh, batches: list[Any]) -> None:
    torch.manual_seed(0)
    model = Transformer(again=True)

    def step(model: nn.Module, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch).float().square().mean()
        loss.backward()
        return loss.detach(), model.block.down.weight.grad

    want, slope = step(copy.deepcopy(model), batches[0][:, :-1])
    spread = module_to_mesh(copy.deepcopy(model), mesh, PLANS["tensor parallel"])
    got, gradient = step(spread, distribute(batches[0], mesh, ["data", None])[:, :-1])
    torch.testing.assert_close(fetch(got), want, rtol=0.02, atol=0.02)
    torch.testing.assert_close(fetch(gradient), slope, rtol=0.05, atol=0.02)


def test_dropout_is_the_same_when_it_is_computed_again(mesh: Mesh) -> None:
    layer = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Dropout(0.5))
    layer[0].weight.data = torch.eye(4)
    spread = module_to_mesh(layer, mesh, {"0": FullyShard("data")})
    x = distribute(torch.ones(6, 4), mesh, ["data", None]).requires_grad_()
    y = checkpoint(spread, x, use_reentrant=False)
    y.sum().backward()
    assert fetch(x.grad).equal(fetch(y.detach()))


def test_tied_parameters_and_factories_in_forward(mesh: Mesh) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, 4)
            self.head = nn.Linear(4, WORDS, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: Any) -> Any:
            return self.head(self.words(x) * torch.arange(x.shape[1])[:, None])

    torch.manual_seed(0)
    model = Tied()
    words = torch.tensor([[1, 2, 3], [4, 5, 30]])
    want = model(words).sum()
    want.backward()
    spread = module_to_mesh(copy.deepcopy(model), mesh, {"*": FullyShard("data")})
    assert spread.head.weight is spread.words.weight
    with activate(mesh):
        got = spread(distribute(words, mesh, ["data", None])).sum()
    spread.zero_grad()
    got.backward()
    torch.testing.assert_close(fetch(got.detach()), want.detach())
    torch.testing.assert_close(fetch(spread.words.weight.grad), model.words.weight.grad)


class Stack(nn.Module):
    """Blocks in a list, which are gathered one after the other, and a rest."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)) for _ in range(2)
        )
        self.out = nn.Linear(3, 2)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


@pytest.fixture
def stacks(mesh: Mesh) -> tuple[Stack, Stack]:
    """One here, and the same on a mesh, fully sharded."""
    torch.manual_seed(0)
    plain = Stack()
    return plain, module_to_mesh(copy.deepcopy(plain), mesh, {"*": FullyShard("data")})


ROWS = torch.arange(12.0).view(4, 3) / 10


def on_rows(mesh: Mesh) -> Any:
    return distribute(ROWS, mesh, ["data", None])


def collectives(recorded: Timeline) -> list[list[str]]:
    """What each process has met the others for."""
    return [[span.name for span in spans if span.kind == "collective"] for _, spans in recorded.processes]


def test_the_parameters_of_a_block_are_gathered_in_one_message(
    mesh: Mesh, stacks: tuple[Stack, Stack]
) -> None:
    _, spread = stacks
    x = on_rows(mesh)
    with timeline(mesh) as recorded:
        spread(x).sum().backward()
    for met in collectives(recorded):
        # Two blocks, and the rest.
        assert sum("gather" in each for each in met) == 3


def test_a_loss_of_what_is_split_gathers_nothing(mesh: Mesh) -> None:
    scores = distribute(torch.randn(4, 9), mesh, ["data", None]).requires_grad_()
    classes = distribute(torch.tensor([3, 0, 8, 1]), mesh, ["data"])
    with timeline(mesh) as recorded:
        functional.cross_entropy(scores, classes).backward()
    for met in collectives(recorded):
        assert met
        assert not any("gather" in each for each in met)


def test_a_copy_of_a_module_gathers_its_own_parameters(mesh: Mesh, stacks: tuple[Stack, Stack]) -> None:
    plain, spread = stacks
    other = copy.deepcopy(spread)
    with torch.no_grad():
        for each in (*plain.parameters(), *other.parameters()):
            each.add_(1)
    torch.testing.assert_close(fetch(other(on_rows(mesh)).detach()), plain(ROWS).detach())
    assert not torch.equal(fetch(spread(on_rows(mesh)).detach()), plain(ROWS).detach())


def test_modules_within_a_block_are_called_by_themselves(mesh: Mesh, stacks: tuple[Stack, Stack]) -> None:
    plain, spread = stacks
    for each, x in ((plain, ROWS), (spread, on_rows(mesh))):
        each.out(each.blocks[1][0](x).tanh()[:, :3]).sum().backward()
    torch.testing.assert_close(fetch(spread.blocks[1][0].weight.grad), plain.blocks[1][0].weight.grad)
    torch.testing.assert_close(fetch(spread.out.weight.grad), plain.out.weight.grad)


def test_parameters_of_a_block_that_do_not_train(mesh: Mesh, stacks: tuple[Stack, Stack]) -> None:
    for each, x in zip(stacks, (ROWS, on_rows(mesh)), strict=True):
        for frozen in (each.blocks[0][0].weight, each.blocks[1][2].bias):
            frozen.requires_grad_(False)
        each(x).sum().backward()
    plain, spread = stacks
    for mine, theirs in zip(plain.parameters(), spread.parameters(), strict=True):
        if mine.grad is None:
            assert theirs.grad is None
        else:
            torch.testing.assert_close(fetch(theirs.grad), mine.grad)


def test_a_part_of_a_block_is_replaced(mesh: Mesh, stacks: tuple[Stack, Stack]) -> None:
    torch.manual_seed(1)
    new = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    plain, spread = stacks
    plain.blocks[0][0] = new
    spread.blocks[0][0] = module_to_mesh(copy.deepcopy(new), mesh)
    torch.testing.assert_close(fetch(spread(on_rows(mesh)).detach()), plain(ROWS).detach())


def test_a_block_that_raises_keeps_nothing_gathered(mesh: Mesh, stacks: tuple[Stack, Stack]) -> None:
    plain, spread = stacks
    with pytest.raises(RuntimeError, match=r"reduction dim|cannot be multiplied"):
        spread(distribute(torch.ones(4, 7), mesh, ["data", None]))
    assert not any("weight" in each.__dict__ for each in spread.modules())
    torch.testing.assert_close(fetch(spread(on_rows(mesh)).detach()), plain(ROWS).detach())


def freed_after_forward(mesh: Mesh, plain: Stack, *, again: bool = True) -> Stack:
    return module_to_mesh(copy.deepcopy(plain), mesh, {"*": FullyShard("data", reshard_after_forward=again)})


def nbytes(mesh: Mesh) -> int:
    return usage(mesh.procs).item(data=0, model=0).nbytes


def test_blocks_are_freed_after_their_forward_pass(mesh: Mesh, stacks: tuple[Stack, Stack]) -> None:
    plain, _ = stacks
    plain(ROWS).sum().backward()

    def used(*, again: bool) -> int:
        """How much is kept for the backward pass."""
        model, x = freed_after_forward(mesh, plain, again=again), on_rows(mesh)
        # What others have left is not this one's.
        gc.collect()
        before = nbytes(mesh)
        loss = model(x).sum()
        kept = nbytes(mesh) - before
        loss.backward()
        for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(fetch(theirs.grad), mine.grad)
        return kept

    whole = sum(each.nbytes for block in plain.blocks for each in block.parameters())
    # Nothing that autograd keeps shows biases, or the first weight: the input has no gradient.
    weights = (
        sum(block[at].weight.nbytes for block in plain.blocks for at in (0, 2))
        - plain.blocks[0][0].weight.nbytes
    )
    assert weights <= used(again=False) - used(again=True) <= whole


def test_what_was_freed_is_made_again_each_time(mesh: Mesh, stacks: tuple[Stack, Stack]) -> None:
    plain, _ = stacks
    model = freed_after_forward(mesh, plain)
    for each, x in ((plain, ROWS), (model, on_rows(mesh))):
        loss = checkpoint(each, x, use_reentrant=False).exp().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for mine, theirs in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(fetch(theirs.grad), mine.grad)


def test_a_captured_step_with_blocks_that_are_freed(mesh: Mesh, stacks: tuple[Stack, Stack]) -> None:
    plain, _ = stacks
    model = freed_after_forward(mesh, plain)

    def train(model: nn.Module, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).exp().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    want, got = (torch.optim.SGD(each.parameters(), lr=0.01) for each in (plain, model))
    step = capture(lambda x: train(model, got, x))
    for _ in range(7):
        here, there = train(plain, want, ROWS), step(on_rows(mesh))
        torch.testing.assert_close(fetch(there), here)
    assert step.replays >= 4, step.reasons


@pytest.mark.parametrize(
    "change",
    [lambda weight: weight.mul_(2), lambda weight: torch._foreach_mul_([weight], 2)],
    ids=["one", "list"],
)
def test_parameters_that_change_before_the_backward_pass(
    mesh: Mesh, stacks: tuple[Stack, Stack], change: Callable[[Any], Any]
) -> None:
    """UNT-1."""
    plain, _ = stacks
    model = freed_after_forward(mesh, plain)
    loss = model(on_rows(mesh)).sum()
    with torch.no_grad():
        change(model.blocks[0][2].weight)
    with pytest.raises(
        RuntimeError, match="was changed in place between the forward pass and the backward pass"
    ):
        loss.backward()
    model(on_rows(mesh)).sum().backward()


def test_plans_that_are_wrong(mesh: Mesh) -> None:
    def place(plan: Any) -> None:
        module_to_mesh(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), mesh, plan)

    with pytest.raises(ValueError, match="no dimension 'tensor'"):
        place({"0": ColumnParallel("tensor")})
    with pytest.raises(ValueError, match=r"'out' is no module's or parameter's name; there are 0, 1"):
        place({"out": ColumnParallel("model")})
    with pytest.raises(ValueError, match=r"is for Linear and Embedding, and 1\.weight belongs to LayerNorm"):
        place({"1": RowParallel("model")})
    with pytest.raises(ValueError, match="split it in two ways"):
        place({"0": [ColumnParallel("data"), FullyShard("data")]})
    layer = module_to_mesh(nn.Linear(2, 2), mesh)
    with pytest.raises(ValueError, match="already"):
        module_to_mesh(layer, mesh)


def test_a_function_on_dtensors(mesh: Mesh) -> None:
    x = distribute(torch.arange(6.0), mesh, ["data"])

    def work(pair: Any, factor: float) -> Any:
        assert pair["x"].device_mesh.mesh_dim_names == ("data", "model")
        return {"sum": pair["x"].sum() * factor, "local": pair["x"].to_local().shape[0], "same": pair["x"]}

    result = mesh.execute(work, {"x": x}, factor=2.0)
    assert (result["sum"] + 1).item() == 31.0
    assert result["local"] == 3
    assert (result["same"] + x).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
