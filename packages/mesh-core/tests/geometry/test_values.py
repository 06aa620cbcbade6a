"""Values of many ranks: `ValueMesh`."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from mesh_core import ActorError, Extent, ProcMesh, SerializationError, ValueMesh
from mesh_core._geometry.values import lazy


@pytest.fixture
def squares() -> ValueMesh[int]:
    return ValueMesh.of(Extent.of(hosts=2, gpus=3), [n * n for n in range(6)])


def test_looking_at_values(squares: ValueMesh[int]) -> None:
    assert squares.values() == [0, 1, 4, 9, 16, 25]
    assert squares.get(4) == 16
    assert squares.item(hosts=1, gpus=2) == 25
    assert [(dict(point), value) for point, value in squares.slice(hosts=1)] == [
        ({"gpus": 0}, 9),
        ({"gpus": 1}, 16),
        ({"gpus": 2}, 25),
    ]
    assert squares.items()[5][1] == 25
    assert dict(squares.items()[5][0]) == {"hosts": 1, "gpus": 2}


def test_a_slices_ranks_are_its_own(squares: ValueMesh[int]) -> None:
    part = squares.slice(gpus=slice(1, 3))
    assert part.values() == [1, 4, 16, 25]
    assert part.get(2) == 16
    assert part.item(hosts=0, gpus=1) == 4
    assert part.slice(gpus=1).values() == [4, 25]


@pytest.mark.parametrize("rank", [6, -1, 10**9])
def test_a_rank_that_does_not_exist(squares: ValueMesh[int], rank: int) -> None:
    with pytest.raises((IndexError, OverflowError)):
        squares.get(rank)


def test_an_item_needs_every_coordinate(squares: ValueMesh[int]) -> None:
    with pytest.raises(ValueError, match=r"item\(hosts=1\) names 3 values of a mesh of hosts=2, gpus=3"):
        squares.item(hosts=1)
    with pytest.raises(ValueError, match="names 6 values"):
        squares.item()


def test_the_number_of_values_fits_the_extent() -> None:
    with pytest.raises(ValueError, match=r"3 values do not fill a mesh of 2 \(gpus=2\)"):
        ValueMesh.of(Extent.of(gpus=2), [1, 2, 3])


def test_map(squares: ValueMesh[int]) -> None:
    roots = squares.slice(hosts=1).map(lambda n: n**0.5)
    assert roots.values() == [3.0, 4.0, 5.0]
    assert roots.sizes == {"gpus": 3}


def test_equality(squares: ValueMesh[int]) -> None:
    assert squares == ValueMesh.of(Extent.of(hosts=2, gpus=3), [0, 1, 4, 9, 16, 25])
    assert squares != ValueMesh.of(Extent.of(hosts=3, gpus=2), [0, 1, 4, 9, 16, 25])
    assert squares != squares.map(lambda n: -n)
    assert squares != [0, 1, 4, 9, 16, 25]
    with pytest.raises(TypeError, match="unhashable"):
        hash(squares)


def test_pickling_sends_what_is_seen(squares: ValueMesh[int]) -> None:
    part = squares.slice(gpus=0)
    back = pickle.loads(pickle.dumps(part))
    assert back == part
    assert len(pickle.dumps(part)) < len(pickle.dumps(squares))


def test_repr_joins_equal_runs() -> None:
    assert repr(ValueMesh.of(Extent.of(gpus=5), ["a", "a", "a", "b", "a"])) == (
        "ValueMesh(gpus=5):\n  0-2: 'a'\n  3: 'b'\n  4: 'a'"
    )


def test_what_is_shown_is_whole_up_to_its_limits() -> None:
    """Twenty rows, and two hundred characters of a value."""
    rows = [repr(ValueMesh.of(Extent.of(gpus=count), range(count))).splitlines() for count in (20, 21)]
    assert (len(rows[0]), rows[0][-1]) == (21, "  19: 19")
    assert (len(rows[1]), rows[1][11], rows[1][-1]) == (22, "  … 1 more …", "  20: 20")
    for size, ending in ((198, "x'"), (199, "x…")):
        assert repr(ValueMesh.of(Extent.of(gpus=1), ["x" * size])).endswith(ending)


def test_ten_thousand_values_are_loaded_to_be_shown() -> None:
    loaded: list[int] = []

    def cell(rank: int) -> Any:
        return lazy(lambda: loaded.append(rank))

    for count, shown in ((10_000, "  0-9999: None"), (10_001, "  5000: … 1 values not loaded …")):
        loaded.clear()
        text = repr(ValueMesh.of(Extent.of(gpus=count), map(cell, range(count))))
        assert shown in text.splitlines()
        assert len(loaded) == 10_000


def test_repr_stays_short() -> None:
    text = repr(ValueMesh.of(Extent.of(gpus=1000), range(1000)))
    assert len(text.splitlines()) == 22
    assert "… 980 more …" in text
    assert len(repr(ValueMesh.of(Extent.of(gpus=1), ["x" * 10_000]))) < 300


def test_html() -> None:
    text = ValueMesh.of(Extent.of(gpus=2), ["<b>", 1])._repr_html_()
    assert "&lt;b&gt;" in text and "<b>" not in text
    assert "gpus=1" in text


def test_every_rank_has_objects_of_its_own(echo: Any) -> None:
    lists = echo.echo.call([1]).get().values()
    lists[0].append(2)
    assert lists == [[1, 2], [1], [1], [1]]


def test_a_value_is_loaded_once(echo: Any) -> None:
    result = echo.echo.call([1]).get()
    assert result.get(0) is result.get(0)
    assert result.slice(hosts=0).get(0) is result.get(0)


def test_a_value_that_cannot_be_rebuilt_spoils_only_itself(procs: ProcMesh, echo: Any) -> None:
    result = echo.call.call(sometimes_broken, procs.pids[1]).get()
    assert result.get(0).__class__ is Whole
    with pytest.raises(SerializationError, match="cannot rebuild a message"):
        result.get(1)
    assert result.get(2).__class__ is Whole


class Whole:
    pass


class Half:
    """Its pickle cannot be read."""

    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> None:
    raise RuntimeError("not today")


def sometimes_broken(pid: int) -> Any:
    import os

    return Half() if os.getpid() == pid else Whole()


def test_all_outcomes_of_a_failed_call(echo: Any) -> None:
    results = echo.fail.call(ValueError("all")).get(return_exceptions=True)
    assert results.sizes == {"hosts": 2, "gpus": 2}
    assert all(isinstance(value, ActorError) and isinstance(value, ValueError) for value in results.values())
    assert [value.rank for value in results.values()] == [0, 1, 2, 3]
