"""What a run leaves out: by its level, and by what it has drawn."""

from pathlib import Path
from types import SimpleNamespace

import pytest

import levels

ALL = {*(f"test_repeats[{n}]" for n in range(9)), "test_another"}

SAMPLED = pytest.mark.sampled(4)


class Item(SimpleNamespace):
    __hash__ = object.__hash__


def item(name, mark):
    return Item(
        path=Path("/here/test_it.py"),
        nodeid=f"here/test_it.py::{name}",
        name=name,
        originalname=name.partition("[")[0],
        get_closest_marker=lambda name: mark if name == "sampled" else None,
    )


@pytest.fixture
def collected(monkeypatch):
    """What a run keeps of what it has collected, by the names of its tests."""

    def collect(*arguments, level, seed="0", mark=SAMPLED, one_in=1):
        monkeypatch.setenv(levels.LEVEL, level)
        monkeypatch.setenv(levels.SEED, seed)
        monkeypatch.setenv(levels.ONE_IN, str(one_in))
        left = []
        hook = SimpleNamespace(pytest_deselected=lambda *, items: left.extend(items))
        items = [
            item(name, None if name in {"test_another", "test_repeats[0]"} else mark.mark)
            for name in sorted(ALL)
        ]
        levels.pytest_collection_modifyitems(SimpleNamespace(hook=hook, args=[*arguments]), items)
        names = [{each.nodeid.partition("::")[2] for each in some} for some in (items, left)]
        assert names[0] | names[1] == ALL and not names[0] & names[1]
        return names[0]

    return collect


def test_a_run_takes_one_in_so_many_of_what_is_sampled(collected):
    runs = [collected(level="quick", seed=str(seed)) for seed in range(4)]
    for run in runs:
        assert {"test_another", "test_repeats[0]"} < run
        assert len(run) == 4
    assert collected(level="full") == runs[0]
    assert len({frozenset(run) for run in runs}) > 1


def test_a_full_run_takes_what_only_takes_long(collected):
    mark = pytest.mark.sampled(8, of="file", full=True)
    assert len(collected(level="quick", mark=mark)) == 3
    assert collected(level="full", mark=mark) == ALL


def test_what_is_named_runs_and_everything_at_the_level_of_all(collected):
    assert collected(level="all") == ALL
    for name in sorted(ALL):
        assert name in collected(f"elsewhere/test_it.py::{name}", level="quick")
    assert collected("test_it.py::test_repeats", level="quick") == ALL


@pytest.mark.parametrize("level", ["quick", "full", "all"])
def test_a_run_elsewhere_takes_one_in_so_many_of_what_is_left(collected, level):
    left = collected(level=level)
    runs = [collected(level=level, seed=str(seed), one_in=3) for seed in range(4)]
    assert {len(run) for run in runs} == {-(-len(left) // 3)}
    assert runs[0] < left
    assert len({frozenset(run) for run in runs}) > 1
    assert "test_another" in collected("test_it.py::test_another", level=level, one_in=100)
    assert len(collected(level=level, one_in=100)) == 1


def test_the_draw_is_the_same_in_any_order(monkeypatch):
    monkeypatch.setenv(levels.SEED, "7")
    names = [f"test_{n}" for n in range(20)]
    assert levels.drawn(names, 6) == levels.drawn(names[::-1], 6)
    assert len(levels.drawn(names, 6)) == 4
    assert levels.drawn(["one"], 6) == {"one"}


def test_levels(monkeypatch):
    monkeypatch.delenv(levels.LEVEL, raising=False)
    assert levels.by_level(quick=1, full=2, everything=3) == 2
    monkeypatch.setenv(levels.LEVEL, "all")
    assert levels.by_level(quick=1, full=2, everything=3) == 3
    monkeypatch.setenv(levels.LEVEL, "most")
    with pytest.raises(ValueError, match="it can be quick, full, all"):
        levels.level()
