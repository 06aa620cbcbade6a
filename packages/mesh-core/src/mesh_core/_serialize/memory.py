"""Raw memory: views of an address, and memoryviews as values."""

from __future__ import annotations

from _pickle import PickleBuffer
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from mesh_core._serialize.stream import OUT_OF_BAND_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The formats that `memoryview.cast` can restore; "c" is a byte, too.
_FORMATS = frozenset("cbB?hHiIlLqQnNfdP")


def carry(address: int, nbytes: int, owner: object) -> PickleBuffer | bytearray:
    """Return ``nbytes`` at ``address`` in a form to pickle: a buffer if large, a copy if small.

    ``owner`` keeps the memory alive, and lives as long as the buffer does. The view is always writable, so that
    what is rebuilt from it is writable as well; nothing here writes to it.
    """
    import ctypes

    if nbytes < OUT_OF_BAND_BYTES:
        return bytearray(ctypes.string_at(address, nbytes))
    # ctypes instances accept attributes; the consumers of a buffer hold the instance, and so the owner.
    memory: Any = _block(nbytes).from_address(address)
    memory.owner = owner
    return PickleBuffer(memory)


@lru_cache(maxsize=64)
def _block(nbytes: int) -> Any:
    """Return the ctypes array type of a size. Cached: creating one costs more than using it, and sizes repeat."""
    import ctypes

    return ctypes.c_ubyte * nbytes


def reduce_memoryview(view: memoryview) -> tuple[Any, ...]:
    """Send a memoryview's elements; it arrives as a memoryview with the same format, shape and writability."""
    kind = view.format.removeprefix("@")
    if kind not in _FORMATS:
        raise TypeError(
            f"cannot send a memoryview of format {view.format!r}: it cannot be rebuilt; "
            "send the object that it is a view of, or a view of its bytes"
        )
    data: Any
    if view.nbytes < OUT_OF_BAND_BYTES:
        data = bytearray(view.tobytes())
    elif view.c_contiguous:
        data = PickleBuffer(view)
    else:
        data = PickleBuffer(bytearray(view.tobytes()))
    return rebuild_memoryview, (data, kind, None if view.ndim == 1 else view.shape, view.readonly)


def rebuild_memoryview(data: Buffer, kind: str, shape: tuple[int, ...] | None, readonly: bool) -> memoryview:
    """Undo :func:`reduce_memoryview`."""
    view: memoryview[Any] = memoryview(data).cast("B")
    if shape is not None and 0 not in shape:
        view = view.cast(kind, shape)  # type: ignore[call-overload]
    elif kind != "B":
        view = view.cast(kind)  # type: ignore[call-overload]
    return view.toreadonly() if readonly else view
