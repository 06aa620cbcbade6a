"""What references cost: `put` and `get` of one large array beside plain copies, and a batch that passes the script.

    python benchmarks/refs.py [--mib 256] [--rounds 9] [--batch-gib 4]

`refs_steps.py` has the first of these with Ray.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import resource
import time
from pathlib import Path

import numpy as np
from refs_steps import steps

from mesh_core import Actor, Ref, configure, endpoint, put, this_host

MIB = 1 << 20


class Producer(Actor):
    """Makes parts of a batch."""

    @endpoint
    def make(self, size: int) -> np.ndarray:
        return np.ones(size, dtype="uint8")


class Trainer(Actor):
    """Reads them."""

    @endpoint
    def train(self, parts: list[Ref[np.ndarray]]) -> int:
        return sum(int(part.get()[:: 1 << 12].sum()) for part in parts)


async def passed(batch: int) -> dict[str, float]:
    """A batch from 4 producers to 2 trainers: how the script's memory grows, and how late its event loop is."""
    lags: list[float] = []

    async def watch() -> None:
        while True:
            begun = time.perf_counter()
            await asyncio.sleep(0.001)
            lags.append(time.perf_counter() - begun - 0.001)

    with this_host().spawn_procs({"gpus": 6}, preload=["numpy"]) as procs:
        producers = procs.slice(gpus=slice(0, 4)).spawn("producers", Producer)
        trainers = procs.slice(gpus=slice(4, None)).spawn("trainers", Trainer)
        await producers.make.with_options(keep=True).call(1 << 16)
        rss = resident()
        watching = asyncio.create_task(watch())
        begun = time.perf_counter()
        part, most = 64 * MIB, rss
        for _ in range(batch // (4 * part)):
            parts = (await producers.make.with_options(keep=True).call(part)).values()
            await trainers.train.call(parts)
            most = max(most, resident())
        took = time.perf_counter() - begun
        watching.cancel()
    lags.sort()
    return {
        "seconds": took,
        "script grew by MiB": (most - rss) / MIB,
        "loop lag p99 ms": 1000 * lags[int(len(lags) * 0.99)],
    }


def resident() -> int:
    """Bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batch-gib", type=float, default=4.0)
    options = parser.parse_args()
    configure(ref_budget=3 << 30)
    print(json.dumps(steps(options.mib, options.rounds, put, Ref.get), indent=1))
    gc.collect()
    if options.batch_gib:
        print(json.dumps(asyncio.run(passed(int(options.batch_gib * (1 << 30)))), indent=1))


if __name__ == "__main__":
    main()
