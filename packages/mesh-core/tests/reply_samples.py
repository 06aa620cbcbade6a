"""Actors that answer more than a caller reads."""

from __future__ import annotations

import os
import threading
from typing import Any

from mesh_core import Actor, MailboxFull, endpoint

GATE = threading.Event()
"""This process's: where answers wait to be given."""

MADE = [0]
"""This process's: how many answers were made."""


def _made(number: int, size: int) -> tuple[int, bytes]:
    MADE[0] += 1
    return number, bytes(size)


class Answerer(Actor):
    """Answers in every way."""

    @endpoint
    def plain(self, number: int, size: int) -> tuple[int, bytes]:
        GATE.wait()
        return _made(number, size)

    @endpoint
    async def coroutine(self, number: int, size: int) -> tuple[int, bytes]:
        GATE.wait()
        return _made(number, size)

    @endpoint
    def raising(self, number: int, size: int) -> None:
        GATE.wait()
        raise ValueError(*_made(number, size))

    @endpoint
    async def raising_coroutine(self, number: int, size: int) -> None:
        GATE.wait()
        raise ValueError(*_made(number, size))


class Loose(Actor):
    """The same by coroutines that overlap."""

    @endpoint(concurrent=True)
    async def concurrent(self, number: int, size: int) -> tuple[int, bytes]:
        GATE.wait()
        return _made(number, size)

    @endpoint(concurrent=True)
    async def ping(self) -> str:
        return "pong"


class Beside(Actor):
    """In the process of those who answer, with a thread of its own."""

    @endpoint
    def let(self, go: bool) -> None:
        if go:
            MADE[0] = 0
            GATE.set()
        else:
            GATE.clear()

    @endpoint
    def made(self) -> int:
        return MADE[0]

    @endpoint
    def waiting(self) -> tuple[int, int]:
        """How many replies wait here, and their bytes."""
        from mesh_core._common.current import current

        counts = current().runtime.counts()
        return counts["replies"], counts["reply_bytes"]

    @endpoint
    def spawns(self) -> tuple[int, int]:
        """The same of spawns."""
        from mesh_core._common.current import current

        counts = current().runtime.counts()
        return counts["spawns"], counts["spawn_bytes"]

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Asker(Actor):
    """Calls, and looks at the answers later."""

    def __init__(self) -> None:
        self.futures: list[Any] = []

    @endpoint
    def begin(self, mesh: Any, name: str, size: int, count: int, timeout: float | None = None) -> None:
        endpoint = getattr(mesh, name).with_options(timeout=timeout)
        self.futures = [endpoint.call_one(number, size) for number in range(count)]

    @endpoint
    def collect(self, backwards: bool) -> list[int]:
        """The numbers that came back, each with its bytes."""
        numbers = []
        for future in self.futures[::-1] if backwards else self.futures:
            try:
                number, data = future.get(timeout=60)
            except ValueError as error:
                number, data = error.args
            assert not any(data[:10])
            numbers.append(number)
        self.futures = []
        return numbers

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def ping(self) -> str:
        return "pong"


class Heavy(Actor):
    """Made of much."""

    def __init__(self, number: int, data: bytes) -> None:
        self.number, self.length = number, len(data)

    @endpoint
    def told(self) -> tuple[int, int]:
        return self.number, self.length


class Spawner(Actor):
    """Spawns at a process that may have stopped."""

    def __init__(self) -> None:
        self.meshes: list[Any] = []

    @endpoint
    async def spawn(self, procs: Any, size: int, count: int) -> tuple[int, str]:
        """In a coroutine; how many were spawned, and the complaint."""
        for number in range(count):
            try:
                self.meshes.append(procs.spawn(f"heavy{number}", Heavy, number, bytes(size)))
            except MailboxFull as error:
                return number, str(error)
        return count, ""

    @endpoint
    def spawn_on_thread(self, procs: Any, size: int, count: int) -> int:
        for number in range(count):
            self.meshes.append(procs.spawn(f"heavy{number}", Heavy, number, bytes(size)))
            MADE[0] += 1
        return count

    @endpoint
    def told(self) -> list[tuple[int, int]]:
        return [mesh.told.call_one().get(timeout=60) for mesh in self.meshes]

    @endpoint
    def references(self) -> list[Any]:
        return self.meshes

    @endpoint
    def pid(self) -> int:
        return os.getpid()
