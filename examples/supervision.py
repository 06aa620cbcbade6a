"""Workers crash at random, their owner replaces them, and the work gets done: `--seconds 60` to watch it for a minute.

Whoever spawns, owns: `__supervise__` of the foreman hears of the end of each worker, whether it was killed, left, or
raised where nobody waited. What the dead had under way raises in the foreman's own call, which gives it to another.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import signal
import time
from collections import Counter

from mesh_core import Actor, HostMesh, MeshError, MeshFailure, ProcMesh, endpoint, this_host

WORKERS, BLOCK = 3, 400_000


class Worker(Actor):
    def __init__(self, number: int) -> None:
        self.dice = random.Random(number)

    @endpoint
    def add_up(self, block: int) -> int:
        total = sum(range(block * BLOCK, (block + 1) * BLOCK))
        if self.dice.random() < 0.015:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.dice.random() < 0.015:
            os._exit(3)
        return total

    @endpoint
    def tidy_up(self) -> None:
        if self.dice.random() < 0.015:
            raise RuntimeError("stumbled over a number")


class Foreman(Actor):
    def __init__(self, hosts: HostMesh) -> None:
        self.places = itertools.cycle([host for _, host in hosts])
        self.numbers = itertools.count(1)
        self.procs: dict[str, ProcMesh] = {}
        self.free: asyncio.Queue[Worker] = asyncio.Queue()
        self.lost: Counter[str] = Counter()
        for _ in range(WORKERS):
            self.hire(next(self.numbers))

    def hire(self, number: int) -> None:
        name = f"worker {number}"
        self.procs[name] = next(self.places).spawn_procs(name=name)
        self.free.put_nowait(self.procs[name].spawn(name, Worker, number))

    def __supervise__(self, failure: MeshFailure) -> bool:
        """A worker has died or failed: replace it. True says that nobody else need hear of it."""
        self.lost["exception" if failure.exception else "signal" if failure.signal else "exit"] += 1
        self.procs.pop(failure.mesh_name).stop()  # one that has raised leaves its process behind
        self.hire(next(self.numbers))
        return True

    @endpoint(concurrent=True)
    async def run(self, seconds: float) -> tuple[dict[int, int], Counter[str]]:
        """Have blocks added up for so long; return their sums, and how workers were lost meanwhile."""
        until = time.monotonic() + seconds
        blocks = itertools.takewhile(lambda _: time.monotonic() < until, itertools.count())
        sums: dict[int, int] = {}

        async def take_turns() -> None:
            for block in blocks:
                while block not in sums:  # given to one worker after another, until one lives to tell the sum
                    worker = await self.free.get()
                    try:
                        sums[block] = await worker.add_up.call_one(block)
                    except MeshError:
                        continue  # `__supervise__` hears of it as well, and hires the next
                    worker.tidy_up.broadcast()
                    self.free.put_nowait(worker)

        await asyncio.gather(*(take_turns() for _ in range(WORKERS)))
        return sums, self.lost


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--seconds", type=float, default=2.0)
    seconds = options.parse_args().seconds
    with this_host().spawn_procs(name="office") as office:
        foreman = office.spawn("foreman", Foreman, this_host())
        sums, lost = foreman.run.call_one(seconds).get(timeout=seconds + 30)
    print(f"lost {lost.total()} workers:", ", ".join(f"{lost[how]} by {how}" for how in sorted(lost)))
    n, total = len(sums) * BLOCK, sum(sums.values())
    print(f"added up {len(sums)} blocks, and the sum is {'right' if total == n * (n - 1) // 2 else 'wrong'}")


if __name__ == "__main__":
    main()
