"""What has changed between two versions, element by element: one byte for the way to each, and its new bits.

DLT-1: a version that was made from another one and a delta is the same, bit for bit, as one that was fetched whole.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mesh_rdma._publication._layout import LINE, Layout

if TYPE_CHECKING:
    import numpy as np

_WIDTHS = (1, 2, 4, 8)
_AT_ONCE = 1 << 22
"""Elements that are compared at a time: what is noted of them fits into a cache."""
_FAR = 255
"""A step that goes on: so many elements, and then the next byte says more."""
_HEAD = struct.Struct("<QQ")
_WORTH = 0.5
"""A delta that is a larger part of the whole is not worth its making."""


def spans(layout: Layout) -> list[tuple[int, int, int]]:
    """Return where in a version elements of one width lie: the first byte, how many, and their width."""
    found: list[list[int]] = []
    for entry in layout:
        width = entry.item if entry.item in _WIDTHS else 1
        length = -(-entry.nbytes // LINE) * LINE
        if found and found[-1][2] == width and found[-1][0] + found[-1][1] == entry.offset:
            found[-1][1] += length
        else:
            found.append([entry.offset, length, width])
    end = layout.nbytes
    return [(start, min(length, end - start) // width, width) for start, length, width in found]


def encode(layout: Layout, old: memoryview, new: memoryview) -> bytes | None:
    """Return what makes the new version from the old one; none if that is not much shorter than the version."""
    parts: list[bytes] = []
    room = layout.nbytes * _WORTH
    for start, count, width in spans(layout):
        steps, values = [], []
        last = 0
        for at, ones, others in _pieces(old, new, start, count, width):
            places, bits, last = _changed(ones, others, at, last)
            steps.append(places)
            values.append(bits)
            room -= len(places) + len(bits)
            if room < 0:
                return None
        parts += [_HEAD.pack(sum(map(len, steps)), sum(map(len, values))), *steps, *values]
    return b"".join(parts)


def apply(layout: Layout, delta: memoryview, memory: memoryview) -> None:
    """Change an old version into the new one, where it lies."""
    import numpy as np

    at = 0
    for start, count, width in spans(layout):
        steps_len, values_len = _HEAD.unpack_from(delta, at)
        at += _HEAD.size
        steps = np.frombuffer(delta, np.uint8, steps_len, at)
        values = np.frombuffer(delta, f"u{width}", values_len // width, at + steps_len)
        at += steps_len + values_len
        elements = np.frombuffer(memory, f"u{width}", count, start)
        places = np.cumsum(steps, dtype=np.int64)[steps != _FAR]
        elements[places] = values


def _pieces(
    old: memoryview, new: memoryview, start: int, count: int, width: int
) -> Iterator[tuple[int, Any, Any]]:
    import numpy as np

    for at in range(0, count, _AT_ONCE):
        some, offset = min(_AT_ONCE, count - at), start + at * width
        yield (
            at,
            np.frombuffer(old, f"u{width}", some, offset),
            np.frombuffer(new, f"u{width}", some, offset),
        )


def _changed(
    old: np.ndarray[Any, Any], new: np.ndarray[Any, Any], at: int, last: int
) -> tuple[bytes, bytes, int]:
    """Return the steps from the last change on, the new bits, and the last change."""
    import numpy as np

    places = np.flatnonzero(old != new)
    if not len(places):
        return b"", b"", last
    gaps = np.diff(places, prepend=last - at)
    far = gaps // _FAR
    steps = np.full(len(gaps) + int(far.sum()), _FAR, np.uint8)
    steps[np.cumsum(far + 1) - 1] = gaps % _FAR
    return steps.tobytes(), new[places].tobytes(), at + int(places[-1])
