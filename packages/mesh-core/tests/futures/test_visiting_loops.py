"""An asyncio loop whose only coroutine waits for a call: it sleeps in the runtime, and still does whatever else becomes due."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mesh_core import Actor, Promise, endpoint, this_host

pytestmark = pytest.mark.usefixtures("runtime")
WITHIN = 60.0


class Gate(Actor):
    """Answers when it is told to."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    @endpoint(concurrent=True)
    async def wait(self) -> str:
        await self.opened.wait()
        self.opened.clear()
        return "through"

    @endpoint(concurrent=True)
    async def open(self) -> None:
        self.opened.set()

    @endpoint(concurrent=True)
    async def echo(self, value: Any) -> Any:
        return value


@pytest.fixture
def gate(runtime: None) -> Iterator[Any]:
    """One such actor."""
    with this_host().spawn_procs() as procs:
        actor: Any = procs.spawn("gate", Gate)
        actor.initialized.get(WITHIN)
        yield actor


def in_a_moment(function: Callable[[], object]) -> threading.Thread:
    """Call something from another thread, most likely when the loop sleeps."""

    def run() -> None:
        time.sleep(0.02)
        function()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def by_timer(loop: asyncio.AbstractEventLoop, go: Callable[[], object]) -> None:
    loop.call_later(0.02, go)


def by_task(loop: asyncio.AbstractEventLoop, go: Callable[[], object]) -> None:
    async def later() -> None:
        await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        go()

    loop.later = loop.create_task(later())  # type: ignore[attr-defined]


def by_descriptor(loop: asyncio.AbstractEventLoop, go: Callable[[], object]) -> None:
    here, there = os.pipe()

    def read() -> None:
        loop.remove_reader(here)
        os.close(here)
        os.close(there)
        go()

    loop.add_reader(here, read)
    in_a_moment(lambda: os.write(there, b"x"))


def by_thread(loop: asyncio.AbstractEventLoop, go: Callable[[], object]) -> None:
    in_a_moment(lambda: loop.call_soon_threadsafe(go))


def by_signal(loop: asyncio.AbstractEventLoop, go: Callable[[], object]) -> None:
    loop.add_signal_handler(signal.SIGUSR1, go)
    in_a_moment(lambda: os.kill(os.getpid(), signal.SIGUSR1))


def by_handler(loop: asyncio.AbstractEventLoop, go: Callable[[], object]) -> None:
    signal.signal(signal.SIGUSR1, lambda *_: go())
    in_a_moment(lambda: os.kill(os.getpid(), signal.SIGUSR1))


WAYS = [by_timer, by_task, by_descriptor, by_thread, by_signal, by_handler]


@pytest.mark.parametrize("way", WAYS)
def test_what_becomes_due_is_done_while_a_call_is_awaited(gate: Any, way: Any) -> None:
    """The call is answered only once it is done; and calls that come back at once let it be done too."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for _ in range(3):
            waiting = gate.wait.call_one()
            way(loop, gate.open.broadcast)
            assert await asyncio.wait_for(waiting, WITHIN) == "through"
        done: list[bool] = []
        way(loop, lambda: done.append(True))
        until = time.monotonic() + WITHIN
        while not done:
            assert await gate.echo.call_one(1) == 1
            assert time.monotonic() < until

    before = signal.getsignal(signal.SIGUSR1)
    try:
        asyncio.run(main())
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_one_coroutine_may_wait_without_a_deadline(gate: Any) -> None:
    """No timer ends the sleep here: only what happens does."""

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for way in (by_descriptor, by_thread, by_signal):
            waiting = gate.wait.call_one()
            way(loop, gate.open.broadcast)
            assert await waiting == "through"

    asyncio.run(main())


def test_a_promise_kept_by_another_task_of_the_loop(gate: Any) -> None:
    async def main() -> None:
        promise = Promise[int]()

        async def keep() -> None:
            await asyncio.sleep(0.01)
            promise.set_result(4)

        keeping = asyncio.create_task(keep())
        assert await promise.future == 4
        await keeping

    asyncio.run(main())


def test_cancellation_and_stops_end_the_sleep(gate: Any) -> None:
    async def main() -> None:
        task = asyncio.current_task()
        assert task is not None
        in_a_moment(lambda: loop.call_soon_threadsafe(task.cancel))
        with pytest.raises(asyncio.CancelledError):
            await gate.wait.call_one()
        task.uncancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await gate.wait.call_one()

    loop = asyncio.new_event_loop()
    loop.run_until_complete(main())
    waiting = loop.create_task(asyncio.wait_for(gate.wait.call_one(), WITHIN))
    in_a_moment(lambda: loop.call_soon_threadsafe(loop.stop))
    loop.run_forever()
    assert not waiting.done()
    waiting.cancel()
    loop.run_until_complete(asyncio.gather(waiting, return_exceptions=True))
    loop.close()


def test_loops_come_and_go_on_many_threads(gate: Any) -> None:
    """The runtime's places for them are used again, and no waiter takes another's answer."""

    async def main(number: int) -> list[int]:
        return [await gate.echo.call_one(number * 100 + n) for n in range(20)]

    found: dict[int, list[int]] = {}

    def run(number: int) -> None:
        for _ in range(5):
            found[number] = asyncio.run(main(number))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WITHIN)
    assert found == {number: [number * 100 + n for n in range(20)] for number in range(4)}
    # A thread whose loop visited may still wait for actors of this process in the ordinary way.
    assert gate.echo.call_one(5).get(WITHIN) == 5
