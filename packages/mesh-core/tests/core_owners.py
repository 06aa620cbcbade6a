"""Actors that own others, and write down what they are told and in which order things end."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import threading
from pathlib import Path
from typing import Any

from core_processes import Watch

from mesh_core import Actor, MeshFailure, ProcMesh, context, endpoint, this_host, this_proc

WITHIN = 10.0


class Told(queue.SimpleQueue[MeshFailure]):
    """What the script's fault handler was told, to be waited for."""

    def next(self) -> MeshFailure:
        """The next failure."""
        return self.get(timeout=WITHIN)


def slay(procs: ProcMesh, rank: int = 0, number: int = signal.SIGKILL) -> int:
    """Kill a process, and wait until it has ended."""
    pid = procs.pids[rank]
    assert pid is not None
    slay_pid(pid, number)
    return pid


def slay_pid(pid: int, number: int = signal.SIGKILL) -> None:
    """Kill a process, and wait until it has ended."""
    watch = Watch([pid])
    os.kill(pid, number)
    assert watch.wait() == []


def write_down(path: str, text: str) -> None:
    """Append a line, whichever processes do so at the same time."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(fd, f"{text}\n".encode())
    os.close(fd)


def lines(path: Path | str) -> list[str]:
    """What was written down."""
    return Path(path).read_text().splitlines() if Path(path).exists() else []


class Leaf(Actor):
    """Can be made to fail, and notes its end in a file."""

    def __init__(self, label: str = "", log: str = "") -> None:
        self.label = label
        self.log = log
        self.gate = threading.Event()

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self, error: BaseException) -> None:
        raise error

    @endpoint
    def exit(self, status: int) -> None:
        os._exit(status)

    @endpoint
    def block(self) -> None:
        """Never come back."""
        self.gate.wait()

    @endpoint
    def instance(self, what: str, *args: Any) -> Any:
        """Something of the actor's instance: an attribute, or what a method returns."""
        found = getattr(context().actor_instance, what)
        return found(*args) if callable(found) else found

    def __cleanup__(self, error: BaseException | None) -> None:
        if self.log:
            write_down(self.log, f"{self.label} {type(error).__name__ if error else None}")


class Soft(Actor):
    """The same for an actor of coroutines only."""

    def __init__(self, label: str = "", log: str = "") -> None:
        self.label = label
        self.log = log

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def fail(self, error: BaseException) -> None:
        raise error

    @endpoint(concurrent=True)
    async def hold(self) -> None:
        """Never come back."""
        await asyncio.Event().wait()

    async def __cleanup__(self, error: BaseException | None) -> None:
        await asyncio.sleep(0)
        if self.log:
            write_down(self.log, f"{self.label} {type(error).__name__ if error else None}")


class Owner(Leaf):
    """Spawns others. Has no ``__supervise__``."""

    procs: Any = None
    mesh: Any = None

    @endpoint
    def hire(self, cls: type[Any], n: int, *args: Any) -> Any:
        """Spawn processes with an actor each; their mesh, and their pids."""
        self.procs = this_host().spawn_procs({"n": n}, "hired")
        self.mesh = self.procs.spawn("hired", cls, *args)
        return self.mesh, self.mesh.pid.call().get(WITHIN).values()

    @endpoint
    def place(self, procs: Any, cls: type[Any], *args: Any) -> Any:
        """Spawn an actor on processes that somebody else owns."""
        self.mesh = procs.spawn("placed", cls, *args)
        return self.mesh, self.mesh.pid.call().get(WITHIN).values()

    @endpoint
    def beside(self, cls: type[Any], *args: Any) -> Any:
        """Spawn an actor in this very process."""
        self.mesh = this_proc().spawn("beside", cls, *args)
        self.mesh.pid.call_one().get(WITHIN)
        return self.mesh

    @endpoint
    def ask(self, name: str, *args: Any) -> Any:
        """Call what it owns."""
        return getattr(self.mesh, name).call(*args).get(WITHIN).values()

    @endpoint
    def ask_other(self, mesh: Any, name: str, *args: Any) -> Any:
        """Call what somebody else owns."""
        return getattr(mesh, name).call_one(*args).get(WITHIN)

    @endpoint
    def ask_and_forget(self, name: str, *args: Any) -> None:
        """Call what it owns, and do not wait."""
        getattr(self.mesh, name).call(*args)

    @endpoint
    def let_go(self) -> None:
        """Stop what it owns."""
        (self.procs or self.mesh).stop().get(WITHIN)

    @endpoint
    def drop(self) -> None:
        """Forget the names of what it owns."""
        self.procs = self.mesh = None


class Guard(Owner):
    """Is asked about failures, and answers as it was told to."""

    def __init__(self, answer: str = "handle", label: str = "", log: str = "") -> None:
        super().__init__(label, log)
        self.answer = answer
        self.heard: list[MeshFailure] = []
        self.where: list[tuple[int, bool]] = []
        self.busy = False
        self._news: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    @endpoint
    def thread(self) -> int:
        return threading.get_ident()

    @endpoint(concurrent=True)
    async def told(self, n: int) -> list[MeshFailure]:
        """What it was told, once that is at least ``n`` failures."""
        while len(self.heard) < n:
            event = asyncio.Event()
            self._news.append((asyncio.get_running_loop(), event))
            if len(self.heard) < n:
                await event.wait()
        return self.heard

    @endpoint
    def asked_where(self) -> list[tuple[int, bool]]:
        """On which thread it was asked each time, and whether an endpoint was running."""
        return self.where

    @endpoint
    def work_until(self, path: str) -> None:
        """Be busy until somebody writes into a fifo."""
        self.busy = True
        Path(path).read_text()
        self.busy = False

    def note(self, failure: MeshFailure) -> None:
        self.heard.append(failure)
        self.where.append((threading.get_ident(), self.busy))
        for loop, event in self._news:
            loop.call_soon_threadsafe(event.set)

    def __supervise__(self, failure: MeshFailure) -> Any:
        self.note(failure)
        return verdict(self.answer)


class SoftGuard(Guard):
    """The same with a coroutine."""

    async def __supervise__(self, failure: MeshFailure) -> Any:
        await asyncio.sleep(0)
        self.note(failure)
        return verdict(self.answer)


def verdict(answer: str) -> Any:
    """What ``__supervise__`` is to say."""
    if answer == "raise":
        raise LookupError("the guard fails")
    if answer == "exit":
        raise SystemExit(3)
    if answer == "cancel":
        raise asyncio.CancelledError
    return {"handle": True, "pass": False, "truthy": "yes", "nothing": None}[answer]


class Bedlam(Actor):
    """Its ``__cleanup__`` does what it was told to do."""

    def __init__(self, what: str) -> None:
        self.what = what

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self, error: BaseException) -> None:
        raise error

    def __cleanup__(self, error: BaseException | None) -> None:
        misbehave(self.what)


class SoftBedlam(Actor):
    """The same for a coroutine, beside a sync endpoint."""

    def __init__(self, what: str) -> None:
        self.what = what

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self, error: BaseException) -> None:
        raise error

    async def __cleanup__(self, error: BaseException | None) -> None:
        if self.what == "hang":
            await asyncio.Event().wait()
        misbehave(self.what)


def misbehave(what: str) -> None:
    if what == "raise":
        raise LookupError("the cleanup fails")
    if what == "exit":
        raise SystemExit(3)
    if what == "hang":
        threading.Event().wait()
