"""Extensions and watches over several hosts."""

from __future__ import annotations

import os
import queue
import signal
from typing import Any

import pytest
from core_hosts import cluster, hosts  # noqa: F401 - fixtures
from hosts_samples import SOON

from mesh_core import Actor, HostMesh, MeshFailure, endpoint, shutdown, this_host
from mesh_core.extensions import (
    Extension,
    Proc,
    ProcEnd,
    Spawning,
    current_proc,
    find,
    install,
    uninstall,
    watch,
)
from mesh_core.testing import LocalCluster


class Places(Extension):
    """Reports where it is, and where it was spawned for."""

    name = "places"

    def for_spawn(self, spawning: Spawning) -> tuple[int, bool]:
        return len(spawning.hosts), spawning.is_local

    def receive(self, message: Any, sender: Proc) -> Any:
        if message == "data":
            return b"x" * (1 << 20)
        return self.proc.host, self.payload, str(sender)


class Asker(Actor):
    @endpoint
    def ask(self, proc: Proc) -> Any:
        places = find(Places)
        assert places is not None
        return places.call(proc, "where").get(timeout=SOON).values()[0]

    @endpoint
    def here(self) -> Proc:
        return current_proc()


@pytest.fixture
def places() -> Any:
    yield install(Places)
    uninstall("places")


def test_messages_reach_every_host(hosts: HostMesh, places: Places) -> None:  # noqa: F811
    with hosts.spawn_procs({"gpus": 2}) as procs:
        answers = places.call(procs, "where").get(timeout=SOON).values()
        assert len({host for host, _, _ in answers}) == len(hosts)
        assert {(payload, sender) for _, payload, sender in answers} == {((len(hosts), False), "controller")}
        assert {len(each) for each in places.call(procs, "data").get(timeout=SOON).values()} == {1 << 20}


def test_processes_of_different_hosts_talk(hosts: HostMesh, places: Places) -> None:  # noqa: F811
    with hosts.spawn_procs() as procs:
        askers: Any = procs.spawn("askers", Asker)
        there = askers.slice(hosts=2).here.call_one().get(timeout=SOON)
        host, _, sender = askers.slice(hosts=1).ask.call_one(there).get(timeout=SOON)
        assert host == there.host
        assert sender == f"{procs.name}[1]"
        # And with the script.
        assert askers.slice(hosts=1).ask.call_one(current_proc()).get(timeout=SOON)[0] == current_proc().host


def test_addresses_of_hosts_are_known_to_the_script(hosts: HostMesh) -> None:  # noqa: F811
    known = current_proc().hosts
    with hosts.spawn_procs() as procs:
        askers: Any = procs.spawn("askers", Asker)
        for proc in askers.here.call().get(timeout=SOON).values():
            if proc.address[2] != 0:
                assert known[proc.host].startswith("tcp://")
            assert proc.hosts == {}


def test_the_end_of_a_process_of_another_host_is_reported(hosts: HostMesh) -> None:  # noqa: F811
    told: queue.SimpleQueue[ProcEnd] = queue.SimpleQueue()
    with hosts.slice(hosts=slice(1, None)).spawn_procs(supervise=lambda _: True) as procs:
        procs.initialized.get(timeout=SOON)
        watch(procs, told.put)
        pid = procs.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        end = told.get(timeout=SOON)
        assert isinstance(end.failure, MeshFailure)
        assert end.failure.signal == signal.SIGKILL
        assert end.point == {"hosts": 0}
        procs.stop().get(timeout=SOON)
        assert told.get(timeout=SOON).failure is None


class FarWatcher(Actor):
    def __init__(self) -> None:
        self.ends: queue.SimpleQueue[tuple[int, ...]] = queue.SimpleQueue()

    @endpoint
    def begin(self, procs: Any) -> None:
        watch(procs, lambda end: self.ends.put(end.address))

    @endpoint
    def wait(self) -> tuple[int, ...]:
        return self.ends.get(timeout=SOON)


def test_a_process_watches_one_of_another_host(hosts: HostMesh) -> None:  # noqa: F811
    with (
        hosts.slice(hosts=1).spawn_procs() as own,
        hosts.slice(hosts=2).spawn_procs(supervise=lambda _: True) as procs,
        this_host().spawn_procs(supervise=lambda _: True) as near,
    ):
        watcher = own.spawn("watcher", FarWatcher)
        for each in (procs, near):
            watcher.begin.call_one(each).get(timeout=SOON)
            (pid,) = each.pids
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            assert watcher.wait.call_one().get(timeout=SOON)[0] == each._procs_id


def test_the_death_of_a_host_ends_its_processes() -> None:
    told: queue.SimpleQueue[ProcEnd] = queue.SimpleQueue()
    shutdown()
    with LocalCluster(hosts=2) as mortal, mortal.attach().spawn_procs(supervise=lambda _: True) as procs:
        procs.initialized.get(timeout=SOON)
        watch(procs, told.put)
        mortal.kill(0)
        end = told.get(timeout=SOON)
        assert end.point == {"hosts": 0}
        assert end.failure is not None
        assert "its host is dead" in end.failure.headline()
        # Also later, for one that is known to be dead.
        watch(procs.slice(hosts=0), told.put)
        assert told.get(timeout=SOON).point == {"hosts": 0}
    shutdown()
