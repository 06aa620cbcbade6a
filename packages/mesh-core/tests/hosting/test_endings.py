"""How actors end: what runs is cancelled first, owners end after what they own, and nothing takes for ever."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_owners import WITHIN, Leaf, Owner, Soft, Told, lines, write_down
from core_processes import Script

from mesh_core import (
    Actor,
    MeshError,
    MeshFailure,
    Port,
    ProcMesh,
    Undeliverable,
    configured,
    endpoint,
    this_host,
)

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def own(runtime: None) -> Iterator[ProcMesh]:
    """Two processes that a test may do anything to."""
    with this_host().spawn_procs({"gpus": 2}, name="own") as procs:
        procs.initialized.get(WITHIN)
        yield procs


def gate(tmp_path: Path, name: str) -> str:
    """Something to wait at."""
    os.mkfifo(tmp_path / name)
    return str(tmp_path / name)


# What runs beside.


class Beside(Actor):
    """Has endpoints that run on; on the event loop."""

    def __init__(self, log: str) -> None:
        self.log = log
        self.begun = 0
        self.change = asyncio.Event()

    async def _run(self) -> None:
        self.begun += 1
        self.change.set()
        try:
            await asyncio.Event().wait()
        finally:
            # It has time for this.
            await asyncio.sleep(0)
            write_down(self.log, "endpoint ends")

    @endpoint(concurrent=True)
    async def run(self) -> None:
        await self._run()

    @endpoint(concurrent=True, explicit_response_port=True)
    async def answer(self, port: Port[int]) -> None:
        await self._run()

    @endpoint(concurrent=True)
    async def cling(self) -> None:
        """Does not care for being cancelled."""
        while True:
            try:
                await self._run()
            except asyncio.CancelledError:
                write_down(self.log, "clings")

    @endpoint(concurrent=True)
    async def running(self, n: int) -> None:
        while self.begun < n:
            self.change.clear()
            await self.change.wait()

    async def __cleanup__(self, error: BaseException | None) -> None:
        await asyncio.sleep(0)
        write_down(self.log, "cleanup")


class ThreadedBeside(Beside):
    """The same with a thread."""

    @endpoint
    def thread(self) -> int:
        return threading.get_ident()


@pytest.mark.parametrize("cls", [Beside, ThreadedBeside])
@pytest.mark.parametrize("what", ["actors", "procs"])
def test_a_stop_cancels_what_runs_and_then_cleans_up(
    told: Told, tmp_path: Path, cls: type[Any], what: str
) -> None:
    log = str(tmp_path / "log")
    with this_host().spawn_procs() as procs:
        actor: Any = procs.spawn("actor", cls, log)
        calls = [actor.run.call_one(), actor.answer.call_one()]
        results = actor.run.stream()
        actor.run.broadcast()
        actor.running.call_one(4).get(WITHIN)
        (actor if what == "actors" else procs).stop().get(WITHIN)
        assert lines(log) == ["endpoint ends"] * 4 + ["cleanup"]
        for call in [*calls, *results]:
            assert isinstance(call.exception(WITHIN), Undeliverable)
    assert told.empty()


@pytest.mark.parametrize("cls", [Beside, ThreadedBeside])
def test_what_has_not_begun_never_does(own: ProcMesh, tmp_path: Path, cls: type[Any]) -> None:
    log = str(tmp_path / "log")
    actor: Any = own.slice(gpus=0).spawn("actor", cls, log)
    calls = [actor.run.call_one() for _ in range(100)]
    actor.stop().get(WITHIN)
    for call in calls:
        assert isinstance(call.exception(WITHIN), Undeliverable)
    assert lines(log)[-1] == "cleanup"


@pytest.mark.slow
@pytest.mark.once
@pytest.mark.parametrize("cls", [Beside, ThreadedBeside])
def test_endpoints_that_do_not_end_are_reported_to_the_stopper(tmp_path: Path, cls: type[Any]) -> None:
    log = str(tmp_path / "log")
    with configured(stop_timeout=0.3), this_host().spawn_procs() as procs:
        actor: Any = procs.spawn("actor", cls, log)
        call = actor.cling.call_one()
        actor.running.call_one(1).get(WITHIN)
        with pytest.raises(MeshError, match=r"cling of actor 'actor' .* did not end within 0\.3 s"):
            actor.stop().get(WITHIN)
        assert isinstance(call.exception(WITHIN), Undeliverable)
        assert lines(log) == ["endpoint ends", "clings", "cleanup"]


class Endless(Actor):
    def __init__(self, log: str) -> None:
        write_down(log, "begun")
        threading.Event().wait()


@pytest.mark.slow
def test_a_constructor_that_does_not_end_is_reported_by_name_and_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, told: Told
) -> None:
    log = str(tmp_path / "log")
    with configured(stop_timeout=0.3), this_host().spawn_procs(name="procs") as procs:
        procs.spawn("endless", Endless, log)
        until = time.monotonic() + 60
        while not (Path(log).exists() and lines(log)):
            assert time.monotonic() < until
            time.sleep(0.01)
    said = "\n".join(caplog.messages)
    assert "actor 'endless' on procs[0]" in said
    assert "failed in its constructor, which nobody waits for:" in said
    assert "MeshError: the constructor of actor 'endless'" in said


@pytest.mark.parametrize("cls", [Beside, ThreadedBeside])
def test_a_failure_cancels_what_runs_and_then_cleans_up(
    own: ProcMesh, told: Told, tmp_path: Path, cls: type[Any]
) -> None:
    class Failing(cls):  # type: ignore[misc, valid-type]
        @endpoint
        async def fail(self) -> None:
            raise ValueError("no")

    log = str(tmp_path / "log")
    actor: Any = own.slice(gpus=0).spawn("actor", Failing, log)
    call = actor.run.call_one()
    actor.running.call_one(1).get(WITHIN)
    actor.fail.broadcast()
    assert told.next().mesh_name == "actor"
    assert "ValueError: no" in str(call.exception(WITHIN))
    actor.stop().get(WITHIN)
    assert lines(log) == ["endpoint ends", "cleanup"]


# In which order.


class User(Leaf):
    """At its end it uses another."""

    def __init__(self, label: str, log: str, other: Any = None) -> None:
        super().__init__(label, log)
        self.other = other

    def __cleanup__(self, error: BaseException | None) -> None:
        answer = "alone" if self.other is None else self.other.pid.call_one().exception(WITHIN)
        write_down(self.log, f"{self.label} {answer}")


class SoftUser(Soft):
    """The same on the event loop."""

    def __init__(self, label: str, log: str, other: Any = None) -> None:
        super().__init__(label, log)
        self.other = other

    async def __cleanup__(self, error: BaseException | None) -> None:
        answer: object = "alone"
        if self.other is not None:
            answer = type(await self.other.pid.call_one()).__name__
        write_down(self.log, f"{self.label} {answer.replace('int', 'None')}")


class Maker(Owner):
    """Makes three meshes, of which the later use the earlier."""

    @endpoint
    def make(self, cls: type[Any], log: str, where: list[ProcMesh] | None) -> None:
        make(cls, log, where)


def make(cls: type[Any], log: str, where: list[ProcMesh] | None) -> None:
    """Make meshes, of which the later use the earlier: on these processes, or each on its own."""
    places = where or [this_host().spawn_procs() for _ in range(3)]
    mesh: Any = None
    for n in (2, 0, 1):
        mesh = places[n % len(places)].spawn(f"mesh{n}", cls, str(n), log, mesh)
        mesh.pid.call_one().get(WITHIN)


IN_TURN = ["1 None", "0 None", "2 alone"]


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("cls", [User, SoftUser])
@pytest.mark.parametrize("where", ["own processes", "one process", "two processes"])
def test_an_owners_meshes_end_one_by_one_the_last_made_first(
    own: ProcMesh, tmp_path: Path, cls: type[Any], where: str
) -> None:
    log = str(tmp_path / "log")
    with this_host().spawn_procs() as procs:
        owner: Any = procs.spawn("owner", Maker)
        ends = {"own processes": None, "one process": 1, "two processes": 2}[where]
        owner.make.call_one(cls, log, ends and [own.slice(gpus=n) for n in range(ends)]).get(WITHIN)
        owner.stop().get(WITHIN)
    assert lines(log) == IN_TURN


def test_actors_of_processes_that_stop_end_in_that_order(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    with this_host().spawn_procs() as procs:
        make(User, log, [procs])
    assert lines(log) == IN_TURN


def test_the_scripts_do_too(script: Callable[..., Script], tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    run = script(f"from test_endings import *\nmake(SoftUser, {log!r}, None)")
    assert run.finish()[1] == ""
    assert lines(log) == IN_TURN


# Constructors.


class Stuck(Actor):
    """Comes out of its constructor when it is let."""

    def __init__(self, fifo: str, log: str) -> None:
        self.log = log
        self.text = Path(fifo).read_text()

    @endpoint
    async def ping(self) -> None: ...

    def __cleanup__(self, error: BaseException | None) -> None:
        with Path(self.log).open("w") as said:
            said.write("cleaned up")


class ThreadedStuck(Stuck):
    """The same on a thread of its own."""

    @endpoint
    def pong(self) -> None: ...


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Stuck, ThreadedStuck])
def test_the_stop_of_an_actor_that_is_not_constructed_has_a_limit(tmp_path: Path, cls: type[Any]) -> None:
    fifo, said = gate(tmp_path, "gate"), gate(tmp_path, "said")
    with configured(stop_timeout=0.3), this_host().spawn_procs() as procs:
        stuck: Any = procs.spawn("stuck", cls, fifo, said)
        call = stuck.ping.call_one()
        with pytest.raises(MeshError, match=r"the constructor of actor 'stuck' .* within 0\.3 s"):
            stuck.stop().get(WITHIN)
        for each in (call, stuck.initialized, stuck.ping.call_one()):
            assert isinstance(each.exception(WITHIN), Undeliverable)
        # Should it return after all, what it has made is not left lying about.
        with Path(fifo).open("w"):
            pass
        assert Path(said).read_text() == "cleaned up"


@pytest.mark.parametrize("cls", [Stuck, ThreadedStuck])
def test_a_stop_waits_for_a_constructor_that_returns(own: ProcMesh, tmp_path: Path, cls: type[Any]) -> None:
    fifo, said = gate(tmp_path, "gate"), str(tmp_path / "said")
    stuck: Any = own.slice(gpus=0).spawn("stuck", cls, fifo, said)
    call, stopped = stuck.ping.call_one(), stuck.stop()
    with Path(fifo).open("w"):
        pass
    stopped.get(WITHIN)
    assert call.get(WITHIN) is None
    assert lines(said) == ["cleaned up"]


# Failures of what ends.


class Guardian(Actor):
    """Handles every failure, and takes its time to end."""

    def __init__(self, procs: ProcMesh, says: str, waits: str) -> None:
        self.first: Any = procs.spawn("first", Waiter)
        self.second: Any = procs.spawn("second", Leaf, "second", says)
        self.waits = waits

    @endpoint
    def lose_later(self, fifo: str) -> None:
        self.first.wait.broadcast(fifo)
        self.first.fail.broadcast(ValueError("no"))

    def __supervise__(self, failure: MeshFailure) -> bool:
        return True

    def __cleanup__(self, error: BaseException | None) -> None:
        Path(self.waits).read_text()


class Waiter(Leaf):
    """Waits at a gate."""

    @endpoint
    def wait(self, fifo: str) -> None:
        Path(fifo).read_text()


def test_a_failure_while_its_owner_is_stopped_is_reported_to_nobody(
    own: ProcMesh, told: Told, tmp_path: Path
) -> None:
    gates = [gate(tmp_path, name) for name in ("says", "waits", "child")]
    beside: Any = own.slice(gpus=0).spawn("beside", Soft)
    owner: Any = own.slice(gpus=0).spawn("owner", Guardian, own.slice(gpus=1), *gates[:2])
    owner.lose_later.call_one(gates[2]).get(WITHIN)
    stopped = owner.stop()
    # What it owns is being stopped, the child behind its failure.
    assert Path(gates[0]).read_text() == "second None\n"
    with Path(gates[2]).open("w"):
        pass
    with Path(gates[1]).open("w"):
        # The failure has come to the owner's process, and the owner has no time for it any more.
        beside.pid.call_one().get(WITHIN)
    stopped.get(WITHIN)
    fence: Any = own.slice(gpus=0).spawn("fence", Leaf)
    fence.fail.broadcast(ValueError("the fence"))
    assert told.next().mesh_name == "fence"
