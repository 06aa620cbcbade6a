"""What policies cost: decisions per second, and how soon a killed process is replaced.

    python benchmarks/supervision.py [--events 200000] [--deaths 60]

Decisions are those of the public protocol, `on` and `on_repair`, in one thread; given by the wall and by the processor, which
differ on a machine that does other things. A replacement is timed from the signal to the answer of the first call that the new
process answers, as a caller sees it that tries again and again. With `--heal` also what a heal costs: of four replicas, and, where
PyTorch is installed, how soon survivors leave a collective and how long a group takes to be formed again.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from meshbench.machine import describe

from mesh_core import Actor, FailureKind, MeshFailure, SupervisionError, Undeliverable, endpoint, this_host
from mesh_core.policies import Event, Failed, Policy, Repaired, RepairEvent, Restart
from mesh_supervision import (
    Backoff,
    ByKind,
    Ignore,
    Levels,
    OneForAll,
    OneForOne,
    form_group,
    heal_mesh,
    keep_snapshots,
)

RANKS = 8
ROUNDS = 7


def failures(count: int) -> list[Failed]:
    """As they come: each another, of one rank after the other."""
    ranks = itertools.islice(itertools.cycle(range(RANKS)), count)
    return [Failed("workers", n, FailureKind.KILLED, MeshFailure(rank=n, signal=9)) for n in ranks]


def told(policy: Policy, events: Sequence[Event | RepairEvent]) -> tuple[float, float]:
    """Seconds, by the wall and by the processor, for a policy to be told these events, one a second."""
    now, any_policy = 0.0, policy
    wall, processor = time.perf_counter(), time.process_time()
    for event in events:
        now += 1.0
        if isinstance(event, Repaired):
            any_policy, _ = any_policy.on_repair(event, now)  # type: ignore[attr-defined]
        else:
            any_policy, _ = any_policy.on(event, now)  # type: ignore[arg-type]
    return time.perf_counter() - wall, time.process_time() - processor


def restarts(count: int, ranks: Callable[[int], tuple[int, ...]]) -> list[Event | RepairEvent]:
    """Failures, each followed by the news that its restart has succeeded."""
    repaired = {n: Repaired("workers", (Restart(ranks(n)),)) for n in range(RANKS)}
    return [each for f in failures(count // 2) for each in (f, repaired[f.rank or 0])]


def decisions(count: int) -> dict[str, Any]:
    """Events per second for each kind of policy."""
    one = OneForOne(intensity=3, period=4.0)
    whole = tuple(range(RANKS))
    single = restarts(count, lambda n: (n,))
    cases: dict[str, tuple[Policy, Sequence[Event | RepairEvent]]] = {
        "ignore": (Ignore(), failures(count)),
        "one_for_one, temporary ranks": (OneForOne(intensity=3, period=4.0, restart="temporary"), failures(count)),
        "one_for_one": (one, single),
        "one_for_one, with backoff": (
            OneForOne(intensity=3, period=4.0, backoff=Backoff(free=3)), single
        ),
        "one_for_all": (
            OneForAll(intensity=3, period=4.0, size=RANKS, settle=0.0),
            restarts(count, lambda n: whole),
        ),
        "levels of one_for_one and one_for_all": (
            Levels(one, OneForAll(intensity=3, period=60.0)), single
        ),
        "by kind, one_for_one": (ByKind({}, otherwise=one), single),
    }  # fmt: skip
    figures = {}
    for name, (policy, events) in cases.items():
        rounds = [told(policy, events) for _ in range(ROUNDS)]
        figures[name] = {
            "events per second": round(len(events) / statistics.median(wall for wall, _ in rounds)),
            "best of the rounds": round(len(events) / min(wall for wall, _ in rounds)),
            "per second of the processor": round(
                len(events) / statistics.median(processor for _, processor in rounds)
            ),
        }
    return figures


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Kept(Worker):
    """Has a state that is kept."""

    def __init__(self) -> None:
        self.state = bytes(1 << 20)

    def __snapshot__(self) -> bytes:
        return self.state

    def __restore__(self, state: bytes) -> None:
        self.state = state

    @endpoint
    def wait(self) -> None:
        """Wait in a collective for ranks that are not in it."""
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.zeros(1))


def replaced(policy: Policy, deaths: int, cls: Any = Worker) -> dict[str, float]:
    """Milliseconds from the signal that kills rank 1 of 4 to the answer of its replacement."""
    took = []
    with this_host().spawn_procs({"gpus": 4}) as procs:
        workers: Any = procs.spawn("workers", cls, supervise=policy)
        workers.pid.call().get(timeout=30)
        last = workers.slice(gpus=1)
        for _ in range(deaths):
            before = last.pid.call_one().get(timeout=30)
            begun = time.perf_counter()
            os.kill(before, signal.SIGKILL)
            while True:
                try:
                    if last.pid.call_one().get(timeout=30) != before:
                        break
                except (SupervisionError, Undeliverable):
                    time.sleep(0.0005)  # as a caller would, who leaves the processor to the others
            took.append(1000 * (time.perf_counter() - begun))
    return spread(took)


def healed(deaths: int) -> dict[str, Any]:
    """Milliseconds from the signal that kills rank 1 of 4 replicas to the answer of all, healed."""
    took = []
    with this_host().spawn_procs({"gpus": 4}, supervise=Ignore()) as procs:
        replicas: Any = procs.spawn("replicas", Kept, supervise=Ignore())
        pids = replicas.pid.call().get(timeout=30).values()
        for _ in range(deaths):
            begun = time.perf_counter()
            os.kill(pids[1], signal.SIGKILL)
            while not procs.failed():
                time.sleep(0.0005)
            pids = heal_mesh(replicas).pid.call().get(timeout=30).values()
            took.append(1000 * (time.perf_counter() - begun))
    return spread(took)


def grouped(deaths: int) -> dict[str, Any]:
    """Milliseconds until two survivors have left a collective with a third that lives, and for a group to be formed again."""
    left, formed, whole = [], [], []
    env = {"OMP_NUM_THREADS": "1"}
    with this_host().spawn_procs({"gpus": 4}, env=env, preload=["torch"], supervise=Ignore()) as procs:
        procs.initialized.get(timeout=120)
        group = form_group(procs)
        replicas: Any = procs.spawn("replicas", Kept, supervise=Ignore())
        pids = replicas.pid.call().get(timeout=30).values()
        for _ in range(deaths):
            waiting = [replicas.slice(gpus=rank).wait.call_one() for rank in (0, 2)]
            time.sleep(0.2)  # they wait for rank 3, which is idle
            begun = time.perf_counter()
            os.kill(pids[1], signal.SIGKILL)
            for each in waiting:
                each.exception(timeout=60)
            left.append(1000 * (time.perf_counter() - begun))
            heal_mesh(replicas)
            whole.append(1000 * (time.perf_counter() - begun))
            pids = replicas.pid.call().get(timeout=30).values()
            begun = time.perf_counter()
            group.form(procs)
            formed.append(1000 * (time.perf_counter() - begun))
    return {
        "survivors have left": spread(left),
        "a group is formed again": spread(formed),
        "all is healed": spread(whole),
    }


def spread(took: list[float]) -> dict[str, float]:
    took.sort()
    return {
        "p50 ms": statistics.median(took),
        "p90 ms": took[int(len(took) * 0.9)],
        "max ms": took[-1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--deaths", type=int, default=60)
    parser.add_argument("--heal", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {
        "machine": describe(),
        "decisions": decisions(options.events),
        "replacement": {
            "one_for_one": replaced(OneForOne(intensity=options.deaths, period=3600.0), options.deaths),
            "one_for_all, settle=0": replaced(
                OneForAll(intensity=options.deaths, period=3600.0, settle=0.0), options.deaths
            ),
        },
    }
    if options.heal:
        keep_snapshots(every=0.05)
        figures["replacement"]["one_for_one, restored from 1 MiB"] = replaced(
            OneForOne(intensity=options.deaths, period=3600.0), options.deaths, Kept
        )
        figures["heal of 4 replicas"] = healed(options.deaths)
        if importlib.util.find_spec("torch") is not None:
            figures["heal of 4 replicas in a group"] = grouped(options.deaths)
    text = json.dumps(figures, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
