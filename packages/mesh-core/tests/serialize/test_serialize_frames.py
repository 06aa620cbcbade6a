"""Frames of Polars travel by their Arrow form."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from mesh_core._serialize import dumps, loads

pl: Any = pytest.importorskip("polars")
pytest.importorskip("pyarrow")

pytestmark = pytest.mark.beside

_ROWS = 100_000


def mixed() -> Any:
    """Return a frame with columns of several types."""
    when = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    return pl.DataFrame(
        {
            "x": pl.Series(range(_ROWS), dtype=pl.Float64),
            "name": ["a long enough name", None] * (_ROWS // 2),
            "flag": [True, False] * (_ROWS // 2),
            "when": [when] * _ROWS,
            "many": [[1, 2]] * _ROWS,
        }
    )


@pytest.fixture(scope="module", autouse=True)
def _polars_is_running() -> None:
    """What Polars opens for itself on first use stays."""
    frame = mixed()
    assert sent(frame)[0].equals(frame)


def sent(frame: Any) -> tuple[Any, int, int]:
    """Return what arrives, and how many bytes travelled within and beside the message."""
    data, buffers = dumps(frame)
    return loads(data, buffers), len(data), sum(memoryview(each).nbytes for each in buffers)


def test_columns_travel_beside_the_message() -> None:
    frame = mixed()
    came, within, beside = sent(frame)
    assert came.equals(frame) and came.schema == frame.schema
    assert within < 100_000 < 8 * _ROWS < beside


@pytest.mark.parametrize("dtype", ["Categorical", "Enum", "Decimal"])
def test_types_that_arrow_may_not_have_arrive_as_they_were(dtype: str) -> None:
    values: Any = ["a", "b"] * _ROWS
    if dtype == "Categorical":
        series = pl.Series("x", values, dtype=pl.Categorical)
    elif dtype == "Enum":
        series = pl.Series("x", values, dtype=pl.Enum(["a", "b"]))
    else:
        series = pl.Series("x", [1, 2] * _ROWS).cast(pl.Decimal(10, 2))
    frame = pl.DataFrame([series])
    came, _, _ = sent(frame)
    assert came.equals(frame) and came.schema == frame.schema


def test_a_part_of_a_frame_does_not_carry_the_whole() -> None:
    frame = pl.DataFrame({"x": pl.Series(range(_ROWS * 10), dtype=pl.Float64)})
    part = frame.slice(500, 20_000)
    came, within, beside = sent(part)
    assert came.equals(part)
    assert within + beside < 2 * 8 * 20_000


def test_small_and_empty_frames() -> None:
    for frame in (pl.DataFrame(), pl.DataFrame({"x": [1, 2]}), pl.DataFrame(schema={"x": pl.String})):
        came, _, _ = sent(frame)
        assert came.equals(frame) and came.schema == frame.schema
