"""One memory to many ranks of this host, and of many ranks into one: `broadcast` and `gather` of mesh-rdma, beside what else there is.

    python benchmarks/broadcasts.py

Wants release builds of mesh-core and mesh-rdma. Prints medians in seconds of rounds in which all take turns: `broadcast`, one read of the source by
each rank at once, and a message of the core with the same bytes to all; `gather`, and one read of each rank after the other.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

from mesh_core import Actor, ActorMesh, endpoint, this_host
from mesh_rdma import RDMABuffer, broadcast, empty, gather

MIB = 1 << 20
ROUNDS = 7


class Rank(Actor):
    """Has memory to be filled."""

    def __init__(self) -> None:
        self.memory = memoryview(bytearray())
        self.buffer = RDMABuffer(self.memory)

    @endpoint
    def offer(self, size: int, mapped: bool) -> RDMABuffer:
        self.memory = empty(size) if mapped else memoryview(bytearray(size))
        self.memory[::4096] = bytes(len(self.memory[::4096]))
        self.buffer = RDMABuffer(self.memory)
        return self.buffer

    @endpoint
    async def read(self, source: RDMABuffer) -> None:
        await source.read_into(self.memory)

    @endpoint
    def take(self, data: bytearray) -> int:
        return len(data)


def seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def figures(ranks: ActorMesh[Rank], size: int, mapped: bool) -> dict[str, float]:
    """Medians of all ways, in turns."""
    into = ranks.offer.call(size, mapped).get(timeout=120)
    data = bytearray(os.urandom(MIB)) * (size // MIB)
    source = RDMABuffer(data)
    whole = bytearray(size)
    part = size // len(ranks)
    pieces = [each[n * part : (n + 1) * part] for n, each in enumerate(into.values())]

    def one_by_one() -> None:
        for n, piece in enumerate(pieces):
            piece.read_into(memoryview(whole)[n * part : (n + 1) * part]).get(timeout=120)

    ways: dict[str, Callable[[], object]] = {
        "broadcast": lambda: broadcast(source, ranks, into).get(timeout=120),
        "a read by each": lambda: ranks.read.call(source).get(timeout=120),
        "a message to all": lambda: ranks.take.call(data).get(timeout=120),
        "gather": lambda: gather(pieces, memoryview(whole)[: part * len(ranks)]).get(timeout=120),
        "a read of each": one_by_one,
    }
    for work in ways.values():
        work()
    rounds = [{name: seconds(work) for name, work in ways.items()} for _ in range(ROUNDS)]
    return {name: statistics.median(each[name] for each in rounds) for name in ways}


def main() -> None:
    for count in (8, 16):
        with this_host().spawn_procs({"ranks": count}) as procs:
            ranks = procs.spawn("ranks", Rank)
            for size, mapped in ((64, False), (64, True), (256, False)):
                kind = "empty()" if mapped else "ordinary"
                for name, found in figures(ranks, size * MIB, mapped).items():
                    print(f"{count} ranks, {size} MiB, {kind}: {name}: {found * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
