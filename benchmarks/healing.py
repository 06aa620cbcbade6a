"""What healing costs those that live, and how soon a killed actor answers again, beside Ray.

    python benchmarks/healing.py [--procs 64] [--kills 20] [--spares 5] [--preload numpy] [--ray PYTHON] [--json FILE]

One rank of `--procs` is killed again and again, and restarted by a policy. The others are called meanwhile, one after the other, each call
timed by its caller. Blocks without and with kills alternate, so that what else the machine does is in both. Ray's actor, with `max_restarts`,
is killed in the same way; both are timed from the signal to the first answer of the next process, by a caller that tries again and again.

A heal onto a spare host is timed with agents on this machine: from the news that a host is dead to the answers of all ranks, with a spare that has
never run anything, and with one that was prepared. `--preload` says what processes import.
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

from mesh_core import Actor, SupervisionError, Undeliverable, endpoint, inspect, this_host
from mesh_core.testing import LocalCluster
from mesh_supervision import Ignore, OneForOne, heal_mesh

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


def renewed(one: Any, happening: inspect.Events) -> float:
    """The same, as a caller sees it that waits until it hears that the actor was made again.

    One that tries again and again keeps the script's interpreter busy with errors, and the other callers in it wait for that.
    """
    before = one.pid.call_one().get(timeout=60)
    begun = time.perf_counter()
    os.kill(before, signal.SIGKILL)
    while (event := happening.get(timeout=60)) is None or event.kind != "actor_created":
        pass
    assert one.pid.call_one().get(timeout=60) != before
    return 1000 * (time.perf_counter() - begun)


def beside(count: int, kills: int, *, heard: bool = True) -> dict[str, Any]:
    """Milliseconds that calls to living ranks take, with and without another one being healed.

    Whoever waits for that one waits for the news, or else tries again and again.
    """
    policy = OneForOne(intensity=10 * kills, period=3600.0)
    calm: list[float] = []
    healing: list[float] = []
    took: list[float] = []
    with (
        this_host().spawn_procs({"gpus": count}, supervise=Ignore()) as procs,
        inspect.events() as happening,
    ):
        workers: Any = procs.spawn("workers", Worker, supervise=policy)
        workers.pid.call().get(timeout=120)
        while (event := happening.get(timeout=1.0)) is not None:
            assert event.kind != "failure"  # they tell of their beginnings
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
                took.append(renewed(last, happening) if heard else replaced(last))
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


def costs(count: int, kills: int) -> dict[str, Any]:
    """Milliseconds of the processor for a heal, by who uses them: the machine's load changes little about these.

    The first heal of a job stands apart from the median of the others.
    """
    policy = OneForOne(intensity=10 * kills, period=3600.0)
    used: dict[str, list[float]] = {}
    with (
        this_host().spawn_procs({"gpus": count}, supervise=Ignore()) as procs,
        inspect.events() as happening,
    ):
        workers: Any = procs.spawn("workers", Worker, supervise=policy)
        pids = [pid for _, pid in workers.pid.call().get(timeout=120)]
        while happening.get(timeout=1.0) is not None:
            pass
        siblings, fork_server = pids[:-1], parent(pids[0])
        last = workers.slice(gpus=count - 1)

        def clocks() -> dict[str, float]:
            of_threads = {f"script, {name}": of_thread(tid) for tid, name in names().items()}
            others = {"siblings": sum(map(of_process, siblings)), "fork server": of_process(fork_server)}
            return of_threads | others

        for _ in range(kills):
            before = clocks()
            renewed(last, happening)
            time.sleep(0.05)  # what comes after the answer counts too
            for name, now in clocks().items():
                used.setdefault(name, []).append(1000 * (now - before.get(name, 0.0)))
            new = last.pid.call_one().get(timeout=60)
            used.setdefault("new process", []).append(1000 * of_process(new))
    return {
        name: {"first ms": round(took[0], 3), "p50 ms": round(statistics.median(took[1:]), 3)}
        for name, took in used.items()
    }


def names() -> dict[int, str]:
    """The threads of this process."""
    found = {
        int(each.name): (each / "comm").read_text().strip() for each in Path("/proc/self/task").iterdir()
    }
    return found | {each.native_id: each.name for each in threading.enumerate() if each.native_id}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def of_process(pid: int) -> float:
    """Seconds of the processor that a process has had, to the nanosecond; as clock_getcpuclockid(3) makes the clock."""
    return time.clock_gettime((~pid << 3) | 2)


def of_thread(tid: int) -> float:
    return time.clock_gettime((~tid << 3) | 6)


def onto_spare(times: int, preload: list[str], *, warm: bool) -> list[float]:
    """Milliseconds for a heal of two ranks, of which one was on a host that is dead."""
    took = []
    for _ in range(times):
        with LocalCluster(3) as cluster:
            hosts = cluster.attach()
            hosts.initialized.get(timeout=120)
            spare = hosts.slice(hosts=2)
            procs = hosts.slice(hosts=slice(0, 2)).spawn_procs(preload=preload, supervise=Ignore())
            workers: Any = procs.spawn("workers", Worker, supervise=Ignore())
            workers.pid.call().get(timeout=300)
            if warm:
                procs.prepare(spare).get(timeout=300)
            cluster.kill(0)
            while not procs.failed():
                time.sleep(0.001)
            begun = time.perf_counter()
            heal_mesh(workers, on=spare, timeout=300).pid.call().get(timeout=60)
            took.append(1000 * (time.perf_counter() - begun))
    return took


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
    parser.add_argument("--spares", type=int, default=5, help="heals onto spare hosts, of each kind")
    parser.add_argument("--preload", default="numpy", help="modules that processes import, joined by commas")
    parser.add_argument("--ray", metavar="PYTHON", help="an interpreter with Ray")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    figures: dict[str, Any] = {"machine": describe(), "load": os.getloadavg()}
    figures[f"calls beside the healing of 1 of {args.procs}"] = beside(args.procs, args.kills)
    figures["the same beside a thread that calls the dead one again and again"] = beside(
        args.procs, args.kills, heard=False
    )
    figures[f"processor time of the healing of 1 of {args.procs}"] = costs(args.procs, args.kills)
    mesh = restarts(args.kills)
    figures["killed until answered, mesh"] = spread(mesh)
    spares = {
        name: onto_spare(args.spares, args.preload.split(","), warm=name == "warm")
        for name in ("cold", "warm")
    }
    figures |= {f"heal onto a {name} spare, {args.preload}": spread(took) for name, took in spares.items()}
    figures["cold / warm, medians"] = statistics.median(spares["cold"]) / statistics.median(spares["warm"])
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
