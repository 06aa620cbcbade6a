"""Whoever spawns, owns: what an actor has spawned ends with the actor's process."""

import os
import select
import signal
from typing import Any

import pytest

from mesh_core import Actor, ProcMesh, SupervisionError, Undeliverable, endpoint, this_host

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


def test_what_a_killed_process_has_spawned_ends_too(pair: ProcMesh) -> None:
    owners: Any = pair.spawn("owners", owner_class())
    spawned = owners.spawn.call(2).get(timeout=WITHIN)
    mine, others = (spawned.get(rank) for rank in range(2))
    assert len({*mine, *others}) == 4
    watched = [os.pidfd_open(pid) for pid in mine]

    owner = owners.slice(gpus=0).pid.call_one().get(timeout=WITHIN)
    os.kill(owner, signal.SIGKILL)
    wait_for_ends(watched)

    assert isinstance(owners.slice(gpus=0).pid.call_one().exception(timeout=WITHIN), SupervisionError)
    # Nobody else's have ended.
    assert owners.slice(gpus=1).pid.call_one().get(timeout=WITHIN)
    for pid in others:
        os.kill(pid, 0)


def test_what_a_stopped_process_has_spawned_ends_too(runtime: None) -> None:
    procs = this_host().spawn_procs({"gpus": 1})
    owner: Any = procs.spawn("owner", owner_class())
    watched = [os.pidfd_open(pid) for pid in owner.spawn.call_one(2).get(timeout=WITHIN)]
    procs.stop().get(timeout=WITHIN)
    wait_for_ends(watched)


def test_what_comes_behind_a_stop_goes_back(pair: ProcMesh) -> None:
    owners: Any = pair.spawn("owners", owner_class())
    owners.pid.call().get(timeout=WITHIN)
    stopped = owners.stop()
    behind = [owners.pid.call() for _ in range(20)]
    stopped.get(timeout=WITHIN)
    for call in behind:
        assert isinstance(call.exception(timeout=WITHIN), Undeliverable)
