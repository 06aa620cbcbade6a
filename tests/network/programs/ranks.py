"""A controller whose actors on several hosts have memory, to broadcast to and gather from; requests and answers as in `serving.py`."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from pathlib import Path
from typing import Any

from serving import run

from mesh_core import Actor, attach_to_workers, endpoint, set_fault_handler
from mesh_rdma import PartsFailed, RDMABuffer, broadcast, gather

LIMIT = 40.0
RANKS = 2
"""On each host."""


def of(data: bytes | bytearray | memoryview) -> str:
    """What tells contents apart."""
    return hashlib.sha256(data).hexdigest()


def sent() -> int:
    """How many bytes this machine has sent to others."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


class Rank(Actor):
    """Has memory."""

    def __init__(self) -> None:
        self.memory = bytearray()

    @endpoint
    def offer(self, size: int) -> RDMABuffer:
        self.memory = bytearray(size)
        self.buffer = RDMABuffer(self.memory)
        return self.buffer

    @endpoint
    def look(self) -> str:
        return of(self.memory)

    @endpoint
    def sent(self) -> int:
        return sent()

    @endpoint
    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Job:
    """The hosts, their ranks, and what a test may ask for."""

    def __init__(self, workers: list[str], credentials: str, **options: Any) -> None:
        set_fault_handler(lambda failure: True)
        self.hosts = attach_to_workers(workers, credentials=credentials, **options)
        self.hosts.initialized.get(timeout=LIMIT)
        self.ranks: Any = self.hosts.spawn_procs({"gpus": RANKS}).spawn("ranks", Rank)
        self.ranks.initialized.get(timeout=LIMIT)

    def do_offer(self, size: int) -> None:
        """Have all ranks make memory."""
        self.into = self.ranks.offer.call(size).get(timeout=LIMIT)

    def do_broadcast(self, size: int, seed: int) -> dict[str, Any]:
        """Broadcast something; returns what, or who has not got it."""
        data = random.Random(seed).randbytes(size)
        try:
            broadcast(data, self.ranks, self.into, timeout=None).get(timeout=LIMIT)
        except PartsFailed as error:
            return {"is": of(data), "failed": sorted(error.failures), "text": str(error)}
        return {"is": of(data), "failed": []}

    def do_look(self) -> list[str | None]:
        """What all ranks have; none of the dead."""
        said = self.ranks.look.call().get(timeout=LIMIT, return_exceptions=True).values()
        return [each if isinstance(each, str) else None for each in said]

    def do_begun(self, rank: int) -> bool:
        """Whether the first bytes have come to a rank."""
        first = bytearray(8)
        self.into.values()[rank].read_into(first).get(timeout=LIMIT)
        return any(first)

    def do_gather(self, alone: list[int] | None = None) -> dict[str, Any]:
        """Gather from all ranks, or from some."""
        buffers = self.into.values()
        some = range(len(buffers)) if alone is None else alone
        try:
            found = gather([buffers[rank] for rank in some], timeout=None).get(timeout=LIMIT)
        except PartsFailed as error:
            return {"failed": sorted(error.failures), "text": str(error)}
        size = len(found) // len(some)
        return {"is": [of(found[n * size : (n + 1) * size]) for n in range(len(some))]}

    def do_kill(self, host: int) -> None:
        """Kill a host's first rank."""
        self.ranks.slice(hosts=host, gpus=0).kill.broadcast()

    def do_sent(self) -> list[int]:
        """How many bytes the controller and each host have sent to others."""
        return [sent(), *self.ranks.slice(gpus=RANKS - 1).sent.call().get(timeout=LIMIT).values()]


if __name__ == "__main__":
    run(Job)
