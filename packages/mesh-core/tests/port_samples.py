"""Actors for the tests of ports and of what is built on them, in a module that workers can import."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

from mesh_core import Actor, Channel, Port, PortReceiver, Undeliverable, current_rank, endpoint
from mesh_core._common.current import current as current_process


def counts() -> dict[str, int]:
    """What waits and lives in the process that this runs in."""
    # An exception that was raised by its argument's name refers to itself, and so to the frame with the port.
    gc.collect()
    return current_process().runtime.counts()


def nothing_left() -> Iterator[None]:
    """The body of a fixture: as many ports and calls wait after a test as before it."""

    def waiting() -> tuple[int, int]:
        found = current_process().runtime.counts()
        return found["ports"], found["calls"]

    before = waiting()
    yield
    # After a thousand tests a collection takes a tenth of a second or more: only where it can make a difference.
    if waiting() != before:
        gc.collect()
        assert waiting() == before


class Poster(Actor):
    """Sends to ports, and keeps them."""

    def __init__(self) -> None:
        self.kept: list[Port[Any]] = []

    @endpoint
    def post(self, port: Port[Any], *values: Any) -> None:
        for value in values:
            port.send(value)

    @endpoint
    async def post_async(self, port: Port[Any], value: Any) -> None:
        port.send(value)

    @endpoint
    def post_rank(self, port: Port[Any], value: Any) -> None:
        port.send((current_rank().rank, value))

    @endpoint
    def fail(self, port: Port[Any], error: BaseException) -> None:
        port.exception(error)

    @endpoint
    def try_post(self, port: Port[Any], value: Any) -> str:
        """What sending says."""
        try:
            port.send(value)
        except Undeliverable as error:
            return str(error)
        return "sent"

    @endpoint
    def keep(self, port: Port[Any]) -> None:
        self.kept.append(port)

    @endpoint
    def try_kept(self, value: Any) -> str:
        try:
            self.kept[-1].send(value)
        except Undeliverable as error:
            return str(error)
        return "sent"

    @endpoint
    def drop(self) -> None:
        self.kept.clear()

    @endpoint
    def pass_on(self, route: list[Any], port: Port[Any], value: Any) -> None:
        """Give the port to the next on the route; the last one sends."""
        if route:
            route[0].pass_on.call_one(route[1:], port, (*value, current_rank().rank)).get()
        else:
            port.send((*value, "end"))

    @endpoint
    def counts(self) -> dict[str, int]:
        return counts()


class Listener(Actor):
    """Receives at ports of its own."""

    def __init__(self) -> None:
        self.receiver: PortReceiver[Any] | None = None

    @endpoint
    def listen(self, once: bool = False) -> Port[Any]:
        port: Port[Any]
        port, self.receiver = Channel[Any].open(once)
        return port

    @endpoint
    def receive(self, count: int) -> list[Any]:
        assert self.receiver is not None
        return [self.receiver.recv().get(timeout=30) for _ in range(count)]

    @endpoint
    async def receive_async(self, count: int) -> list[Any]:
        assert self.receiver is not None
        return [await self.receiver.recv() for _ in range(count)]

    @endpoint
    def ask(self, poster: Any, value: Any) -> Any:
        """A channel inside one endpoint."""
        port, receiver = Channel[Any].open(once=True)
        poster.post.broadcast(port, value)
        return receiver.recv().get(timeout=30)

    @endpoint
    def close(self) -> None:
        assert self.receiver is not None
        self.receiver.close()

    @endpoint
    def forget(self) -> None:
        self.receiver = None

    @endpoint
    def nothing(self) -> None:
        """A barrier."""


class Responder(Actor):
    """Answers by the port of a call."""

    def __init__(self) -> None:
        self.kept: list[Port[Any]] = []
        self.outcome = "nothing yet"

    @endpoint(explicit_response_port=True)
    def answer(self, port: Port[int], value: int) -> None:
        port.send(value + 1)

    @endpoint(explicit_response_port=True)
    async def answer_async(self, port: Port[int], value: int) -> None:
        await asyncio.sleep(0)
        port.send(value + 1)

    @endpoint(explicit_response_port=True)
    def often(self, port: Port[int], count: int) -> None:
        for n in range(count):
            port.send(n)

    @endpoint(explicit_response_port=True)
    def fail(self, port: Port[int], error: BaseException) -> None:
        port.exception(error)

    @endpoint(explicit_response_port=True)
    def raises(self, port: Port[int], error: BaseException) -> None:
        raise error

    @endpoint(explicit_response_port=True)
    async def raises_async(self, port: Port[int], error: BaseException) -> None:
        raise error

    @endpoint(explicit_response_port=True)
    def sends_then_raises(self, port: Port[int], error: BaseException) -> None:
        port.send(1)
        raise error

    @endpoint(explicit_response_port=True)
    def ignore(self, port: Port[int]) -> None:
        """Lets go of the port."""

    @endpoint(explicit_response_port=True)
    def keep(self, port: Port[int]) -> None:
        self.kept.append(port)

    @endpoint(explicit_response_port=True)
    def hand_to(self, port: Port[int], other: Any) -> None:
        other.adopt.call_one(port).get()

    @endpoint(explicit_response_port=True)
    def from_a_thread(self, port: Port[int], value: int) -> None:
        threading.Thread(target=port.send, args=(value,)).start()

    @endpoint
    def adopt(self, port: Port[int]) -> None:
        self.kept.append(port)

    @endpoint
    def answer_kept(self, *values: int) -> str:
        """Answer what was kept first; what sending says."""
        port = self.kept[0]
        try:
            for value in values:
                port.send(value)
        except Undeliverable as error:
            return str(error)
        return "sent"

    @endpoint
    def close_kept(self) -> None:
        self.kept[0].close()

    @endpoint
    def drop_kept(self) -> None:
        self.kept.clear()

    @endpoint
    def counts(self) -> dict[str, int]:
        return counts()


class Summand(Actor):
    """Gives results that can be combined."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    @endpoint
    def rank(self, factor: float = 1) -> float:
        return current_rank().rank * factor

    @endpoint
    async def rank_async(self, factor: int = 1) -> int:
        await asyncio.sleep(0)
        return current_rank().rank * factor

    @endpoint
    def listed(self) -> list[int]:
        return [current_rank().rank] * (1 + current_rank().rank % 3)

    @endpoint
    def text(self) -> str:
        return f"<{current_rank().rank}>"

    @endpoint
    def losses(self) -> dict[str, Any]:
        return {"loss": float(current_rank().rank), "by": {"n": 1}}

    @endpoint
    def block(self, size: int) -> bytearray:
        return bytearray([current_rank().rank % 256]) * size

    @endpoint
    def array(self, size: int) -> Any:
        import numpy

        return numpy.full(size, current_rank().rank, dtype="float64")

    @endpoint
    def raises_at(self, ranks: list[int]) -> int:
        if current_rank().rank in ranks:
            raise ValueError(f"rank {current_rank().rank} has no result")
        return 1

    @endpoint
    def wait_at(self, ranks: list[int]) -> int:
        if current_rank().rank in ranks:
            self.gate.wait(30)
        return 1

    @endpoint
    async def hang_at(self, ranks: list[int]) -> int:
        if current_rank().rank in ranks:
            await asyncio.Event().wait()
        return 1

    @endpoint
    def nothing(self) -> None:
        """A barrier."""

    @endpoint(explicit_response_port=True)
    def by_port(self, port: Port[int]) -> None:
        port.send(1)

    def plain(self, factor: int, *, more: int = 0) -> int:
        """Not marked."""
        return current_rank().rank * factor + more

    async def plain_async(self) -> int:
        return current_rank().rank

    def plain_port(self, port: Port[str], text: str) -> None:
        port.send(text)

    def _private(self) -> None:
        """Nobody's business."""


class Opener(Actor):
    """Opens the gates of summands in its process, and looks at what is gathered there; on the loop."""

    @endpoint
    async def open(self) -> None:
        stage = current_process()._actor_host
        assert stage is not None
        for hosted in stage.actors.values():
            if isinstance(hosted.object, Summand):
                hosted.object.gate.set()

    @endpoint
    async def gathering(self) -> int:
        stage = current_process()._actor_host
        assert stage is not None
        return 0 if stage.reductions is None else len(stage.reductions)

    async def coroutine(self) -> str:
        return "awaited"

    def on_the_loop(self) -> str:
        asyncio.get_running_loop()
        return "called"
