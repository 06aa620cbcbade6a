"""An actor's constructor runs where its endpoints run, and a slow one keeps nobody else waiting."""

from __future__ import annotations

import asyncio
import fcntl
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
from core_owners import WITHIN

from mesh_core import Actor, MeshError, ProcMesh, endpoint, this_host

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def own(runtime: None) -> Iterator[ProcMesh]:
    """A process that a test may do anything to."""
    with this_host().spawn_procs(name="own") as procs:
        yield procs


@pytest.fixture
def shut(tmp_path: Path) -> Iterator[Gate]:
    """Something to wait at."""
    with Gate(tmp_path / "gate") as gate:
        yield gate


class Gate:
    """Those who pass wait for its opening."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._file = path.open("w")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self.open = self._file.close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.open()


def pass_through(gate: str) -> None:
    with Path(gate).open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)


class Bound(Actor):
    """Sets what belongs to its thread."""

    def __init__(self, gate: str = "") -> None:
        if gate:
            pass_through(gate)
        self.local = threading.local()
        self.local.value = "set"
        self.made_by = threading.get_ident()


class Sync(Bound):
    @endpoint
    def look(self) -> tuple[Any, bool]:
        return getattr(self.local, "value", None), self.made_by == threading.get_ident()


class Async(Bound):
    @endpoint
    async def look(self) -> tuple[Any, bool]:
        return getattr(self.local, "value", None), self.made_by == threading.get_ident()

    @endpoint
    async def where(self) -> int:
        return threading.get_ident()

    def __cleanup__(self, error: BaseException | None) -> None:
        del self.local.value


class AlsoAsync(Async):
    """Another class, with the same constructor."""


class Asks(Actor):
    """Blocks in its constructor for the answer of another actor of its process."""

    def __init__(self, other: Any) -> None:
        self.heard = other.where.call_one().get(WITHIN)

    @endpoint
    async def what(self) -> int:
        return int(self.heard)


class Later(Actor):
    """Starts a task in its constructor."""

    def __init__(self) -> None:
        self.task = asyncio.create_task(self.work())

    async def work(self) -> int:
        return threading.get_ident()

    @endpoint
    async def same(self) -> bool:
        return await self.task == threading.get_ident()


@pytest.mark.parametrize("cls", [Sync, Async])
def test_what_a_constructor_sets_for_its_thread_is_there_in_endpoints(own: ProcMesh, cls: Any) -> None:
    actors: Any = own.spawn("actors", cls)
    assert actors.look.call_one().get(WITHIN) == ("set", True)
    actors.stop().get(WITHIN)  # raises what a clean-up raises


def test_a_constructor_starts_tasks_on_the_loop_of_its_endpoints(own: ProcMesh) -> None:
    actor: Any = own.spawn("actor", Later)
    assert actor.same.call_one().get(WITHIN)


def test_actors_of_a_class_with_a_quick_constructor_share_a_loop(own: ProcMesh) -> None:
    actors: list[Any] = [own.spawn(f"actor{n}", Async) for n in range(10)]
    # The first may have been slow all the same, on a busy machine: all but a few share.
    places = [actor.where.call_one().get(WITHIN) for actor in actors]
    assert len(set(places)) < len(places)


def test_a_slow_constructor_keeps_no_other_actor_waiting(own: ProcMesh, shut: Gate) -> None:
    before: Any = own.spawn("before", Async)
    before.where.call_one().get(WITHIN)
    slow: Any = own.spawn("slow", AlsoAsync, shut.path)
    same_class: Any = own.spawn("same_class", AlsoAsync)
    other_class: Any = own.spawn("other_class", Later)
    assert before.look.call_one().get(WITHIN) == ("set", True)
    assert same_class.look.call_one().get(WITHIN) == ("set", True)
    assert other_class.same.call_one().get(WITHIN)
    shut.open()
    assert slow.look.call_one().get(WITHIN) == ("set", True)


def test_more_slow_constructors_than_loops(own: ProcMesh, shut: Gate) -> None:
    blocked: list[Any] = [own.spawn(f"actor{n}", Async, shut.path) for n in range(32)]
    # All loops are in constructors that wait, and these are constructed after them.
    late: list[Any] = [own.spawn(f"late{n}", Async) for n in range(8)]
    shut.open()
    for actor in (*late, *blocked):
        assert actor.look.call_one().get(WITHIN) == ("set", True)


def test_a_constructor_that_blocks_for_an_actor_of_another_class_gets_its_answer(own: ProcMesh) -> None:
    other: Any = own.spawn("other", Async)
    asks: Any = own.spawn("asks", Asks, other)
    assert asks.what.call_one().get(WITHIN) == other.where.call_one().get(WITHIN)


def test_a_constructor_that_holds_up_living_actors_is_warned_of(
    own: ProcMesh, shut: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    first: Any = own.spawn("first", Async)
    first.where.call_one().get(WITHIN)
    second: Any = own.spawn("second", Async)
    second.where.call_one().get(WITHIN)
    held: Any = own.spawn("held", Async, shut.path)
    probe: Any = own.spawn("probe", Sync)
    while "the constructor of actor 'held'" not in caplog.text:
        probe.look.call_one().get(WITHIN)
    assert "holds up 2 other coroutine actors" in caplog.text
    shut.open()
    assert held.look.call_one().get(WITHIN) == ("set", True)


class Blocks(Actor):
    @endpoint
    async def ask(self, other: Any) -> str:
        try:
            other.where.call_one().get(WITHIN)
        except MeshError as error:
            return str(error)
        return "answered"

    @endpoint
    async def where(self) -> int:
        return threading.get_ident()


def test_get_in_a_coroutine_for_an_actor_of_the_same_loop_is_refused(own: ProcMesh) -> None:
    first: Any = own.spawn("first", Blocks)
    first.where.call_one().get(WITHIN)
    second: Any = own.spawn("second", Blocks)
    if first.where.call_one().get(WITHIN) == second.where.call_one().get(WITHIN):
        assert "deadlock" in second.ask.call_one(first).get(WITHIN)
    else:
        assert second.ask.call_one(first).get(WITHIN) == "answered"
