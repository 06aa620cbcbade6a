"""Whether `mesh why` names what hangs: 20 kinds of hang and slowness, and calm runs in which nobody is to be named.

    python benchmarks/why.py [--rounds 3] [--calm 200] [--seed 14] [--json FILE]

A hang is caused on a rank that the seed chooses, while other ranks work. The job is asked again and again, as the command asks it; what
counts is how long after its beginning the hang is named with the right rank and line, and that it is within two seconds. A calm
run is a seeded mixture of calls, tasks, queues and, with PyTorch, collectives; it is asked while it works. Needs PyTorch for two of the kinds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from meshbench.machine import describe

from mesh_core import Pool, Queue, endpoint, this_host
from mesh_supervision import Ignore, form_group
from mesh_supervision._watching._why import Reason, confirmed

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "packages" / "mesh-supervision" / "tests"))

from hangs import Hanging, look, wait_aside  # noqa: E402

RANKS = 4
WITHIN = 2.0
GIVEN_UP = 20.0
TORCH = importlib.util.find_spec("torch") is not None


class Worker(Hanging):
    """Hangs in every way, also in collectives, and works otherwise."""

    @endpoint
    def collective(self, late: int, root: int = -1) -> None:
        """Take part in a collective; one rank loads data meanwhile, or takes another one for its root."""
        import torch
        import torch.distributed as dist

        rank = dist.get_rank()
        if root >= 0:
            dist.broadcast(torch.zeros(4), (root + 1) % RANKS if rank == root else root)
        else:
            if rank == late:
                threading.Event().wait()
            dist.all_reduce(torch.zeros(4))

    # Work.

    @endpoint
    def step(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            sum(range(1000))

    @endpoint
    async def nap(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @endpoint
    def pass_on(self, other: Any, seconds: float) -> None:
        other.step.call_one(seconds).get()

    @endpoint
    def reduce(self, count: int) -> None:
        import torch
        import torch.distributed as dist

        for _ in range(count):
            dist.all_reduce(torch.zeros(64))


class Job:
    """Processes with workers, one of which hangs."""

    def __init__(self, chance: random.Random, workers: Any, procs: Any) -> None:
        self.chance, self.workers, self.procs = chance, workers, procs
        self.rank, self.other = chance.sample(range(RANKS), 2)
        self.who = f"workers[{self.rank}]"

    @property
    def one(self) -> Any:
        """The one that hangs."""
        return self.workers.slice(gpus=self.rank)

    @property
    def next(self) -> Any:
        """One beside it."""
        return self.workers.slice(gpus=self.other)


def waiting(future: Any) -> None:
    wait_aside(future, GIVEN_UP)


Named = Callable[[Reason], bool]


def by(who: str, *, line: str = "", text: str = "") -> Named:
    """Whether somebody is named, and nobody else, with the line or these words."""
    return lambda found: (
        len(found.culprits) == 1
        and found.culprits[0].who == who
        and line in found.culprits[0].line
        and text in found.culprits[0].text
    )


def plain(method: str, *, line: str | None = None, text: str = "") -> Callable[[Job], Named]:
    """A handler that does not end."""

    def cause(job: Job) -> Named:
        waiting(getattr(job.one, method).call_one())
        return by(job.who, line=f"in {method}" if line is None else line, text=text)

    return cause


def chain(job: Job) -> Named:
    third = next(rank for rank in range(RANKS) if rank not in (job.rank, job.other))
    waiting(job.next.chain.call_one(job.workers.slice(gpus=third), job.one))
    return by(job.who, line="in lock")


def circle(job: Job) -> Named:
    waiting(job.one.circle.call_one(job.next, job.one))
    return lambda found: any(job.who in each and f"workers[{job.other}]" in each for each in found.circles)


def mailbox(job: Job) -> Named:
    waiting(job.next.flood.call_one(job.one))
    return by(job.who, line="in slow", text="messages wait behind it")


def queue(job: Job) -> Named:
    made = Queue[int]()
    waiting(job.one.take.call_one(made))
    return lambda found: any(job.who in each.chain or each.who == job.who for each in found.culprits)


def pool(job: Job) -> Named:
    made = Pool(job.workers)
    others = [made.submit(job.workers.task, 1) for _ in range(20)]
    waiting(made.submit(job.workers.task, -1))
    for each in others:
        each.get(timeout=60)
    return lambda found: len(found.culprits) == 1 and "in held" in found.culprits[0].line


def stopped(job: Job) -> Named:
    os.kill(job.procs.pids[job.rank], signal.SIGSTOP)
    waiting(job.one.step.call_one(0.0))
    return lambda found: any(
        job.who == each.who and "stopped by a signal" in each.text for each in found.culprits
    )


def constructor(job: Job) -> Named:
    made = job.procs.slice(gpus=job.rank).spawn("late", Worker, True, supervise=Ignore())
    waiting(made.step.call_one(0.0))
    return by("late", line="in __init__")


def collective(job: Job) -> Named:
    waiting(job.workers.collective.call(job.rank))
    return by(job.who, line="in collective", text="has not come to collective")


def mismatch(job: Job) -> Named:
    waiting(job.workers.collective.call(-1, job.rank))
    return by(job.who, text="never meet")


KINDS: dict[str, Callable[[Job], Named]] = {
    "a lock": plain("lock"),
    "an endless loop": plain("spin"),
    "slow work": plain("slow"),
    "C code that holds the interpreter's lock": plain("regex"),
    "a blocked event loop": plain("block_loop"),
    "a child process": plain("child"),
    "a pipe": plain("pipe"),
    "a coroutine that awaits what never comes": plain("forget", line="", text="it awaits something"),
    "the end of a chain of calls": chain,
    "a circle of calls": circle,
    "a full mailbox": mailbox,
    "an empty queue": queue,
    "a task of a pool": pool,
    "a value from a channel": plain("channel"),
    "a promise": plain("promise"),
    "an answer that is kept back": plain("keep", line="", text="has not answered by its port"),
    "a stopped process": stopped,
    "a constructor": constructor,
    "a rank that does not come to a collective": collective,
    "a rank in another collective": mismatch,
}  # fmt: skip
WITH_TORCH = {"a rank that does not come to a collective", "a rank in another collective"}


def ask() -> Reason:
    """As the command does."""
    return confirmed(look)


@contextlib.contextmanager
def job(chance: random.Random, torch: bool) -> Iterator[Job]:
    """Processes of their own, which are killed in the end: nothing else ends what hangs."""
    options: dict[str, Any] = {"env": {"OMP_NUM_THREADS": "1"}, "preload": ["torch"]} if torch else {}
    with this_host().spawn_procs({"gpus": RANKS}, name="hosts", supervise=Ignore(), **options) as procs:
        procs.initialized.get(timeout=120)
        if torch:
            form_group(procs)
        workers: Any = procs.spawn("workers", Worker, supervise=Ignore())
        workers.step.call(0.0).get(timeout=60)
        yield Job(chance, workers, procs)
        for pid in procs.pids:
            if pid is not None:
                os.kill(pid, signal.SIGKILL)


def hang(name: str, chance: random.Random) -> float | None:
    """Seconds until it is named; none if it is not."""
    with job(chance, name in WITH_TORCH) as made:
        begun = time.monotonic()
        named = KINDS[name](made)
        found: object = None
        while (now := time.monotonic() - begun) < GIVEN_UP:
            found = ask()
            if named(found):
                return time.monotonic() - begun
        print(f"{name}, after {now:.1f} s: {found}", flush=True)
        return None


def work(chance: random.Random, made: Job, torch: bool) -> list[Any]:
    """Begin a mixture of work that takes some tenths of a second."""
    workers, futures = made.workers, []
    # A rank that waits for another one that is in a collective with it would wait for ever.
    kinds = chance.choice([(0, 1, 2, 3), (0, 1, 3, 4)]) if torch else (0, 1, 2, 3)
    for _ in range(chance.randrange(3, 12)):
        rank, other = chance.sample(range(RANKS), 2)
        one, seconds = workers.slice(gpus=rank), chance.uniform(0.0, 0.05)
        match chance.choice(kinds):
            case 0:
                futures.append(one.step.call_one(seconds))
            case 1:
                futures.append(one.nap.call_one(seconds))
            case 2:
                # Upwards only: two that ask each other would wait for each other.
                low, high = sorted((rank, other))
                futures.append(workers.slice(gpus=low).pass_on.call_one(workers.slice(gpus=high), seconds))
            case 3:
                futures.append(workers.task.call(1))
            case _:
                futures.append(workers.reduce.call(chance.randrange(1, 20)))
    return futures


def calm(count: int, chance: random.Random) -> dict[str, Any]:
    """How many calm runs had somebody named, and who that was."""
    named: list[str] = []
    asked = 0
    with job(chance, TORCH) as made:
        for _ in range(count):
            futures = work(chance, made, TORCH)
            found = ask()
            asked += 1
            while any(not each.done() for each in futures):
                found, asked = ask(), asked + 1
                if found.culprits or found.circles:
                    break
            if found.culprits or found.circles:
                named.append(str(found))
            for each in futures:
                each.get(timeout=60)
    return {"runs": count, "asked": asked, "with somebody named": len(named), "who": named[:5]}


def counting() -> dict[str, float]:
    """Microseconds of the processor for a collective of one rank, with nobody counting and with it counted."""
    import torch
    import torch.distributed as dist

    from mesh_supervision._collectives import Watched

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        group, tensor = dist.group.WORLD, torch.zeros(64)
        assert group is not None
        found: dict[str, list[float]] = {"plain": [], "counted": []}
        for _ in range(15):
            for kind, took in found.items():
                watched = Watched("0", 0, "controller")
                if kind == "counted":
                    group.register_pre_hook(1, watched.before)
                    group.register_post_hook(1, watched.after)
                begun = time.process_time()
                for _ in range(1000):
                    dist.all_reduce(tensor)
                took.append(1000 * (time.process_time() - begun))
                if kind == "counted":
                    group.unregister_pre_hook(1)
                    group.unregister_post_hook(1)
        dist.destroy_process_group()
    return {f"{kind}, best of 15": round(min(took), 2) for kind, took in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calm", type=int, default=200)
    parser.add_argument("--seed", type=int, default=14)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    took: dict[str, list[float | None]] = {}
    for name in KINDS:
        if TORCH or name not in WITH_TORCH:
            took[name] = [hang(name, chance) for _ in range(args.rounds)]
            print(name, took[name], flush=True)

    def middle(each: list[float | None]) -> float:
        return statistics.median(GIVEN_UP if one is None else one for one in each)

    figures = {
        "machine": describe(),
        "load": os.getloadavg(),
        "kinds": len(took),
        "named within 2 s": sum(middle(each) <= WITHIN for each in took.values()),
        "seconds until named, median": {name: round(middle(each), 2) for name, each in took.items()},
        "all": took,
        "calm": calm(args.calm, chance),
        "microseconds for a collective": counting() if TORCH else {},
    }
    text = json.dumps(figures, indent=1)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
