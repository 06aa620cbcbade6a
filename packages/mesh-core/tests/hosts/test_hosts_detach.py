"""Hosts that are released while the job and its other hosts go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_hosts import cluster, end_job  # noqa: F401 - a fixture
from core_owners import Told, lines, suspend, write_down
from core_processes import Watch, family
from hosts_samples import SOON, Guard, Member
from test_hosts_failure import told, wait_until  # noqa: F401 - a fixture

from mesh_core import (
    AuthenticationError,
    Credentials,
    HostMesh,
    MeshError,
    Promise,
    SpawnError,
    Undeliverable,
    attach_to_workers,
    configured,
    endpoint,
    shutdown,
    this_host,
)
from mesh_core.testing import LocalCluster

pytestmark = [pytest.mark.slow]


@pytest.fixture(autouse=True)
def job(cluster: LocalCluster) -> Iterator[None]:  # noqa: F811
    """A job of its own for each test."""
    shutdown()
    yield
    end_job(cluster)


class Tidy(Member):
    """Records that it was cleaned up."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    @endpoint
    def let_go(self, hosts: HostMesh) -> None:
        hosts.detach().get(timeout=SOON)

    def __cleanup__(self, error: BaseException | None) -> None:
        write_down(self.path, "clean" if error is None else repr(error))


@pytest.mark.full
def test_some_hosts_are_released_and_the_others_continue(
    cluster: LocalCluster,  # noqa: F811
    told: Told,  # noqa: F811
    tmp_path: Path,
) -> None:
    hosts = cluster.attach()
    procs = hosts.spawn_procs({"gpus": 2})
    members: Any = procs.spawn("members", Tidy, str(tmp_path / "down"))
    only: Any = hosts.slice(hosts=1).spawn_procs().spawn("only", Member)
    pids = [pid for _, pid in members.slice(hosts=1).where.call().get(timeout=SOON).values()]
    pids += [pid for _, pid in only.where.call().get(timeout=SOON).values()]
    watch = Watch(pids)
    waiting = members.slice(hosts=1, gpus=0).block.call_one()
    with configured(stop_timeout=2.0):
        hosts.detach(hosts.slice(hosts=1)).get(timeout=SOON)
    assert watch.wait() == []
    # The one that blocks was killed; the other stopped in order.
    assert lines(tmp_path / "down") == ["clean"]
    for call in (waiting, members.slice(hosts=1, gpus=1).echo.call_one(1), only.echo.call_one(1)):
        with pytest.raises(Undeliverable, match="was let go"):
            call.get(timeout=SOON)
    outcomes = members.echo.call(2).get(timeout=SOON, return_exceptions=True).values()
    assert [isinstance(each, Undeliverable) for each in outcomes] == [False, False, True, True, False, False]
    rest = members.slice(hosts=slice(0, None, 2))
    assert [value for _, value in rest.echo.call(3).get(timeout=SOON).values()] == [3] * 4
    with pytest.raises(Undeliverable, match="the script has detached it"):
        hosts.spawn_procs()
    assert repr(hosts).endswith("1 stopped>")
    assert told.empty(), "that is no failure"
    wait_until(lambda: "has ended here" in cluster.log(1))
    # The same job can have the host again, as another one.
    again: Any = attach_to_workers([cluster.addresses[1]], credentials=cluster.credentials).spawn_procs()
    fresh = again.spawn("members", Member)
    assert fresh.echo.call_one(4).get(timeout=SOON) == (0, 4)
    fresh.meet.call_one(rest).get(timeout=SOON)
    assert [value for _, value in fresh.ask.call_one(5).get(timeout=SOON)] == [5] * 4
    assert told.empty()


def test_a_host_is_released_twice(cluster: LocalCluster, told: Told) -> None:  # noqa: F811
    hosts = cluster.attach()
    hosts.spawn_procs().initialized.get(timeout=SOON)
    part = hosts.slice(hosts=slice(0, 2))
    both = [part.detach(), part.detach()]
    for each in [*both, hosts.slice(hosts=0).detach()]:
        each.get(timeout=SOON)
    hosts.stop().get(timeout=SOON)
    assert told.empty() and repr(hosts).endswith("3 stopped>")


def test_who_may_release_hosts(cluster: LocalCluster, tmp_path: Path) -> None:  # noqa: F811
    hosts, others = cluster.attach(), cluster.attach()
    members: Any = hosts.slice(hosts=0).spawn_procs().spawn("members", Tidy, str(tmp_path / "down"))
    with pytest.raises(MeshError, match="only the script that attached hosts can release them"):
        members.let_go.call_one(hosts).get(timeout=SOON)
    with pytest.raises(MeshError, match="only the script that attached hosts can release them"):
        this_host().detach()
    with pytest.raises(
        ValueError, match=r"is not in .*; call detach\(\) on the mesh that it was attached with"
    ):
        hosts.detach(others.slice(hosts=0))
    with pytest.raises(TypeError, match=r"a part of this mesh, such as hosts.slice\(hosts=0\), got 1"):
        hosts.detach(1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"release these hosts with detach\(\)"):
        hosts.slice(hosts=1).stop()
    assert members.echo.call_one(1).get(timeout=SOON) == (0, 1)


def test_a_relay_is_released_under_load(cluster: LocalCluster, told: Told) -> None:  # noqa: F811
    # A chain: messages for a later host pass the earlier ones.
    with configured(fan_out=1):
        hosts = cluster.attach()
    members: Any = hosts.spawn_procs().spawn("members", Member)
    members.where.call().get(timeout=SOON)
    rest = members.slice(hosts=slice(1, None))
    data = bytes(1 << 20)
    enough, answers = threading.Event(), list[Any]()

    def load() -> None:
        while not enough.is_set():
            calls = [rest.echo.call((n, data)) for n in range(8)]
            answers.extend([value[0] for _, value in call.get(timeout=SOON).values()] for call in calls)

    thread = threading.Thread(target=load)
    thread.start()
    try:
        wait_until(lambda: len(answers) >= 8)
        hosts.slice(hosts=0).detach().get(timeout=SOON)
        before = len(answers)
        wait_until(lambda: len(answers) >= before + 16)
    finally:
        enough.set()
        thread.join(SOON)
    assert not thread.is_alive() and answers[:8] == [[n, n] for n in range(8)]
    assert all(one == [n % 8, n % 8] for n, one in enumerate(answers)), "something was lost or doubled"
    hosts.slice(hosts=1).detach().get(timeout=SOON)
    assert rest.slice(hosts=1).echo.call_one(1).get(timeout=SOON) == (2, 1)
    assert told.empty()


def test_what_was_answered_before_arrives(cluster: LocalCluster, told: Told) -> None:  # noqa: F811
    """REL-1."""
    hosts = cluster.attach()
    members: Any = hosts.spawn_procs().spawn("members", Member)
    members.where.call().get(timeout=SOON)
    last = members.slice(hosts=2)
    calls = [last.echo.call_one(bytes(16 << 20)), *(last.echo.call_one(n) for n in range(100))]
    gone = hosts.slice(hosts=2).detach()
    # A stop comes after what was sent before.
    assert [call.get(timeout=SOON)[1] for call in calls[1:]] == list(range(100))
    gone.get(timeout=SOON)
    assert told.empty()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_host_ends_while_it_is_released(
    told: Told,  # noqa: F811
    number: int,
) -> None:
    with LocalCluster(hosts=2) as cluster:  # noqa: F811
        end_while_it_is_let_go(cluster, number)
    assert told.empty(), "whoever lets a host go does not miss it"


def end_while_it_is_let_go(cluster: LocalCluster, number: int) -> None:  # noqa: F811
    """REL-2."""
    hosts = cluster.attach()
    members: Any = hosts.spawn_procs().spawn("members", Member)
    (_, pid), *_ = members.slice(hosts=0).where.call().get(timeout=SOON).values()
    on_it = Watch(family(cluster.pids[0]))
    suspend(pid)
    gone = hosts.slice(hosts=0).detach()
    assert not gone.done()
    cluster.kill(0, number)
    gone.get(timeout=SOON)
    with pytest.raises(
        Undeliverable, match="was let go: the script has detached it; it was gone before it had ended"
    ):
        members.slice(hosts=0).echo.call_one(1).get(timeout=SOON)
    assert on_it.wait() == []
    assert members.slice(hosts=1).echo.call_one(1).get(timeout=SOON) == (1, 1)


@pytest.mark.full
def test_a_silent_host_is_released_too(cluster: LocalCluster, told: Told) -> None:  # noqa: F811
    hosts = attach_to_workers(cluster.addresses, credentials=cluster.credentials, heartbeat_timeout=60)
    hosts.spawn_procs().initialized.get(timeout=SOON)
    cluster.kill(1, signal.SIGSTOP)
    try:
        with configured(stop_timeout=0.1):
            hosts.slice(hosts=1).detach().get(timeout=SOON)
    finally:
        cluster.kill(1, signal.SIGCONT)
    wait_until(lambda: "has ended here" in cluster.log(1))
    assert told.empty()


def test_hosts_that_are_not_attached_yet(cluster: LocalCluster, told: Told) -> None:  # noqa: F811
    never = Promise[str]()
    hosts = attach_to_workers([cluster.addresses[0], never.future], credentials=cluster.credentials)
    hosts.slice(hosts=1).detach().get(timeout=SOON)
    error = hosts.initialized.exception(timeout=SOON)
    assert isinstance(error, SpawnError) and "the script has detached it" in str(error)
    assert hosts.slice(hosts=0).spawn_procs().spawn("m", Member).echo.call_one(1).get(timeout=SOON) == (0, 1)  # type: ignore[call-overload]
    assert told.empty()


def test_what_actors_own_across_hosts(cluster: LocalCluster, told: Told) -> None:  # noqa: F811
    hosts = cluster.attach()
    stays, goes = (hosts.slice(hosts=n).spawn_procs() for n in (0, 1))
    owner: Any = stays.spawn("owner", Guard)
    # Some of its processes are released.
    owned = owner.spawn.call_one(hosts.slice(hosts=slice(1, None)), 1).get(timeout=SOON)
    owned.where.call().get(timeout=SOON)
    # It goes, and with it what it owns elsewhere.
    leaver: Any = goes.spawn("leaver", Guard)
    left = leaver.spawn.call_one(hosts.slice(hosts=2), 2).get(timeout=SOON)
    watch = Watch([pid for _, pid in left.where.call().get(timeout=SOON).values()])
    hosts.slice(hosts=1).detach().get(timeout=SOON)
    assert watch.wait() == [], "they outlive their owner"
    with pytest.raises(Undeliverable, match="was let go"):
        owned.slice(hosts=0).echo.call_one(1).get(timeout=SOON)
    assert owned.slice(hosts=1).echo.call_one(1).get(timeout=SOON) == (1, 1)
    assert owner.heard.call_one().get(timeout=SOON) == []
    assert told.empty()


def test_a_spawn_on_hosts_that_are_being_released(cluster: LocalCluster, told: Told) -> None:  # noqa: F811
    hosts = cluster.attach()
    members: Any = hosts.slice(hosts=0).spawn_procs().spawn("members", Member)
    members.block.call()
    members.echo.call(1)
    with configured(stop_timeout=1.0):
        gone = hosts.slice(hosts=0).detach()
    # At once, or as soon as the host is no longer there.
    with pytest.raises(Undeliverable, match="was let go"):
        hosts.slice(hosts=0).spawn_procs().initialized.get(timeout=SOON)
    gone.get(timeout=SOON)
    assert told.empty()


def test_code_is_sent_to_the_remaining_hosts(cluster: LocalCluster, tmp_path: Path) -> None:  # noqa: F811
    hosts = cluster.attach()
    (tmp_path / "recipe.py").write_text("RATE = 1")
    hosts.sync_workspace(tmp_path).get(timeout=SOON)
    hosts.slice(hosts=2).detach().get(timeout=SOON)
    (tmp_path / "recipe.py").write_text("RATE = 22")
    assert hosts.slice(hosts=slice(0, 2)).sync_workspace(tmp_path).get(timeout=SOON).sent == ("recipe.py",)


# Hosts with other credentials.


def test_after_the_last_host_was_released_others_may_be_attached(cluster: LocalCluster) -> None:  # noqa: F811
    """CRD-1"""
    with LocalCluster(hosts=1) as other:
        for _ in range(2):
            for each in (cluster, other):
                hosts = each.attach()
                procs = hosts.spawn_procs({"gpus": 1}).slice(hosts=0, gpus=0)
                assert procs.spawn("member", Member).where.call_one().get(timeout=SOON)
                hosts.stop().get(timeout=SOON)
                with pytest.raises(
                    Undeliverable, match="was let go: its mesh of hosts was stopped; attach it again"
                ):
                    hosts.spawn_procs()


def test_the_credentials_of_attached_hosts_count(cluster: LocalCluster) -> None:  # noqa: F811
    """CRD-1"""
    with LocalCluster(hosts=1) as other:
        hosts = cluster.attach()
        hosts.initialized.get(timeout=SOON)
        hosts.detach(hosts.slice(hosts=0)).get(timeout=SOON)
        with pytest.raises(AuthenticationError, match="must use the same ones"):
            other.attach().initialized.get(timeout=SOON)
        hosts.detach(hosts.slice(hosts=slice(1, None))).get(timeout=SOON)
        # Two at the same time agree on the new ones.
        both = [other.attach(), attach_to_workers(["127.0.0.1:1"], credentials=other.credentials, timeout=0)]
        both[0].initialized.get(timeout=SOON)
        both[0].stop().get(timeout=SOON)


def test_a_wrong_folder_is_no_obstacle_for_the_right_one(cluster: LocalCluster, tmp_path: Path) -> None:  # noqa: F811
    """CRD-1"""
    wrong = Credentials.new(tmp_path / "wrong").path
    with pytest.raises(AuthenticationError):
        attach_to_workers(cluster.addresses, credentials=wrong, timeout=0).initialized.get(timeout=SOON)
    cluster.attach().initialized.get(timeout=SOON)
