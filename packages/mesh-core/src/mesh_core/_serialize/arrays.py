"""numpy arrays, which are sent as their elements in memory order."""

from __future__ import annotations

import importlib
from _pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

from mesh_core._serialize.memory import carry
from mesh_core._serialize.stream import OUT_OF_BAND_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

# Kinds of dtype that are fully described by their short string.
_NAMED_KINDS = frozenset("biufcSU")


def reduce_array(array: Any) -> Any:
    """Send an array's elements without a copy if they are contiguous, in C or Fortran order.

    Only for `numpy.ndarray` itself, not its subclasses. Arrays of Python objects, and those whose elements
    refer to memory elsewhere, are pickled by numpy.
    """
    dtype = array.dtype
    if dtype.hasobject or dtype.kind == "T":
        return array.__reduce_ex__(5)
    flags = array.flags
    order = "F" if flags.f_contiguous and not flags.c_contiguous else "C"
    data: PickleBuffer | bytearray
    if array.nbytes < OUT_OF_BAND_BYTES:
        data = bytearray(array.tobytes(order))
    else:
        # Only the elements of a strided view are copied and sent, not what lies between them.
        together = array if flags.forc else array.copy(order="C")
        if together.flags.writeable:
            data = PickleBuffer(together)
        else:
            data = carry(together.__array_interface__["data"][0], together.nbytes, together)
    named = dtype.kind in _NAMED_KINDS and dtype.metadata is None
    return rebuild_array, (data, dtype.str if named else dtype, array.shape, order)


def rebuild_array(data: Buffer, dtype: Any, shape: tuple[int, ...], order: str) -> Any:
    """Create the array on ``data`` without a copy; writable if ``data`` is."""
    numpy = importlib.import_module("numpy")
    return numpy.ndarray(shape, dtype, buffer=data, order=order)
