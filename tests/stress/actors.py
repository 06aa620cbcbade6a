"""What the meshes under stress run."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

from world import LIMIT

from mesh_core import Actor, endpoint, this_proc


class Worker(Actor):
    """What is called."""

    def __init__(self, fail: str = "") -> None:
        if fail:
            raise ValueError(fail)
        self.seen: dict[str, int] = {}
        self.bytes = 0

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def aecho(self, value: Any) -> Any:
        return value

    @endpoint
    def next(self, sender: str, number: int) -> int:
        """Return how far behind the sender's last message this one is; 1 if they came in order."""
        step = number - self.seen.get(sender, number - 1)
        self.seen[sender] = number
        return step

    @endpoint
    def total(self, data: bytearray) -> tuple[int, bytearray]:
        data[0] = 7  # what arrives may be written to
        return len(data), data

    @endpoint(concurrent=True)
    async def nap(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @endpoint
    async def lull(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    @endpoint
    def block(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    @endpoint
    def fail(self, kind: str) -> None:
        raise {
            "value": ValueError,
            "key": KeyError,
            "exit": SystemExit,
            "interrupt": KeyboardInterrupt,
            "own": Odd,
        }[kind](kind)

    @endpoint
    async def afail(self) -> None:
        raise OSError(5, "afail")

    @endpoint
    def die(self, how: str) -> None:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM, "segv": signal.SIGSEGV}[how])
        time.sleep(LIMIT)  # another thread may be the one that takes the signal

    @endpoint
    def nested(self, value: int) -> int:
        """Spawn an actor beside this one, call it, stop it."""
        beside: Any = this_proc().spawn("beside", Beside)
        got: int = beside.double.call_one(value).get(LIMIT)
        beside.stop().get(LIMIT)
        return got

    @endpoint
    def count(self, data: bytes) -> None:
        self.bytes += len(data)


class Beside(Actor):
    """Spawned by actors."""

    @endpoint
    async def double(self, value: int) -> int:
        return 2 * value


class Quick(Actor):
    """Has no thread: coroutines only."""

    @endpoint
    async def aecho(self, value: Any) -> Any:
        return value

    @endpoint(concurrent=True)
    async def nap(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds


class Odd(Exception):
    """Cannot be unpickled from its arguments."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind, "and more")
