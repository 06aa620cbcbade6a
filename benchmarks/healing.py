"""What healing costs those that live, and how soon a killed actor answers again, beside Ray.

    python benchmarks/healing.py [--procs 64] [--kills 20] [--ray PYTHON] [--json FILE]

One rank of `--procs` is killed again and again, and restarted by a policy. The others are called meanwhile, one after the other, each call
timed by its caller. Blocks without and with kills alternate, so that what else the machine does is in both. Ray's actor, with `max_restarts`,
is killed in the same way; both are timed from the signal to the first answer of the next process, by a caller that tries again and again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from meshbench.machine import describe

from mesh_core import Actor, SupervisionError, Undeliverable, endpoint, this_host
from mesh_supervision import Ignore, OneForOne

RAY = """
import json, os, signal, sys, time
import ray
from ray.exceptions import RayActorError

@ray.remote(max_restarts=-1, num_cpus=0)
class Worker:
    def pid(self):
        return os.getpid()

ray.init(num_cpus=2, logging_level="ERROR", include_dashboard=False, log_to_driver=False)
worker = Worker.remote()
took = []
for _ in range(int(sys.argv[1])):
    before = ray.get(worker.pid.remote())
    begun = time.perf_counter()
    os.kill(before, signal.SIGKILL)
    while True:
        try:
            if ray.get(worker.pid.remote()) != before:
                break
        except RayActorError:
            time.sleep(0.0005)
    took.append(1000 * (time.perf_counter() - begun))
ray.shutdown()
print(json.dumps(took))
"""


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


def replaced(one: Any) -> float:
    """Milliseconds from the signal that kills an actor's process to the answer of the next one."""
    before = one.pid.call_one().get(timeout=60)
    begun = time.perf_counter()
    os.kill(before, signal.SIGKILL)
    while True:
        try:
            if one.pid.call_one().get(timeout=60) != before:
                return 1000 * (time.perf_counter() - begun)
        except (SupervisionError, Undeliverable):
            time.sleep(0.0005)  # as a caller would, who leaves the processor to the others


def beside(count: int, kills: int) -> dict[str, Any]:
    """Milliseconds that calls to living ranks take, with and without another one being healed."""
    policy = OneForOne(intensity=10 * kills, period=3600.0)
    calm: list[float] = []
    healing: list[float] = []
    took: list[float] = []
    with this_host().spawn_procs({"gpus": count}, supervise=Ignore()) as procs:
        workers: Any = procs.spawn("workers", Worker, supervise=policy)
        workers.pid.call().get(timeout=120)
        others = [workers.slice(gpus=rank) for rank in range(count - 1)]
        last = workers.slice(gpus=count - 1)

        def measure(into: list[float], until: threading.Event | float) -> None:
            place = 0
            while not until.is_set() if isinstance(until, threading.Event) else time.perf_counter() < until:
                begun = time.perf_counter()
                others[place].pid.call_one().get(timeout=60)
                into.append(1000 * (time.perf_counter() - begun))
                place = (place + 1) % len(others)

        measure([], time.perf_counter() + 1.0)
        for _ in range(kills):
            done = threading.Event()

            def heal(done: threading.Event = done) -> None:
                took.append(replaced(last))
                done.set()

            thread = threading.Thread(target=heal)
            begun = time.perf_counter()
            thread.start()
            measure(healing, done)
            thread.join()
            # As long without one.
            measure(calm, time.perf_counter() + time.perf_counter() - begun)
    return {
        "calm": spread(calm),
        "while one is healed": spread(healing),
        "p99 later by, ms": spread(healing)["p99 ms"] - spread(calm)["p99 ms"],
        "the heal itself": spread(took),
    }


def spread(took: list[float]) -> dict[str, float]:
    took = sorted(took)
    return {
        "count": len(took),
        "p50 ms": statistics.median(took),
        "p90 ms": took[int(len(took) * 0.9)],
        "p99 ms": took[int(len(took) * 0.99)],
        "max ms": took[-1],
    }


def restarts(kills: int) -> list[float]:
    """Milliseconds until one of four actors has answered again."""
    with this_host().spawn_procs({"gpus": 4}, supervise=Ignore()) as procs:
        workers: Any = procs.spawn(
            "workers", Worker, supervise=OneForOne(intensity=10 * kills, period=3600.0)
        )
        workers.pid.call().get(timeout=60)
        return [replaced(workers.slice(gpus=1)) for _ in range(kills)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--procs", type=int, default=64)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ray", metavar="PYTHON", help="an interpreter with Ray")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {"machine": describe(), "load": os.getloadavg()}
    figures[f"calls beside the healing of 1 of {args.procs}"] = beside(args.procs, args.kills)
    mesh = restarts(args.kills)
    figures["killed until answered, mesh"] = spread(mesh)
    if args.ray:
        done = subprocess.run(
            [args.ray, "-c", RAY, str(args.kills)], stdout=subprocess.PIPE, check=True, text=True, timeout=900
        )
        ray = json.loads(done.stdout.splitlines()[-1])
        figures["killed until answered, Ray"] = spread(ray)
        figures["Ray / mesh, medians"] = statistics.median(ray) / statistics.median(mesh)
    text = json.dumps(figures, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
