"""numpy arrays, which are sent as their elements in memory order."""

from __future__ import annotations

import importlib
from _pickle import PickleBuffer
from collections.abc import Callable
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from mesh_core._native import COPIED_BYTES
from mesh_core._serialize.stream import Stream

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Kinds of dtype that are fully described by their short string.
_NAMED_KINDS = frozenset("biufcSU")


def reduce_array(stream: Stream, array: Any) -> Any:
    """Send an array's elements without a copy if they are contiguous, in C or Fortran order.

    Only for `numpy.ndarray` itself, not its subclasses. Arrays of Python objects, and those whose elements
    refer to memory elsewhere, are pickled by numpy.
    """
    dtype = array.dtype
    if dtype.hasobject or dtype.kind == "T":
        return array.__reduce_ex__(5)
    flags = array.flags
    if flags.c_contiguous:
        order, together = "C", array
    elif flags.f_contiguous:
        order, together = "F", array
    else:
        # Only the elements of a strided view are copied and sent, not what lies between them.
        order, together = "C", array.copy(order="C")
    named = dtype.kind in _NAMED_KINDS and dtype.metadata is None
    data: Any
    if named and array.nbytes >= stream.alone and together.flags.writeable:
        data, at = PickleBuffer(together), 0
    else:
        data, at = (stream.blocks or stream.begin_blocks()).put_array(together)
    return rebuild_array, (data, at, _name_of(dtype) if named else dtype, array.shape, order)


def rebuild_array(data: Buffer, at: int, dtype: Any, shape: tuple[int, ...], order: str) -> Any:
    """Create the array on its memory in ``data``, writable if that is, or on a copy if it is small."""
    array = _ndarray()(shape, dtype, data, at, None, order)
    return array.copy("K") if type(data) is bytes or array.nbytes < COPIED_BYTES else array


@cache
def _ndarray() -> Callable[..., Any]:
    array: Callable[..., Any] = importlib.import_module("numpy").ndarray
    return array


@lru_cache(maxsize=256)
def _name_of(dtype: Any) -> str:
    """Return the short string of a dtype. One object, which a pickle contains only once."""
    return str(dtype.str)
