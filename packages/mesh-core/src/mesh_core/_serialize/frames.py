"""Data frames of Polars and tables of Arrow: their columns travel beside the message, and a part travels without the rest."""

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
    if not same or _is_part(table):
        return frame.__reduce_ex__(5)
    return rebuild_frame, (table,)


def rebuild_frame(table: Any) -> Any:
    """Create the frame on the columns of an Arrow table."""
    return _frame_of(table)


def reduce_table(table: Any) -> Any:
    """Send a small part of an Arrow table, or of a record batch, by Arrow's own format, which leaves the rest out.

    pyarrow pickles the buffers that such a part lies in, all of them. Everything else is left to it, extension types too: their
    classes are found in a pickle by name, and in Arrow's format only where they have been registered.
    """
    arrow = importlib.import_module("pyarrow")
    try:
        if not _is_part(table) or not _is_plain(table.schema):
            return table.__reduce_ex__(5)
        sink = arrow.BufferOutputStream()
        with arrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write(table)
    except arrow.ArrowException:  # a type that this release of Arrow cannot measure or write
        return table.__reduce_ex__(5)
    return (rebuild_table if isinstance(table, arrow.Table) else rebuild_batch), (sink.getvalue(),)


def rebuild_table(data: Any) -> Any:
    """Create the table on the memory that arrived."""
    return importlib.import_module("pyarrow").ipc.open_stream(data).read_all()


def rebuild_batch(data: Any) -> Any:
    """Create the record batch on the memory that arrived."""
    return importlib.import_module("pyarrow").ipc.open_stream(data).read_next_batch()


def _frame_of(table: Any) -> Any:
    polars = importlib.import_module("polars")
    return polars.from_arrow(table, rechunk=False)


def _is_part(table: Any) -> bool:
    whole = table.get_total_buffer_size()
    return bool(whole >= OUT_OF_BAND_BYTES and whole > 2 * table.nbytes)


def _is_plain(schema: Any) -> bool:
    extension = importlib.import_module("pyarrow").BaseExtensionType
    types = list(schema.types)
    while types:
        each = types.pop()
        if isinstance(each, extension):
            return False
        types += [each.field(i).type for i in range(each.num_fields)]
        if hasattr(each, "value_type"):  # of dictionaries
            types.append(each.value_type)
    return True
