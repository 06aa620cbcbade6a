"""Actors that wait for each other."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable
from typing import Any

from mesh_core import Actor, ActorTimeout, Channel, Port, Promise, Queue, endpoint, inspect

WITHIN = 30.0
FREED = threading.Event()
"""Ends ``block``, for all actors of a process."""


def until_explained(pattern: str, error: Callable[[], str]) -> None:
    """Have an error of a late call until it says why, which is left out where that is not found out in a quarter of a second."""
    end = time.monotonic() + WITHIN
    while not re.search(pattern, said := error()):
        assert time.monotonic() < end, said


def late_error(future: Any) -> str:
    """The error of a wait for what is not done."""
    try:
        future.get(timeout=1.0)
    except ActorTimeout as error:
        return str(error)
    raise AssertionError("it is done")


class Freer(Actor):
    """Lets those go that block in the same process."""

    @endpoint
    def free(self, may_go: bool) -> None:
        if may_go:
            FREED.set()
        else:
            FREED.clear()


class Waiter(Actor):
    """Waits in all the ways there are."""

    @endpoint
    def ask(self, *way: Any) -> int:
        """Ask the next on the way, which asks the one after it."""
        return 1 + way[0].ask.call_one(*way[1:]).get() if way else 0

    @endpoint
    def block(self, began: Port[str]) -> None:
        began.send("began")
        FREED.wait(WITHIN)

    @endpoint
    def receive(self, to: Port[Port[int]]) -> int:
        port, receiver = Channel[int].open()
        to.send(port)
        return receiver.recv().get(WITHIN)

    @endpoint
    def take(self, queue: Queue[int], began: Port[str]) -> int:
        began.send("began")
        return queue.take().get(WITHIN)

    @endpoint
    def promised(self, began: Port[str]) -> None:
        promise = Promise[None]("the weights")
        thread = threading.Thread(target=lambda: promise.set_result(FREED.wait(WITHIN) and None))
        thread.start()
        began.send("began")
        promise.future.get(WITHIN)
        thread.join()

    @endpoint
    def flood(self, other: Any, data: bytes) -> None:
        for _ in range(256):
            other.swallow.broadcast(data)

    @endpoint
    def swallow(self, data: bytes) -> None:
        """Take it."""

    @endpoint
    def look(self) -> list[str]:
        return [str(one) for one in inspect.waits().waits]

    @endpoint
    def late(self, other: Any, seconds: float) -> str:
        try:
            other.ask.with_options(timeout=seconds).call_one().get()
        except ActorTimeout as error:
            return str(error)
        return ""


class AsyncWaiter(Actor):
    """The same for coroutines."""

    def __init__(self) -> None:
        self.over = asyncio.Event()

    @endpoint
    async def ask(self, *way: Any) -> int:
        return 1 + await way[0].ask.call_one(*way[1:]) if way else 0

    @endpoint(concurrent=True)
    async def open_ask(self, *way: Any) -> int:
        if not way:
            await self.over.wait()
            return 0
        return 1 + int(await way[0].open_ask.call_one(*way[1:]))

    @endpoint(concurrent=True)
    async def end(self) -> None:
        self.over.set()

    @endpoint
    async def late(self, other: Any, seconds: float) -> str:
        try:
            await other.block.with_options(timeout=seconds).call_one(Channel[str].open()[0])
        except ActorTimeout as error:
            return str(error)
        return ""
