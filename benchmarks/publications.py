"""Figures of publications, each beside what the machine itself takes for the same bytes, in the same run.

    python benchmarks/publications.py [MIB]

Wants numpy, and release builds of mesh-core and mesh-rdma. Prints medians of rounds in which both take turns.
"""

from __future__ import annotations

import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from mesh_rdma import Piece, Publication, PublicationReader, RDMABuffer, empty
from mesh_rdma._publication._delta import apply, encode
from mesh_rdma._publication._layout import layout_of, parts_of

MIB = int(sys.argv[1]) if len(sys.argv) > 1 and sys.argv[1] != "owner" else 1024
ROUNDS = 7
TENSORS = 40_000
"""How many there are of all bytes."""
LINK = 1e9
"""Bytes a second of a link to another host, for which a delta is reckoned."""

OWNERS = """
import json, sys
import numpy as np
from mesh_rdma import Piece, Publication, PublicationReader, RDMABuffer, empty
import base64, pickle
{made}
print(base64.b64encode(pickle.dumps(offered)).decode(), flush=True)
sys.stdin.read()
"""
MANY = """
state = {{str(n): np.full({each}, n % 251, np.uint8) for n in range({count})}}
publication = Publication(state)
publication.publish()
one = np.frombuffer(empty({each} * {count}), np.uint8)
one[:] = 1
buffer = RDMABuffer(one)
offered = publication.reader(), buffer
"""
RANKS = """
publications = []
for rank in range(4):
    rows = {rows} * rank // 4, {rows} * (rank + 1) // 4
    state = {{str(n): np.full((rows[1] - rows[0], {columns}), n % 100, np.float32) for n in range({count})}}
    pieces = {{name: Piece(({rows}, {columns}), (rows[0], 0), array.shape) for name, array in state.items()}}
    publications.append(Publication(state, pieces=pieces, start=1))
    publications[-1].publish()
one = np.frombuffer(empty({bytes}), np.uint8)
one[:] = 1
buffer = RDMABuffer(one)
offered = PublicationReader.joined([each.reader() for each in publications]), buffer
"""


def owner(made: str, **numbers: int) -> tuple[subprocess.Popen[str], tuple[PublicationReader, RDMABuffer]]:
    """Start another process that publishes; returns what it offers."""
    import base64
    import pickle

    code = OWNERS.format(made=made.format(**numbers))
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, pickle.loads(base64.b64decode(process.stdout.readline()))


def end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def taken(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def in_turn(*works: Callable[[], object]) -> list[float]:
    """Return how long each takes: the median, after one round that is not counted."""
    times = [[taken(work) for work in works] for _ in range(ROUNDS + 1)][1:]
    return [statistics.median(column) for column in zip(*times, strict=True)]


def ratios(one: Callable[[], object], other: Callable[[], object]) -> dict[str, float]:
    """Return how long both take, and the median of what the one takes of the other beside it."""
    pairs = [(taken(one), taken(other)) for _ in range(ROUNDS + 2)][2:]
    return {
        "ms": round(statistics.median(a for a, _ in pairs) * 1e3, 1),
        "beside_ms": round(statistics.median(b for _, b in pairs) * 1e3, 1),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
    }


def memcpy(target: np.ndarray, source: np.ndarray) -> None:
    """The C library's, of the same bytes."""
    ctypes.memmove(target.ctypes.data, source.ctypes.data, source.nbytes)


def stall(tensors: int) -> dict[str, float]:
    """How long ``publish()`` holds the trainer up, beside one memcpy of as many bytes into memory that is there already."""
    each = (MIB << 20) // tensors // 64 * 64
    whole = np.ones(each * tensors, np.uint8)
    target = np.zeros_like(whole)
    state = {str(n): whole[n * each : (n + 1) * each] for n in range(tensors)}
    with Publication(state) as publication:
        publication.publish()
        return ratios(publication.publish, lambda: memcpy(target, whole))


def many() -> dict[str, float]:
    """Tensors read in one, into tensors that lie apart, beside one transfer of as many bytes."""
    each = (MIB << 20) // TENSORS // 64 * 64
    process, (reader, buffer) = owner(MANY, each=each, count=TENSORS)
    target = {str(n): np.zeros(each, np.uint8) for n in range(TENSORS)}
    whole = np.zeros(each * TENSORS, np.uint8)
    found = ratios(lambda: reader.load_into(target), lambda: buffer.read_into(whole).get())
    assert all(target[name][0] == int(name) % 251 for name in target)
    end(process)
    return found


def resharded(dim: int) -> dict[str, float]:
    """As many bytes in 400 tensors of 4 ranks by rows, read by 6 ranks by rows or columns, beside one transfer of them."""
    count, rows = 400, 1200
    columns = (MIB << 20) // count // rows // 4 // 6 * 6
    nbytes = count * rows * columns * 4
    process, (reader, buffer) = owner(RANKS, count=count, rows=rows, columns=columns, bytes=nbytes)
    whole_shape = (rows, columns)
    targets, pieces = [], []
    for n in range(6):
        start, shape = [0, 0], list(whole_shape)
        start[dim] = whole_shape[dim] * n // 6
        shape[dim] = whole_shape[dim] // 6
        targets.append({str(n): np.zeros(shape, np.float32) for n in range(count)})
        piece = Piece(whole_shape, tuple(start), tuple(shape))
        pieces.append({str(n): piece for n in range(count)})
    readers = [PublicationReader.joined([reader]) for _ in targets]
    whole = np.zeros(nbytes, np.uint8)

    def load() -> None:
        for one, target, piece in zip(readers, targets, pieces, strict=True):
            one.load_into(target, pieces=piece)

    found = ratios(load, lambda: buffer.read_into(whole).get())
    assert all((array == int(name) % 100).all() for target in targets for name, array in target.items())
    end(process)
    return found


def delta() -> dict[str, float]:
    """What has changed in 2 of 100 numbers of two bytes: its bytes, and its time on a link beside that of all of them."""
    old = np.frombuffer(empty(MIB << 20), np.uint16)
    rng = np.random.default_rng(1)
    old[:] = rng.integers(0, 1 << 16, len(old), np.uint16)
    new = np.frombuffer(empty(MIB << 20), np.uint16)
    new[:] = old
    new[rng.random(len(new), np.float32) < 0.02] ^= 1
    layout = layout_of(list(parts_of({"weights": old}, None)))
    there = np.frombuffer(empty(MIB << 20), np.uint16)
    views = [each.view(np.uint8).data for each in (old, new, there)]
    made = encode(layout, views[0], views[1])
    assert made is not None

    def make() -> None:
        memcpy(there, old)
        apply(layout, memoryview(made), views[2])

    find_s, make_s = in_turn(lambda: encode(layout, views[0], views[1]), make)
    assert np.array_equal(there, new)
    whole_s, changes_s = layout.nbytes / LINK, find_s + len(made) / LINK + make_s
    return {
        "bytes_of_all": round(len(made) / layout.nbytes, 4),
        "find_ms": round(find_s * 1e3, 1),
        "make_ms": round(make_s * 1e3, 1),
        "of_all_at_1_GB/s": round(changes_s / whole_s, 3),
    }


def main() -> None:
    figures: list[tuple[str, Callable[[], object]]] = [
        ("stall, 1 tensor", lambda: stall(1)),
        ("stall, 300 tensors", lambda: stall(300)),
        (f"stall, {TENSORS} tensors", lambda: stall(TENSORS)),
        (f"{TENSORS} tensors in one read", many),
        ("4 ranks by rows to 6 by rows", lambda: resharded(0)),
        ("4 ranks by rows to 6 by columns", lambda: resharded(1)),
        ("delta, 2 of 100 changed", delta),
    ]
    print(f"{MIB} MiB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for name, work in figures:
        print(f"{name}: {json.dumps(work())}", flush=True)


if __name__ == "__main__":
    main()
