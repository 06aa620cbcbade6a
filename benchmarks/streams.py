"""What a second stream gains, and what a loan costs: `python benchmarks/streams.py [--json FILE]`.

Processes compute for some time, are in a reduction, and compute again. In the first case all processors compute all the time; in the second
each process is the slower one in turn, so that the others wait for it in the reduction; in the third the reduction itself waits, as for a slow network (a sleep stands for
it). In order, and with the reduction on a stream of its own, in turn; medians. Needs mesh-core, mesh-tensor and PyTorch.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from mesh_core import ProcMesh, this_host
from mesh_tensor import Stream, activate, fetch_shard, rank_tensor, reduce, remote

ROUNDS, STEPS = 7, 10
LOANS = 2_000
SIZE = 1 << 20


@remote
def work(x: Any, rank: Any, turns: tuple[int, ...]) -> Any:
    """Multiply matrices, on each process so often."""
    turn = turns[int(rank)] if type(rank) is torch.Tensor else 0
    for _ in range(turn):
        x = (x @ x).clamp(-1, 1)
    return x + 0


@remote
def late(x: Any, seconds: float) -> Any:
    """Wait as for a network, without a processor."""
    if type(x) is torch.Tensor:
        time.sleep(seconds)
    return x + 0


def timed(procs: ProcMesh, turns: Any, delay: float, comm: Stream | None) -> float:
    """Milliseconds of a step."""
    with activate(procs):
        x, big, rank = torch.eye(256), torch.ones(SIZE), rank_tensor(procs, "gpus")

        def run() -> None:
            here = x
            for _ in range(STEPS):
                here = work(here, rank, turns[0])
                gradient = big + here[0, 0]
                if comm is None:
                    total = reduce(late(gradient, delay) if delay else gradient)
                    here = work(here, rank, turns[1])
                    here = here + total[0] * 0
                else:
                    lent, borrow = comm.borrow(gradient, mutable=True)
                    with comm.activate():
                        lent.copy_(reduce(late(lent, delay) if delay else lent))
                    here = work(here, rank, turns[1])
                    borrow.drop()
                    here = here + gradient[0] * 0
            fetch_shard(here[0, 0])

        run()
        begin = time.perf_counter()
        run()
        return (time.perf_counter() - begin) / STEPS * 1e3


def loans(procs: ProcMesh) -> float:
    """Microseconds of a loan and its end, carried out."""
    comm = Stream("loans")
    with activate(procs):
        x = torch.ones(8)

        def run() -> float:
            begin = time.perf_counter()
            for _ in range(LOANS):
                _, borrow = comm.borrow(x)
                borrow.drop()
            fetch_shard(x + 1)
            return (time.perf_counter() - begin) / LOANS * 1e6

        run()
        return statistics.median(run() for _ in range(5))


def main() -> None:
    """All of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    cases: dict[str, tuple[Any, float]] = {
        "all compute all the time": (((4, 4), (4, 4)), 0.0),
        "each is the slower one in turn": (((8, 1), (1, 8)), 0.0),
        "the reduction waits 10 ms": (((4, 4), (4, 4)), 0.01),
    }
    found: dict[str, Any] = {"load before": os.getloadavg()[0]}
    comm = Stream("comm")
    with this_host().spawn_procs({"gpus": 2}, preload=["torch"], env={"OMP_NUM_THREADS": "1"}) as procs:
        for name, (turns, delay) in cases.items():
            one: list[float] = []
            two: list[float] = []
            for _ in range(ROUNDS):
                one.append(timed(procs, turns, delay, None))
                two.append(timed(procs, turns, delay, comm))
            found[name] = {
                "in order ms": statistics.median(one),
                "two streams ms": statistics.median(two),
                "times as fast": statistics.median([a / b for a, b in zip(one, two, strict=True)]),
            }
        found["a loan and its end us"] = loans(procs)
    found["load after"] = os.getloadavg()[0]
    text = json.dumps(found, indent=1)
    print(text)
    if asked.json:
        asked.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
