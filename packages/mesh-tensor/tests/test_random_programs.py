"""Random programs give in both views what they give without a mesh: views, changes in place, slices, collectives, and operators that fail."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mesh_core import ProcMesh, this_host

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

import both_roads  # noqa: E402
from mesh_tensor import (  # noqa: E402
    Mesh,
    RemoteException,
    all_gather,
    all_to_all,
    distribute,
    fetch,
    fetch_shard,
    rank_tensor,
    reduce,
    share,
)

pytestmark = [pytest.mark.beside, pytest.mark.slow]

RANKS = 2
LENGTH = 50
FAILED = None
"""Stands for a tensor that has failed."""


class Pair:
    """A tensor of a mesh, and what each rank should have of it; in the global view all have the same."""

    def __init__(self, there: Any, here: list[Any]) -> None:
        self.there = there
        self.here = here

    @property
    def is_whole(self) -> bool:
        """Whether it has failed on no rank."""
        return all(each is not FAILED for each in self.here)

    def check(self, rank: int, fetched: Callable[[Any, int], Any]) -> None:
        want = self.here[rank]
        if want is FAILED:
            with pytest.raises(RemoteException):
                fetched(self.there, rank)
        else:
            torch.testing.assert_close(fetched(self.there, rank), want, equal_nan=True)


def applied(work: Callable[..., Any], *pairs: Pair) -> Pair:
    """Do the same on both sides; what depends on something that has failed has failed."""
    here = [
        FAILED if any(each is FAILED for each in given) else work(*given)
        for given in zip(*(pair.here for pair in pairs), strict=True)
    ]
    return Pair(work(*(pair.there for pair in pairs)), here)


def choose(chance: random.Random, pool: list[Pair], *, whole: bool = False) -> Pair:
    return chance.choice([each for each in pool if each.is_whole or not whole])


def changed(work: Callable[..., Any], target: Pair, *others: Pair) -> None:
    """Change a tensor in place, on both sides."""
    work(target.there, *(each.there for each in others))
    for given in zip(target.here, *(each.here for each in others), strict=True):
        work(*given)


def common_step(chance: random.Random, pool: list[Pair]) -> Pair | None:
    """What both views can do; tensors are 4 by 4."""
    kind = chance.randrange(10)
    number, row = chance.uniform(-1, 1), chance.randrange(4)
    if kind == 0:
        return applied(lambda x, y: x + y, choose(chance, pool), choose(chance, pool))
    if kind == 1:
        return applied(lambda x, y: (x @ y).tanh(), choose(chance, pool), choose(chance, pool))
    if kind == 2:
        return applied(lambda x: x.t(), choose(chance, pool))
    if kind == 3:
        return applied(lambda x: x[row].expand(4, 4) * number, choose(chance, pool))
    if kind == 4:
        return applied(lambda x: torch.cat([x[2:], x[:2]]).softmax(1), choose(chance, pool))
    if kind == 5:
        return applied(lambda x: x.view(2, 2, 4).transpose(0, 1).reshape(4, 4), choose_dense(chance, pool))
    if kind == 6:
        changed(lambda x: x.mul_(number).add_(1), choose(chance, pool, whole=True))
    elif kind == 7:
        changed(
            lambda x, y: x[row].copy_(y[:, row].clone()),
            choose(chance, pool, whole=True),
            choose(chance, pool, whole=True),
        )
    elif kind == 8:
        changed(
            lambda x, y: x[1:3].add_(y[2:4].detach().clone()),
            choose(chance, pool, whole=True),
            choose(chance, pool, whole=True),
        )
    else:
        target = choose(chance, pool, whole=True)
        part = applied(lambda x: x[:, 1:3], target)
        changed(lambda x: x.fill_(number), part)
    return None


def choose_dense(chance: random.Random, pool: list[Pair]) -> Pair:
    return applied(lambda x: x.clone(memory_format=torch.contiguous_format), choose(chance, pool))


def run(
    chance: random.Random, pool: list[Pair], own_step: Callable[[random.Random, list[Pair]], Pair]
) -> list[Pair]:
    """A program of both views' steps and, one in four, those of one view."""
    for _ in range(LENGTH):
        made = own_step(chance, pool) if chance.random() < 0.25 else common_step(chance, pool)
        if made is not None:
            pool.append(made)
        whole = [each for each in pool if each.is_whole]
        if len(pool) > 6 and (len(whole) > 2 or not pool[0].is_whole):
            pool.remove(chance.choice(whole if len(whole) > 2 else [e for e in pool if not e.is_whole]))
    return pool


def value(seed: int) -> Any:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("seed", range(6))
def test_in_the_per_rank_view(procs: ProcMesh, seed: int) -> None:
    """STM-1: what is issued comes in its order; COL-1: what cannot take part in a collective fails it for all, and no other."""
    ranks = rank_tensor(procs, "gpus")

    def together(work: Callable[[Any], Any], model: Callable[[list[Any]], list[Any]], x: Pair) -> Pair:
        here = model(x.here) if x.is_whole else [FAILED] * RANKS
        return Pair(work(x.there), here)

    def own_step(chance: random.Random, pool: list[Pair]) -> Pair:
        kind = chance.randrange(6)
        x = choose(chance, pool)
        if kind == 0:
            op: Any = chance.choice(["sum", "max", "avg"])
            combine = {
                "sum": lambda x: x.sum(0),
                "max": lambda x: x.amax(0),
                "avg": lambda x: x.mean(0),
            }[op]
            return together(
                lambda x: reduce(x, "gpus", op),
                lambda parts: [combine(torch.stack(parts)) for _ in parts],
                x,
            )
        if kind == 1:
            return together(
                lambda x: all_gather(x, "gpus").sum(0) / 2,
                lambda parts: [torch.stack(parts).sum(0) / 2 for _ in parts],
                x,
            )
        if kind == 2:
            return together(
                lambda x: all_to_all(x.contiguous().view(2, 2, 4), "gpus").reshape(4, 4),
                lambda parts: [
                    torch.stack([part.reshape(2, 2, 4)[rank] for part in parts]).reshape(4, 4)
                    for rank in range(RANKS)
                ],
                x,
            )
        if kind == 3:
            return together(
                lambda x: reduce(x, "gpus", scatter=True).repeat(2, 1),
                lambda parts: [
                    torch.stack(parts).sum(0).chunk(2)[rank].repeat(2, 1) for rank in range(RANKS)
                ],
                x,
            )
        if kind == 4:
            there = x.there * (ranks + 1)
            return Pair(there, [e if e is FAILED else e * (rank + 1) for rank, e in enumerate(x.here)])
        # Fails on the second rank only.
        first = x.here[0]
        there = x.there[torch.stack([ranks * 9] * 4)]
        return Pair(there, [first if first is FAILED else first[[0] * 4], FAILED])

    chance = random.Random(seed)
    pool = [Pair(share(value(n), procs), [value(n) for _ in range(RANKS)]) for n in range(3)]
    for pair in run(chance, pool, own_step):
        for rank in range(RANKS):
            pair.check(rank, lambda tensor, at: fetch_shard(tensor, gpus=at, timeout=60))


@pytest.fixture(scope="module")
def mesh(procs: ProcMesh) -> Iterator[Mesh]:
    with Mesh((RANKS,), ("gpus",), procs) as mesh:
        yield mesh


LAYOUTS: list[Any] = [[None, None], ["gpus", None], [None, "gpus"]]


@pytest.fixture(scope="module")
def comparing(runtime: None, preload: list[str]) -> Iterator[Mesh]:
    """A mesh whose processes carry operators out both as DTensor does and as they have kept, and compare."""
    with (
        this_host().spawn_procs(
            {"gpus": RANKS}, preload=preload, name="both", bootstrap=both_roads.take
        ) as procs,
        Mesh((RANKS,), ("gpus",), procs) as mesh,
    ):
        yield mesh


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("seed", range(6))
def test_in_the_global_view(mesh: Mesh, seed: int) -> None:
    """STM-3: all processes meet in the same collectives, whatever fails in one; VWS-1: views are views, however tensors lie."""
    compare_programs(mesh, seed)


@pytest.mark.sampled(1, full=True)
@pytest.mark.parametrize("seed", range(6, 12))
def test_in_the_global_view_three_times(mesh: Mesh, seed: int) -> None:
    """DCN-1: the first time DTensor decides, the second time that is noted, the third time it is carried out as noted."""
    for _ in range(3):
        compare_programs(mesh, seed)


@pytest.mark.sampled(1, full=True)
@pytest.mark.parametrize("seed", range(12, 18))
def test_in_the_global_view_in_both_ways(comparing: Mesh, seed: int) -> None:
    """DCN-1: each operator gives the same as DTensor decides it, and as it is kept."""
    for _ in range(2):
        compare_programs(comparing, seed)


def compare_programs(mesh: Mesh, seed: int) -> None:
    bad = distribute(torch.tensor([0, 1, 2, 9]), mesh, ["gpus"])

    def own_step(chance: random.Random, pool: list[Pair]) -> Pair:
        kind = chance.randrange(4)
        x = choose(chance, pool)
        if kind == 0:
            layout = chance.choice(LAYOUTS)
            return Pair(x.there.redistribute(layout) * 1, [e if e is FAILED else e * 1 for e in x.here])
        if kind == 1:
            return applied(lambda x: x.sum(0, keepdim=True) + x / 4, x)
        if kind == 2:
            return applied(lambda x: x.cumsum(0).sort(1).values / 4, x)
        # Fails in the process that has the last row.
        return Pair(functional.embedding(bad, x.there), [FAILED])

    chance = random.Random(seed)
    pool = [Pair(distribute(value(n), mesh, LAYOUTS[n]), [value(n)]) for n in range(3)]
    for pair in run(chance, pool, own_step):
        pair.check(0, lambda tensor, _: fetch(tensor, timeout=60))
