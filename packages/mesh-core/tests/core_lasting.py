"""Actors whose endpoints outlast restarts, and a policy that waits until it is let."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mesh_core import Actor, context, endpoint, this_host
from mesh_core.policies import Action, Event, Failed, Ignore, Later, Policy, Restart

WITHIN = 20.0


class Held:
    """Puts each failure off until ``go`` is set, and has then made again what it is told to."""

    def __init__(self, actions: Callable[[Failed], Sequence[Action]] = lambda event: [Restart()]) -> None:
        self.go = threading.Event()
        self.is_over = False
        """What is put off is dropped."""
        self.heard = threading.Semaphore(0)
        self._actions = actions
        self._put_off: set[int] = set()

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        if not isinstance(event, Failed):
            return self, []
        if self.is_over:
            return self, [Ignore()]
        if self.go.is_set():
            return self, self._actions(event)
        if id(event) not in self._put_off:
            self._put_off.add(id(event))
            self.heard.release()
        return self, [Later(0.002, event)]

    def wait(self) -> None:
        """Wait until it has heard of one more failure."""
        assert self.heard.acquire(timeout=WITHIN)


class Teller(Actor):
    """Tells which process it is in, and what it was told."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder
        self.heard: list[int] = []

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint(on_restart="wait")
    def hear(self, n: int) -> tuple[int, list[int]]:
        self.heard.append(n)
        return os.getpid(), list(self.heard)

    @endpoint(on_restart="wait")
    def begin(self, name: str) -> int:
        return self._begin(name)

    @endpoint(on_restart="retry", idempotent=True)
    def again(self, name: str) -> int:
        return self._begin(name)

    @endpoint(on_restart="retry", idempotent=True)
    async def again_later(self, name: str) -> int:
        if self._is_first(name):
            await asyncio.sleep(3600)
        return os.getpid()

    @endpoint(on_restart="wait", concurrent=True)
    async def begin_later(self, name: str) -> int:
        if self._is_first(name):
            await asyncio.sleep(3600)
        return os.getpid()

    @endpoint(on_restart="wait")
    def reject(self) -> None:
        raise KeyError("no")

    @endpoint
    def ask_itself(self, me: Any) -> Any:
        return me.hear.call_one(0).get(timeout=WITHIN)

    @endpoint
    async def ask_itself_later(self, me: Any) -> Any:
        return await me.begin_alone.call_one()

    @endpoint(on_restart="wait")
    async def begin_alone(self) -> None: ...

    @endpoint
    def fail(self) -> None:
        context().actor_instance.kill("a test")

    @endpoint(concurrent=True)
    async def fail_beside(self) -> None:
        context().actor_instance.kill("a test")

    def _is_first(self, name: str) -> bool:
        path = Path(self.folder, name)
        first = not path.exists()
        path.touch()
        return first

    def _begin(self, name: str) -> int:
        """The first life never comes to an end."""
        if self._is_first(name):
            threading.Event().wait()
        return os.getpid()


class Caller(Actor):
    """Calls from a process of its own."""

    @endpoint
    async def hear(self, teller: Any, n: int) -> int:
        pid, _ = await teller.hear.call_one(n)
        return int(pid)

    @endpoint
    def hear_blocking(self, teller: Any, n: int) -> int:
        pid, _ = teller.hear.call_one(n).get(timeout=WITHIN)
        return int(pid)


class Owner(Actor):
    """Owns supervised actors, in a worker."""

    def __init__(self) -> None:
        self.policy = Held()

    @endpoint
    def make(self) -> Any:
        procs = this_host().spawn_procs(supervise=lambda failure: True)
        return procs.spawn("tellers", Teller, supervise=self.policy)

    @endpoint
    def wait(self) -> None:
        self.policy.wait()

    @endpoint
    def go(self) -> None:
        self.policy.go.set()


def await_file(path: Path) -> None:
    """Wait until an endpoint has begun."""
    while not path.exists():
        os.sched_yield()


class Writer(Actor):
    """Notes in a file what it was told, which outlasts its lives."""

    def __init__(self, path: str) -> None:
        self.path = path

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint(on_restart="wait")
    def once(self, word: str) -> int:
        self._write(word)
        return os.getpid()

    @endpoint(on_restart="retry", idempotent=True)
    def perhaps_twice(self, word: str) -> int:
        self._write(word)
        return os.getpid()

    @endpoint
    def fail(self) -> None:
        context().actor_instance.kill("a test")

    def _write(self, word: str) -> None:
        with Path(self.path).open("a") as file:
            file.write(word + "\n")
