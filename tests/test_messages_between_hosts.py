"""Large parts of messages between hosts, which mesh-rdma moves past their agents."""

import os
import random
import signal
import time

import pytest

from mesh_core import Actor, Channel, SupervisionError, endpoint
from mesh_core._common.bypass import find_bypass
from mesh_core._common.current import current
from mesh_core._native import set_bypass
from mesh_core.testing import LocalCluster

pytest.importorskip("mesh_rdma", reason="mesh-rdma is not installed here")

LARGE = 3_000_000
COUNTED = ("parts_offered", "parts_past_gateways", "landing", "kept", "kept_bytes")


def counts():
    """What this process has offered and got past the agents, and what it still keeps or waits for."""
    found = current().runtime.counts()
    return {name: found[name] for name in COUNTED}


def wait_until(met):
    """Look again until something is so; a test that waits in vain ends by its time limit."""
    while not met():
        time.sleep(0.002)


class Rank(Actor):
    """Takes and gives bytes."""

    def __init__(self):
        self.came = []

    @endpoint
    def ready(self):
        """Do what a process does at its first large part."""
        find_bypass(current())

    @endpoint
    def go_without(self):
        set_bypass(current().runtime, None, 0)

    @endpoint
    def take(self, serial, data):
        self.came.append((serial, len(data), data[:1], data[-1:]))

    @endpoint
    def all(self):
        return self.came

    @endpoint
    def echo(self, data):
        return data

    @endpoint
    def each(self, sizes):
        for size in sizes:
            yield bytes([size % 251]) * size

    @endpoint
    def counts(self):
        return counts()

    @endpoint
    def send_on(self, other, data):
        return other.echo.call_one(data).get(timeout=60) == data

    @endpoint
    def flood_and_die(self, other, port):
        for serial in range(4):
            other.take.broadcast(serial, bytes(LARGE))
        port.send("sent")
        os.kill(os.getpid(), signal.SIGKILL)

    @endpoint
    def pid(self):
        return os.getpid()

    @endpoint
    def drop_dead(self, data):
        os.kill(os.getpid(), signal.SIGKILL)


def acquaint(rank):
    """Have this process and a rank try the way to each other's memory: what they send until then comes through the agents."""

    def both_came():
        before, there = (
            found["parts_past_gateways"] for found in (counts(), rank.counts.call_one().get(timeout=30))
        )
        rank.echo.call_one(bytes(LARGE)).get(timeout=60)
        after, then = (
            found["parts_past_gateways"] for found in (counts(), rank.counts.call_one().get(timeout=30))
        )
        return after > before and then > there

    wait_until(both_came)


# A quick run has half of them.
pytestmark = pytest.mark.sampled(2, of="file", full=True)


@pytest.fixture(scope="module")
def hosts():
    with LocalCluster(hosts=2) as cluster:
        yield cluster.attach()


@pytest.fixture
def ranks(hosts):
    procs = hosts.spawn_procs({"ranks": 1})
    ranks = procs.spawn("ranks", Rank)
    find_bypass(current())
    ranks.ready.call().get(timeout=60)
    for host in range(2):
        acquaint(ranks.slice(hosts=host))
    yield ranks
    procs.stop().get(timeout=60)


def gave_all_back(*actors):
    """Nothing is kept for messages any more, and none is landing."""

    def is_clean(found):
        return found["landing"] == found["kept"] == found["kept_bytes"] == 0

    wait_until(
        lambda: (
            is_clean(counts()) and all(is_clean(each.counts.call_one().get(timeout=30)) for each in actors)
        )
    )


@pytest.mark.slow
def test_what_is_large_travels_past_the_agents_in_both_directions(ranks):
    rank = ranks.slice(hosts=0)
    data = random.Random(4).randbytes(LARGE)
    before, there = counts(), rank.counts.call_one().get(timeout=30)
    assert rank.echo.call_one(data).get(timeout=60) == data
    after, then = counts(), rank.counts.call_one().get(timeout=30)
    assert after["parts_offered"] == before["parts_offered"] + 1
    assert then["parts_past_gateways"] == there["parts_past_gateways"] + 1
    assert then["parts_offered"] == there["parts_offered"] + 1
    assert after["parts_past_gateways"] == before["parts_past_gateways"] + 1
    # So does what two processes of different hosts send each other, in several parts of several sizes.
    parts = [bytearray([n]) * (n * 700_000 + n) for n in range(5)]
    assert rank.send_on.call_one(ranks.slice(hosts=1), parts).get(timeout=60)
    gave_all_back(rank, ranks.slice(hosts=1))


@pytest.mark.slow
def test_nothing_overtakes_a_message_that_is_landing(ranks):
    rank = ranks.slice(hosts=1)
    made = random.Random(5)
    sizes = [made.choice((10, 100_000, 1_500_000, 8_000_000)) for _ in range(60)]
    for serial, size in enumerate(sizes):
        rank.take.broadcast(serial, bytes([serial]) * size)
    came = rank.all.call_one().get(timeout=60)
    assert came == [(n, size, bytes([n]), bytes([n])) for n, size in enumerate(sizes)]
    gave_all_back(rank)


@pytest.mark.slow
def test_streams_and_channels_use_it_too(ranks):
    rank = ranks.slice(hosts=0)
    sizes = [2_000_000, 5, 1_200_000, 1_048_576, 70_000]
    offered = rank.counts.call_one().get(timeout=30)["parts_offered"]
    assert [len(each.get(timeout=60)) for each in rank.each.stream(sizes)] == sizes
    assert rank.counts.call_one().get(timeout=30)["parts_offered"] == offered + 3
    gave_all_back(rank)


@pytest.mark.slow
def test_a_process_that_cannot_take_part_gets_all_through_the_agents(hosts):
    procs = hosts.spawn_procs({"ranks": 1})
    rank = procs.spawn("ranks", Rank).slice(hosts=0)
    rank.go_without.call_one().get(timeout=60)
    find_bypass(current())
    before = counts()["parts_offered"]
    for serial in range(3):
        rank.take.broadcast(serial, bytes([serial]) * LARGE)
    rank.take.broadcast(3, b"short")
    came = rank.all.call_one().get(timeout=60)
    assert [each[:2] for each in came] == [(0, LARGE), (1, LARGE), (2, LARGE), (3, 5)]
    assert counts()["parts_offered"] == before + 3
    assert rank.counts.call_one().get(timeout=30)["parts_past_gateways"] == 0
    gave_all_back(rank)
    procs.stop().get(timeout=60)


@pytest.mark.slow
def test_a_sender_that_dies_holds_nobody_up(ranks, hosts):
    doomed = hosts.slice(hosts=1).spawn_procs().spawn("doomed", Rank)
    doomed.ready.call_one().get(timeout=60)
    rank = ranks.slice(hosts=0)
    port, receiver = Channel[str].open()
    call = doomed.flood_and_die.call_one(rank, port)
    assert receiver.recv().get(timeout=60) == "sent"
    with pytest.raises(SupervisionError):
        call.get(timeout=60)
    # Others are heard at once, and what it has sent is whole or not there.
    assert rank.echo.call_one(b"x" * LARGE).get(timeout=60) == b"x" * LARGE
    came = rank.all.call_one().get(timeout=60)
    assert [each[0] for each in came] == list(range(len(came)))
    assert all(size == LARGE for _, size, *_ in came)
    gave_all_back(rank)


@pytest.mark.slow
def test_what_was_sent_to_the_dead_is_kept_no_longer(ranks, hosts):
    doomed = hosts.slice(hosts=0).spawn_procs().spawn("doomed", Rank)
    doomed.ready.call_one().get(timeout=60)
    calls = [doomed.drop_dead.call_one(bytes(LARGE)) for _ in range(5)]
    for call in calls:
        with pytest.raises(SupervisionError):
            call.get(timeout=60)
    gave_all_back(ranks.slice(hosts=0))


@pytest.mark.slow
def test_a_process_that_is_stopped_is_waited_for(ranks):
    rank = ranks.slice(hosts=1)
    pid = rank.pid.call_one().get(timeout=30)
    os.kill(pid, signal.SIGSTOP)
    try:
        call = rank.echo.call_one(b"y" * LARGE)
        assert ranks.slice(hosts=0).echo.call_one(b"z" * LARGE).get(timeout=60) == b"z" * LARGE
        assert not call.done()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert call.get(timeout=60) == b"y" * LARGE
    gave_all_back(rank)
