"""Actors for the tests, in a module that workers can import."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

from mesh_core import (
    Actor,
    context,
    current_actor_name,
    current_rank,
    current_size,
    endpoint,
    this_host,
    this_proc,
)


class Echo(Actor):
    """Gives back what it gets."""

    @endpoint
    def echo(self, value: Any) -> Any:
        return value

    @endpoint
    async def echo_async(self, value: Any) -> Any:
        return value

    @endpoint
    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run anything."""
        return function(*args)

    @endpoint
    def fail(self, error: BaseException) -> None:
        raise error

    @endpoint
    def keywords(self, a: int, /, b: int = 2, *rest: int, c: int, **others: int) -> Any:
        return a, b, rest, c, others


class Coroutines(Actor):
    """Coroutines only: the process's one event loop runs it."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.gates: dict[Any, asyncio.Event] = {}
        self.threads: set[int] = set()

    def _gate(self, key: Any) -> asyncio.Event:
        return self.gates.setdefault(key, asyncio.Event())

    @endpoint
    async def note(self, value: Any) -> None:
        # Would let a later message overtake, did messages not wait for each other.
        await asyncio.sleep(0)
        self.seen.append(value)

    @endpoint
    async def notes(self) -> list[Any]:
        return self.seen

    @endpoint(concurrent=True)
    async def enter(self, key: Any) -> Any:
        """Come back when somebody calls `open`."""
        self.seen.append(("in", key))
        await self._gate(key).wait()
        return key

    @endpoint(concurrent=True)
    async def open(self, key: Any) -> list[Any]:
        self._gate(key).set()
        return self.seen

    @endpoint(concurrent=True)
    async def hold(self) -> None:
        """Never come back; `holding` does once this has begun, `cancelled` once it was cancelled."""
        self._gate("holding").set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self._gate("cancelled").set()
            raise

    @endpoint(concurrent=True)
    async def holding(self) -> None:
        await self._gate("holding").wait()

    @endpoint(concurrent=True)
    async def cancelled(self) -> bool:
        await self._gate("cancelled").wait()
        return True

    @endpoint
    async def hold_all(self, other: Coroutines) -> None:
        """Not concurrent: nothing else is handled meanwhile. Tells another that it has begun."""
        other.open.broadcast("begun")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise


class Mixed(Actor):
    """Sync and async endpoints over one state."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self.busy = False

    @endpoint
    def note(self, value: Any) -> int:
        assert not self.busy
        self.seen.append(value)
        return threading.get_ident()

    @endpoint
    async def note_async(self, value: Any) -> int:
        assert not self.busy
        self.busy = True
        await asyncio.sleep(0)
        self.busy = False
        self.seen.append(value)
        return threading.get_ident()

    @endpoint
    def notes(self) -> list[Any]:
        return self.seen


class Where(Actor):
    """Knows its place."""

    def __init__(self) -> None:
        self.rank_at_birth = context().actor_instance.rank.rank

    @endpoint
    def place(self) -> dict[str, Any]:
        now = context()
        me = now.actor_instance
        return {
            "birth": self.rank_at_birth,
            "rank": me.rank.rank,
            "coords": dict(me.rank),
            "message_rank": now.message_rank.rank,
            "message_coords": dict(now.message_rank),
            "current_rank": current_rank().rank,
            "current_size": current_size(),
            "name": current_actor_name(),
            "class": me.class_name,
            "proc": me.proc_id,
            "proc_name": this_proc().name,
            "proc_len": len(me.proc),
            "pid": os.getpid(),
            "logger": self.logger.name,
        }

    @endpoint
    async def rank_after_a_while(self) -> tuple[int, int]:
        before = current_rank().rank
        await asyncio.sleep(0)
        return before, current_rank().rank


class Gate(Actor):
    """Waits in a sync endpoint."""

    def __init__(self) -> None:
        self.event = threading.Event()

    @endpoint
    def block(self) -> None:
        self.event.wait()


class Caller(Actor):
    """Calls other actors."""

    @endpoint
    def ask(self, other: Echo, value: Any) -> Any:
        return other.echo.call(value).get().values()

    @endpoint
    async def ask_async(self, other: Echo, value: Any) -> Any:
        return (await other.echo_async.call(value)).values()

    @endpoint
    def ask_one(self, other: Any, value: Any) -> Any:
        return other.echo.call_one(value).get()

    @endpoint
    def neighbours(self, value: Any) -> Any:
        """Spawn an actor in this very process, and call it."""
        echo = this_proc().spawn("neighbour", Echo)
        return echo.echo.call_one(value).get(), echo.call.call_one(os.getpid).get()

    @endpoint
    def nest(self, count: int) -> tuple[list[int], list[int]]:
        """Spawn processes of its own, call them, stop them."""
        with this_host().spawn_procs(per_host={"inner": count}) as procs:
            echo = procs.spawn("inner", Echo)
            pids = echo.call.call(os.getpid).get().values()
            return pids, echo.call.call(os.getppid).get().values()

    @endpoint
    def adopt(self, count: int) -> list[int]:
        """Spawn processes and keep them."""
        self.procs = this_host().spawn_procs(per_host={"inner": count})
        return self.procs.spawn("inner", Echo).call.call(os.getpid).get().values()

    @endpoint
    def watch(self, other: Any) -> str:
        """Wait for an actor that is going to die."""
        try:
            other.block.call_one().get()
        except Exception as error:
            return f"{type(error).__name__} {getattr(getattr(error, 'failure', None), 'signal', None)}"
        return "nothing"


class Broken(Actor):
    """Cannot be made."""

    def __init__(self, text: str) -> None:
        raise ValueError(text)

    @endpoint
    def ping(self) -> str:
        return "pong"


class BrokenAsync(Actor):
    """Cannot be made either; lives on the loop."""

    def __init__(self) -> None:
        raise KeyError("no such thing")

    @endpoint
    async def ping(self) -> str:
        return "pong"


class Unpicklable(Exception):
    """Holds what cannot be sent."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


def raise_unpicklable() -> None:
    raise Unpicklable("the lock comes along")


def make_lock() -> Any:
    return threading.Lock()


def exit_now(status: int) -> None:
    os._exit(status)


def environment(name: str) -> str | None:
    return os.environ.get(name)


def scribble(buffer: Any) -> int:
    """Write into what came, and say what its first byte was."""
    view = memoryview(buffer).cast("B")
    first = view[0]
    view[:4] = b"\xff\xff\xff\xff"
    return int(first)
