"""Actors for tests over several hosts, in a module that workers can import."""

from __future__ import annotations

import os
import threading
from typing import Any

from mesh_core import (
    Actor,
    HostMesh,
    MeshFailure,
    ProcMesh,
    context,
    endpoint,
    get_or_spawn_controller,
    this_host,
)

SOON = 30.0


class Member(Actor):
    """Knows others of its kind, and speaks to them itself."""

    def __init__(self) -> None:
        self.known: Any = None
        self.procs: Any = None
        self.kept: list[Any] = []

    @endpoint
    def where(self) -> tuple[str, int]:
        return this_host().name, os.getpid()

    @endpoint
    def meet(self, other: Any) -> None:
        self.known = other

    @endpoint
    def pass_on(self, to: Any) -> None:
        """Hand what it knows to another."""
        to.meet.call(self.known).get(timeout=SOON)

    @endpoint
    def ask(self, value: Any) -> Any:
        return self.known.echo.call(value).get(timeout=SOON).values()

    @endpoint
    def echo(self, value: Any) -> Any:
        return context().actor_instance.rank.rank, value

    @endpoint
    def block(self) -> None:
        """Never come back."""
        threading.Event().wait()

    @endpoint
    def fail(self) -> None:
        raise LookupError("not here")

    @endpoint
    def spawn(self, hosts: HostMesh, per_host: int) -> Any:
        """Spawn processes and actors there; they are this actor's."""
        self.procs = hosts.spawn_procs({"gpus": per_host})
        return self.procs.spawn("mine", Member)

    @endpoint
    def spawn_and_tell(self, hosts: HostMesh, other: Any) -> None:
        """Spawn there, and tell another at once."""
        self.procs = hosts.spawn_procs()
        other.meet.call(self.procs.spawn("mine", Member)).get(timeout=SOON)

    @endpoint
    def spawn_actor_and_tell(self, procs: ProcMesh, other: Any) -> None:
        """Spawn an actor in these processes, and tell another at once."""
        other.meet.call(procs.spawn("mine", Member)).get(timeout=SOON)

    @endpoint
    def ask_later(self, value: Any) -> None:
        """Ask, and keep what will be answered."""
        self.kept.append(self.known.echo.call(value))

    @endpoint
    def answered(self) -> Any:
        return self.kept.pop().get(timeout=SOON).values()

    @endpoint
    def register(self) -> int:
        """Ask the job's one register for the next number."""
        register: Any = get_or_spawn_controller("register", Register).get(timeout=SOON)
        return register.next.call_one().get(timeout=SOON)  # type: ignore[no-any-return]


class Register(Actor):
    """Counts."""

    def __init__(self) -> None:
        self.count = 0

    @endpoint
    async def next(self) -> int:
        self.count += 1
        return self.count


class Guard(Member):
    """Owns others, and writes down what becomes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.failures: list[tuple[str, str, int | None]] = []

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.failures.append((failure.host, failure.mesh_name, failure.rank))
        return True

    @endpoint
    def heard(self) -> list[tuple[str, str, int | None]]:
        return self.failures
