"""Hosts that are attached early, twice, or for one job only, and released again."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from core_hosts import cluster, end_job, free_address  # noqa: F401 - a fixture
from core_owners import Told
from core_processes import Watch
from hosts_samples import SOON, Member
from test_hosts_failure import told, wait_until  # noqa: F401 - a fixture

from mesh_core import MeshError, SpawnError, Undeliverable, attach_to_workers, shutdown, this_host
from mesh_core.testing import LocalCluster

pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def job(cluster: LocalCluster) -> Iterator[None]:  # noqa: F811
    """A job of its own for each test."""
    shutdown()
    yield
    end_job(cluster)


def agent(cluster: LocalCluster, *options: str) -> subprocess.Popen[str]:  # noqa: F811
    command = [sys.executable, "-m", "mesh_core.cli", "host", "--credentials", f"{cluster.credentials}/host"]
    return subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_agents_that_do_not_listen_yet_are_waited_for(cluster: LocalCluster) -> None:  # noqa: F811
    address = free_address()
    hosts = attach_to_workers([*cluster.addresses, address], credentials=cluster.credentials, timeout=SOON)
    procs = hosts.spawn_procs()
    # Those that are there are attached meanwhile, and the wait for this one goes on.
    wait_until(lambda: hosts.names[:3] == ["host-0", "host-1", "host-2"])
    assert not hosts.initialized.done()
    with agent(cluster, "--listen", address, "--name", "late") as late:
        try:
            hosts.initialized.get(timeout=SOON)
            assert hosts.names[3] == "late"
            assert len(procs.spawn("members", Member).echo.call(1).get(timeout=SOON)) == 4
            shutdown()
        finally:
            late.terminate()
            late.communicate()


def test_the_wait_for_an_agent_has_an_end(cluster: LocalCluster) -> None:  # noqa: F811
    hosts = attach_to_workers([free_address()], credentials=cluster.credentials, timeout=0.3)
    error = hosts.initialized.exception(timeout=SOON)
    assert isinstance(error, SpawnError) and "no `mesh host` listens there" in str(error)


def test_a_script_attaches_the_same_agents_again(cluster: LocalCluster) -> None:  # noqa: F811
    first, second = cluster.attach(), cluster.attach()
    members: list[Any] = [hosts.spawn_procs().spawn("members", Member) for hosts in (first, second)]
    pids = [{pid for _, pid in each.where.call().get(timeout=SOON).values()} for each in members]
    assert len(pids[0] | pids[1]) == 6
    assert first.names == second.names
    # They belong to one job, and know each other.
    members[0].slice(hosts=1).meet.call_one(members[1]).get(timeout=SOON)
    assert members[0].slice(hosts=1).ask.call_one(5).get(timeout=SOON) == [(n, 5) for n in range(3)]


def test_hosts_are_released_and_attached_again(
    cluster: LocalCluster,  # noqa: F811
    told: Told,  # noqa: F811
) -> None:
    hosts, others = cluster.attach(), cluster.attach()
    members: Any = hosts.spawn_procs().spawn("members", Member)
    beside: Any = others.spawn_procs().spawn("members", Member)
    pids = [pid for _, pid in members.where.call().get(timeout=SOON).values()]
    beside.where.call().get(timeout=SOON)
    watch = Watch(pids)
    hosts.stop().get(timeout=SOON)
    assert watch.wait() == []
    with pytest.raises(Undeliverable):
        members.echo.call(1).get(timeout=SOON)
    with pytest.raises(Undeliverable, match="was let go"):
        hosts.spawn_procs().initialized.get(timeout=SOON)
    assert repr(hosts).endswith("3 stopped>")
    hosts.stop().get(timeout=SOON)
    # Other users of the agents go on, and so can this script.
    assert beside.echo.call(2).get(timeout=SOON).values() == [(n, 2) for n in range(3)]
    again: Any = cluster.attach().spawn_procs().spawn("members", Member)
    assert again.echo.call(3).get(timeout=SOON).values() == [(n, 3) for n in range(3)]
    assert told.empty()


def test_a_with_block_releases_its_hosts(cluster: LocalCluster, told: Told) -> None:  # noqa: F811
    with cluster.attach() as hosts:
        members: Any = hosts.spawn_procs().spawn("members", Member)
        watch = Watch([pid for _, pid in members.where.call().get(timeout=SOON).values()])
    assert watch.wait() == []

    async def work() -> Watch:
        async with cluster.attach() as hosts:
            members: Any = hosts.spawn_procs().spawn("members", Member)
            return Watch([pid for _, pid in (await members.where.call()).values()])

    assert asyncio.run(work()).wait() == []
    assert told.empty()


def test_a_host_that_cannot_be_released_is_an_error(cluster: LocalCluster) -> None:  # noqa: F811
    with pytest.raises(MeshError, match="only the script that attached hosts can release them"):
        this_host().stop()
    hosts = cluster.attach()
    with pytest.raises(ValueError, match="cannot stop a part of a mesh of hosts"):
        hosts.slice(hosts=1).stop()


def test_an_agent_that_serves_one_job_ends_with_it(cluster: LocalCluster) -> None:  # noqa: F811
    with agent(cluster, "--listen", "127.0.0.1:0", "--once") as once:
        try:
            assert once.stdout is not None
            address = once.stdout.readline().strip()
            hosts = attach_to_workers([address], credentials=cluster.credentials)
            hosts.initialized.get(timeout=SOON)
            script = (
                "import sys; from mesh_core import attach_to_workers; "
                "print(attach_to_workers([sys.argv[1]], credentials=sys.argv[2]).initialized.exception(timeout=30))"
            )
            other = subprocess.run(
                [sys.executable, "-c", script, address, cluster.credentials],
                capture_output=True, text=True, timeout=60, env={**os.environ},
            )  # fmt: skip
            assert "it serves one job alone, and that is another one" in other.stdout, other
            assert hosts.spawn_procs().initialized.exception(timeout=SOON) is None
            hosts.stop().get(timeout=SOON)
            assert once.wait(SOON) == 0
        finally:
            once.kill()
            once.communicate()
