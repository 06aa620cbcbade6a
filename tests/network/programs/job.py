"""A controller that does what a test tells it, by requests and answers as `serving.py` has them."""

from __future__ import annotations

import collections
import random
import threading
import time
import traceback
from typing import Any

from serving import run
from witness import KEPT_WORDS, Talker, Witness

from mesh_core import Future, MeshFailure, attach_to_workers, set_fault_handler

LIMIT = 20.0
UNDER_WAY = 40
"""Calls of the load that wait for their answer at one time."""


class Load(threading.Thread):
    """Messages from the controller in one order, and a record of what each witness should see of them."""

    def __init__(self, job: Job, name: str, seed: int, first: int) -> None:
        super().__init__(name=name)
        self.job = job
        self.sender = name
        self.dice = random.Random(f"{seed}/{name}")
        self.ranks = range(first, len(job.witnesses))
        self.sent: dict[int, list[int]] = {rank: [] for rank in self.ranks}
        self.wrong: list[str] = []
        self.answered = 0
        self.slowest = 0.0
        self.over = threading.Event()
        self.waiting: collections.deque[tuple[int, list[int], int, float, Future[Any]]] = collections.deque()

    def run(self) -> None:
        number = 0
        try:
            while not self.over.is_set():
                number += 1
                self.send(number)
                while len(self.waiting) >= UNDER_WAY:
                    self.settle()
            while self.waiting:
                self.settle()
        except Exception:
            # A message that could not be sent would look like one that was lost.
            self.wrong.append(f"{self.sender}: {number}: {traceback.format_exc()}")

    def send(self, number: int) -> None:
        kind = self.dice.choice(["all", "one", "one", "part", "tell", "tell all"])
        first = self.ranks.start
        if kind in ("one", "tell"):
            to = [self.dice.choice(self.ranks)]
            mesh = self.job.witnesses.slice(hosts=to[0])
        elif kind == "part":
            to = list(range(first, self.dice.choice(self.ranks) + 1))
            mesh = self.job.witnesses.slice(hosts=slice(first, to[-1] + 1))
        else:
            to = list(self.ranks)
            mesh = self.job.witnesses.slice(hosts=slice(first, None))
        size = KEPT_WORDS if self.dice.random() < 0.02 else 0
        for rank in to:
            self.sent[rank].append(number)
        if kind.startswith("tell"):
            mesh.add.broadcast(self.sender, number, bytes(size))
        else:
            future = mesh.add.call(self.sender, number, bytes(size))
            self.waiting.append((number, to, size, time.monotonic(), future))

    def settle(self) -> None:
        number, to, size, began, future = self.waiting.popleft()
        try:
            answers = list(future.get(timeout=LIMIT).values())
        except Exception as error:
            self.wrong.append(f"{self.sender}: {number} to {to}: {type(error).__name__}: {error}"[:400])
            return
        self.answered += 1
        self.slowest = max(self.slowest, time.monotonic() - began)
        if answers != [(number, size)] * len(to):
            self.wrong.append(f"{self.sender}: {number} to {to} answered {answers}")


class Talks(threading.Thread):
    """Has the talkers talk, round after round, and adds up what the witnesses should have seen."""

    def __init__(self, job: Job, first: int) -> None:
        super().__init__(name="talks")
        self.job = job
        self.first = first
        self.sent: dict[tuple[str, int], list[int]] = collections.defaultdict(list)
        self.wrong: list[str] = []
        self.rounds = 0
        self.over = threading.Event()

    def run(self) -> None:
        talkers = self.job.talkers.slice(hosts=slice(self.first, None))
        while not self.over.is_set():
            try:
                answers = talkers.talk.call(10, self.first).get(timeout=LIMIT)
            except Exception as error:
                self.wrong.append(f"talk: {type(error).__name__}: {error}"[:400])
                return
            self.rounds += 1
            for name, sent, wrong in answers.values():
                self.wrong += wrong
                for rank, numbers in sent.items():
                    self.sent[name, rank] += numbers


class Job:
    """The hosts, what runs there, and what a test may ask for."""

    def __init__(self, workers: list[str], credentials: str, **options: Any) -> None:
        self.failures: list[dict[str, Any]] = []
        set_fault_handler(self.failed)
        self.loads: list[Load | Talks] = []
        self.hosts = attach_to_workers(workers, credentials=credentials, **options)
        self.hosts.initialized.get(timeout=LIMIT)
        self.procs = self.hosts.spawn_procs()
        self.witnesses: Any = self.procs.spawn("witnesses", Witness)
        self.talkers: Any = self.procs.spawn("talkers", Talker, self.witnesses, 1)
        self.witnesses.log.call().get(timeout=LIMIT)
        self.talkers.initialized.get(timeout=LIMIT)

    def failed(self, failure: MeshFailure) -> bool:
        """The fault handler: a test asks for `failures` when it wants to know."""
        self.failures.append(
            {
                "at": time.monotonic(),
                "mesh": failure.mesh_name,
                "rank": failure.rank,
                "reason": failure.reason,
            }
        )
        return True

    def do_failures(self) -> list[dict[str, Any]]:
        return self.failures

    def do_names(self) -> list[str]:
        return self.hosts.names

    def do_call(self, host: int | None = None, timeout: float = LIMIT) -> dict[str, Any]:
        """One call to one host or to all; what came of it, and when."""
        mesh = self.witnesses if host is None else self.witnesses.slice(hosts=host)
        began = time.monotonic()
        try:
            answers = list(mesh.length.call(b"four").get(timeout=timeout).values())
            outcome: dict[str, Any] = {"answers": answers}
        except Exception as error:
            outcome = {"error": type(error).__name__, "text": str(error)}
        return {"took": time.monotonic() - began, "at": time.monotonic(), **outcome}

    def do_latencies(self, first: int, last: int, calls: int, seconds: float = LIMIT) -> list[float]:
        """How long calls to each host of a range took, one after the other."""
        ones = [self.witnesses.slice(hosts=host) for host in range(first, last)]
        took = []
        end = time.monotonic() + seconds
        for _ in range(calls):
            for one in ones:
                began = time.monotonic()
                one.length.call_one(b"").get(timeout=LIMIT)
                took.append(time.monotonic() - began)
            if time.monotonic() > end:
                break
        return took

    def do_beside(self, host: int, seconds: float) -> list[float]:
        """How long calls to processes of their own on a host took."""
        procs = self.hosts.slice(hosts=host).spawn_procs()
        one: Any = procs.spawn("beside", Witness)
        one.initialized.get(timeout=LIMIT)
        took = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            one.length.call_one(b"").get(timeout=LIMIT)
            took.append(time.monotonic() - began)
        return took

    def do_spawn(self, first: int, last: int) -> list[int]:
        """Spawn processes on some hosts, use them, and stop them."""
        procs = self.hosts.slice(hosts=slice(first, last)).spawn_procs()
        try:
            procs.initialized.get(timeout=LIMIT)
            more: Any = procs.spawn("more", Witness)
            return list(more.length.call(b"four").get(timeout=LIMIT).values())
        finally:
            procs.stop().get(timeout=LIMIT)

    def do_stop(self) -> None:
        """Stop the processes that all other requests are about."""
        self.procs.stop().get(timeout=LIMIT)

    def do_transfer(self, host: int, size: int) -> dict[str, float]:
        """Send so many bytes to a host in one call."""
        began = time.monotonic()
        came = self.witnesses.slice(hosts=host).length.call_one(bytes(size)).get(timeout=300)
        return {"took": time.monotonic() - began, "came": came}

    def do_fetch(self, host: int, size: int) -> dict[str, float]:
        """Have a host answer with so many bytes."""
        began = time.monotonic()
        came = self.witnesses.slice(hosts=host).zeros.call_one(size).get(timeout=300)
        return {"took": time.monotonic() - began, "came": len(came)}

    def do_load(self, seed: int = 0, first: int = 0, talks: bool = True) -> None:
        """Begin to send from two threads, and among the hosts, until `settle`."""
        self.loads = [Load(self, f"thread{number}", seed, first) for number in range(2)]
        if talks:
            self.loads.append(Talks(self, first))
        for load in self.loads:
            load.start()

    def do_progress(self) -> int:
        """How many calls of the load were answered so far."""
        return sum(load.answered for load in self.loads if isinstance(load, Load))

    def do_settle(self) -> dict[str, Any]:
        """End the load, wait for every outcome, and compare what the witnesses saw with what was sent."""
        for load in self.loads:
            load.over.set()
        for load in self.loads:
            load.join()
        wrong = [line for load in self.loads for line in load.wrong]
        first = min(load.ranks.start for load in self.loads if isinstance(load, Load))
        part = self.witnesses.slice(hosts=slice(first, None))
        expected: dict[tuple[str, int], list[int]] = {}
        for load in self.loads:
            if isinstance(load, Load):
                expected |= {(load.sender, rank): numbers for rank, numbers in load.sent.items()}
            else:
                expected |= load.sent
        # What a host was told by another one has no answer; it may still be under way.
        total = sum(map(len, expected.values()))
        end = time.monotonic() + LIMIT
        while True:
            logs = list(part.log.call().get(timeout=LIMIT).values())
            if (
                sum(len(numbers) for log in logs for numbers in log.values()) >= total
                or time.monotonic() > end
            ):
                break
        for rank, log in enumerate(logs, first):
            for sender in {*log, *(sender for sender, to in expected if to == rank)}:
                sent, arrived = expected.get((sender, rank), []), log.get(sender, [])
                if sent != arrived:
                    wrong += [difference(sender, rank, sent, arrived)]
        answered = self.do_progress()
        slowest = max(load.slowest for load in self.loads if isinstance(load, Load))
        return {"wrong": wrong[:20], "answered": answered, "messages": total, "slowest": slowest}


def difference(sender: str, rank: int, sent: list[int], seen: list[int]) -> str:
    """Where what was seen first departs from what was sent."""
    at = next(
        (i for i, (a, b) in enumerate(zip(sent, seen, strict=False)) if a != b), min(len(sent), len(seen))
    )
    counts = collections.Counter(seen)
    twice = [number for number, count in counts.items() if count > 1][:5]
    lost = [number for number in sent if number not in counts][:5]
    return (
        f"{sender} to rank {rank}: {len(sent)} sent, {len(seen)} seen; they part at {at}: "
        f"{sent[at : at + 3]} / {seen[at : at + 3]}; twice {twice}, lost {lost}"
    )


if __name__ == "__main__":
    run(Job)
