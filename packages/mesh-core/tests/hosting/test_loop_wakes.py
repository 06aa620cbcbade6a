"""What wakes the event loop of an actor: messages, its own descriptors, other threads, calls that are done."""

from __future__ import annotations

import asyncio
import os
import threading
from typing import Any

import pytest

from mesh_core import Actor, endpoint, this_host

pytestmark = pytest.mark.usefixtures("runtime")
WITHIN = 60.0
ROUNDS = 50


class Wakes(Actor):
    """Waits for all of them."""

    @endpoint
    async def echo(self, value: Any) -> Any:
        return value

    @endpoint(concurrent=True)
    async def read(self) -> int:
        """Read from a pipe into which a thread writes each time that the last byte was read."""
        loop, got, go_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        here, there = os.pipe()
        count = 0

        def write() -> None:
            for _ in range(ROUNDS):
                os.write(there, b"x")
                assert go_on.wait(WITHIN)
                go_on.clear()

        def read() -> None:
            nonlocal count
            count += len(os.read(here, 1))
            got.set()

        loop.add_reader(here, read)
        thread = threading.Thread(target=write)
        thread.start()
        while count < ROUNDS:
            await got.wait()
            got.clear()
            go_on.set()
        thread.join()
        loop.remove_reader(here)
        os.close(here)
        os.close(there)
        return count

    @endpoint(concurrent=True)
    async def be_told(self) -> int:
        """Be called by a thread, again and again."""
        for _ in range(ROUNDS):
            await asyncio.get_running_loop().run_in_executor(None, threading.get_ident)
        return ROUNDS

    @endpoint(concurrent=True)
    async def ask(self, other: Any) -> int:
        """Call another actor of the same loop, or of another."""
        for n in range(ROUNDS):
            assert await other.echo.call_one(n) == n
        return ROUNDS

    @endpoint(concurrent=True)
    async def sleep(self) -> int:
        for _ in range(ROUNDS):
            await asyncio.sleep(0.001)
        return ROUNDS


class Other(Wakes):
    """Lives on another loop."""


class Threaded(Wakes):
    """Lives on the process's loop, because it has a thread too."""

    @endpoint
    def plain(self) -> None: ...


@pytest.mark.parametrize("cls", [Wakes, Threaded])
def test_a_loop_hears_all_that_wakes_it(runtime: None, cls: type[Any]) -> None:
    """Each alone, while the loop sleeps otherwise, then all at the same time."""
    with this_host().spawn_procs() as procs:
        actor: Any = procs.spawn("actor", cls)
        same: Any = procs.spawn("same", cls)
        other: Any = procs.spawn("other", Other)
        begin = [
            actor.read.call_one,
            actor.be_told.call_one,
            lambda: actor.ask.call_one(same),
            lambda: actor.ask.call_one(other),
            actor.sleep.call_one,
        ]
        for each in begin:
            assert each().get(WITHIN) == ROUNDS
        together = [each() for each in begin * 2]
        for n in range(ROUNDS):
            assert actor.echo.call_one(n).get(WITHIN) == n
        assert [each.get(WITHIN) for each in together] == [ROUNDS] * len(together)
