"""An actor that hangs in every way, and how a job is asked why it does not go on. The benchmark of `mesh why` uses it too."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import threading
import time
from typing import Any

from mesh_core import Actor, ActorTimeout, Channel, Port, Promise, Queue, endpoint, inspect
from mesh_supervision._watching._why import Reason, why

FOR_EVER = 3600


class Hanging(Actor):
    def __init__(self, stuck: bool = False) -> None:
        self.kept: list[Any] = []
        if stuck:
            threading.Event().wait()

    @endpoint
    def lock(self) -> None:
        held = threading.Lock()
        held.acquire()
        held.acquire()

    @endpoint
    def spin(self) -> None:
        while True:
            pass

    @endpoint
    def slow(self) -> None:
        time.sleep(FOR_EVER)

    @endpoint
    def regex(self) -> None:
        # Holds the interpreter's lock for longer than anybody lives.
        re.match(r"(a+)+$", "a" * 64 + "b")

    @endpoint
    async def block_loop(self) -> None:
        time.sleep(FOR_EVER)  # noqa: ASYNC251 - as those do who do not know

    @endpoint
    def child(self) -> None:
        subprocess.run(["sleep", str(FOR_EVER)], check=False)

    @endpoint
    def pipe(self) -> None:
        end, _ = os.pipe()
        os.read(end, 1)

    @endpoint
    async def forget(self) -> None:
        await asyncio.Event().wait()

    @endpoint
    def chain(self, *others: Any) -> None:
        (others[0].chain.call_one(*others[1:]) if len(others) > 1 else others[0].lock.call_one()).get()

    @endpoint
    async def chain_async(self, other: Any) -> None:
        await other.lock.call_one()

    @endpoint
    def circle(self, other: Any, me: Any) -> None:
        (other.circle.call_one(None, me) if other is not None else me.lock.call_one()).get()

    @endpoint
    def flood(self, other: Any) -> None:
        other.slow.broadcast()
        while True:
            other.swallow.broadcast(bytes(1 << 20))

    @endpoint
    def swallow(self, data: bytes) -> None:
        pass

    @endpoint
    def take(self, queue: Queue[int]) -> int:
        return queue.take().get()

    @endpoint
    def task(self, number: int) -> int:
        """A negative one does not end."""
        return number if number >= 0 else self.held()

    def held(self) -> int:
        threading.Event().wait()
        return 0

    @endpoint
    def channel(self) -> None:
        _, receiver = Channel.open()
        receiver.recv().get()

    @endpoint
    def promise(self) -> None:
        kept = Promise[int]("the answer to everything")
        kept.future.get()

    @endpoint(explicit_response_port=True)
    def keep(self, port: Port[int]) -> None:
        self.kept.append(port)


def wait_aside(future: Any, limit: float) -> None:
    """Have another thread wait for it, as a script would."""

    def wait() -> None:
        with contextlib.suppress(ActorTimeout):
            future.exception(limit)

    threading.Thread(target=wait, daemon=True).start()


def look() -> Reason:
    """One look at this script's job, as the command takes it."""
    return why(inspect.snapshot(pss=False), inspect.waits(), inspect.connect(os.getpid()).stacks())
