"""An actor's weights read into the memory of another actor, on one host: mesh, Monarch's RDMABuffer, Ray's object store.

    python benchmarks/buffers.py mesh=PYTHON monarch=PYTHON ray=PYTHON

Each is an interpreter that has the system; Monarch's needs torch, mesh's numpy, Ray's numpy. The systems take turns. A step is what a
trainer and a generator do: the owner changes its weights, then the reader fetches all of them into memory of its own.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

SIZES = {"1 MiB": 1 << 20, "64 MiB": 64 << 20, "256 MiB": 256 << 20}
ROUNDS = 3
STEPS = 7
_LIMIT_S = 300.0

MESH = """
import time
import numpy as np
from mesh_core import Actor, endpoint, shutdown, this_host
from mesh_rdma import RDMABuffer

class Owner(Actor):
    def __init__(self, size):
        self.weights = np.ones(size, np.uint8)
        self.buffer = RDMABuffer(self.weights)
    @endpoint
    def handle(self):
        return self.buffer
    @endpoint
    def change(self, value):
        self.weights[:] = value

class Reader(Actor):
    def __init__(self, size, owner):
        self.weights = np.zeros(size, np.uint8)
        self.buffer = owner.handle.call_one().get()
    @endpoint
    def fetch(self, value):
        self.buffer.read_into(self.weights).get()
        return int(self.weights[0]) == int(self.weights[-1]) == value

def run(size, steps):
    procs = this_host().spawn_procs({"gpus": 2})
    owner = procs.slice(gpus=0).spawn("owner", Owner, size)
    reader = procs.slice(gpus=1).spawn("reader", Reader, size, owner)
    took = []
    for value in range(2, steps + 3):
        owner.change.call_one(value).get()
        begun = time.perf_counter()
        assert reader.fetch.call_one(value).get()
        took.append(time.perf_counter() - begun)
    procs.stop().get()
    return took[1:]
"""

MONARCH = """
import time
import torch
from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer

class Owner(Actor):
    def __init__(self, size):
        self.weights = torch.ones(size, dtype=torch.uint8)
        self.buffer = None
    @endpoint
    async def handle(self):
        self.buffer = RDMABuffer(self.weights)
        return self.buffer
    @endpoint
    async def change(self, value):
        self.weights[:] = value

class Reader(Actor):
    def __init__(self, size):
        self.weights = torch.zeros(size, dtype=torch.uint8)
    @endpoint
    async def take(self, buffer):
        self.buffer = buffer
    @endpoint
    async def fetch(self, value):
        await self.buffer.read_into(self.weights, timeout=120)
        return int(self.weights[0]) == int(self.weights[-1]) == value

def run(size, steps):
    host = this_host()
    owner = host.spawn_procs().spawn("owner", Owner, size)
    reader = host.spawn_procs().spawn("reader", Reader, size)
    reader.take.call_one(owner.handle.call_one().get()).get()
    took = []
    for value in range(2, steps + 3):
        owner.change.call_one(value).get()
        begun = time.perf_counter()
        assert reader.fetch.call_one(value).get()
        took.append(time.perf_counter() - begun)
    return took[1:]
"""

RAY = """
import logging
import time
import numpy as np
import ray

@ray.remote
class Owner:
    def __init__(self, size):
        self.weights = np.ones(size, np.uint8)
    def change(self, value):
        self.weights[:] = value
    def put(self):
        return [ray.put(self.weights)]

@ray.remote
class Reader:
    def __init__(self, size):
        self.weights = np.zeros(size, np.uint8)
    def fetch(self, refs, value):
        np.copyto(self.weights, ray.get(refs[0]))
        return int(self.weights[0]) == int(self.weights[-1]) == value

def run(size, steps):
    ray.init(num_cpus=2, object_store_memory=2 << 30, logging_level=logging.ERROR, include_dashboard=False)
    owner, reader = Owner.remote(size), Reader.remote(size)
    took = []
    for value in range(2, steps + 3):
        ray.get(owner.change.remote(value))
        begun = time.perf_counter()
        # The store's copy is of the moment: it is made at each step.
        assert ray.get(reader.fetch.remote(ray.get(owner.put.remote()), value))
        took.append(time.perf_counter() - begun)
    ray.shutdown()
    return took[1:]
"""

PROGRAMS = {"mesh": MESH, "monarch": MONARCH, "ray": RAY}


def seconds(system: str, python: str, size: int) -> list[float]:
    """Run a system's program; what each of its steps took."""
    last = f"\nimport json, os\nprint('took', json.dumps(run({size}, {STEPS})), flush=True)\nos._exit(0)\n"
    done = subprocess.run(
        [python, "-c", PROGRAMS[system] + last], capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("took "):
            steps: list[float] = json.loads(line.removeprefix("took "))
            return steps
    raise SystemExit(f"{system} did not finish: {done.stderr[-2000:]}")


def main(arguments: list[str]) -> None:
    pythons = dict(each.split("=", 1) for each in arguments)
    for system, python in pythons.items():
        if system not in PROGRAMS or not Path(python).exists():
            raise SystemExit(f"{system}: must be one of {', '.join(PROGRAMS)}, with an interpreter")
    print(
        f"| a step | {' | '.join(pythons)} | {' | '.join(f'{each} / mesh' for each in pythons if each != 'mesh')} |"
    )
    for label, size in SIZES.items():
        rounds: dict[str, list[float]] = {system: [] for system in pythons}
        for _ in range(ROUNDS):
            for system, python in pythons.items():
                rounds[system].append(statistics.median(seconds(system, python, size)))
        took = {system: statistics.median(each) for system, each in rounds.items()}
        cells = [f"{1000 * each:.2f} ms" for each in took.values()]
        cells += [f"{each / took['mesh']:.1f}" for system, each in took.items() if system != "mesh"]
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
