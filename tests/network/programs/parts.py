"""A controller whose actors send each other large data, as a test tells it; requests and answers as in `serving.py`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from serving import run

from mesh_core import Actor, attach_to_workers, endpoint, set_fault_handler
from mesh_core._common.bypass import find_bypass
from mesh_core._common.current import current

LIMIT = 60.0
COUNTED = ("parts_offered", "parts_past_gateways", "landing", "kept", "kept_bytes")


def counted() -> dict[str, int]:
    """What has travelled past the agents, and what is kept for what is under way."""
    found = current().runtime.counts()
    return {name: found[name] for name in COUNTED}


class Part(Actor):
    """Takes and gives data."""

    def __init__(self) -> None:
        self.came: list[tuple[int, int]] = []
        find_bypass(current())

    @endpoint
    def take(self, number: int, data: bytes) -> int:
        self.came.append((number, len(data)))
        return len(data) if not data or data[0] == data[-1] == number % 251 else -1

    @endpoint
    def give(self, size: int) -> bytearray:
        return bytearray(size)

    @endpoint
    def all(self) -> list[tuple[int, int]]:
        return self.came

    @endpoint
    def send(self, other: Any, numbers: list[int], size: int) -> list[int]:
        calls = [other.take.call_one(number, bytes([number % 251]) * size) for number in numbers]
        return [call.get(timeout=LIMIT) for call in calls]

    @endpoint
    def counts(self) -> dict[str, int]:
        return counted()

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Job:
    """The hosts, and an actor on each."""

    def __init__(self, workers: list[str], credentials: str, **options: Any) -> None:
        set_fault_handler(lambda failure: True)
        self.hosts = attach_to_workers(workers, credentials=credentials, **options)
        self.hosts.initialized.get(timeout=LIMIT)
        self.parts: Any = self.hosts.spawn_procs().spawn("parts", Part)
        # So that who dies is not in the way of who is asked.
        others = self.hosts.spawn_procs()
        self.others: Any = others.spawn("others", Part)
        self.killers: Any = others.spawn("killers", Part)
        self.parts.counts.call().get(timeout=LIMIT)
        self.others.counts.call().get(timeout=LIMIT)
        self.killers.counts.call().get(timeout=LIMIT)
        find_bypass(current())

    def do_time(self, host: int, size: int) -> tuple[float, float]:
        """How many seconds an argument and a result of that size take."""
        part = self.parts.slice(hosts=host)
        begun = time.perf_counter()
        assert part.take.call_one(0, bytes(size)).get(timeout=LIMIT) == size
        between = time.perf_counter()
        assert len(part.give.call_one(size).get(timeout=LIMIT)) == size
        return between - begun, time.perf_counter() - between

    def do_send(self, source: int, target: int, numbers: list[int], size: int) -> list[int]:
        """Have the actor of one host call that of another with data."""
        call = self.others.slice(hosts=source).send.call_one(self.parts.slice(hosts=target), numbers, size)
        found: list[int] = call.get(timeout=LIMIT)
        return found

    def do_came(self, host: int) -> list[tuple[int, int]]:
        """What has come there, in order."""
        found: list[tuple[int, int]] = self.parts.slice(hosts=host).all.call_one().get(timeout=LIMIT)
        return found

    def do_counts(self, host: int) -> dict[str, int]:
        """Those of the receiver of a host; of the script itself below 0."""
        if host < 0:
            return counted()
        found: dict[str, int] = self.parts.slice(hosts=host).counts.call_one().get(timeout=LIMIT)
        return found

    def do_kill(self, host: int) -> None:
        """Kill the sender of a host."""
        self.killers.slice(hosts=host).die.broadcast()


if __name__ == "__main__":
    run(Job)
