"""Actors that lag behind until they are told to go on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from mesh_core import Actor, MailboxFull, endpoint

GATE = threading.Event()
"""This process's: where `Slow` waits, and `Valve` lets it through."""


class Slow(Actor):
    """Handles nothing while the gate is shut."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    def note(self, value: Any) -> None:
        GATE.wait()
        self.count += 1

    @endpoint
    def seen(self) -> int:
        return self.count

    @endpoint
    def fail(self, value: Any) -> None:
        raise ValueError("nobody hears of it")


class Valve(Actor):
    """In the same process, with a thread of its own."""

    @endpoint
    def open(self) -> None:
        GATE.set()

    @endpoint
    def shut(self) -> None:
        GATE.clear()


class Producer(Actor):
    """Sends to others."""

    @endpoint
    def fill(self, target: Any, size: int) -> tuple[int, str]:
        """Send until there is no room; how many went, and the complaint."""
        return fill(target, bytes(size))

    @endpoint
    def flood(self, target: Any, size: int, count: int) -> int:
        for _ in range(count):
            target.note.broadcast(bytes(size))
        return count

    @endpoint
    def note(self, value: Any) -> None:
        pass


class Looper(Actor):
    """A coroutine that sends to whomever it is told, from its process's event loop."""

    @endpoint
    async def flood(self, target: Any, size: int, count: int) -> None:
        for _ in range(count):
            target.note.broadcast(bytes(size))

    @endpoint(concurrent=True)
    async def note(self, value: Any) -> None:
        await asyncio.sleep(0)


def fill(target: Any, value: Any, most: int = 1_000_000) -> tuple[int, str]:
    """Broadcast until the target's mailbox is full; how many went, and the complaint."""
    note = target.note.with_options(block=False)
    for count in range(most):
        try:
            note.broadcast(value)
        except MailboxFull as error:
            return count, str(error)
    raise AssertionError(f"{most} messages, and the mailbox is not full")
