"""Figures of publications, each beside a copy or a transfer of the same bytes, in the same run.

    python benchmarks/publications.py

Wants numpy, and release builds of mesh-core and mesh-rdma. Prints medians, and ratios of neighbours in time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mesh_core import Actor, ProcMesh, endpoint, shutdown, this_host
from mesh_rdma import Piece, Publication, PublicationReader, RDMABuffer, empty
from mesh_rdma._publication._delta import apply, encode
from mesh_rdma._publication._layout import layout_of, parts_of

MANY, EACH = 40_000, 26_843  # a GiB
LARGE = 256 << 20
ROUNDS = 7
LINK = 1e9
"""Bytes a second of the network that a delta is compared on."""


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


class Reader(Actor):
    """Copies versions, and buffers of the same bytes."""

    def __init__(self, shapes: list[int]) -> None:
        whole = np.zeros(sum(shapes), np.uint8)
        cuts = np.cumsum([0, *shapes])
        self.whole = whole
        self.state = {f"t{n}": whole[cuts[n] : cuts[n + 1]] for n in range(len(shapes))}

    @endpoint
    def load(self, reader: PublicationReader, buffer: RDMABuffer) -> tuple[float, float]:
        """A version, and the same bytes by one transfer."""
        one = seconds(lambda: buffer.read_into(self.whole).get())
        return seconds(lambda: reader.load_into(self.state)), one

    @endpoint
    def reshard(
        self, reader: PublicationReader, rank: int, rows: int, buffer: RDMABuffer
    ) -> tuple[float, float]:
        """A sixth of rows, cut by columns or rows, and as many bytes by one transfer."""
        part = np.zeros((rows // 6 + (rank < rows % 6), 4096), np.uint8)
        start = sum(rows // 6 + (each < rows % 6) for each in range(rank))
        piece = {"weight": Piece((rows, 4096), (start, 0), part.shape)}
        reader.load_into({"weight": part}, pieces=piece)
        one = seconds(lambda: buffer.read_into(self.whole[: part.nbytes]).get())
        return seconds(lambda: reader.load_into({"weight": part}, pieces=piece)), one


def told(name: str, pairs: list[tuple[float, float]], asked: str) -> None:
    """Print medians, and the ratio of neighbours."""
    ones, others = [one for one, _ in pairs], [other for _, other in pairs]
    ratio = statistics.median(one / other for one, other in zip(ones, others, strict=True))
    one, other = 1000 * statistics.median(ones), 1000 * statistics.median(others)
    print(f"| {name} | {one:.1f} ms | {other:.1f} ms | {ratio:.2f} | {asked} |", flush=True)


def stall(name: str, state: dict[str, np.ndarray[Any, Any]]) -> None:
    """What `publish` takes of its caller's time, beside a copy of the same tensors into memory that is there."""
    copies = {key: np.empty_like(value) for key, value in state.items()}

    def copy() -> None:
        for key, value in state.items():
            np.copyto(copies[key], value)

    with Publication(state) as publication:
        for _ in range(3):
            publication.publish()
            copy()
        pairs = [(seconds(publication.publish), seconds(copy)) for _ in range(ROUNDS)]
    told(f"publish {name} / a copy", pairs, "<= 1.1")


def loads(procs: ProcMesh) -> None:
    """All tensors of a version, beside one transfer of as many bytes."""
    whole = np.frombuffer(empty(MANY * EACH), np.uint8)
    state = {f"t{n}": np.ones(EACH, np.uint8) for n in range(MANY)}
    reader = procs.slice(gpus=0).spawn("reader", Reader, [EACH] * MANY)
    buffer = RDMABuffer(whole)
    with Publication(state) as publication:
        publication.publish()
        pairs = []
        for _ in range(ROUNDS + 1):
            publication.publish()
            pairs.append(reader.load.call_one(publication.reader(), buffer).get())
    told("load 40,000 tensors, 1 GiB / one transfer", pairs[1:], "<= 1.3")
    stall("40,000 tensors, 1 GiB", state)
    reader.stop().get()


def resharded(procs: ProcMesh) -> None:
    """Rows of four ranks, read by six."""
    rows = LARGE // 4096
    ranks = []
    for rank in range(4):
        part = {"weight": np.full((rows // 4, 4096), rank, np.uint8)}
        piece = {"weight": Piece((rows, 4096), (rank * rows // 4, 0), (rows // 4, 4096))}
        ranks.append(Publication(part, pieces=piece, start=1))
    buffer = RDMABuffer(np.frombuffer(empty(LARGE), np.uint8))
    reader = PublicationReader.joined([each.reader() for each in ranks])
    actor = procs.slice(gpus=0).spawn("sixth", Reader, [LARGE // 6 + 4096])
    for each in ranks:
        each.publish(version=1)
    pairs = [actor.reshard.call_one(reader, n % 6, rows, buffer).get() for n in range(2 * ROUNDS)]
    told("a sixth of what 4 ranks publish / one transfer", pairs, "<= 1.6")
    for each in ranks:
        each.close()


def deltas() -> None:
    """Two of a hundred elements of 2 bytes have changed: how many bytes, and how long beside sending everything."""
    state = {"weight": np.zeros(LARGE // 2, np.float16)}
    layout = layout_of(list(parts_of(state, None)))
    dice = np.random.default_rng(1)
    old = dice.integers(0, 1 << 16, LARGE // 2, np.uint16)
    new = old.copy()
    new[dice.choice(len(new), len(new) // 50, replace=False)] ^= 1
    memory = np.empty_like(old)
    bytes_of: list[Any] = [each.view(np.uint8).data for each in (old, new, memory)]
    found: list[bytes] = []

    def change() -> None:
        """What both ends do."""
        found[:] = [encode(layout, *bytes_of[:2]) or b""]
        np.copyto(memory, old)
        apply(layout, memoryview(found[0]), bytes_of[2])

    took = [seconds(change) for _ in range(ROUNDS)]
    assert (memory == new).all()
    share = len(found[0]) / LARGE
    print(
        f"| bytes of a delta, 2 % of elements changed | {len(found[0]) / 1e6:.1f} MB | {LARGE / 1e6:.1f} MB | {share:.3f} | <= 0.04 |"
    )
    whole = LARGE / LINK
    told(
        f"256 MiB by a delta / whole, at {LINK / 1e9:g} GB/s",
        [(each + share * whole, whole) for each in took],
        "< 1",
    )


def main() -> None:
    print("| figure | it | beside | ratio | asked |\n| --- | --- | --- | --- | --- |")
    stall("256 MiB", {"weight": np.ones(LARGE, np.uint8)})
    with this_host().spawn_procs({"gpus": 1}) as procs:
        loads(procs)
        resharded(procs)
    deltas()
    shutdown()


if __name__ == "__main__":
    main()
