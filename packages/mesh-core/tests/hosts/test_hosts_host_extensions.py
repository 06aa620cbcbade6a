"""The extensions of several hosts: messages between them, hosts that join, leave and die, and jobs side by side."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_hosts import cluster, end_job  # noqa: F401 - a fixture
from core_owners import lines, slay_pid, suspend
from core_processes import Script, Watch, family
from hosts_keepers import Keeper, Store
from hosts_samples import SOON

from mesh_core import (
    MeshError,
    SupervisionError,
    Undeliverable,
    attach_to_workers,
    configured,
    shutdown,
    this_host,
)
from mesh_core.extensions import current_proc, install
from mesh_core.testing import LocalCluster

pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def job(cluster: LocalCluster) -> Iterator[None]:  # noqa: F811
    """A job of its own for each test."""
    shutdown()
    yield
    end_job(cluster)


def test_each_host_has_its_own(cluster: LocalCluster) -> None:  # noqa: F811
    store = install(Store)
    hosts = cluster.attach()
    with hosts.spawn_procs({"x": 2}) as procs:
        keepers: Any = procs.spawn("keepers", Keeper)
        found = [each[0] for each in keepers.who.call().get(timeout=SOON).values()]
        assert [proc.host for proc in found] == ["host-0"] * 2 + ["host-1"] * 2 + ["host-2"] * 2
        assert len(set(found)) == 3
        assert all(proc.is_host for proc in found)
        answers = store.call(hosts, "who").get(timeout=SOON)
        assert answers.sizes == {"hosts": 3}
        assert answers.values() == found[::2]
        # A part of them, one after another, and one from a process of another host.
        assert store.call(hosts.slice(hosts=slice(0, 3, 2)), "who").get(timeout=SOON).values() == [
            found[0],
            found[4],
        ]
        there = keepers.slice(hosts=0, x=1).who.call_one(hosts.slice(hosts=2)).get(timeout=SOON)
        assert there == [found[4]]
        # The script's own host has none, because nothing was spawned there.
        with pytest.raises(MeshError, match="does not have extension 'store'"):
            store.call(this_host(), "who")
        store.install_on(this_host()).get(timeout=SOON)
        both = hosts.slice(hosts=1).join(this_host())
        assert [proc.host for proc in store.call(both, "who").get(timeout=SOON).values()] == [
            "host-1",
            current_proc().host,
        ]
        everywhere = keepers.slice(hosts=1, x=0).who.call_one(both).get(timeout=SOON)
        assert everywhere[1].address[2] == 0


def test_messages_to_several_hosts_arrive_in_order(cluster: LocalCluster) -> None:  # noqa: F811
    store = install(Store)
    hosts = cluster.attach()
    store.install_on(hosts).get(timeout=60)
    with hosts.slice(hosts=1).spawn_procs() as procs:
        keeper: Any = procs.spawn("keeper", Keeper)
        assert keeper.keep.call_one(hosts, 300).get(timeout=SOON) == list(range(300))
        assert store.call(hosts, "kept").get(timeout=SOON).values() == [list(range(300))] * 3


def test_workers_bring_an_extension_to_further_hosts(cluster: LocalCluster) -> None:  # noqa: F811
    store = install(Store)
    hosts = cluster.attach()
    with hosts.slice(hosts=0).spawn_procs() as procs:
        keeper: Any = procs.spawn("keeper", Keeper)
        rest = hosts.slice(hosts=slice(1, None))
        found = keeper.bring.call_one(rest).get(timeout=60)
        assert [proc.host for proc in found] == ["host-1", "host-2"]
        # By now the script knows it.
        assert store.call(hosts, "who").get(timeout=SOON).values()[1:] == found


def test_hosts_that_come_later_have_it_too(cluster: LocalCluster) -> None:  # noqa: F811
    store = install(Store)
    first = attach_to_workers(cluster.addresses[:1], credentials=cluster.credentials)
    with first.spawn_procs() as procs:
        procs.initialized.get(timeout=60)
        later = attach_to_workers(cluster.addresses[1:], credentials=cluster.credentials)
        with later.spawn_procs() as more:
            keepers: Any = more.spawn("keepers", Keeper)
            found = [each[0] for each in keepers.who.call().get(timeout=60).values()]
            everyone = store.call(first.join(later), "who").get(timeout=SOON).values()
            assert everyone[1:] == found
            assert [proc.host for proc in everyone] == ["host-0", "host-1", "host-2"]


def test_a_dead_process_of_another_host_is_restarted(cluster: LocalCluster) -> None:  # noqa: F811
    store = install(Store)
    hosts = cluster.attach()
    with hosts.spawn_procs() as procs:
        keepers: Any = procs.spawn("keepers", Keeper)
        before = [each[0] for each in keepers.who.call().get(timeout=60).values()]
        near = keepers.slice(hosts=0)
        assert near.who.call_one(hosts.slice(hosts=2)).get(timeout=SOON) == [before[2]]
        slay_pid(before[2].pid)
        while True:
            try:
                after = store.call(hosts.slice(hosts=2), "who").get(timeout=SOON).item()
                break
            except SupervisionError:
                continue
        assert after.host == "host-2"
        assert after.pid != before[2].pid
        assert store.call(hosts, "who").get(timeout=SOON).values() == [*before[:2], after]
        assert keepers.slice(hosts=2).who.call_one().get(timeout=SOON) == [after]
        assert procs.failed() == []


def test_the_death_of_an_agent_ends_what_is_asked_there() -> None:
    store = install(Store)
    with LocalCluster(hosts=2) as mortal:
        hosts = mortal.attach()
        with hosts.spawn_procs(supervise=lambda _: True) as procs:
            keepers: Any = procs.spawn("keepers", Keeper, supervise=lambda _: True)
            found = [each[0] for each in keepers.who.call().get(timeout=60).values()]
            suspend(found[1].pid)
            waiting = store.call(hosts, "kept")
            gone = Watch([found[1].pid])
            mortal.kill(1)
            with pytest.raises(SupervisionError, match="host-1"):
                waiting.get(timeout=SOON)
            assert gone.wait() == []
            with pytest.raises(MeshError, match="host-1"):
                store.call(hosts.slice(hosts=1), "who").get(timeout=SOON)
            # Processes there report that the host is dead; the other one goes on.
            assert store.call(hosts.slice(hosts=0), "who").get(timeout=SOON).item() == found[0]
            with pytest.raises(MeshError):
                store.install_on(hosts.slice(hosts=1)).get(timeout=SOON)
        shutdown()


def test_a_released_host_ends_its_extension_last(
    cluster: LocalCluster,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "stops"
    store = install(Store, str(path))
    hosts = cluster.attach()
    with hosts.spawn_procs({"x": 2}) as procs:
        procs.initialized.get(timeout=60)
        found = store.call(hosts, "who").get(timeout=SOON).values()
        gone = Watch([found[1].pid])
        hosts.detach(hosts.slice(hosts=1)).get(timeout=SOON)
        assert gone.wait() == []
        assert lines(path) == ["host-1 process", "host-1 process", "host-1 host"]
        with pytest.raises(MeshError, match=r"host-1|does not have"):
            store.call(hosts.slice(hosts=1), "who").get(timeout=SOON)
        assert store.call(hosts.slice(hosts=2), "who").get(timeout=SOON).item() == found[2]
        # The same agent, as another host of the job.
        again = attach_to_workers(cluster.addresses[1:2], credentials=cluster.credentials)
        store.install_on(again).get(timeout=60)
        back = store.call(again, "who").get(timeout=SOON).item()
        assert back.host == "host-1"
        assert back != found[1]


def test_the_whole_mesh_of_hosts_ends_in_order(
    cluster: LocalCluster,  # noqa: F811
    tmp_path: Path,
) -> None:
    path = tmp_path / "stops"
    install(Store, str(path))
    with cluster.attach() as hosts:
        hosts.spawn_procs().initialized.get(timeout=60)
    written = lines(path)
    assert len(written) == 6
    for number in range(3):
        name = f"host-{number}"
        assert [line for line in written if line.startswith(name)] == [f"{name} process", f"{name} host"]


def test_a_process_that_does_not_stop_is_killed(cluster: LocalCluster) -> None:  # noqa: F811
    store = install(Store)
    with configured(stop_timeout=1.0):
        hosts = cluster.attach()
        store.install_on(hosts).get(timeout=60)
        pid = store.call(hosts.slice(hosts=0), "who").get(timeout=SOON).item().pid
        suspend(pid)
        gone = Watch([pid])
        hosts.stop().get(timeout=SOON)
        assert gone.wait() == []


OTHER = """\
import sys
from mesh_core import attach_to_workers
from hosts_keepers import Store
from mesh_core.extensions import install

if __name__ == "__main__":
    store = install(Store)
    # A short one: hosts miss a script that was killed after this time.
    hosts = attach_to_workers(sys.argv[2:], credentials=sys.argv[1], heartbeat_timeout=3)
    store.install_on(hosts).get(timeout=60)
    print(*(proc.pid for proc in store.call(hosts, "who").get(timeout=30).values()), flush=True)
    for line in sys.stdin:
        print(store.call(hosts, line.strip()).get(timeout=30).values(), flush=True)
"""


@pytest.mark.full
def test_jobs_on_the_same_agents_are_kept_apart(
    script: Callable[..., Script],
    cluster: LocalCluster,  # noqa: F811
) -> None:
    store = install(Store)
    hosts = cluster.attach()
    store.install_on(hosts).get(timeout=60)
    mine = store.call(hosts, "who").get(timeout=SOON).values()
    other = script(OTHER, cluster.credentials, *cluster.addresses)
    theirs = [int(word) for word in other.line().split()]
    assert not {proc.pid for proc in mine} & set(theirs)
    store.tell(hosts, "mine")
    other.say("theirs")
    assert other.line() == "[1, 1, 1]"
    other.say("kept")
    assert other.line() == "[['theirs'], ['theirs'], ['theirs']]"
    assert store.call(hosts, "kept").get(timeout=SOON).values() == [["mine"]] * 3
    # Below the agents and not in them: a job's code does there what it could do in any worker.
    below = [set(family(agent)) for agent in cluster.pids]
    assert all(proc.pid in pids for proc, pids in zip(mine, below, strict=True))
    watch = Watch(theirs)
    other.process.kill()
    assert watch.wait() == [], "they outlive their job"
    assert store.call(hosts, "who").get(timeout=SOON).values() == mine


def test_a_crash_affects_neither_the_agent_nor_other_jobs(
    script: Callable[..., Script],
    cluster: LocalCluster,  # noqa: F811
) -> None:
    store = install(Store)
    hosts = cluster.attach()
    with hosts.spawn_procs() as procs:
        keepers: Any = procs.spawn("keepers", Keeper)
        keepers.here.call().get(timeout=60)
        other = script(OTHER, cluster.credentials, *cluster.addresses)
        theirs = other.line()
        for proc in store.call(hosts, "who").get(timeout=SOON).values():
            os.kill(proc.pid, signal.SIGABRT)
        other.say("kept")
        assert other.line() == "[[], [], []]"
        assert len(theirs.split()) == 3
        assert [proc.host for proc in keepers.here.call().get(timeout=SOON).values()] == [
            "host-0",
            "host-1",
            "host-2",
        ]
        other.finish()
        assert other.process.returncode == 0


@pytest.mark.full
def test_a_host_without_the_extension_is_an_error_in_workers_too(cluster: LocalCluster) -> None:  # noqa: F811
    install(Store)
    hosts = cluster.attach()
    with hosts.slice(hosts=0).spawn_procs() as procs:
        keeper: Any = procs.spawn("keeper", Keeper)
        with pytest.raises(Undeliverable, match="extension store"):
            keeper.who.call_one(hosts.slice(hosts=1)).get(timeout=60)
