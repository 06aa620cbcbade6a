"""Who owns whom, and who is told of what, with owners and owned meshes on several hosts."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_hosts import end_job
from core_owners import Told, slay, suspend
from core_processes import Script, Watch, family
from hosts_samples import SOON, Guard, Member

from mesh_core import (
    HostMesh,
    MeshFailure,
    SpawnError,
    SupervisionError,
    Undeliverable,
    configured,
    inspect,
    set_fault_handler,
    shutdown,
)
from mesh_core.testing import LocalCluster

AT_ONCE = 3.0
"""For a busy machine; what is measured takes a few milliseconds."""


def wait_until(what: Callable[[], Any], limit: float = SOON) -> Any:
    until = time.monotonic() + limit
    while not (found := what()):
        assert time.monotonic() < until, "it does not come about"
        time.sleep(0.005)
    return found


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Three hosts, some of which will not survive the test."""
    with LocalCluster(hosts=3) as cluster:
        yield cluster
        shutdown()


@pytest.fixture
def hosts(cluster: LocalCluster) -> HostMesh:
    hosts = cluster.attach()
    hosts.initialized.get(timeout=SOON)
    return hosts


@pytest.fixture
def told() -> Iterator[Told]:
    """What the script's fault handler was told."""
    told = Told()
    before = set_fault_handler(told.put)
    yield told
    set_fault_handler(before)


def test_meshes_on_other_hosts_end_with_their_owners_process(hosts: HostMesh, told: Told) -> None:
    procs = hosts.slice(hosts=0).spawn_procs()
    owner: Any = procs.spawn("owner", Guard)
    owned = owner.spawn.call_one(hosts.slice(hosts=slice(1, None)), 2).get(timeout=SOON)
    pids = [pid for _, pid in owned.where.call().get(timeout=SOON).values()]
    assert len(pids) == 4
    watch = Watch(pids)
    slay(procs)
    assert watch.wait() == [], "they outlive their owner"
    assert told.next().host == "host-0"


def test_actors_in_others_processes_end_with_their_owner(hosts: HostMesh, told: Told) -> None:
    first, second = hosts.slice(hosts=0).spawn_procs(), hosts.slice(hosts=1).spawn_procs()
    owner: Any = first.spawn("owner", Guard)
    other: Any = first.spawn("other", Guard)
    friend: Any = second.spawn("friend", Member)
    owner.spawn_actor_and_tell.call_one(second, friend).get(timeout=SOON)
    assert friend.ask.call_one(1).get(timeout=SOON) == [(0, 1)]
    slay(first)
    del other
    wait_until(lambda: isinstance(friend.ask.call_one(1).exception(timeout=SOON), Undeliverable))
    assert friend.echo.call_one(2).get(timeout=SOON) == (0, 2)


def test_an_owner_is_notified_of_deaths_on_other_hosts(hosts: HostMesh) -> None:
    with hosts.slice(hosts=0).spawn_procs() as procs:
        owner: Any = procs.spawn("owner", Guard)
        owned = owner.spawn.call_one(hosts.slice(hosts=slice(1, None)), 1).get(timeout=SOON)
        (_, first), _ = owned.where.call().get(timeout=SOON).values()
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: owner.heard.call_one().get(timeout=SOON) == [("host-1", "mine", 0)])
        with pytest.raises(SupervisionError, match="host-1"):
            owned.slice(hosts=0).echo.call_one(1).get(timeout=AT_ONCE)
        assert owned.slice(hosts=1).echo.call_one(1).get(timeout=SOON) == (1, 1)


def test_a_host_that_is_killed(cluster: LocalCluster, hosts: HostMesh, told: Told) -> None:
    procs = hosts.spawn_procs({"gpus": 2})
    members: Any = procs.spawn("members", Member)
    members.where.call().get(timeout=SOON)
    guards = hosts.slice(hosts=0).spawn_procs()
    guard: Any = guards.spawn("guard", Guard)
    owned = guard.spawn.call_one(hosts.slice(hosts=slice(1, None)), 1).get(timeout=SOON)
    owned.where.call().get(timeout=SOON)
    on_it = Watch(family(cluster.pids[1]))
    waiting = [members.slice(hosts=1, gpus=n).block.call_one() for n in range(2)]
    cluster.kill(1)
    for n, call in enumerate(waiting):
        with pytest.raises(SupervisionError) as caught:
            call.get(timeout=AT_ONCE)
        failure = caught.value.failure
        assert failure is not None
        assert (failure.host, failure.rank) == ("host-1", 2 + n)
        assert "host" in failure.report() and "dead" in failure.report()
    # Each rank is one failure.
    failures = [told.next() for _ in range(2)]
    assert sorted((each.host, each.rank) for each in failures) == [("host-1", 2), ("host-1", 3)]
    assert told.empty()
    # So does an owner on another host.
    wait_until(lambda: guard.heard.call_one().get(timeout=SOON) == [("host-1", "mine", 0)])
    assert on_it.wait() == [], "they outlive their agent"
    # The others go on.
    rest = members.slice(hosts=slice(0, None, 2))
    assert [value for _, value in rest.echo.call(5).get(timeout=SOON).values()] == [5] * 4
    with pytest.raises(SupervisionError, match="host-1"):
        members.echo.call(5).get(timeout=AT_ONCE)
    with pytest.raises((SpawnError, SupervisionError), match="dead"):
        hosts.spawn_procs().initialized.get(timeout=AT_ONCE)
    assert hosts.slice(hosts=0).spawn_procs().spawn("m", Member).echo.call_one(1).get(timeout=SOON) == (0, 1)  # type: ignore[call-overload]


def test_a_host_that_falls_silent(cluster: LocalCluster, told: Told) -> None:
    window = 1.0
    with configured(heartbeat_timeout=window):
        hosts = cluster.attach()
    procs = hosts.spawn_procs()
    members: Any = procs.spawn("members", Member)
    _, (_, pid), _ = members.where.call().get(timeout=SOON).values()
    watch = Watch([pid])
    suspend(cluster.pids[1])
    with pytest.raises(SupervisionError, match="nothing was heard of it for 1"):
        members.slice(hosts=1).echo.call_one(1).get(timeout=SOON)
    assert members.slice(hosts=slice(0, None, 2)).echo.call(2).get(timeout=SOON).values() == [(0, 2), (2, 2)]
    # It continues, and is told that it is dead.
    cluster.kill(1, signal.SIGCONT)
    assert watch.wait() == [], "it goes on as if nothing had been"


@pytest.mark.full
@pytest.mark.full
def test_processes_without_actors_die_with_a_silent_host(cluster: LocalCluster) -> None:
    with configured(heartbeat_timeout=1.0):
        hosts = cluster.attach()
    told: list[MeshFailure] = []

    def note(failure: MeshFailure) -> bool:
        told.append(failure)
        return True

    every = hosts.spawn_procs(name="every", supervise=note)
    only = hosts.slice(hosts=1).spawn_procs({"gpus": 2}, name="only", supervise=note)
    stopped = hosts.slice(hosts=1).spawn_procs(name="stopped", supervise=note)
    for procs in (every, only, stopped):
        procs.initialized.get(timeout=SOON)
    stopped.stop().get(timeout=SOON)
    assert inspect.snapshot(SOON).dead == ()
    suspend(cluster.pids[1])
    # Nothing is sent to them, and their owner is told nevertheless.
    wait_until(lambda: len(told) == 3)
    assert sorted((each.mesh.name, each.rank, each.host) for each in told) == [
        ("every", 1, "host-1"),
        ("only", 0, "host-1"),
        ("only", 1, "host-1"),
    ]
    assert [point["hosts"] for point in every.failed()] == [1]
    assert [point["gpus"] for point in only.failed()] == [0, 1]
    # A mesh without any living process is seen, on its dead host.
    seen = inspect.snapshot(SOON)
    assert [(each.name, each.host, each.state) for each in seen.dead] == [
        ("every[1]", "host-1", "dead"),
        ("only[0]", "host-1", "dead"),
        ("only[1]", "host-1", "dead"),
    ]
    assert "only[1] (gpus=1)" in str(seen)
    # Until it is respawned, or told to stop.
    only.respawn(0, on=hosts.slice(hosts=2)).get(timeout=SOON)
    assert [each.name for each in inspect.snapshot(SOON).dead] == ["every[1]", "only[1]"]
    only.stop().get(timeout=SOON)
    assert [each.name for each in inspect.snapshot(SOON).dead] == ["every[1]"]
    cluster.kill(1, signal.SIGCONT)


def test_what_is_owned_from_a_host_that_dies_ends(cluster: LocalCluster, hosts: HostMesh, told: Told) -> None:
    first, second = hosts.slice(hosts=0).spawn_procs(), hosts.slice(hosts=1).spawn_procs()
    owner: Any = first.spawn("owner", Guard)
    friend: Any = second.spawn("friend", Member)
    # Processes of its own there, and an actor in another mesh's process.
    owned = owner.spawn.call_one(hosts.slice(hosts=slice(1, None)), 1).get(timeout=SOON)
    pids = [pid for _, pid in owned.where.call().get(timeout=SOON).values()]
    owner.spawn_actor_and_tell.call_one(second, friend).get(timeout=SOON)
    assert friend.ask.call_one(1).get(timeout=SOON) == [(0, 1)]
    watch = Watch(pids)
    cluster.kill(0)
    assert watch.wait() == [], "they outlive their owner's host"
    wait_until(lambda: isinstance(friend.ask.call_one(1).exception(timeout=SOON), Undeliverable))
    assert friend.echo.call_one(2).get(timeout=SOON) == (0, 2)


def test_a_failure_elsewhere_is_raised_by_the_call_that_waits(cluster: LocalCluster, hosts: HostMesh) -> None:
    first, second = hosts.slice(hosts=0).spawn_procs(), hosts.slice(hosts=1).spawn_procs()
    idle: Any = second.spawn("idle", Member)
    idle.echo.call_one(1).get(timeout=SOON)
    busy: Any = first.spawn("busy", Member)
    waiting = busy.block.call_one()
    cluster.kill(1)
    with pytest.raises(SupervisionError, match="host-1"):
        waiting.get(timeout=AT_ONCE)
    assert not waiting.done()


@pytest.mark.full
def test_a_host_dies_under_a_transfer(cluster: LocalCluster, hosts: HostMesh, told: Told) -> None:
    members: Any = hosts.spawn_procs().spawn("members", Member)
    members.where.call().get(timeout=SOON)
    data = bytes(64 << 20)
    calls = [members.echo.call(data) for _ in range(3)]
    cluster.kill(2)
    for call in calls:
        outcomes = call.get(timeout=SOON, return_exceptions=True).values()
        assert [len(outcome[1]) for outcome in outcomes[:2]] == [len(data)] * 2
        assert isinstance(outcomes[2], SupervisionError) or len(outcomes[2][1]) == len(data)
    assert told.next().host == "host-2"


def test_a_host_that_is_told_to_end(cluster: LocalCluster, hosts: HostMesh, told: Told) -> None:
    procs = hosts.spawn_procs()
    members: Any = procs.spawn("members", Member)
    waiting = members.slice(hosts=2).block.call_one()
    on_it = Watch(family(cluster.pids[2]))
    cluster.kill(2, signal.SIGTERM)
    with pytest.raises(SupervisionError, match="its agent was stopped"):
        waiting.get(timeout=AT_ONCE)
    assert cluster._agents[2].wait(SOON) == 0
    assert on_it.wait() == []
    assert members.slice(hosts=slice(0, 2)).echo.call(1).get(timeout=SOON).values() == [(0, 1), (1, 1)]
    # It returns as another host.
    cluster.restart(2)
    again = cluster.attach()
    with again.slice(hosts=2).spawn_procs() as fresh:
        assert fresh.spawn("m", Member).echo.call_one(1).get(timeout=SOON) == (0, 1)  # type: ignore[call-overload]


JOB = """
    import sys, time
    from hosts_samples import Member
    from mesh_core import attach_to_workers, configure

    if __name__ == "__main__":
        # Within the first hosts stop where their controller was killed.
        configure(heartbeat_timeout=2.0, stop_timeout=0.5)
        hosts = attach_to_workers(sys.argv[2:], credentials=sys.argv[1])
        procs = hosts.spawn_procs({"gpus": 2})
        members = procs.spawn("members", Member)
        print(*(pid for _, pid in members.where.call().get(timeout=30).values()), flush=True)
        for line in sys.stdin:
            if line.strip() == "call":
                print(*(value for _, value in members.echo.call(7).get(timeout=30).values()), flush=True)
            elif line.strip() == "wait":
                print("waiting", flush=True)
                members.block.call().get(timeout=60)
"""


def job(script: Callable[..., Script], cluster: LocalCluster) -> tuple[Script, list[int]]:
    """A script with two processes on each host, and those processes."""
    started = script(JOB, cluster.credentials, *cluster.addresses)
    return started, [int(word) for word in started.line().split()]


@pytest.mark.full
def test_jobs_on_the_same_hosts_know_nothing_of_each_other(
    script: Callable[..., Script], cluster: LocalCluster, hosts: HostMesh
) -> None:
    other, theirs = job(script, cluster)
    with hosts.spawn_procs() as procs:
        members: Any = procs.spawn("members", Member)
        mine = [pid for _, pid in members.where.call().get(timeout=SOON).values()]
        assert not set(mine) & set(theirs)
        watch = Watch(theirs)
        other.process.kill()
        assert watch.wait() == [], "they outlive their controller"
        assert members.echo.call(1).get(timeout=SOON).values() == [(0, 1), (1, 1), (2, 1)]
        # The hosts serve the next job at once.
        third, _ = job(script, cluster)
        third.say("call")
        assert third.line() == "7 7 7 7 7 7"
        third.finish()
        assert third.process.returncode == 0
        assert members.echo.call(2).get(timeout=SOON).values() == [(0, 2), (1, 2), (2, 2)]


def test_a_script_ends_with_the_report_of_a_dead_host(
    script: Callable[..., Script], cluster: LocalCluster
) -> None:
    started, _ = job(script, cluster)
    started.say("wait")
    assert started.line() == "waiting"
    cluster.kill(1)
    _, said = started.finish()
    assert started.process.returncode == 1
    assert "host-1" in said and "dead" in said


def test_failures_that_nobody_handles_are_reported_at_the_end(
    script: Callable[..., Script], cluster: LocalCluster
) -> None:
    started, pids = job(script, cluster)
    watch = Watch([pids[2]])
    os.kill(pids[2], signal.SIGKILL)
    assert watch.wait() == []
    with contextlib.suppress(BrokenPipeError):
        started.say("call")
    _, said = started.finish()
    assert started.process.returncode == 1
    assert "host-1" in said and "SIGKILL" in said


def test_a_job_ends_and_another_begins_in_one_script(cluster: LocalCluster) -> None:
    for n in range(3):
        hosts = cluster.attach()
        procs = hosts.spawn_procs()
        members: Any = procs.spawn("members", Member)
        assert members.echo.call(n).get(timeout=SOON).values() == [(0, n), (1, n), (2, n)]
        end_job(cluster)
        with pytest.raises(Exception, match="shut down"):
            members.echo.call(n)


def test_an_address_without_a_host(cluster: LocalCluster, told: Told) -> None:
    cluster.kill(1)
    hosts = cluster.attach()
    with pytest.raises(SpawnError, match=r"1 of 3 hosts cannot be used: .*refused"):
        hosts.initialized.get(timeout=SOON)
    with hosts.slice(hosts=slice(0, None, 2)).spawn_procs() as procs:
        mesh: Any = procs.spawn("m", Member)
        assert mesh.where.call().get(timeout=SOON).values()[1][0] == "host-2"
    failures: list[MeshFailure] = []
    while not told.empty():
        failures.append(told.next())
    assert failures == []
