"""What it costs to move tensors between meshes and to give them to actors: `python benchmarks/moving.py [--json FILE]`.

It needs mesh-core, mesh-tensor and PyTorch in its environment. Each transfer is timed to its end: a value that depends on it is fetched. Beside it, in the
same round, a plain copy of as many bytes in one process, into memory that is there and into new memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mesh_core import Actor, ProcMesh, endpoint, this_host
from mesh_tensor import fetch_shard, share, to_mesh

SIZE = 64 << 20
ROUNDS = 9
SMALL = 300


class Taker(Actor):
    """Looks at one number of what it is given."""

    @endpoint
    def take(self, tensor: torch.Tensor) -> float:
        return float(tensor.view(-1)[0])


def clock(work: Callable[[], object]) -> float:
    """Milliseconds."""
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def large(first: ProcMesh, second: ProcMesh) -> dict[str, float]:
    """64 MiB from one process to another, and to an actor of the same process."""
    there = share(torch.zeros(SIZE // 4), first)
    source, target = torch.zeros(SIZE // 4), torch.zeros(SIZE // 4)
    taker = first.spawn("taker", Taker)
    works: dict[str, Callable[[], object]] = {
        "plain copy ms": lambda: target.copy_(source),
        "copy into new memory ms": source.clone,
        "to_mesh ms": lambda: fetch_shard(to_mesh(there, second)[:1]),
        "argument of an actor ms": lambda: taker.take.call_one(there).get(),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS + 1):
        for name, work in works.items():
            times[name].append(clock(work))
    found = {name: statistics.median(each[1:]) for name, each in times.items()}
    found["to_mesh / plain copy"] = found["to_mesh ms"] / found["plain copy ms"]
    found["to_mesh / copy into new memory"] = found["to_mesh ms"] / found["copy into new memory ms"]
    return found


def small(first: ProcMesh, second: ProcMesh) -> dict[str, float]:
    """The script's own time for a tensor of one number."""
    there = share(torch.zeros(1), first)
    found = to_mesh(there, second)
    fetch_shard(found)

    def moved() -> float:
        nonlocal found
        begin = time.thread_time()
        for _ in range(SMALL):
            found = to_mesh(there, second)
        spent = time.thread_time() - begin
        fetch_shard(found)
        return spent / SMALL * 1e6

    return {"script us of to_mesh": statistics.median(moved() for _ in range(5))}


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {"load before": os.getloadavg()[0]}
    with this_host().spawn_procs({"stage": 2}, preload=["torch"], env={"OMP_NUM_THREADS": "1"}) as procs:
        first, second = procs.slice(stage=0), procs.slice(stage=1)
        found["64 MiB"] = large(first, second)
        found["4 bytes"] = small(first, second)
    found["load after"] = os.getloadavg()[0]
    text = json.dumps(found, indent=1)
    print(text)
    if asked.json:
        asked.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
