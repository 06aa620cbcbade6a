"""Hosts that are taken away with notice: their agents get SIGTERM, with a grace period."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from core_owners import Told
from hosts_samples import SOON, Member
from test_hosts_failure import told  # noqa: F401 - a fixture

from mesh_core import HostMesh, SupervisionError, inspect, shutdown
from mesh_core.inspect import Event, Events
from mesh_core.testing import LocalCluster

pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    """A job of its own for each test."""
    shutdown()
    yield
    shutdown()


@contextmanager
def cluster_of(hosts: int, grace: str) -> Iterator[tuple[LocalCluster, HostMesh, Events]]:
    with LocalCluster(hosts, env={"MESH_PREEMPTION_GRACE": grace}) as cluster:
        attached = cluster.attach()
        attached.initialized.get(timeout=SOON)
        with inspect.events(actors=False) as happening:
            yield cluster, attached, happening


def next_of(happening: Events, kind: str) -> Event:
    while True:
        event = happening.get(timeout=SOON)
        assert event is not None, f"no {kind}"
        if event.kind == kind:
            return event


def test_jobs_are_notified_and_the_agent_ends_once_nothing_runs_there(told: Told) -> None:  # noqa: F811
    with cluster_of(2, "600") as (cluster, hosts, happening):
        first, second = (hosts.slice(hosts=n).spawn_procs() for n in range(2))
        members = second.spawn("members", Member)
        assert members.where.call_one().get(timeout=SOON)[0] == "host-1"
        cluster.kill(1, signal.SIGTERM)
        leaving = next_of(happening, "host_leaving")
        assert (leaving.host, leaving.grace) == ("host-1", 600.0)
        assert leaving.text == "its agent was told to end by SIGTERM"
        assert "host_leaving host-1 in 600 s" in str(leaving)
        # Nothing has been stopped, and everything there can be moved.
        assert members.echo.call_one(7).get(timeout=SOON)[1] == 7
        second.stop().get(timeout=SOON)
        assert next_of(happening, "host_died").host == "host-1"
        assert "nothing runs here any more" in cluster.log(1)
        assert first.spawn("members", Member).where.call_one().get(timeout=SOON)[0] == "host-0"
    assert told.empty()


@pytest.mark.parametrize("by", ["its grace is over", "another SIGTERM"])
def test_what_is_left_there_ends_with_the_agent(by: str) -> None:
    with cluster_of(1, "0.5" if by == "its grace is over" else "600") as (cluster, hosts, happening):
        member = hosts.slice(hosts=0).spawn_procs(supervise=lambda _: True).spawn("members", Member)
        waiting = member.block.call_one()
        cluster.kill(0, signal.SIGTERM)
        next_of(happening, "host_leaving")
        if by == "another SIGTERM":
            cluster.kill(0, signal.SIGTERM)
        with pytest.raises(SupervisionError, match="its agent was stopped"):
            waiting.get(timeout=SOON)
        assert ("its grace is over" in cluster.log(0)) == (by == "its grace is over")


def test_a_host_without_processes_goes_at_once() -> None:
    with cluster_of(1, "600") as (cluster, _, happening):
        cluster.kill(0, signal.SIGTERM)
        assert next_of(happening, "host_leaving").host == "host-0"
        assert next_of(happening, "host_died").host == "host-0"
