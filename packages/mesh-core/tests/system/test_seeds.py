"""Random numbers of processes: different on every rank, and reproducible with a seed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from core_samples import Echo

from mesh_core import Actor, ProcMesh, endpoint, rank_seed, this_host

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]

Start = pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])


def ask(procs: ProcMesh, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call a function in every process, and return the results."""
    values: list[Any] = procs.spawn("echo", Echo).call.call(function, *args).get().values()
    return values


def drawn(library: str) -> float:
    """A random number of a library's global generator."""
    if library == "random":
        import random

        return random.random()
    if library == "numpy":
        import numpy

        return float(numpy.random.rand())
    import torch

    return float(torch.rand(1))


def loaded(module: str) -> bool:
    return module in sys.modules


def needs(library: str) -> None:
    if library != "random":
        pytest.importorskip(library)


# Where the generator is: numpy imports it when it is first used.
MODULES = {"random": "random", "numpy": "numpy.random", "torch": "torch"}

Library = pytest.mark.parametrize(
    "library",
    [
        "random",
        pytest.param("numpy", marks=pytest.mark.beside),
        pytest.param("torch", marks=[pytest.mark.beside, pytest.mark.slow]),
    ],
)


@Library
def test_preloaded_generators_differ_between_ranks(library: str) -> None:
    needs(library)
    with this_host().spawn_procs({"gpus": 3}, preload=[library, MODULES[library]]) as procs:
        assert all(ask(procs, loaded, MODULES[library]))
        assert len(set(ask(procs, drawn, library))) == 3


@pytest.mark.beside
def test_a_seed_the_script_has_set_is_not_inherited_by_preloading(tmp_path: Any, monkeypatch: Any) -> None:
    needs("numpy")
    (tmp_path / "seeds_itself.py").write_text("import numpy.random\nnumpy.random.seed(0)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with this_host().spawn_procs({"gpus": 2}, preload=["numpy", "seeds_itself"]) as procs:
        assert len(set(ask(procs, drawn, "numpy"))) == 2


@pytest.mark.parametrize("library", ["random", pytest.param("numpy", marks=pytest.mark.beside)])
def test_a_seed_reproduces_each_ranks_own_numbers(library: str) -> None:
    needs(library)

    def numbers(**options: Any) -> list[float]:
        with this_host().spawn_procs({"gpus": 2}, **options) as procs:
            return ask(procs, drawn, library)

    preload = [library, MODULES[library]]
    first = numbers(seed=7, preload=preload)
    assert len(set(first)) == 2
    assert numbers(seed=7, preload=preload) == first
    assert numbers(seed=8, preload=preload) != first
    # Imported there after the process started.
    assert numbers(seed=7) == first


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.beside
def test_a_seed_applies_to_torch_preloaded_or_not() -> None:
    needs("torch")
    numbers = []
    for preload in ([], ["torch"]):
        with this_host().spawn_procs({"gpus": 2}, seed=7, preload=preload) as procs:
            numbers.append(ask(procs, drawn, "torch"))
    assert numbers[0] == numbers[1]
    assert len(set(numbers[0])) == 2


@pytest.mark.slow
@pytest.mark.beside
def test_a_seed_applies_to_exec_too() -> None:
    needs("numpy")

    def numbers(start: Any) -> list[list[float]]:
        with this_host().spawn_procs({"gpus": 2}, seed=-3, start=start) as procs:
            return [ask(procs, drawn, library) for library in ("random", "numpy")]

    assert numbers("exec") == numbers("fork")


class ImportsInItsConstructor(Actor):
    def __init__(self) -> None:
        import numpy as np

        self.first = float(np.random.rand())

    @endpoint
    def number(self) -> float:
        return self.first


@pytest.mark.beside
def test_modules_imported_by_a_constructor_are_seeded() -> None:
    needs("numpy")

    def numbers() -> list[float]:
        with this_host().spawn_procs({"gpus": 2}, seed=1) as procs:
            return procs.spawn("late", ImportsInItsConstructor).number.call().get().values()

    assert numbers() == numbers()


@Start
def test_rank_seed_is_for_other_libraries(start: Any) -> None:
    def seeds(seed: int | None) -> list[tuple[int, int, int]]:
        with this_host().spawn_procs({"gpus": 2}, seed=seed, start=start) as procs:
            return ask(procs, three_seeds)

    first, again, without, anew = seeds(5), seeds(5), seeds(None), seeds(None)
    assert first == again
    assert all(a == b for a, b, _ in [*first, *without])
    assert len({n for row in (*first, *without, *anew) for n in row}) == 12
    assert all(0 <= n < 2**63 for row in first for n in row)


def three_seeds() -> tuple[int, int, int]:
    return rank_seed(), rank_seed(), rank_seed("other")


def test_a_bootstrap_may_seed_other_libraries() -> None:
    def prepare() -> None:
        import os

        os.environ["MESH_CORE_TEST_SEED"] = str(rank_seed("other"))

    def seeds() -> list[Any]:
        with this_host().spawn_procs({"gpus": 2}, seed=11, bootstrap=prepare) as procs:
            return ask(procs, environment_value, "MESH_CORE_TEST_SEED")

    first = seeds()
    assert len(set(first)) == 2
    assert seeds() == first


def environment_value(name: str) -> str | None:
    import os

    return os.environ.get(name)


@pytest.mark.parametrize("seed", ["7", 1.5, True])
def test_an_invalid_seed(seed: Any) -> None:
    with pytest.raises(TypeError, match="seed must be a whole number, or None"):
        this_host().spawn_procs(seed=seed)
