"""Frames of Polars travel by their Arrow form, and parts of Arrow tables without the rest."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from mesh_core._serialize import dumps, loads

pl: Any = pytest.importorskip("polars")
pa: Any = pytest.importorskip("pyarrow")

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


def arrow_table() -> Any:
    """Return an Arrow table with columns of several types."""
    return pa.table(
        {
            "x": pa.array(range(_ROWS), pa.float64()),
            "word": pa.array(["a", None] * (_ROWS // 2)).dictionary_encode(),
            "many": [[{"a": 1}], []] * (_ROWS // 2),
        },
        metadata={"made by": "a test"},
    )


def test_arrow_table_travels_beside_the_message_as_it_is() -> None:
    table = arrow_table()
    came, within, beside = sent(table)
    assert came.equals(table, check_metadata=True)
    assert within < 50_000 < _ROWS * 8 < beside


def test_a_part_of_an_arrow_table_does_not_carry_the_whole() -> None:
    part = arrow_table().slice(500, 5_000)
    came, within, beside = sent(part)
    assert came.equals(part, check_metadata=True)
    assert within + beside < 2 * part.nbytes


def test_batches_of_an_arrow_table_do_not_carry_the_table() -> None:
    batches = arrow_table().to_batches(max_chunksize=10_000)
    came, within, beside = zip(*map(sent, batches), strict=True)
    assert all(one.equals(other, check_metadata=True) for one, other in zip(came, batches, strict=True))
    assert sum(within) + sum(beside) < 2 * sum(batch.nbytes for batch in batches)


def test_a_part_of_an_arrow_table_without_rows() -> None:
    part = arrow_table().slice(500, 0)
    assert sent(part)[0].equals(part, check_metadata=True)


class Celsius(pa.ExtensionType):
    """A type that nobody has registered."""

    def __init__(self) -> None:
        super().__init__(pa.float64(), "mesh.test.celsius")

    def __arrow_ext_serialize__(self) -> bytes:
        return b""

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: Any, serialized: bytes) -> Any:
        return cls()


@pytest.mark.parametrize("within", ["column", "struct"])
def test_parts_keep_types_that_are_not_registered(within: str) -> None:
    values = pa.ExtensionArray.from_storage(Celsius(), pa.array(range(_ROWS), pa.float64()))
    column = values if within == "column" else pa.StructArray.from_arrays([values], ["t"])
    part = pa.table({"t": column}).slice(0, 10)
    came, _, _ = sent(part)
    assert came.schema == part.schema and came.equals(part)
