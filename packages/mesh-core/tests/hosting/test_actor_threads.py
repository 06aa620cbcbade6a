"""The threads of actors with sync endpoints."""

from __future__ import annotations

import sqlite3
import threading
from typing import Any

import pytest

from mesh_core import Actor, ProcMesh, endpoint, inspect, this_host
from mesh_core._hosting.thread_executor import ActorThread

pytestmark = pytest.mark.usefixtures("runtime")
WITHIN = 60.0


class Small(Actor):
    """Leaves something on its thread."""

    def __init__(self, number: int) -> None:
        self.local = threading.local()
        self.local.number = number
        self.database = sqlite3.connect(":memory:")
        self.thread = threading.get_ident()

    @endpoint
    def number(self) -> tuple[int, bool, str]:
        assert self.database.execute("select 1").fetchone() == (1,)
        same = threading.get_ident() == self.thread
        return self.local.number, same, threading.current_thread().name


def test_each_of_many_actors_keeps_its_thread(runtime: None) -> None:
    """What a constructor leaves on its thread is there in the endpoints, and belongs to no other actor."""
    with this_host().spawn_procs() as procs:
        actors: list[Any] = [procs.spawn(f"small{n}", Small, n) for n in range(100)]
        for _ in range(2):
            calls = [actor.number.call_one() for actor in actors]
            assert [call.get(WITHIN) for call in calls] == [(n, True, f"mesh-small{n}") for n in range(100)]
        stacks = inspect.stacks(procs).item()
        assert all(stacks.of(f"small{n}").frames for n in (0, 50, 99))
        for actor in actors:
            actor.stop().get(WITHIN)
        assert threads(procs) < 20


def threads(procs: ProcMesh) -> int:
    """How many threads a process has."""
    (proc,) = [each for each in inspect.snapshot().procs if each.mesh == procs.name]
    assert proc.threads is not None
    return proc.threads


def test_a_thread_that_has_not_begun_can_be_waited_for() -> None:
    """Whoever starts it does not wait until it runs; whoever waits for its end does."""
    gate, ran = threading.Event(), []

    def run() -> None:
        gate.wait(WITHIN)
        ran.append(threading.current_thread().name)

    thread = ActorThread("mesh-one", run)
    with pytest.raises(RuntimeError):
        ActorThread("mesh-never", run).join(0.0)
    thread.start()
    thread.join(0.0)
    gate.set()
    thread.join(WITHIN)
    assert (ran, thread.is_alive()) == (["mesh-one"], False)
