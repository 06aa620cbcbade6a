"""Columns copied out of rows by the engine, beside as many bytes that lie together, in the same run.

    python benchmarks/columns.py

Short works, over memory that no cache holds: the tenth of them that took least tells what the machine can do, though others use it.
Wants a release build of mesh-rdma, and 800 MB.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from mesh_rdma import empty
from mesh_rdma._memory import memory_of, writable_memory_of
from mesh_rdma._native import Boxes

BLOCKS, ROWS, PIECE, RANKS = 40, 7000, 372, 6
TURNS = 4
PITCH = PIECE * RANKS
EACH = ROWS * PIECE
"""Bytes of one work."""


def least(works: Iterable[tuple[Boxes, object]]) -> float:
    """Milliseconds that the fastest tenth of them take at most."""
    taken = []
    for boxes, memory in works:
        begun = time.perf_counter()
        boxes.copy(memory)  # type: ignore[arg-type]
        taken.append(time.perf_counter() - begun)
    return sorted(taken)[len(taken) // 10] * 1e3


def main() -> None:
    """Print both, and their ratio."""
    source = np.frombuffer(empty(BLOCKS * ROWS * PITCH), np.uint8)
    source[:] = 1
    memory = memory_of(source)
    targets = [np.ones(EACH, np.uint8) for _ in range(2 * BLOCKS)]
    columns, together = [], []
    for rank in range(RANKS):
        for block in range(BLOCKS):
            here = writable_memory_of(targets[block])
            columns.append(
                (Boxes([(block * ROWS * PITCH + rank * PIECE, [ROWS], [PITCH], PIECE, here)]), memory)
            )
            here = writable_memory_of(targets[BLOCKS + block])
            together.append((Boxes([((block * RANKS + rank) * EACH, [], [], EACH, here)]), memory))
    found = [(least(columns), least(together)) for _ in range(TURNS)]
    for pieces, whole in found:
        print(
            f"{ROWS} pieces of {PIECE} bytes {pieces:.3f} ms, together {whole:.3f} ms, ratio {pieces / whole:.2f}"
        )


if __name__ == "__main__":
    main()
