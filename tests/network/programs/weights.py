"""A controller that publishes weights, and readers of them on other hosts; requests and answers as in `serving.py`."""

from __future__ import annotations

import hashlib
import os
import random
import signal
from pathlib import Path
from typing import Any

from serving import run

from mesh_core import Actor, HostMesh, attach_to_workers, endpoint, set_fault_handler
from mesh_rdma import Publication, PublicationReader, RDMAError

LIMIT = 40.0


def of(weights: bytes | bytearray | memoryview) -> str:
    """What tells contents apart."""
    return hashlib.sha256(weights).hexdigest()


def sent() -> int:
    """How many bytes this machine has sent to others."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.split(":")[0].strip() != "lo")


class Reader(Actor):
    """Reads versions, in place or into memory of its own."""

    @endpoint
    def read(self, reader: PublicationReader, least: int) -> dict[str, Any]:
        try:
            with reader.use(min_version=least, timeout=LIMIT) as weights:
                return {"version": weights.version, "is": of(weights["weights"])}
        except RDMAError as error:
            return {"error": type(error).__name__, "text": str(error)}

    @endpoint
    def load(self, reader: PublicationReader, least: int, size: int) -> dict[str, Any]:
        memory = bytearray(size)
        version = reader.load_into({"weights": memory}, min_version=least, timeout=LIMIT)
        return {"version": version, "is": of(memory)}


class Witness(Actor):
    """Beside the readers, which may be waiting."""

    @endpoint
    def sent(self) -> int:
        return sent()

    @endpoint
    def kill_copy(self) -> None:
        """Kill the process that has this host's copy."""
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            if b"publication" in each.read_bytes():
                os.kill(int(each.parent.name), signal.SIGKILL)


class Job:
    """The hosts, their readers, and what a test may ask for."""

    def __init__(self, workers: list[str], credentials: str, **options: Any) -> None:
        set_fault_handler(lambda failure: True)
        self.hosts = attach_to_workers(workers, credentials=credentials, **options)
        self.hosts.initialized.get(timeout=LIMIT)
        procs = self.hosts.spawn_procs({"gpus": 4})
        self.readers: Any = procs.spawn("readers", Reader)
        self.witnesses: Any = procs.spawn("witnesses", Witness)
        self.witnesses.initialized.get(timeout=LIMIT)
        self.state: dict[str, bytearray] = {}
        self.publication: Publication | None = None

    def _some(self, hosts: list[int]) -> HostMesh:
        return self.hosts.slice(hosts=slice(hosts[0], hosts[-1] + 1))

    def do_open(self, size: int, hosts: list[int]) -> None:
        """Make a publication, with copies on these hosts."""
        self.state["weights"] = bytearray(size)
        self.publication = Publication(self.state, hosts=self._some(hosts), start=1)

    def do_add(self, hosts: list[int]) -> None:
        """Have copies on more hosts."""
        assert self.publication is not None
        self.publication.add_hosts(self._some(hosts))

    def do_publish(self, seed: int, changes: int | None = None) -> dict[str, Any]:
        """Publish something new: everything, or so many bytes."""
        assert self.publication is not None
        dice, weights = random.Random(seed), self.state["weights"]
        if changes is None:
            weights[:] = dice.randbytes(len(weights))
        for at in dice.sample(range(len(weights)), changes or 0):
            weights[at] ^= dice.randrange(1, 256)
        number = self.publication.publish(timeout=LIMIT, delta=changes is not None)
        return {"version": number, "is": of(weights)}

    def do_read(self, hosts: list[int], least: int) -> list[dict[str, Any]]:
        """Have all readers of these hosts read."""
        assert self.publication is not None
        readers = self.readers.slice(hosts=slice(hosts[0], hosts[-1] + 1))
        found: list[dict[str, Any]] = (
            readers.read.call(self.publication.reader(), least).get(timeout=LIMIT).values()
        )
        return found

    def do_load(self, host: int, least: int) -> dict[str, Any]:
        """Have a reader copy."""
        assert self.publication is not None
        reader = self.readers.slice(hosts=host, gpus=0)
        size = len(self.state["weights"])
        found: dict[str, Any] = reader.load.call_one(self.publication.reader(), least, size).get(
            timeout=LIMIT
        )
        return found

    def do_copies(self) -> list[int | None]:
        """The versions that have come to the copies."""
        assert self.publication is not None
        return list(self.publication.copies.values())

    def do_failures(self) -> list[str]:
        """What could not be had."""
        assert self.publication is not None
        return [failure.reason for failure in self.publication.failures]

    def do_kill_copy(self, host: int) -> None:
        """Kill the process that has a host's copy."""
        self.witnesses.slice(hosts=host, gpus=0).kill_copy.call_one().get(timeout=LIMIT)

    def do_sent(self, host: int) -> int:
        """How many bytes a host has sent to others; -1 is the controller's."""
        if host < 0:
            return sent()
        told: int = self.witnesses.slice(hosts=host, gpus=0).sent.call_one().get(timeout=LIMIT)
        return told

    def do_close(self) -> None:
        """Publish no more."""
        assert self.publication is not None
        self.publication.close()


if __name__ == "__main__":
    run(Job)
