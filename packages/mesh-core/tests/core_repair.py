"""Actors for meshes that are repaired, and waiting for what was lost."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable
from typing import Any

from mesh_core import (
    Actor,
    MeshError,
    MeshFailure,
    ProcMesh,
    context,
    endpoint,
    this_host,
)

WITHIN = 20.0


class Losses:
    """A policy that handles all failures, and keeps them to be waited for."""

    def __init__(self) -> None:
        self._told: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()

    def __call__(self, failure: MeshFailure) -> bool:
        self._told.put(failure)
        return True

    def next(self) -> MeshFailure:
        """The next one."""
        return self._told.get(timeout=WITHIN)

    def wait(self) -> None:
        """Wait for one, and leave it there."""
        self._told.put(self.next())

    def none(self) -> bool:
        """Whether there is none just now."""
        return self._told.empty()

    def slay(self, procs: ProcMesh, rank: int) -> MeshFailure:
        """Kill a process, and wait until its owner has been told."""
        pid = procs.pids[rank]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return self.next()


class Counter(Actor):
    """Counts what it was told."""

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self.heard: list[int] = []

    @endpoint
    def hear(self, n: int) -> int:
        self.heard.append(n)
        return len(self.heard)

    @endpoint
    def all(self) -> list[int]:
        return self.heard

    @endpoint
    def who(self) -> tuple[int, int, int, int]:
        """Its rank, how many there are, its place in what was called, and its process."""
        rank = context().actor_instance.rank
        return rank.rank, rank.extent.nelements, context().message_rank.rank, os.getpid()

    @endpoint
    def begun_with(self) -> int:
        return self.start

    @endpoint
    def echo(self, data: bytes) -> bytes:
        return data

    @endpoint
    def say(self, text: str) -> None:
        print(text)  # noqa: T201 - what it is for

    @endpoint
    def listed(self) -> list[int]:
        return [context().actor_instance.rank.rank]

    @endpoint
    def fail(self) -> None:
        context().actor_instance.kill("as a test wants")

    @endpoint
    def env(self, name: str) -> str | None:
        return os.environ.get(name)


class Asker(Actor):
    """Calls others by the reference that it was given."""

    def __init__(self, other: Any = None) -> None:
        self.other = other

    @endpoint
    def keep(self, other: Any) -> None:
        self.other = other

    @endpoint
    def who(self) -> list[tuple[int, int, int, int]]:
        told: list[tuple[int, int, int, int]] = self.other.who.call().get(timeout=WITHIN).values()
        return told

    @endpoint
    def lost(self) -> list[int]:
        return [point.rank for point in self.other.failed()]


class Keeper(Actor):
    """Owns a mesh of processes, and repairs it."""

    def __init__(self) -> None:
        self.losses = Losses()
        self.procs = this_host().spawn_procs({"gpus": 3}, supervise=self.losses)
        self.counters = self.procs.spawn("counters", Counter, supervise=lambda failure: True)

    @endpoint
    def mesh(self) -> Any:
        return self.counters

    @endpoint
    def lose_and_repair(self, rank: int) -> list[int]:
        self.losses.slay(self.procs, rank)
        self.procs.respawn().get(timeout=WITHIN)
        self.counters.respawn().get(timeout=WITHIN)
        return self.procs.incarnations


def await_loss(mesh: Any) -> None:
    """Wait until it is known that a process has ended, of which nobody is told apart."""
    while not mesh.failed():
        os.sched_yield()


def until(call: Callable[[], Any]) -> Any:
    """What a call gives once nothing is amiss any more."""
    while True:
        try:
            return call()
        except MeshError:
            continue  # each comes back as soon as it is known to be in vain


def ranks(points: list[Any]) -> list[int]:
    return [point.rank for point in points]
