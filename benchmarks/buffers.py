"""Two examples on one host, in mesh, with Monarch's RDMABuffer and with Ray's object store, in turn.

    python benchmarks/buffers.py mesh=PYTHON monarch=PYTHON ray=PYTHON

Each is an interpreter that has the system; Monarch's needs torch, mesh's numpy, Ray's numpy. A step of the weight sync is what a
trainer and a generator do: the owner changes its weights, then the reader fetches all of them into memory of its own. A step of the
parameter server is that of a server and two workers: each worker gives its gradient to the server, which adds them to the weights, and
each fetches all weights. Values are checked in each step.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

SIZES = {"1 MiB": 1 << 20, "64 MiB": 64 << 20, "256 MiB": 256 << 20}
EXAMPLES = {"weight sync": "sync", "parameter server": "serve"}
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

def sync(size, steps):
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

class Server(Actor):
    def __init__(self, size):
        self.weights = np.zeros(size // 4, np.float32)
        self.gradients = [np.zeros_like(self.weights) for _ in range(2)]
        self.buffers = RDMABuffer(self.weights), [RDMABuffer(each) for each in self.gradients]
    @endpoint
    def handles(self):
        return self.buffers
    @endpoint
    def apply(self):
        for each in self.gradients:
            self.weights += each

class Worker(Actor):
    def __init__(self, size, server, rank):
        self.weights, self.gradient = np.zeros(size // 4, np.float32), np.ones(size // 4, np.float32)
        self.source, slots = server.handles.call_one().get()
        self.slot = slots[rank]
    @endpoint
    def push(self):
        self.slot.write_from(self.gradient).get()
    @endpoint
    def pull(self, value):
        self.source.read_into(self.weights).get()
        return self.weights[0] == self.weights[-1] == value

def serve(size, steps):
    procs = this_host().spawn_procs({"gpus": 3})
    server = procs.slice(gpus=0).spawn("server", Server, size)
    workers = [procs.slice(gpus=at + 1).spawn("worker", Worker, size, server, at) for at in range(2)]
    took = []
    for step in range(1, steps + 2):
        begun = time.perf_counter()
        for each in [worker.push.call_one() for worker in workers]:
            each.get()
        server.apply.call_one().get()
        assert all(each.get() for each in [worker.pull.call_one(2 * step) for worker in workers])
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

def sync(size, steps):
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

class Server(Actor):
    def __init__(self, size):
        self.weights = torch.zeros(size // 4)
        self.gradients = [torch.zeros(size // 4) for _ in range(2)]
    @endpoint
    async def handles(self):
        return [RDMABuffer(each.view(torch.uint8)) for each in (self.weights, *self.gradients)]
    @endpoint
    async def apply(self):
        for each in self.gradients:
            self.weights += each

class Worker(Actor):
    def __init__(self, size):
        self.weights, self.gradient = torch.zeros(size // 4), torch.ones(size // 4)
    @endpoint
    async def take(self, source, slot):
        self.source, self.slot = source, slot
    @endpoint
    async def push(self):
        await self.slot.write_from(self.gradient.view(torch.uint8), timeout=120)
    @endpoint
    async def pull(self, value):
        await self.source.read_into(self.weights.view(torch.uint8), timeout=120)
        return float(self.weights[0]) == float(self.weights[-1]) == value

def serve(size, steps):
    host = this_host()
    server = host.spawn_procs().spawn("server", Server, size)
    workers = [host.spawn_procs().spawn("worker", Worker, size) for _ in range(2)]
    source, *slots = server.handles.call_one().get()
    for worker, slot in zip(workers, slots):
        worker.take.call_one(source, slot).get()
    took = []
    for step in range(1, steps + 2):
        begun = time.perf_counter()
        for each in [worker.push.call_one() for worker in workers]:
            each.get()
        server.apply.call_one().get()
        assert all(each.get() for each in [worker.pull.call_one(2 * step) for worker in workers])
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

def sync(size, steps):
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

@ray.remote
class Server:
    def __init__(self, size):
        self.weights = np.zeros(size // 4, np.float32)
    def apply(self, refs):
        for each in ray.get(refs):
            self.weights += each
        return [ray.put(self.weights)]

@ray.remote
class Worker:
    def __init__(self, size):
        self.weights, self.gradient = np.zeros(size // 4, np.float32), np.ones(size // 4, np.float32)
    def push(self):
        return [ray.put(self.gradient)]
    def pull(self, refs, value):
        np.copyto(self.weights, ray.get(refs[0]))
        return self.weights[0] == self.weights[-1] == value

def serve(size, steps):
    ray.init(num_cpus=3, object_store_memory=3 << 30, logging_level=logging.ERROR, include_dashboard=False)
    server, workers = Server.remote(size), [Worker.remote(size) for _ in range(2)]
    took = []
    for step in range(1, steps + 2):
        begun = time.perf_counter()
        gradients = [refs[0] for refs in ray.get([worker.push.remote() for worker in workers])]
        weights = ray.get(server.apply.remote(gradients))
        assert all(ray.get([worker.pull.remote(weights, 2 * step) for worker in workers]))
        took.append(time.perf_counter() - begun)
    ray.shutdown()
    return took[1:]
"""

PROGRAMS = {"mesh": MESH, "monarch": MONARCH, "ray": RAY}


def seconds(system: str, python: str, example: str, size: int) -> list[float]:
    """Run a system's program; what each of its steps took."""
    last = (
        f"\nimport json, os\nprint('took', json.dumps({example}({size}, {STEPS})), flush=True)\nos._exit(0)\n"
    )
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
    ratios = " | ".join(f"{each} / mesh" for each in pythons if each != "mesh")
    print(f"| a step | size | {' | '.join(pythons)} | {ratios} |")
    for name, example in EXAMPLES.items():
        for label, size in SIZES.items():
            rounds: dict[str, list[float]] = {system: [] for system in pythons}
            for _ in range(ROUNDS):
                for system, python in pythons.items():
                    rounds[system].append(statistics.median(seconds(system, python, example, size)))
            took = {system: statistics.median(each) for system, each in rounds.items()}
            cells = [f"{1000 * each:.2f} ms" for each in took.values()]
            cells += [f"{each / took['mesh']:.1f}" for system, each in took.items() if system != "mesh"]
            print(f"| {name} | {label} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
