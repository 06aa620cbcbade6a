"""Actors for pools."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mesh_core import Actor, Pool, Port, context, endpoint

WITHIN = 30.0


class Worker(Actor):
    """Does what a pool asks for; ``log`` is a file that has a line for each task that was begun."""

    def __init__(self, log: str = "", refuse: str = "") -> None:
        self.log = log
        self.now = self.most = 0
        if refuse and Path(refuse).exists():
            raise RuntimeError("refused")

    @endpoint
    def double(self, n: int) -> int:
        return 2 * n

    @endpoint
    def data(self, n: int) -> bytearray:
        return bytearray(n)

    @endpoint
    def measure(self, data: bytearray) -> int:
        return len(data)

    @endpoint
    def add(self, a: int, b: int) -> int:
        return a + b

    @endpoint
    def divide(self, n: int) -> float:
        return 12 / n

    @endpoint
    async def double_async(self, n: int) -> int:
        await asyncio.sleep(0)
        return 2 * n

    @endpoint
    def who(self, _n: int) -> int:
        return context().actor_instance.rank.rank

    @endpoint
    def block(self, gate: str, begun: Port[int] | None = None) -> int:
        """Return once the gate is open."""
        if begun is not None:
            begun.send(context().actor_instance.rank.rank)
        with Path(gate).open("rb", buffering=0) as file:
            file.read(1)
        return context().actor_instance.rank.rank

    @endpoint
    async def wait(self, told: Port[str]) -> None:
        """Wait until it is cancelled."""
        told.send("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            told.send("cancelled")
            raise

    @endpoint(concurrent=True)
    async def overlap(self, _n: int) -> int:
        """With how many others it has run here at most."""
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(5):
            await asyncio.sleep(0)
        self.now -= 1
        return self.most

    def _note(self, n: int) -> None:
        with Path(self.log).open("a") as file:
            file.write(f"{n}\n")

    @endpoint
    def note(self, n: int) -> int:
        self._note(n)
        return n

    @endpoint
    def blob(self, n: int, size: int) -> bytes:
        self._note(n)
        return bytes([n]) * size

    @endpoint
    def die_at(self, n: int, gate: str, begun: Port[int]) -> None:
        """Die once the gate is open."""
        self.block(gate, begun)
        self.die(n)

    @endpoint
    def die(self, n: int = 0) -> None:
        if self.log:
            self._note(n)
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def die_once(self, n: int, mark: str) -> int:
        """Die, but not where another has died of it."""
        self._note(n)
        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return n
        os.kill(os.getpid(), signal.SIGKILL)
        return -1


class User(Actor):
    """Uses a pool that it was sent."""

    def __init__(self) -> None:
        self.pool: Pool[Any] | None = None

    @endpoint
    def keep(self, pool: Pool[Any]) -> bool:
        """Whether it is the one that was here before."""
        before, self.pool = self.pool, pool
        return before is pool

    @endpoint
    def double(self, pool: Pool[Any], count: int) -> list[int]:
        return list(pool.map(pool.actors.double, range(count)))

    @endpoint
    async def double_async(self, pool: Pool[Any], count: int) -> list[int]:
        return [n async for n in pool.map(pool.actors.double_async, range(count))]

    @endpoint
    def most(self, pool: Pool[Any], count: int) -> int:
        return max(pool.map_unordered(pool.actors.overlap, range(count)))

    @endpoint
    def hold(self, pool: Pool[Any], gate: str, begun: Port[int], count: int) -> int:
        """Take turns, and keep them."""
        self.futures = [pool.submit(pool.actors.block, gate, begun) for _ in range(count)]
        return os.getpid()

    @endpoint
    def send_on(self, pool: Pool[Any], other: Any) -> None:
        other.keep.call_one(pool).get()

    @endpoint
    def double_kept(self, count: int) -> list[int]:
        assert self.pool is not None
        return list(self.pool.map(self.pool.actors.double, range(count)))

    @endpoint
    def drain(self, pool: Pool[Any]) -> None:
        pool.drain()

    @endpoint
    def die(self, pool: Pool[Any]) -> None:
        pool.submit(pool.actors.die).get(WITHIN)

    @endpoint
    def die_once(self, pool: Pool[Any], mark: str) -> int:
        found: int = pool.submit(pool.actors.die_once, 7, mark).get(WITHIN)
        return found

    @endpoint
    def make_for_all(self, workers: Any) -> Pool[Any]:
        """Make a pool for others."""
        self.pool = Pool(workers)
        return self.pool

    @endpoint
    def have_begun(self, user: Any, count: int) -> None:
        """Have another user of the pool begin tasks."""
        user.begin.call_one(self.pool, count).get(WITHIN)

    @endpoint
    def begin(self, pool: Pool[Any], count: int) -> None:
        self.futures = [pool.submit(pool.actors.double, n) for n in range(count)]

    @endpoint
    def outcomes(self) -> list[str]:
        """The kinds of errors that what was begun has come to."""
        return [type(future.exception(WITHIN)).__name__ for future in self.futures]

    @endpoint
    def make(self, workers: Any) -> list[int]:
        """Make a pool, and leave it open."""
        self.pool = Pool(workers)
        return list(self.pool.map(workers.double, range(8)))


class Gate:
    """A FIFO that blocks whoever reads it until it is open."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        # Open for reading as well, so that neither side waits for the other, and what is written stays.
        self._file = os.open(path, os.O_RDWR)

    def open(self) -> None:
        """Let all pass who wait or come later."""
        os.write(self._file, b"." * 1000)

    def close(self) -> None:
        os.close(self._file)


def join_pool_thread() -> None:
    """It goes when it has had nothing to do for a moment."""
    for thread in threading.enumerate():
        if thread.name == "mesh-pool":
            thread.join(WITHIN)
            assert not thread.is_alive()


def lines(path: Path) -> Iterator[int]:
    """The numbers of the tasks that were begun."""
    return (int(line) for line in path.read_text().split())
