"""The changes between two versions, element by element: one byte for the distance to each, and its new bits.

A version that was made from another one and a delta equals, bit for bit, one that was fetched whole (DLT-1). The engine
finds and applies the changes of elements of one width; this module says where these lie.
"""

from __future__ import annotations

import os
import struct

from mesh_rdma._errors import InvalidTransfer
from mesh_rdma._memory import memory_of, writable_memory_of
from mesh_rdma._native import apply_changes, find_changes
from mesh_rdma._publication._layout import LINE, Layout

_WIDTHS = (1, 2, 4, 8)
_PIECE = 16 << 20
"""The number of bytes that one thread compares."""
_MOST_CORES = 4
_LENGTH = struct.Struct("<Q")
_WORTH = 0.5
"""A delta that is a larger part of the whole is not worth making."""


def spans(layout: Layout) -> list[tuple[int, int, int]]:
    """Return where in a version elements of one width lie: from which byte to which, and their width; in pieces."""
    found: list[list[int]] = []
    for entry in layout:
        width = entry.item if entry.item in _WIDTHS else 1
        stop = entry.offset + -(-entry.nbytes // LINE) * LINE
        if found and found[-1][1:] == [entry.offset, width]:
            found[-1][1] = stop
        else:
            found.append([entry.offset, stop, width])
    return [
        (at, min(at + _PIECE, stop, layout.nbytes), width)
        for start, stop, width in found
        for at in range(start, stop, _PIECE)
    ]


def encode(layout: Layout, old: memoryview, new: memoryview) -> bytes | None:
    """Return the delta from the old version to the new one; ``None`` if it is not much shorter than the version.

    Nobody may write to either in the meantime.
    """
    from concurrent.futures import ThreadPoolExecutor

    room = int(layout.nbytes * _WORTH)

    def find(span: tuple[int, int, int]) -> bytes | None:
        start, stop, width = span
        return find_changes(memory_of(old[start:stop]), memory_of(new[start:stop]), width, room)

    pieces = spans(layout)
    parts: list[bytes] = []
    cores = min(len(os.sched_getaffinity(0)), _MOST_CORES, len(pieces)) or 1
    with ThreadPoolExecutor(cores, "mesh-publication-find") as threads:
        try:
            found = threads.map(find, pieces)
        except RuntimeError:
            # The interpreter is ending: nobody waits for it.
            return None
        for changes in found:
            if changes is None or len(changes) > room:
                threads.shutdown(wait=False, cancel_futures=True)
                return None
            room -= len(changes)
            parts += [_LENGTH.pack(len(changes)), changes]
    return b"".join(parts)


def apply(layout: Layout, delta: memoryview, memory: memoryview) -> None:
    """Change an old version into the new one, in place."""
    at = 0
    for start, stop, _ in spans(layout):
        if at + _LENGTH.size > len(delta):
            raise InvalidTransfer("the delta is shorter than its version needs")
        (length,) = _LENGTH.unpack_from(delta, at)
        at += _LENGTH.size
        apply_changes(writable_memory_of(memory[start:stop]), memory_of(delta[at : at + length]))
        at += length
