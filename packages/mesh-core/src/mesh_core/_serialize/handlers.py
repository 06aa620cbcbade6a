"""Types with special reducers: memoryviews, numpy arrays, torch tensors, data frames, and those registered by other packages."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

from mesh_core._native import Block
from mesh_core._serialize.arrays import reduce_array
from mesh_core._serialize.frames import reduce_frame, reduce_table
from mesh_core._serialize.memory import reduce_memoryview
from mesh_core._serialize.stream import OUT_OF_BAND_BYTES, Stream
from mesh_core._serialize.tensors import reduce_parameter, reduce_tensor

__all__ = ["OUT_OF_BAND_BYTES", "NoHandlerError", "Reducer", "Registered", "add_handlers", "registered"]

Reducer = Callable[[Any], Any]


class NoHandlerError(LookupError):
    """A message contains an object whose handler is not registered here."""


class Registered:
    """What was registered in this process; see ``registered``, which the first registration imports."""

    __slots__ = ("handlers", "reducers")

    def __init__(self) -> None:
        # Replaced as a whole at each registration, because messages may be pickled meanwhile.
        self.reducers: dict[type, Reducer] = {}
        """By exact type."""
        self.handlers: dict[str, Any] = {}
        """Functions that rebuild objects, by type name."""


@cache
def registered() -> Registered:
    """Return this process's registrations."""
    return Registered()


def add_handlers(found: dict[type, Reducer], stream: Stream) -> None:
    """Add the reducer of each exact type that has one to those of a message.

    Called for each message, because numpy and torch are not imported here but may be at any time. A module
    that another thread is still importing may lack the names looked for here.
    """
    found[memoryview] = reduce_memoryview
    modules = sys.modules
    numpy: Any = modules.get("numpy")
    if numpy is not None and (array := getattr(numpy, "ndarray", None)) is not None:
        found[array] = MethodType(reduce_array, stream)
        found[Block] = stream.reduce_block
    torch: Any = modules.get("torch")
    if torch is not None and (tensor := getattr(torch, "Tensor", None)) is not None:
        found[tensor] = MethodType(reduce_tensor, stream)
        found[Block] = stream.reduce_block
        if (parameter := getattr(getattr(torch, "nn", None), "Parameter", None)) is not None:
            found[parameter] = MethodType(reduce_parameter, stream)
    polars: Any = modules.get("polars")
    if polars is not None and (frame := getattr(polars, "DataFrame", None)) is not None:
        found[frame] = reduce_frame
    arrow: Any = modules.get("pyarrow")
    if arrow is not None and (batch := getattr(arrow, "RecordBatch", None)) is not None:
        found[batch] = reduce_table
        if (table := getattr(arrow, "Table", None)) is not None:
            found[table] = reduce_table
    if reducers := registered().reducers:
        found.update(reducers)
