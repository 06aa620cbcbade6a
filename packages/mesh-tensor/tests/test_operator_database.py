"""PyTorch's own samples of its operators, in both views: some of them, by seed, on two processes; with `./dev test --all` all, on one, two and four.

Of an operator in the global view, a run draws samples, a layout, a type of numbers and whether it works in place; runs of everything take the
commonest, and `tools/operator_database.py` any.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest

from mesh_core import ProcMesh, this_host

pytest.importorskip("torch")
pytest.importorskip("expecttest", reason="PyTorch's database of operators needs expecttest")

import torch

import both_roads
from levels import by_level, drawn, level, seed
from mesh_tensor import Mesh
from operator_database import KNOWN, KNOWN_GLOBAL, Comparison, Layout, check, operators

pytestmark = [pytest.mark.beside, pytest.mark.slow]

EVERYTHING = operators()
_NAMES = drawn([each.formatted_name for each in EVERYTHING], by_level(quick=30, full=20, everything=1))
CHOSEN = [each for each in EVERYTHING if each.formatted_name in _NAMES]
COUNTS = by_level(quick=(2,), full=(2,), everything=(1, 2, 4))


KINDS = (torch.float32, torch.float32, torch.float64, torch.int64, torch.complex64)
"""What is drawn from. Not numbers of 16 bits, as sums of them over processes are rounded differently."""


def comparison(operator: Any) -> Comparison:
    """What of an operator this run compares."""
    if level() == "all":
        return Comparison()
    draw = random.Random(f"{seed()} {operator.formatted_name}")
    layout = draw.choice(get_args(Layout))
    dtype = draw.choice([each for each in KINDS if each in operator.supported_dtypes("cpu")])
    in_place = operator.inplace_variant is not None and draw.random() < 0.5
    return Comparison(dtype, layout, samples=4, in_place=in_place, seed=draw.randrange(1 << 16))


@pytest.fixture(scope="module")
def places(runtime: None, preload: list[str]) -> Iterator[Callable[[int], ProcMesh]]:
    """The first so many processes of a mesh; in every other run such that compare what they have kept of DTensor's decisions with DTensor."""
    compares = level() == "all" or random.Random(f"{seed()} both").random() < 0.5
    bootstrap = both_roads.take if compares else None
    with this_host().spawn_procs({"gpus": max(COUNTS)}, preload=preload, bootstrap=bootstrap) as procs:
        yield lambda count: procs.slice(gpus=slice(0, count))


@pytest.fixture(scope="module")
def meshes(places: Callable[[int], ProcMesh]) -> Callable[[int], Mesh]:
    """A mesh of the global view of so many processes; the same one each time."""
    made: dict[int, Mesh] = {}

    def mesh(count: int) -> Mesh:
        if count not in made:
            made[count] = Mesh((count,), ("gpus",), places(count))
        return made[count]

    return mesh


@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("operator", CHOSEN, ids=lambda each: each.formatted_name)
def test_an_operator_gives_what_it_gives_here(
    operator: Any, count: int, places: Callable[[int], ProcMesh]
) -> None:
    if operator.formatted_name in KNOWN:
        pytest.xfail(KNOWN[operator.formatted_name])
    assert check(operator, places(count)) is None


@pytest.mark.timeout(120)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("operator", CHOSEN, ids=lambda each: each.formatted_name)
def test_an_operator_on_split_tensors_gives_what_it_gives_here(
    operator: Any, count: int, meshes: Callable[[int], Mesh]
) -> None:
    if operator.formatted_name in KNOWN_GLOBAL:
        pytest.xfail(KNOWN_GLOBAL[operator.formatted_name])
    chosen = comparison(operator)
    # DCN-1: DTensor decides, that is noted, and carried out as noted.
    said = check(operator, meshes(count), comparison=chosen, times=3)
    # Sums over processes are rounded in another order: how much is for the tool to say.
    assert said is None or said.startswith("Rounding"), chosen
