"""Raw memory: memoryviews as values."""

from __future__ import annotations

from _pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

from mesh_core._serialize.stream import OUT_OF_BAND_BYTES

if TYPE_CHECKING:
    from typing_extensions import Buffer

# The formats that `memoryview.cast` can restore; "c" is a byte, too.
_FORMATS = frozenset("cbB?hHiIlLqQnNfdP")


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
