"""Data frames of Polars: sent by their Arrow form, whose columns travel beside the message."""

from __future__ import annotations

import importlib
from typing import Any

from mesh_core._serialize.stream import OUT_OF_BAND_BYTES


def reduce_frame(frame: Any) -> Any:
    """Send a large frame's columns without a copy in Python, if pyarrow is installed and has types for all of them.

    Only for ``polars.DataFrame`` itself. A frame that is a small part of a larger one is pickled by Polars, as Arrow would send
    all of it.
    """
    if frame.estimated_size() < OUT_OF_BAND_BYTES:
        return frame.__reduce_ex__(5)
    try:
        table = frame.to_arrow()
        same = _frame_of(table.slice(0, 0)).schema == frame.schema
    except Exception:  # noqa: BLE001 - Polars itself can pickle it, or has the better error
        return frame.__reduce_ex__(5)
    if not same or table.get_total_buffer_size() > 2 * table.nbytes:
        return frame.__reduce_ex__(5)
    return rebuild_frame, (table,)


def rebuild_frame(table: Any) -> Any:
    """Create the frame on the columns of an Arrow table."""
    return _frame_of(table)


def _frame_of(table: Any) -> Any:
    polars = importlib.import_module("polars")
    return polars.from_arrow(table, rechunk=False)
