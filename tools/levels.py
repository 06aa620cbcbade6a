"""How much a run of tests does: quick, full or all. The `conftest.py` of the root makes a pytest plugin of it.

Tests marked `sampled(N)` repeat what others show, over another library, stand-in, policy or size. Of those that a test
function has, a run takes one in N, and at least one; a run of everything takes all of them. With `of="file"` the draw is
among all such tests of a file, and with `full=True` full runs take all of them too: they are no repetitions, but take long.
Which ones is drawn by a seed, which the header shows and MESH_TEST_SEED sets: the same one by default, so that a run that
was green stays so.

MESH_TEST_ONE_IN=N has a run take one in N of all that is left, drawn likewise among the tests of each file: sessions set it that repeat
elsewhere what ran whole.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from pathlib import Path
from typing import TypeVar

import pytest

LEVEL = "MESH_TEST_LEVEL"
SEED = "MESH_TEST_SEED"
ONE_IN = "MESH_TEST_ONE_IN"
_LEVELS = ("quick", "full", "all")

_T = TypeVar("_T")


def level() -> str:
    """The level of this run: "quick", "full" or "all"."""
    found = os.environ.get(LEVEL) or "full"
    if found not in _LEVELS:
        raise ValueError(f"{LEVEL} is {found!r}; it can be {', '.join(_LEVELS)}")
    return found


def by_level(*, quick: _T, full: _T, everything: _T) -> _T:
    """What the level of this run asks for."""
    return {"quick": quick, "full": full, "all": everything}[level()]


def seed() -> str:
    """What this run draws by: the same in all its processes."""
    return os.environ.setdefault(SEED, "2026-11-28")


def drawn(names: list[str], one_in: int) -> set[str]:
    """One in so many of the names, at least one. It takes the same ones in any order, in each process of a run."""

    def rank(name: str) -> str:
        return hashlib.sha256(f"{seed()} {name}".encode()).hexdigest()

    return set(sorted(names, key=rank)[: -(-len(names) // one_in)])


def pytest_configure() -> None:
    """Draw before workers and the pytests of tests are started: they inherit the seed."""
    level()
    seed()


def pytest_report_header() -> str:
    """Say what another run has to be told to do the same."""
    of_all = f", of which one in {os.environ[ONE_IN]}" if os.environ.get(ONE_IN) else ""
    return f"level: {LEVEL}={level()}{of_all}, drawn by {SEED}={seed()}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what was not drawn, before `-k` and `-m` do; what is named on the command line runs."""
    if level() != "all":
        _keep_drawn(config, items, _sampled(items))
    if (one_in := int(os.environ.get(ONE_IN) or 1)) > 1:
        files = defaultdict[Path, list[pytest.Item]](list)
        for item in items:
            files[item.path].append(item)
        _keep_drawn(config, items, [(one_in, each) for each in files.values()])


def _sampled(items: list[pytest.Item]) -> list[tuple[int, list[pytest.Item]]]:
    """Tests that show the same as each other, and in how many of them one is drawn."""
    groups = defaultdict[tuple[Path, str, int], list[pytest.Item]](list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        # A draw of what a quick run leaves out anyway would be lost.
        if mark and not (mark.kwargs.get("full") if level() == "full" else item.get_closest_marker("full")):
            function = "" if mark.kwargs.get("of") == "file" else getattr(item, "originalname", item.name)
            groups[item.path, function, mark.args[0]].append(item)
    return [(one_in, group) for (_, _, one_in), group in groups.items()]


def _keep_drawn(
    config: pytest.Config, items: list[pytest.Item], groups: list[tuple[int, list[pytest.Item]]]
) -> None:
    """Leave out what belongs to one of these groups and was not drawn of it."""
    named = [_without_folder(argument) for argument in config.args if "::" in argument]
    left = set[pytest.Item]()
    for one_in, group in groups:
        taken = drawn([_without_folder(item.nodeid) for item in group], one_in)
        left.update(
            item
            for item in group
            if (name := _without_folder(item.nodeid)) not in taken
            and not any(name == each or name.startswith((f"{each}::", f"{each}[")) for each in named)
        )
    if left:
        config.hook.pytest_deselected(items=sorted(left, key=lambda item: item.nodeid))
        items[:] = [item for item in items if item not in left]


def _without_folder(nodeid: str) -> str:
    """The same from wherever pytest was started."""
    path, separator, test = nodeid.partition("::")
    return f"{Path(path).name}{separator}{test}"
