"""Queues over several hosts, some of which die: AFR-1, QUE-1, QUE-6, QSV-1."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_pool import WITHIN

from mesh_core import (
    Actor,
    HostMesh,
    MeshError,
    ProcMesh,
    Queue,
    QueueClosed,
    QueueItem,
    SupervisionError,
    endpoint,
    set_fault_handler,
    shutdown,
    this_proc,
)
from mesh_core.extensions import watch
from mesh_core.testing import LocalCluster

pytestmark = pytest.mark.slow

Made = tuple[str, int]


class Member(Actor):
    """Puts and takes."""

    def __init__(self) -> None:
        self.kept: list[QueueItem[Made]] = []
        self.ended: list[int] = []

    @endpoint
    def put(self, queue: Queue[Made], name: str, count: int) -> None:
        queue.put_many((name, n) for n in range(count)).get(WITHIN)

    @endpoint
    def begin_to_put(self, queue: Queue[Made], name: str, count: int) -> None:
        """Put more than there is room for."""
        queue.put_many((name, n) for n in range(count))

    @endpoint
    def hold(self, queue: Queue[Made], count: int) -> list[Made]:
        """Lease items, and never acknowledge them."""
        while len(self.kept) < count:
            self.kept += queue.take(count - len(self.kept), lease=3600.0).get(WITHIN)
        return [item.value for item in self.kept]

    @endpoint
    def drain(self, queue: Queue[Made]) -> list[Made]:
        return list(queue)

    @endpoint
    def outcomes(self, queue: Queue[Made]) -> list[str]:
        """Wait for an item and for room; return how both waits end."""
        waiting = [queue.take(), queue.put(("late", 0))]
        return [_outcome(each.exception(WITHIN)) for each in waiting]

    @endpoint
    def proc(self) -> ProcMesh:
        return this_proc()

    @endpoint
    def watch(self, procs: list[ProcMesh]) -> None:
        self.watches = [watch(each, lambda end: self.ended.append(end.address[1])) for each in procs]

    @endpoint
    def have_ended(self) -> list[int]:
        return self.ended


def until(true: Callable[[], object]) -> None:
    """Ask again and again, each time over the network, until it is true."""
    end = time.monotonic() + WITHIN
    while not true():
        assert time.monotonic() < end, "it never comes to be so"


def _outcome(error: BaseException | None) -> str:
    return "" if error is None else f"{type(error).__name__}: {error}"


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    """Two hosts, one of which will not survive the test."""
    with LocalCluster(hosts=2) as cluster:
        yield cluster
        shutdown()


@pytest.fixture
def hosts(cluster: LocalCluster) -> Iterator[HostMesh]:
    before = set_fault_handler(lambda failure: None)
    hosts = cluster.attach()
    hosts.initialized.get(timeout=WITHIN)
    yield hosts
    set_fault_handler(before)


# In whatever order the queue learned of its users: it knows each one separately.
@pytest.mark.parametrize("order", ["abcd", "dcba"])
def test_items_of_a_dead_host_go_to_those_that_live_and_to_nobody_else(
    cluster: LocalCluster, hosts: HostMesh, order: str
) -> None:
    members: Any = hosts.spawn_procs({"gpus": 2}).spawn("members", Member)
    by_name = dict(zip("abcd", (member for _, member in members), strict=True))
    # It is on the script's host, which is neither of the two.
    with Queue[Made](max_items=1000) as queue:
        for name in order:
            by_name[name].put.call_one(queue, name, 100).get(WITHIN)
        held = members.slice(hosts=1, gpus=0).hold.call_one(queue, 30).get(WITHIN)
        assert held == [(order[0], n) for n in range(30)]
        waiting = members.slice(hosts=1, gpus=1).hold.call_one(queue, 10)
        waiting.get(WITHIN)
        cluster.kill(1)
        taken = members.slice(hosts=0).drain.call(queue)
        queue.close().get(WITHIN)
        found = [list(each) for each in taken.get(WITHIN).values()]
        assert sorted(item for each in found for item in each) == [
            (name, n) for name in "abcd" for n in range(100)
        ]
        assert queue.stats().get(WITHIN).given_back == 40


def test_waiters_on_a_dead_host_get_no_more_items(cluster: LocalCluster, hosts: HostMesh) -> None:
    members: Any = hosts.spawn_procs().spawn("members", Member)
    with Queue[Made](max_items=10) as queue:
        dead = members.slice(hosts=1).drain.call_one(queue)
        until(lambda: queue.stats().get(WITHIN).takers == 1)
        cluster.kill(1)
        assert isinstance(dead.exception(WITHIN), SupervisionError)
        until(lambda: queue.stats().get(WITHIN).takers == 0)
        queue.put_many(("script", n) for n in range(10)).get(WITHIN)
        taken = members.slice(hosts=0).drain.call_one(queue)
        queue.close().get(WITHIN)
        assert taken.get(WITHIN) == [("script", n) for n in range(10)]
        assert queue.stats().get(WITHIN).given_back == 0


def test_a_producers_items_come_in_order_although_its_host_dies(
    cluster: LocalCluster, hosts: HostMesh
) -> None:
    members: Any = hosts.spawn_procs().spawn("members", Member)
    with Queue[Made](max_items=5) as queue:
        members.slice(hosts=1).begin_to_put.call_one(queue, "dead", 600).get(WITHIN)
        until(lambda: queue.stats().get(WITHIN).putters == 1)
        living = members.slice(hosts=0).put.call_one(queue, "living", 20)
        cluster.kill(1)
        found: list[Made] = []
        while len([name for name, _ in found if name == "living"]) < 20:
            found += queue.take(100).get(WITHIN)
        living.get(WITHIN)
        queue.close().get(WITHIN)
        with pytest.raises(QueueClosed):
            queue.take().get(WITHIN)
        for name, least in (("living", 20), ("dead", 5)):
            numbers = [n for each, n in found if each == name]
            assert numbers == list(range(len(numbers)))
            assert len(numbers) >= least


def test_users_of_a_queue_are_notified_at_once_of_its_hosts_death(
    cluster: LocalCluster, hosts: HostMesh
) -> None:
    home = hosts.slice(hosts=1).spawn_procs(name="home")
    member: Any = hosts.slice(hosts=0).spawn_procs().spawn("member", Member)
    queue = Queue[Made](on=home, max_items=5, name="results")
    # All five have a user: takers and producers wait.
    queue.put_many(("script", n) for n in range(5)).get(WITHIN)
    assert len(queue.take(5, lease=3600.0).get(WITHIN)) == 5
    waiting = member.outcomes.call_one(queue)
    here = [queue.take(), queue.put(("late", 1))]
    until(lambda: (stats := queue.stats().get(WITHIN)).takers == stats.putters == 2)
    cluster.kill(1)
    said = [_outcome(each.exception(WITHIN)) for each in here] + waiting.get(WITHIN)
    for one in said:
        assert "host-1" in one, said
        assert "results" in one, said
    with pytest.raises(MeshError, match="cannot put into queue 'results'"):
        queue.put(("later", 0))
    with pytest.raises(SupervisionError):
        queue.take().get(WITHIN)


# AFR-1
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_procs_that_are_watched_one_by_one_end_with_their_own_host(
    cluster: LocalCluster, hosts: HostMesh, order: tuple[int, int]
) -> None:
    members: Any = hosts.spawn_procs().spawn("members", Member)
    procs = [members.slice(hosts=host).proc.call_one().get(WITHIN) for host in range(2)]
    watcher: Any = hosts.slice(hosts=0).spawn_procs().spawn("watcher", Member)
    watcher.watch.call_one([procs[host] for host in order]).get(WITHIN)
    cluster.kill(1)
    until(lambda: watcher.have_ended.call_one().get(WITHIN))
    # Nor does the other host, later.
    assert members.slice(hosts=0).proc.call_one().get(WITHIN) is not None
    assert watcher.have_ended.call_one().get(WITHIN) == [1]
