"""Who comes first: failures before messages, and no actor for long."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_owners import WITHIN, Leaf, Soft, lines, write_down

from mesh_core import Actor, MeshFailure, ProcMesh, SupervisionError, context, endpoint, this_host

pytestmark = pytest.mark.usefixtures("runtime")
MANY = 2000


@pytest.fixture
def own(runtime: None) -> Iterator[ProcMesh]:
    """Two processes that a test may do anything to."""
    with this_host().spawn_procs({"gpus": 2}, name="own") as procs:
        procs.initialized.get(WITHIN)
        yield procs


def wait_at(fifo: str) -> None:
    """Hold up everything that this thread has to do."""
    Path(fifo).read_text()


class OnProcessLoop(Actor):
    """Its coroutines run on the loop that takes notices of failures, because it has a plain function too."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def reaches(self, other: Any) -> bool:
        try:
            await other.pid.call_one()
        except SupervisionError:
            return False
        return True

    @endpoint
    def plain(self) -> None: ...


class Busy(Actor):
    """Owns another, and writes down what it does; on a thread of its own."""

    def __init__(self, procs: ProcMesh, log: str) -> None:
        self.child: Any = procs.spawn("child", Leaf)
        self.log = log

    @endpoint
    def block(self, fifo: str) -> None:
        wait_at(fifo)

    @endpoint
    def note(self, text: str) -> None:
        write_down(self.log, text)

    @endpoint
    def mine(self) -> Any:
        return self.child

    def __supervise__(self, failure: MeshFailure) -> bool:
        write_down(self.log, "supervise")
        return True


class SoftBusy(Busy):
    """The same for coroutines only."""

    @endpoint
    async def block(self, fifo: str) -> None:
        wait_at(fifo)

    @endpoint
    async def note(self, text: str) -> None:
        write_down(self.log, text)

    @endpoint(concurrent=True)
    async def note_beside(self, text: str) -> None:
        write_down(self.log, text)

    @endpoint
    async def mine(self) -> Any:
        return self.child


def gate(tmp_path: Path, name: str) -> str:
    """Something to wait at."""
    os.mkfifo(tmp_path / name)
    return str(tmp_path / name)


def lose(child: Any) -> None:
    """Have an actor fail, and return when that is known here."""
    child.fail.broadcast(ValueError("no"))
    assert isinstance(child.pid.call_one().exception(WITHIN), SupervisionError)


def test_a_failure_goes_ahead_of_messages_that_were_taken_with_the_last(
    own: ProcMesh, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    beside: Any = own.slice(gpus=0).spawn("beside", OnProcessLoop)
    actor: Any = own.slice(gpus=0).spawn("actor", Busy, own.slice(gpus=1), str(log))
    child = actor.mine.call_one().get(WITHIN)
    before, first = gate(tmp_path, "before"), gate(tmp_path, "first")
    actor.block.broadcast(before)
    with Path(before).open("w"):
        # All of these are taken from the inbox together.
        actor.block.broadcast(first)
        for n in range(100):
            actor.note.broadcast(str(n))
        beside.pid.call_one().get(WITHIN)
    with Path(first).open("w"):
        lose(child)
        # The notice comes from the child's process, as this answer does after it.
        assert not beside.reaches.call_one(child).get(WITHIN)
    actor.mine.call_one().get(WITHIN)
    assert lines(log) == ["supervise", *map(str, range(100))]


@pytest.mark.parametrize("endpoint", ["note", "note_beside"])
def test_a_backlog_keeps_neither_failures_nor_other_actors_waiting(
    own: ProcMesh, tmp_path: Path, endpoint: str
) -> None:
    log, first = tmp_path / "log", gate(tmp_path, "first")
    threaded: Any = own.slice(gpus=0).spawn("threaded", Leaf)
    other: Any = own.slice(gpus=0).spawn("other", SoftBusy, own.slice(gpus=1), str(log))
    actor: Any = own.slice(gpus=0).spawn("actor", SoftBusy, own.slice(gpus=1), str(log))
    child = actor.mine.call_one().get(WITHIN)
    other.mine.call_one().get(WITHIN)
    actor.block.broadcast(first)
    with Path(first).open("w"):
        for n in range(MANY - 1):
            getattr(actor, endpoint).broadcast(str(n))
        last = getattr(actor, endpoint).call_one(str(MANY - 1))
        noted = other.note.call_one("other")
        lose(child)
        threaded.pid.call_one().get(WITHIN)
    noted.get(WITHIN)
    last.get(WITHIN)
    seen = lines(log)
    assert [each for each in seen if each.isdigit()] == [str(n) for n in range(MANY)]
    assert seen.index("other") < MANY
    assert seen.index("supervise") < MANY


class Founder(Actor):
    """Uses the event loop in its constructor."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.done = asyncio.Event()
        # What follows is the loop's from here on: it does not wait for the constructor.
        self.loop = asyncio.get_running_loop()
        self.task = asyncio.create_task(self.work())
        self.loop.call_later(0.001, self.timed, "positional")
        self.loop.call_later(0.001, self.timed, "cancelled").cancel()

    async def work(self) -> str:
        await asyncio.sleep(0)
        self.found.append("task")
        return context().actor_instance.name

    def timed(self, text: str) -> None:
        self.found.append(text)
        self.done.set()

    @endpoint
    async def told(self) -> tuple[str, list[str], bool]:
        await self.done.wait()
        return await self.task, self.found, asyncio.get_running_loop() is self.loop


def test_a_constructor_may_begin_tasks_and_timers(own: ProcMesh) -> None:
    founder: Any = own.slice(gpus=0).spawn("founder", Founder)
    name, found, same = founder.told.call_one().get(WITHIN)
    assert (name, sorted(found), same) == ("founder", ["positional", "task"], True)


class Slow(Actor):
    """Its constructor waits at a gate."""

    def __init__(self, fifo: str) -> None:
        self.text = Path(fifo).read_text()

    @endpoint
    async def said(self) -> str:
        return self.text


def test_a_constructor_blocks_nobody(own: ProcMesh, tmp_path: Path) -> None:
    gates = [gate(tmp_path, f"gate{n}") for n in range(3)]
    one = own.slice(gpus=0)
    neighbour: Any = one.spawn("neighbour", Soft)
    slow: list[Any] = [one.spawn(f"slow{n}", Slow, path) for n, path in enumerate(gates)]
    calls = [each.said.call_one() for each in slow]
    # Neither those that are there, nor those that come after.
    assert neighbour.pid.call_one().get(WITHIN) == own.pids[0]
    late: Any = one.spawn("late", Soft)
    assert late.pid.call_one().get(WITHIN) == own.pids[0]
    for n in (2, 0, 1):
        with Path(gates[n]).open("w") as go_on:
            go_on.write(f"through {n}")
        assert calls[n].get(WITHIN) == f"through {n}"
