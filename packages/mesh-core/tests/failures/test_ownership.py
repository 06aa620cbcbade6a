"""Ownership: what an actor spawned ends with the actor's process."""

import asyncio
import os
import select
import signal
from pathlib import Path
from typing import Any

import pytest
from core_owners import Leaf, Owner, Soft, Told, lines, slay
from core_processes import Watch

from mesh_core import (
    Actor,
    MeshError,
    ProcMesh,
    SupervisionError,
    Undeliverable,
    endpoint,
    this_host,
)

WITHIN = 30.0


def wait_for_ends(pidfds: list[int]) -> None:
    """Wait until the processes have ended."""
    for fd in pidfds:
        readable, _, _ = select.select([fd], [], [], WITHIN)
        os.close(fd)
        assert readable, "a process outlives its owner"


def owner_class() -> type[Any]:
    """A class that workers need not import."""

    class Owned(Actor):
        @endpoint
        def pid(self) -> int:
            return os.getpid()

    class Owner(Owned):
        @endpoint
        def spawn(self, n: int) -> list[int]:
            self.mesh = this_host().spawn_procs({"n": n})
            return self.mesh.spawn("owned", Owned).pid.call().get(timeout=WITHIN).values()

    return Owner


@pytest.fixture
def pair(runtime: None) -> Any:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        yield procs


def test_children_of_a_killed_process_end_too(pair: ProcMesh) -> None:
    owners: Any = pair.spawn("owners", owner_class())
    spawned = owners.spawn.call(2).get(timeout=WITHIN)
    mine, others = (spawned.get(rank) for rank in range(2))
    assert len({*mine, *others}) == 4
    watched = [os.pidfd_open(pid) for pid in mine]

    owner = owners.slice(gpus=0).pid.call_one().get(timeout=WITHIN)
    os.kill(owner, signal.SIGKILL)
    wait_for_ends(watched)

    assert isinstance(owners.slice(gpus=0).pid.call_one().exception(timeout=WITHIN), SupervisionError)
    # Other processes are still running.
    assert owners.slice(gpus=1).pid.call_one().get(timeout=WITHIN)
    for pid in others:
        os.kill(pid, 0)


def test_children_of_a_stopped_process_end_too(runtime: None) -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    owner: Any = procs.spawn("owner", owner_class())
    watched = [os.pidfd_open(pid) for pid in owner.spawn.call_one(2).get(timeout=WITHIN)]
    procs.stop().get(timeout=WITHIN)
    wait_for_ends(watched)


def test_messages_after_a_stop_are_returned(pair: ProcMesh) -> None:
    owners: Any = pair.spawn("owners", owner_class())
    owners.pid.call().get(timeout=WITHIN)
    stopped = owners.stop()
    behind = [owners.pid.call() for _ in range(20)]
    stopped.get(timeout=WITHIN)
    for call in behind:
        assert isinstance(call.exception(timeout=WITHIN), Undeliverable)


# Children first.


def test_what_an_owner_owns_is_cleaned_up_before_it(pair: ProcMesh, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    top: Any = pair.slice(gpus=0).spawn("top", Owner, "top", log)
    middle, _ = top.place.call_one(pair.slice(gpus=1), Owner, "middle", log).get(WITHIN)
    middle.hire.call_one(Leaf, 1, "bottom", log).get(WITHIN)
    top.stop().get(WITHIN)
    assert lines(log) == ["bottom None", "middle None", "top None"]


@pytest.mark.parametrize("cls", [Leaf, Soft])
@pytest.mark.parametrize("how", ["mesh", "instance", "processes"])
def test_cleanup_runs_in_an_orderly_end(pair: ProcMesh, tmp_path: Path, cls: type[Any], how: str) -> None:
    log = str(tmp_path / "log")
    procs = this_host().spawn_procs()
    actor: Any = procs.spawn("actor", cls, "it", log)
    actor.pid.call_one().get(WITHIN)
    if how == "mesh":
        actor.stop().get(WITHIN)
    elif how == "instance" and cls is Leaf:
        actor.instance.call_one("stop", "enough").get(WITHIN)
        with pytest.raises(Undeliverable):
            actor.pid.call_one().get(WITHIN)
    procs.stop().get(WITHIN)
    assert lines(log) == ["it None"]


@pytest.mark.parametrize("cls", [Leaf, Soft])
def test_cleanup_of_an_actor_that_fails_is_told_why(
    pair: ProcMesh, told: Told, tmp_path: Path, cls: type[Any]
) -> None:
    log = str(tmp_path / "log")
    actor: Any = pair.slice(gpus=0).spawn("actor", cls, "it", log)
    actor.fail.broadcast(ValueError("no"))
    assert told.next().mesh_name == "actor"
    actor.stop().get(WITHIN)
    assert lines(log) == ["it ValueError"]


def test_what_a_failed_owner_owns_ends_with_it(pair: ProcMesh, told: Told, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    owner: Any = pair.slice(gpus=0).spawn("owner", Owner, "owner", log)
    _, pids = owner.hire.call_one(Leaf, 2, "hired", log).get(WITHIN)
    watch = Watch(pids)
    owner.fail.broadcast(KeyError("no"))
    assert told.next().mesh_name == "owner"
    assert watch.wait() == []
    owner.stop().get(WITHIN)
    assert lines(log) == ["hired None", "hired None", "owner KeyError"]
    assert told.empty()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_an_owner_that_ends_in_a_process_that_lives_takes_what_it_owns(
    pair: ProcMesh, told: Told, how: str
) -> None:
    owner: Any = pair.slice(gpus=0).spawn("owner", Owner)
    watch = Watch(owner.hire.call_one(Leaf, 2).get(WITHIN)[1])
    placed, _ = pair.slice(gpus=0).spawn("other", Owner).place.call_one(pair.slice(gpus=1), Leaf).get(WITHIN)
    owner.instance.call_one(how, "enough").exception(WITHIN)
    assert watch.wait() == []
    if how == "kill":
        failure = told.next()
        assert failure.mesh_name == "owner"
        assert "was killed: enough" in failure.report()
    # What its neighbour owns is still running.
    assert placed.pid.call_one().get(WITHIN) == pair.pids[1]
    assert told.empty()


def test_an_actor_on_somebody_elses_process_ends_with_its_owners_process(pair: ProcMesh, told: Told) -> None:
    own = this_host().spawn_procs(name="own")
    owner: Any = own.spawn("owner", Owner)
    placed, _ = owner.place.call_one(pair.slice(gpus=1), Leaf).get(WITHIN)
    mine: Any = pair.slice(gpus=1).spawn("mine", Leaf)
    slay(own)
    assert told.next().mesh_name == "owner"
    # FAM-4: its stop is on its way, before this call.
    assert isinstance(placed.pid.call_one().exception(WITHIN), Undeliverable)
    assert mine.pid.call_one().get(WITHIN) == pair.pids[1]
    own.stop().get(WITHIN)


def test_references_own_nothing(pair: ProcMesh) -> None:
    mine: Any = pair.slice(gpus=0).spawn("mine", Leaf)
    borrower: Any = pair.slice(gpus=1).spawn("borrower", Owner)
    assert borrower.ask_other.call_one(mine, "pid").get(WITHIN) == pair.pids[0]
    borrower.stop().get(WITHIN)
    assert mine.pid.call_one().get(WITHIN) == pair.pids[0]


def test_dropping_references_changes_nothing(pair: ProcMesh) -> None:
    owner: Any = pair.slice(gpus=0).spawn("owner", Owner)
    mesh, pids = owner.hire.call_one(Leaf, 1).get(WITHIN)
    owner.drop.call_one().get(WITHIN)
    assert mesh.pid.call_one().get(WITHIN) == pids[0]
    watch = Watch(pids)
    owner.stop().get(WITHIN)
    assert watch.wait() == []


def test_nothing_is_spawned_by_an_actor_that_has_ended(pair: ProcMesh, tmp_path: Path) -> None:
    late: Any = pair.slice(gpus=0).spawn("late", Late)
    waiting = late.spawn_later.call_one()
    late.begun.call_one().get(WITHIN)
    late.stop().get(WITHIN)
    pair.slice(gpus=0).spawn("opener", Opener).open.call_one().get(WITHIN)
    assert isinstance(waiting.exception(WITHIN), MeshError)


class Late(Actor):
    """Spawns after its end."""

    def __init__(self) -> None:
        import builtins

        self.gate = builtins.__dict__.setdefault("late_gate", asyncio.Event())
        self.here = asyncio.Event()

    @endpoint(concurrent=True)
    async def spawn_later(self) -> None:
        self.here.set()
        await self.gate.wait()
        this_host().spawn_procs()

    @endpoint(concurrent=True)
    async def begun(self) -> None:
        await self.here.wait()


class Opener(Actor):
    """Shares a process with the class above."""

    @endpoint
    async def open(self) -> None:
        import builtins

        builtins.__dict__["late_gate"].set()


def test_an_actor_knows_its_creator(pair: ProcMesh) -> None:
    owner: Any = pair.slice(gpus=0).spawn("owner", Owner)
    assert owner.instance.call_one("creator").get(WITHIN) == "the script"
    beside = owner.beside.call_one(Leaf).get(WITHIN)
    (proc,) = {owner.instance.call_one("proc_id").get(WITHIN)}
    assert beside.instance.call_one("creator").get(WITHIN) == f"actor 'owner' in {proc}"
