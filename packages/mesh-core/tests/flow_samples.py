"""Actors that lag behind until they are told to go on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

from mesh_core import Accumulator, Actor, Channel, MailboxFull, Port, PortReceiver, endpoint

GATE = threading.Event()
"""This process's: where `Slow` waits, and `Valve` lets it through."""


MADE = [0]
"""This process's: how many items a `Fountain` has made."""


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


class Recorder(Actor):
    """The same, and it notes what has come, in order."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    @endpoint
    def note(self, number: int, _: bytes) -> int:
        GATE.wait()
        self.numbers.append(number)
        return number

    @endpoint
    def blob(self, _: bytes) -> None:
        GATE.wait()

    @endpoint
    def answer(self, port: Port[int], count: int) -> None:
        """Answer a call of somebody else's."""
        for number in range(count):
            port.send(number)

    @endpoint
    def seen(self) -> list[int]:
        return self.numbers

    @endpoint
    def pid(self) -> int:
        return os.getpid()


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

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Looper(Actor):
    """A coroutine that sends to whomever it is told, from its process's event loop."""

    @endpoint
    async def flood(self, target: Any, size: int, count: int) -> None:
        for _ in range(count):
            target.note.broadcast(bytes(size))

    @endpoint(concurrent=True)
    async def flood_and_wait(self, target: Any, size: int, count: int) -> int:
        """Send without waiting, then wait for everything."""
        answers = [target.note.call_one(number, bytes(size)) for number in range(count)]
        return len([await answer for answer in answers])

    @endpoint
    async def flood_numbers(self, target: Any, size: int, count: int) -> None:
        for number in range(count):
            target.note.broadcast(number, bytes(size))

    @endpoint
    async def flood_awaiting(self, target: Any, size: int, count: int) -> None:
        """Send, each once the one before is on its way."""
        for number in range(count):
            await target.note.broadcast(number, bytes(size))

    @endpoint(concurrent=True)
    async def note(self, *values: Any) -> None:
        await asyncio.sleep(0)


def fill(target: Any, value: Any, most: int = 1_000_000, endpoint: str = "note") -> tuple[int, str]:
    """Broadcast until the target's mailbox is full; how many went, and the complaint."""
    note = getattr(target, endpoint).with_options(block=False)
    for count in range(most):
        try:
            note.broadcast(value)
        except MailboxFull as error:
            return count, str(error)
    raise AssertionError(f"{most} messages, and the mailbox is not full")


def most(one: float | None, other: float | None) -> float | None:
    return other if one is None else one if other is None else max(one, other)


class Worker(Actor):
    """Waits, and calls others, for the tests of deadlines and cancellation. Coroutines only."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.changed = asyncio.Event()

    def _note(self, what: str) -> None:
        self.log.append(what)
        self.changed.set()

    @endpoint(concurrent=True)
    async def wait(self, who: str = "") -> None:
        """Wait until cancelled."""
        self._note(f"wait {who}")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self._note(f"cancelled {who}")
            raise

    @endpoint(concurrent=True)
    async def wait_at(self, other: Any, who: str = "") -> None:
        """Wait for another who waits."""
        self._note(f"wait_at {who}")
        try:
            await other.wait.call_one(who)
        except asyncio.CancelledError:
            self._note(f"cancelled {who}")
            raise

    @endpoint(concurrent=True)
    async def until(self, what: str) -> list[str]:
        """Come back once that is in the log."""
        while what not in self.log:
            self.changed.clear()
            await self.changed.wait()
        return list(self.log)

    @endpoint(concurrent=True)
    async def seen(self) -> list[str]:
        """The log."""
        return self.log

    @endpoint(concurrent=True)
    async def left_at(self, other: Any, own: float | None) -> float | None:
        """How much time a nested call is told of."""
        left: float | None = await other.left.with_options(timeout=own).call_one()
        return left

    @endpoint(concurrent=True)
    async def left_at_all(self, others: Any, how: str) -> float | None:
        """How much time calls to many are told of, whose replies are combined, or folded here."""
        if how == "reduced":
            left: float | None = await others.left.with_options(reduce=most).call()
        else:
            left = await Accumulator(others.left, None, most).accumulate()
        return left

    @endpoint(concurrent=True)
    async def left(self) -> float | None:
        from mesh_core._common.context import current_message

        message = current_message()
        return None if message is None else message.left

    @endpoint
    async def one_at_a_time(self, who: str) -> None:
        self._note(who)


class Blocker(Actor):
    """Sync: it can be neither cancelled nor hurried."""

    def __init__(self) -> None:
        self.log: list[str] = []

    @endpoint
    def block(self, who: str) -> str:
        self.log.append(who)
        GATE.wait()
        return who

    @endpoint
    def seen(self) -> list[str]:
        return self.log

    @endpoint
    def nested(self, other: Any) -> None:
        """Wait, on this thread, for what never comes."""
        other.wait.call_one("nested").get()


class Caller(Actor):
    """Calls others, and itself, in every way that might not end. Some ways are coroutines."""

    @endpoint
    async def wait_for(self, other: Any, name: str) -> Any:
        return await getattr(other, name).call_one()

    @endpoint(concurrent=True)
    async def wait_for_concurrently(self, other: Any, name: str) -> Any:
        return await getattr(other, name).call_one()

    @endpoint
    async def get(self, other: Any, name: str) -> Any:
        """Block the loop."""
        return getattr(other, name).call_one().get(timeout=20)

    @endpoint
    async def send(self, other: Any, name: str) -> None:
        """Call, and do not wait."""
        self.pending = getattr(other, name).call_one()

    @endpoint
    async def collect(self) -> Any:
        return await self.pending

    @endpoint
    async def back(self, first: Any, second: Any) -> Any:
        """First calls back through the second."""
        return await first.wait_for.call_one(second, "ping")

    @endpoint(concurrent=True)
    async def back_concurrently(self, first: Any, second: Any) -> Any:
        return await first.wait_for.call_one(second, "ping_concurrently")

    @endpoint(concurrent=True)
    async def ping_concurrently(self) -> str:
        return "pong"

    @endpoint
    async def ping(self) -> str:
        return "pong"


class Plain(Actor):
    """The same with a thread of its own."""

    @endpoint
    def get(self, other: Any, name: str) -> Any:
        return getattr(other, name).call_one().get(timeout=20)

    @endpoint
    def ping(self) -> str:
        return "pong"


class Speaker(Actor):
    """Sends values to ports, faster than anybody receives."""

    def __init__(self) -> None:
        self.receiver: PortReceiver[Any] | None = None

    @endpoint
    def speak(self, port: Port[Any], size: int, count: int) -> int:
        for number in range(count):
            port.send((number, bytes(size)))
        return count

    @endpoint(concurrent=True)
    async def speak_async(self, port: Port[Any], size: int, count: int) -> int:
        for number in range(count):
            await port.send((number, bytes(size)))
        return count

    @endpoint
    async def speak_carelessly(self, port: Port[Any], size: int, count: int) -> tuple[int, str]:
        for number in range(count):
            try:
                port.send((number, bytes(size)))
            except MailboxFull as error:
                return number, str(error)
        return count, ""

    @endpoint(concurrent=True)
    async def ping(self) -> str:
        return "pong"

    @endpoint
    def blob(self, size: int) -> bytes:
        return bytes(size)

    @endpoint(concurrent=True)
    async def blob_async(self, size: int) -> bytes:
        return bytes(size)

    @endpoint
    def open(self) -> Port[Any]:
        port, self.receiver = Channel[Any].open()
        return port

    @endpoint
    def waiting(self) -> int:
        assert self.receiver is not None
        return len(self.receiver)

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class Level(Actor):
    """Beside a `Fountain`, which may be busy."""

    @endpoint
    def made(self) -> int:
        return MADE[0]


class Fountain(Actor):
    """Answers calls with more than anybody reads."""

    def __init__(self) -> None:
        MADE[0] = 0
        self.over = threading.Event()
        self.stream: Any = None

    def _made(self, number: int, size: int) -> tuple[int, bytes]:
        MADE[0] = number + 1
        return number, bytes(size)

    @staticmethod
    def _end(count: int, fail: bool) -> None:
        if fail:
            raise ValueError(f"after {count}")

    @endpoint
    def items(self, size: int, count: int, fail: bool = False) -> Iterator[tuple[int, bytes]]:
        self.over.clear()
        try:
            for number in range(count):
                yield self._made(number, size)
            self._end(count, fail)
        finally:
            self.over.set()

    @endpoint(concurrent=True)
    async def items_async(
        self, size: int, count: int, fail: bool = False
    ) -> AsyncIterator[tuple[int, bytes]]:
        self.over.clear()
        try:
            for number in range(count):
                yield self._made(number, size)
            self._end(count, fail)
        finally:
            self.over.set()

    @endpoint(explicit_response_port=True)
    def by_port(self, port: Port[Any], size: int, count: int, fail: bool = False) -> None:
        for number in range(count):
            port.send(self._made(number, size))
        self._end(count, fail)

    @endpoint(explicit_response_port=True)
    async def by_port_async(self, port: Port[Any], size: int, count: int, fail: bool = False) -> None:
        for number in range(count):
            await port.send(self._made(number, size))
        self._end(count, fail)

    @endpoint(explicit_response_port=True)
    def elsewhere(self, port: Port[Any], size: int, count: int, helper: Any, fail: bool = False) -> None:
        """Another message of the same actor answers."""
        helper.help.broadcast(port, size, count, fail)

    @endpoint
    def help(self, port: Port[Any], size: int, count: int, fail: bool) -> None:
        for number in range(count):
            port.send(self._made(number, size))
        if fail:
            port.exception(ValueError(f"after {count}"))

    @endpoint(explicit_response_port=True)
    async def hand_on(self, port: Port[Any], slow: Any, size: int, count: int) -> None:
        """Have somebody answer whose mailbox is full."""
        for number in range(count):
            slow.note.broadcast(number, bytes(size))
        slow.answer.broadcast(port, 5)
        given_up = slow.answer.broadcast(port, 7)
        assert given_up.cancel()

    @endpoint(explicit_response_port=True)
    async def carelessly(self, port: Port[Any], size: int, count: int) -> None:
        for number in range(count):
            port.send(self._made(number, size))

    @endpoint
    def ended(self) -> bool:
        return self.over.wait(30)

    @endpoint
    def begin(self, other: Any, size: int) -> None:
        self.stream = other.items.stream(size, 10**9)

    @endpoint
    def read(self, other: Any, size: int, count: int) -> int:
        return len([item.get(timeout=30) for item in other.items.stream(size, count)])

    @endpoint
    async def read_async(self, other: Any, size: int, count: int) -> int:
        return len([await item async for item in other.items_async.stream(size, count)])

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def meters(self) -> int:
        from mesh_core._common.current import current

        return current().runtime.counts()["meters"]
