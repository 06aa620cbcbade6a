"""Short pieces of work that two versions do in turn: `python -m meshbench.slices SYSTEM`, driven over stdin by `duel.py`.

A line `begin ITEM` makes what the item needs, `slice` measures it once and answers with a number, `end` clears up.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from time import perf_counter
from typing import Any

from meshbench.adapter import load
from meshbench.catalogue import ITEMS, LINES_PER_SECOND, TENSOR_BYTES, Scale, over, running
from meshbench.processes import pss_bytes
from meshbench.timing import quantile


@dataclass(frozen=True)
class Slice:
    """One piece of work; less of what it gives is better."""

    unit: str
    factor: float
    """From what `run` gives to the unit."""
    run: Callable[[Any], float]
    """What is measured; times in seconds."""
    procs: int = 0
    hosts: int = 0
    slices: int = 40
    """How often each version does it, unless told otherwise."""

    def running(self, system: Any) -> AbstractContextManager[None]:
        """Have what it needs."""
        if self.hosts:
            return over(system, self.hosts, self.procs)
        return running(system, self.procs) if self.procs else nullcontext()


def _tensor(system: Any) -> float:
    data = import_module("numpy").ones(TENSOR_BYTES // 4, dtype="float32")
    return _median(system.tensor(data, 4))


def _spawn(system: Any) -> float:
    start = perf_counter()
    system.start(32)
    taken = perf_counter() - start
    system.close()
    return taken


def _import(system: Any) -> float:
    return _median(ITEMS["import"].run(system, Scale(quick=True))["import_names"]) / 1e3


def _memory(system: Any) -> float:
    # In MB, not in seconds.
    return sum(map(pss_bytes, system.pids())) / 8 / 1e6


def _beside_lines(system: Any) -> float:
    return _median(system.calls_beside_lines(0.5, LINES_PER_SECOND, True))


def _median(seconds: list[float]) -> float:
    return quantile(seconds, 0.5)


SLICES: Mapping[str, Slice] = {
    "call_sync": Slice("µs", 1e6, lambda system: _median(system.call_sync(500)), procs=1),
    "call_async": Slice("µs", 1e6, lambda system: _median(system.call_async(300)), procs=1),
    "pipelined": Slice("µs", 1e6, lambda system: system.pipelined(2000) / 2000, procs=1),
    "call_8": Slice("µs", 1e6, lambda system: _median(system.call_all(60)), procs=8),
    "call_32": Slice("µs", 1e6, lambda system: _median(system.call_all(20)), procs=32),
    "promise": Slice("µs", 1e6, lambda system: system.promises(5000) / 5000),
    "broadcast_2": Slice("µs", 1e6, lambda system: system.broadcast(2000) / 2000, procs=2),
    "tensor": Slice("ms", 1e3, _tensor, procs=1, slices=20),
    "pool": Slice("µs", 1e6, lambda system: system.pool_tasks(1000) / 1000, procs=8),
    "submit": Slice("µs", 1e6, lambda system: system.submitted(1000) / 1000, procs=8),
    "channel": Slice("µs", 1e6, lambda system: system.channel(1000) / 1000, procs=1),
    "queue": Slice("µs", 1e6, lambda system: system.queued(1000) / 1000, procs=1),
    "refs": Slice("µs", 1e6, lambda system: system.refs(1000) / 1000, procs=1),
    "procs_1000": Slice("s", 1, lambda system: system.many_procs(1000)[0], slices=2),
    "spawn_32": Slice("s", 1, _spawn, slices=8),
    "actors_3000": Slice("s", 1, lambda system: system.many_actors(3000)[0], slices=8),
    "memory": Slice("MB", 1, _memory, procs=8, slices=4),
    "import": Slice("ms", 1e3, _import, slices=8),
    "log_call": Slice("µs", 1e6, _beside_lines, slices=8),
    "kill_detection": Slice("ms", 1e3, lambda system: _median(system.kill_detection(3)), slices=10),
    "hosts_call": Slice("µs", 1e6, lambda system: _median(system.host_call(300)), procs=1, hosts=1),
}
"""By the name that `duel.py --only` takes."""


def main() -> None:
    """Do what stdin says."""
    answer = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    system = load(sys.argv[1])
    for line in sys.stdin:
        word, _, item = line.strip().partition(" ")
        if word != "begin":
            raise SystemExit(f"expected `begin ITEM`, got {line!r}")
        work = SLICES[item]
        with work.running(system):
            print("ready", file=answer)
            while sys.stdin.readline().strip() == "slice":
                print(work.run(system) * work.factor, file=answer)
        print("ended", file=answer)


if __name__ == "__main__":
    main()
