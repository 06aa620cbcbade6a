"""Spawns in a process that has stopped reading: actors are announced, and their arguments wait at the spawner (SPW-1)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
from core_owners import suspend
from reply_samples import Beside, Heavy, Spawner

from mesh_core import MailboxFull, ProcMesh, SupervisionError, Undeliverable, configured, shutdown, this_host
from mesh_core._common.current import current

MIB = 2**20
BUDGET = 4 * MIB
SIZE = 600_000
FEW = 4
"""This many may wait for each of two processes and be within the budget."""


@pytest.fixture(scope="module", autouse=True)
def budget() -> Iterator[None]:
    shutdown()
    # The runtime exists before the first test, which checks what is left behind.
    with configured(link_budget=BUDGET), this_host().spawn_procs() as procs:
        procs.initialized.get(timeout=60)
        yield
    shutdown()


@pytest.fixture
def there() -> Iterator[ProcMesh]:
    """Two processes; the first is stopped now and then."""
    with this_host().spawn_procs({"gpus": 2}, name="there", supervise=lambda failure: True) as procs:
        procs.initialized.get(timeout=60)
        yield procs


@contextlib.contextmanager
def stopped(procs: ProcMesh) -> Iterator[int]:
    first = procs.slice(gpus=0).spawn("beside", Beside, supervise=lambda failure: True)
    pid = first.pid.call_one().get(timeout=30)
    suspend(pid)
    try:
        yield pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def waiting() -> int:
    return current().runtime.counts()["spawns"]


@pytest.mark.slow
def test_arguments_wait_and_nothing_overtakes_them(there: ProcMesh) -> None:
    with stopped(there):
        meshes = [there.spawn(f"heavy{number}", Heavy, number, bytes(SIZE)) for number in range(FEW)]
        assert waiting() > 0
        # To both processes, directly behind the spawns.
        told = [mesh.told.call() for mesh in meshes]
        second = [mesh.slice(gpus=1).told.call_one().get(timeout=30) for mesh in meshes]
        assert second == [(number, SIZE) for number in range(FEW)]
    for number, each in enumerate(told):
        assert each.get(timeout=60).values() == [(number, SIZE)] * 2
    assert waiting() == 0


@pytest.mark.slow
def test_references_may_be_sent_on_before_the_arguments_have_gone(there: ProcMesh) -> None:
    first = there.slice(gpus=0)
    with this_host().spawn_procs(name="spawner") as procs:
        spawner = procs.spawn("spawner", Spawner)
        beside = procs.spawn("beside", Beside)
        with stopped(there):
            assert spawner.spawn.call_one(first, SIZE, 5).get(timeout=30) == (5, "")
            assert beside.spawns.call_one().get(timeout=30)[0] > 0
            meshes = spawner.references.call_one().get(timeout=30)
            # From another process, to which they were sent by the one that still holds the arguments.
            told = [mesh.told.call_one() for mesh in meshes]
        assert [each.get(timeout=60) for each in told] == [(number, SIZE) for number in range(5)]
        assert beside.spawns.call_one().get(timeout=30) == (0, 0)


@pytest.mark.slow
def test_a_coroutine_is_refused_beyond_the_budget_and_a_thread_waits(there: ProcMesh) -> None:
    first = there.slice(gpus=0)
    with this_host().spawn_procs(name="spawner") as procs:
        spawner, other = procs.spawn("spawner", Spawner), procs.spawn("other", Spawner)
        beside = procs.spawn("beside", Beside)
        beside.let.call_one(True).get(timeout=30)
        with stopped(there):
            count, complaint = spawner.spawn.call_one(first, SIZE, 100).get(timeout=30)
            assert count * SIZE < 2 * BUDGET
            assert "for processes that do not read them" in complaint
            # A thread adds one, and waits with it.
            pending = other.spawn_on_thread.call_one(first, SIZE, 20)
            until = time.monotonic() + 60
            while beside.spawns.call_one().get(timeout=30)[0] <= count - 1:
                assert time.monotonic() < until
            assert beside.made.call_one().get(timeout=30) == 0
        assert pending.get(timeout=60) == 20
        assert spawner.told.call_one().get(timeout=60) == [(number, SIZE) for number in range(count)]
        assert other.told.call_one().get(timeout=60) == [(number, SIZE) for number in range(20)]


@pytest.mark.slow
def test_in_a_coroutine_of_the_script_too(there: ProcMesh) -> None:
    async def spawn() -> list[Any]:
        meshes: list[Any] = []
        while len(meshes) < 100:
            number = len(meshes)
            try:
                meshes.append(there.spawn(f"heavy{number}", Heavy, number, bytes(SIZE)))
            except MailboxFull:
                return meshes
        raise AssertionError("nobody was refused")

    with stopped(there):
        meshes = asyncio.run(spawn())
    assert [mesh.told.call().get(timeout=60).values() for mesh in meshes] == [
        [(number, SIZE)] * 2 for number in range(len(meshes))
    ]


@pytest.mark.slow
def test_the_death_of_the_process_drops_what_waits_for_it(there: ProcMesh) -> None:
    with stopped(there) as pid:
        meshes = [
            there.spawn(f"heavy{number}", Heavy, number, bytes(SIZE), supervise=lambda failure: True)
            for number in range(FEW)
        ]
        assert waiting() > 0
        os.kill(pid, signal.SIGKILL)
        for mesh in meshes:
            with pytest.raises(SupervisionError):
                mesh.told.call().get(timeout=60)
    assert waiting() == 0
    assert meshes[-1].slice(gpus=1).told.call_one().get(timeout=30) == (FEW - 1, SIZE)


@pytest.mark.slow
def test_the_death_of_the_spawner_answers_those_who_wait_for_its_actors(there: ProcMesh) -> None:
    first = there.slice(gpus=0)
    with this_host().spawn_procs(name="spawner", supervise=lambda failure: True) as procs:
        spawner = procs.spawn("spawner", Spawner, supervise=lambda failure: True)
        beside = procs.spawn("beside", Beside, supervise=lambda failure: True)
        with stopped(there):
            assert spawner.spawn.call_one(first, SIZE, 5).get(timeout=30) == (5, "")
            last = spawner.references.call_one().get(timeout=30)[-1]
            told = last.told.call_one()
            os.kill(spawner.pid.call_one().get(timeout=30), signal.SIGKILL)
            with pytest.raises(SupervisionError):
                beside.spawns.call_one().get(timeout=30)
        with pytest.raises((Undeliverable, SupervisionError)):
            told.get(timeout=60)
    # The process continues.
    assert first.spawn("heavy", Heavy, 1, b"").told.call_one().get(timeout=30) == (1, 0)


@pytest.mark.slow
def test_a_stop_waits_for_the_arguments_that_it_follows(there: ProcMesh) -> None:
    first = there.slice(gpus=0)
    with stopped(there):
        meshes = [first.spawn(f"heavy{number}", Heavy, number, bytes(SIZE)) for number in range(5)]
        assert waiting() > 0
        told, stop = meshes[-1].told.call_one(), meshes[-1].stop()
    assert told.get(timeout=60) == (4, SIZE)
    stop.get(timeout=60)
    with pytest.raises(Undeliverable):
        meshes[-1].told.call_one().get(timeout=30)
