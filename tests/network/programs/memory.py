"""A controller whose actors read and write each other's memory, as a test tells it; requests and answers as in `serving.py`.

Host -1 is the controller itself; the others are counted as they were attached.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
import threading
import weakref
from typing import Any

from serving import run

from mesh_core import Actor, attach_to_workers, endpoint, set_fault_handler
from mesh_rdma import RDMABuffer, RDMAError, explain

LIMIT = 40.0


class Kept(bytearray):
    """Memory that can be seen to be let go."""


def rebuilt(handle: str) -> RDMABuffer:
    """The buffer of a handle, which may be from another job."""
    make, _ = RDMABuffer(bytearray(1)).__reduce__()
    found: RDMABuffer = make(bytes.fromhex(handle))
    return found


def of(data: bytes | bytearray) -> str:
    """What tells contents apart."""
    return hashlib.sha256(data).hexdigest()


class Memory:
    """Memory of a process, and what it does to that of others."""

    def __init__(self) -> None:
        self.kept: dict[str, tuple[Kept, RDMABuffer]] = {}
        self.freed: dict[str, threading.Event] = {}
        self.first: dict[str, bytes] = {}
        self.copy = bytearray()

    def offer(self, name: str, size: int, seed: int) -> tuple[RDMABuffer, str]:
        data = Kept(random.Random(seed).randbytes(size))
        self.freed[name] = threading.Event()
        weakref.finalize(data, self.freed[name].set)
        self.kept[name] = data, RDMABuffer(data)
        self.first[name] = bytes(data[: 1 << 20])
        return self.kept[name][1], of(data)

    def look(self, name: str) -> str:
        return of(self.kept[name][0])

    def forget(self, name: str) -> None:
        self.kept.pop(name)[1].drop()

    def is_freed(self, name: str) -> bool:
        # What threads of the engine have let go is freed where Python next calls into it.
        RDMABuffer(bytearray(1)).drop()
        return self.freed[name].is_set()

    async def act(self, work: str, buffer: RDMABuffer, seed: int) -> dict[str, Any]:
        try:
            if work == "read":
                self.copy = bytearray(buffer.size())
                await buffer.read_into(self.copy, timeout=None)
                return {"is": of(self.copy)}
            if work == "write":
                data = random.Random(seed).randbytes(buffer.size())
                await buffer.write_from(data, timeout=None)
                return {"is": of(data)}
            if work == "explain":
                said = explain(buffer)
                return {"candidates": said.candidates, "passed": said.passed, "backend": buffer.backend}
            return {"was": await buffer[:8].fetch_add(1)}
        except RDMAError as error:
            return {"error": type(error).__name__, "text": str(error)}

    def clear(self) -> None:
        self.copy = bytearray()

    def begun(self) -> bool:
        return any(self.copy[: 1 << 20])

    def is_changed(self, name: str) -> bool:
        return self.kept[name][0][: 1 << 20] != self.first[name]

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Keeper(Actor):
    """The same on another host."""

    def __init__(self) -> None:
        self.memory = Memory()

    @endpoint(concurrent=True)
    async def act(self, work: str, buffer: Any, seed: int) -> dict[str, Any]:
        if isinstance(buffer, str):
            buffer = rebuilt(buffer)
        return await self.memory.act(work, buffer, seed)

    @endpoint(concurrent=True)
    async def do(self, work: str, *words: Any) -> Any:
        return getattr(self.memory, work)(*words)


class Job:
    """The hosts, what runs there, and what a test may ask for."""

    def __init__(self, workers: list[str], credentials: str, **options: Any) -> None:
        set_fault_handler(lambda failure: True)
        self.hosts = attach_to_workers(workers, credentials=credentials, **options)
        self.hosts.initialized.get(timeout=LIMIT)
        self.keepers: Any = self.hosts.spawn_procs().spawn("keepers", Keeper)
        self.keepers.initialized.get(timeout=LIMIT)
        self.own = Memory()
        self.buffers: dict[str, RDMABuffer] = {}

    def do_offer(self, host: int, name: str, size: int, seed: int = 1) -> dict[str, str]:
        """Have a process offer memory; what is in it, and its handle."""
        self.buffers[name], told = self.do_ask(host, "offer", name, size, seed)
        return {"is": told, "handle": self.buffers[name].__reduce__()[1][0].hex()}

    def do_act(
        self, host: int, work: str, *, name: str = "", handle: str = "", seed: int = 2
    ) -> dict[str, Any]:
        """Have a process read, write or count in a buffer that was offered, or that a handle names."""
        if host < 0:
            return asyncio.run(self.own.act(work, rebuilt(handle) if handle else self.buffers[name], seed))
        answer: Any = self.keepers.slice(hosts=host).act.call_one(work, handle or self.buffers[name], seed)
        found: dict[str, Any] = answer.get(timeout=LIMIT)
        return found

    def do_ask(self, host: int, work: str, *words: Any, **names: Any) -> Any:
        """Have a process do something to its own memory."""
        words += tuple(names.values())
        if host < 0:
            return getattr(self.own, work)(*words)
        return self.keepers.slice(hosts=host).do.call_one(work, *words).get(timeout=LIMIT)

    def do_kill(self, host: int) -> None:
        """Kill a process."""
        self.keepers.slice(hosts=host).do.broadcast("die")


if __name__ == "__main__":
    run(Job)
