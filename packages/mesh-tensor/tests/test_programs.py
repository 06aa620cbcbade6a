"""What users write with PyTorch gives on a mesh what it gives here."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from mesh_core import ProcMesh

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

from mesh_tensor import MeshTensor, activate, fetch, fetch_shard, manual_seed, share  # noqa: E402

pytestmark = [pytest.mark.beside, pytest.mark.slow]


def values(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def views(x: Any) -> Any:
    y = x.t()[1:].reshape(-1)
    return y[::2] + 1, y.unfold(0, 3, 2), x.expand(2, *x.shape).sum(0)


def in_place(x: Any) -> Any:
    x = x.clone()
    row = x[1]
    row.mul_(2).add_(1)
    x[:, 0] = 7
    x[x > 1] = 0
    return x, row


def in_place_forms(x: Any) -> Any:
    x = x.clone()
    x.t_()
    x.unsqueeze_(0)
    y = x.squeeze(0)
    y.transpose_(0, 1)
    return x + 1, y * 2, list(x.shape)


def written_to(x: Any) -> Any:
    out = torch.empty_like(x)
    torch.mul(x, 3, out=out)
    low, high = torch.aminmax(x)
    both = torch.max(x, 0, out=(torch.empty_like(x[0]), torch.empty_like(x[0], dtype=torch.long)))
    return out, low, high, both[0], both[1]


def lists(x: Any) -> Any:
    parts = x.split(1)
    # What optimizers use.
    sums = torch._foreach_add(list(parts), 2)  # noqa: SLF001
    torch._foreach_mul_(list(sums), 3.5)
    return torch.cat(parts[::-1]), torch.stack(sums), *torch.broadcast_tensors(x, x[0]), *x.unbind(1)


def kinds(x: Any) -> Any:
    whole = (x * 10).to(torch.int64)
    # The last argument is `copy`.
    copies = x.to(torch.float64, False, True), x.to("cpu", torch.float64, False, True), x.to(x, False, True)
    return *copies, whole // 3, whole + 0.5, x.double() + x, x > 0, whole.bool() & (x > 0), (x + 2j * x).abs()


def numbers(x: Any) -> Any:
    for n in range(3):
        x = x * (n + 0.25) + n - 1.5
        x = x.clamp(-n, n + 1).pow(2)
    return x, torch.arange(3) + 1, torch.linspace(0, 1, 5), x.add(x, alpha=2)


def depending_on_values(x: Any) -> Any:
    where = torch.nonzero(x > 0)
    return where, x[x > 0], torch.unique((x * 2).round()), where.shape[0]


def values_here(x: Any) -> Any:
    y = x.sum()
    if y > 0:
        y = y + 1
    return (
        y.item(),
        float(x[0, 0]),
        bool((x == x.clone()).all()),
        x.tolist() if not isinstance(x, MeshTensor) else fetch_shard(x).tolist(),
    )


def gradients(x: Any) -> Any:
    w = x.detach().clone().requires_grad_()
    y = torch.tanh(w @ w.t()).logsumexp(0)
    (first,) = torch.autograd.grad(y.sum(), w, create_graph=True)
    first.square().sum().backward()
    z = (w * 2)[1:]
    z.mul_(w[1:])
    (second,) = torch.autograd.grad(z.sum(), w)
    return first.detach(), w.grad, second


def training(x: Any) -> Any:
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 3)
    )
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            with torch.no_grad():
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter).sin())
            if isinstance(x, MeshTensor) and not isinstance(parameter, MeshTensor):
                setattr(module, name, torch.nn.Parameter(share(parameter, x.procs)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), torch.zeros_like(x[:, 0], dtype=torch.long))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return losses, [each.detach() for each in model.parameters()]


PROGRAMS = [
    views,
    in_place,
    in_place_forms,
    written_to,
    lists,
    kinds,
    numbers,
    depending_on_values,
    values_here,
    gradients,
    training,
]


def brought_here(what: Any) -> Any:
    if isinstance(what, MeshTensor):
        first, *rest = fetch(what, timeout=60).values()
        for each in rest:
            torch.testing.assert_close(each, first, rtol=0, atol=0, equal_nan=True)
        return first
    if isinstance(what, (list, tuple)):
        return [brought_here(each) for each in what]
    return what


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gives_what_it_gives_here(procs: ProcMesh, program: Callable[[Any], Any]) -> None:
    here = values(4, 3)
    there = share(here, procs)
    with activate(procs):
        found = program(there)
    # Twice, as the second time all forms are known.
    again = program(there) if program is not numbers else found
    want = program(here)
    for each in (found, again):
        got = brought_here(each)
        torch.testing.assert_close(got, brought_here(want), equal_nan=True)


STEPS: list[Callable[[random.Random, list[Any]], Any]] = [
    lambda chance, pool: chance.choice(pool) + chance.choice(pool),
    lambda chance, pool: chance.choice(pool) * chance.uniform(-1, 1),
    lambda chance, pool: chance.choice(pool).t(),
    lambda chance, pool: chance.choice(pool)[chance.randrange(3)].expand(3, 3).clone(),
    lambda chance, pool: chance.choice(pool).tanh_(),
    lambda chance, pool: chance.choice(pool).clone().fill_diagonal_(chance.randint(0, 9)),
    lambda chance, pool: chance.choice(pool)[1:].copy_(chance.choice(pool)[:2].clone()),
    lambda chance, pool: torch.cat([chance.choice(pool)[:1], chance.choice(pool)[1:]]),
    lambda chance, pool: chance.choice(pool) @ chance.choice(pool).clamp(-1, 1),
    lambda chance, pool: chance.choice(pool).sort(chance.randrange(2))[0],
    lambda chance, pool: pool.pop(chance.randrange(len(pool))).contiguous(),
]


def random_program(seed: int, pool: list[Any]) -> list[Any]:
    """Operators, views, changes in place, and tensors that are dropped, as the seed has it."""
    chance = random.Random(seed)
    for _ in range(60):
        made = chance.choice(STEPS)(chance, pool)
        if made.shape == (3, 3):
            # A view, now and then: changes in place reach it.
            pool.append(made if chance.random() < 0.5 else made.clone())
        if len(pool) > 5:
            del pool[chance.randrange(len(pool))]
    return pool


@pytest.mark.parametrize("seed", range(8))
def test_random_programs(procs: ProcMesh, seed: int) -> None:
    """STM-1: changes in place and what is asked come in the order of the program."""
    here = [values(3, 3, seed=n) for n in range(3)]
    there = [share(each, procs) for each in here]
    want = random_program(seed, [each.clone() for each in here])
    got = random_program(seed, [each.clone() for each in there])
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(brought_here(a), b, equal_nan=True)


def test_factories_make_tensors_on_the_mesh_within_activate_only(procs: ProcMesh) -> None:
    with activate(procs):
        made = [
            torch.ones(2),
            torch.tensor([1.0, 2.0]),
            torch.randn(2),
            torch.nn.Linear(2, 2).weight,
            torch.eye(2),
        ]
        assert all(isinstance(each, MeshTensor) for each in made)
    assert not isinstance(torch.ones(2), MeshTensor)
    assert fetch(made[1]).item(gpus=1).tolist() == [1.0, 2.0]


def test_random_numbers(procs: ProcMesh) -> None:
    def draw() -> list[Any]:
        with activate(procs):
            return fetch(torch.rand(4)).values()

    manual_seed(7, procs)
    first, second = draw()
    assert not torch.equal(first, second)
    manual_seed(7, procs)
    assert all(map(torch.equal, draw(), [first, second]))
    manual_seed(7, procs, shared=True)
    one, other = draw()
    assert torch.equal(one, other)


def test_a_process_of_the_mesh_alone(procs: ProcMesh) -> None:
    alone = procs.slice(gpus=1)
    x = share(torch.ones(2), alone) + 1
    assert fetch(x).item().tolist() == [2.0, 2.0]
    assert x.procs == alone
