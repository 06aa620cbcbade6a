"""Actors that keep values and hold references."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

from mesh_core import Actor, Port, Queue, Ref, endpoint, put, put_async
from mesh_core._common.current import current

WITHIN = 30.0
KIB = 1024
BUDGET = 1024 * KIB
"""What the processes of these tests may keep."""
SIZE = 100 * KIB


def kept() -> tuple[int, int]:
    """How many values this process keeps, and their bytes."""
    counts = current().runtime.counts()
    return counts["kept"], counts["kept_bytes"]


class Party(Actor):
    """Keeps values, holds references, passes them on."""

    def __init__(self, first: Any = None) -> None:
        self.first = first
        self.held: dict[str, Any] = {}

    # Keeping.

    @endpoint
    def put(self, size: int = SIZE, fill: int = 1) -> Ref[bytearray]:
        return put(bytearray([fill]) * size)

    @endpoint
    def put_and_hold(self, name: str, size: int = SIZE) -> None:
        self.held[name] = put(bytearray(size))

    @endpoint
    def put_in_time(self, size: int, timeout: float | None) -> Ref[bytearray]:
        return put(bytearray(size), timeout=timeout)

    @endpoint(concurrent=True)
    async def put_later(self, size: int, begun: Port[None] | None = None) -> Ref[bytearray]:
        waiting = asyncio.ensure_future(put_async(bytearray(size)))
        await asyncio.sleep(0)
        if begun is not None:
            begun.send(None)
        return await waiting

    @endpoint(concurrent=True)
    async def put_on_loop(self, size: int) -> Ref[bytearray]:
        return put(bytearray(size))

    @endpoint
    def put_nested(self, refs: list[Ref[Any]]) -> Ref[dict[str, Any]]:
        return put({"refs": refs, "beside": bytearray(SIZE)})

    @endpoint
    def drained(self) -> tuple[int, int]:
        """Wait until nothing is kept here: all the room is there again."""
        gc.collect()
        ref = put(bytearray(BUDGET - 8 * KIB), timeout=WITHIN)
        del ref
        return kept()

    @endpoint
    def kept(self) -> tuple[int, int]:
        return kept()

    @endpoint
    def fetched(self) -> int:
        """How often others have fetched a value from here."""
        return current().runtime.counts()["fetched"]

    # Making results.

    @endpoint
    def make(self, size: int = SIZE, fill: int = 3) -> bytearray:
        return bytearray([fill]) * size

    @endpoint
    async def make_async(self, size: int = SIZE) -> bytearray:
        return bytearray(size)

    @endpoint
    def items(self, n: int) -> Iterator[bytearray]:
        for i in range(n):
            yield bytearray([i]) * SIZE

    @endpoint
    async def items_async(self, n: int) -> AsyncIterator[bytearray]:
        for i in range(n):
            yield bytearray([i]) * SIZE

    @endpoint
    def fail(self) -> bytearray:
        raise ValueError("nothing was made")

    @endpoint(explicit_response_port=True)
    def answer(self, port: Port[int]) -> None:
        port.send(1)

    # Arguments.

    @endpoint
    def kinds(self, *args: Any, **kwargs: Any) -> list[str]:
        return [type(each).__name__ for each in (*args, *kwargs.values())]

    @endpoint
    async def kinds_async(self, *args: Any, **kwargs: Any) -> list[str]:
        return [type(each).__name__ for each in (*args, *kwargs.values())]

    @endpoint
    def kind_of_first(self) -> str:
        return type(self.first).__name__

    @endpoint
    def sum(self, data: bytearray) -> int:
        return sum(data)

    @endpoint
    def scribble(self, data: bytearray) -> int:
        view = memoryview(data)
        view[0] = 99
        return view[0]

    # Holding.

    @endpoint
    def hold(self, name: str, refs: Any) -> None:
        self.held[name] = refs

    @endpoint
    def hold_value(self, name: str, held: list[Ref[Any]]) -> None:
        self.held[name] = held[0].get()

    @endpoint
    def drop(self, name: str) -> None:
        self.held.pop(name)
        gc.collect()

    @endpoint
    def pass_on(self, name: str, to: Any) -> None:
        to.hold.call_one(name, self.held[name]).get(timeout=WITHIN)

    @endpoint
    def value_of(self, name: str) -> int:
        return sum(self.held[name][0].get())

    @endpoint
    async def await_value(self, name: str) -> int:
        return sum(await self.held[name][0])

    @endpoint
    def sum_of_held(self, name: str) -> int:
        return sum(self.held[name])

    @endpoint
    def is_lost(self, name: str) -> bool:
        return bool(self.held[name][0].is_lost)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def wait_for(self, told: Port[Port[None]]) -> None:
        """Handle no other message until the port is written to."""
        from mesh_core import Channel

        port, receiver = Channel[None].open(once=True)
        told.send(port)
        receiver.recv().get(timeout=WITHIN)

    # Queues.

    @endpoint
    def put_into(self, queue: Queue[Any], n: int) -> None:
        for i in range(n):
            queue.put({"ref": put(bytearray([i]) * SIZE), "number": i})
        queue.flush().get(timeout=WITHIN)

    @endpoint
    def take_from(self, queue: Queue[Any], lease: float | None) -> int:
        item = queue.take(lease=lease, items=True).get(timeout=WITHIN)
        self.held["item"] = item
        return int(item.value["number"])

    @endpoint
    def look_at_item(self) -> int:
        return sum(self.held["item"].value["ref"].get())

    @endpoint
    def ack(self, queue: Queue[Any]) -> int:
        item = self.held.pop("item")
        return queue.ack(item).get(timeout=WITHIN)

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
