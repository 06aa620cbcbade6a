"""Ports of calls that are passed on between hosts, and hosts of holders that die."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from test_handed_on import Clerk

from mesh_core import (
    ActorError,
    HostMesh,
    MeshFailure,
    ProcMesh,
    SupervisionError,
    set_fault_handler,
    shutdown,
)
from mesh_core.testing import LocalCluster

SOON = 30.0


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Three hosts, some of which will not survive the test."""
    told: list[MeshFailure] = []
    before = set_fault_handler(told.append)
    with LocalCluster(hosts=3) as cluster:
        yield cluster
        shutdown()
    set_fault_handler(before)


@pytest.fixture
def hosts(cluster: LocalCluster) -> HostMesh:
    hosts = cluster.attach()
    hosts.initialized.get(timeout=SOON)
    return hosts


@pytest.fixture
def each(hosts: HostMesh) -> list[ProcMesh]:
    return [hosts.slice(hosts=n).spawn_procs() for n in range(3)]


@pytest.fixture
def clerks(each: list[ProcMesh]) -> list[Any]:
    clerks: list[Any] = [procs.spawn(f"clerk-{n}", Clerk) for n, procs in enumerate(each)]
    for clerk in clerks:
        clerk.initialized.get(timeout=SOON)
    return clerks


def test_the_host_of_who_holds_it_dies(cluster: LocalCluster, clerks: list[Any]) -> None:
    future = clerks[0].pass_to.call_one(clerks[1])
    clerks[0].nothing.call_one().get(timeout=SOON)
    assert not future.done()
    cluster.kill(1, signal.SIGKILL)
    with pytest.raises(SupervisionError, match="'clerk-0' on rank 0 passed the port") as caught:
        future.get(timeout=SOON)
    failure = caught.value.failure
    assert failure is not None
    assert (failure.mesh_name, failure.host) == ("clerk-1", "host-1")
    assert "its host is dead" in str(caught.value)


def test_a_process_of_another_host_that_holds_it_dies(each: list[ProcMesh], clerks: list[Any]) -> None:
    future = clerks[0].pass_to.call_one(clerks[1])
    clerks[0].nothing.call_one().get(timeout=SOON)
    pid = each[1].pids[0]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError, match="clerk-1") as caught:
        future.get(timeout=SOON)
    assert caught.value.failure is not None
    assert (caught.value.failure.signal, caught.value.failure.host) == (signal.SIGKILL, "host-1")


@pytest.mark.parametrize("whole", [False, True])
def test_an_actor_calls_and_others_on_two_hosts_hold_it(
    cluster: LocalCluster, each: list[ProcMesh], clerks: list[Any], whole: bool
) -> None:
    asked = clerks[0].ask.call_one(clerks[1], clerks[2])
    while not clerks[2].counts.call_one().get(timeout=SOON)["ports"]:
        pass
    if whole:
        cluster.kill(2, signal.SIGKILL)
    else:
        pid = each[2].pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    said = asked.get(timeout=SOON)
    assert said.startswith("SupervisionError: ")
    assert "clerk-2" in said
    counts = clerks[0].counts.call_one().get(timeout=SOON)
    assert (counts["calls"], counts["ports"]) == (0, 0)
    assert clerks[1].counts.call_one().get(timeout=SOON)["ports"] == 0


def test_it_is_handed_to_a_host_that_has_died(cluster: LocalCluster, clerks: list[Any]) -> None:
    cluster.kill(2, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        clerks[2].nothing.call_one().get(timeout=SOON)
    with pytest.raises(SupervisionError, match="clerk-2"):
        clerks[0].cast_to.call_one(clerks[2]).get(timeout=SOON)
    said = clerks[0].ask_cast.call_one(clerks[1], clerks[2]).get(timeout=SOON)
    assert said.startswith("SupervisionError: ")
    assert "clerk-2" in said


def test_an_actor_calls_one_whose_host_has_died_long_ago(cluster: LocalCluster, clerks: list[Any]) -> None:
    cluster.kill(2, signal.SIGKILL)
    with pytest.raises(SupervisionError):
        clerks[2].nothing.call_one().get(timeout=SOON)
    for _ in range(2):
        said = clerks[0].ask.call_one(clerks[2], clerks[1]).get(timeout=SOON)
        assert said.startswith("SupervisionError: ")


def test_another_host_answers(each: list[ProcMesh], clerks: list[Any]) -> None:
    future = clerks[0].pass_to.call_one(clerks[1])
    clerks[0].nothing.call_one().get(timeout=SOON)
    clerks[1].pass_kept_to.call_one(clerks[2]).get(timeout=SOON)
    each[1].stop().get(timeout=SOON)
    assert not future.done()
    assert clerks[2].answer_kept.call_one(5).get(timeout=SOON) == "sent"
    assert future.get(timeout=SOON) == 5
    future = clerks[0].pass_to.call_one(clerks[2])
    clerks[0].nothing.call_one().get(timeout=SOON)
    clerks[2].drop_kept.call_one().get(timeout=SOON)
    assert isinstance(future.exception(timeout=SOON), ActorError)


def test_it_is_handed_to_actors_that_are_being_spawned(hosts: HostMesh, clerks: list[Any]) -> None:
    """Their host may learn of the port before it learns of them."""
    for _ in range(5):
        assert clerks[0].ask_newcomer.call_one(clerks[1], hosts.slice(hosts=2)).get(timeout=SOON) == 9
