"""What a message may overtake if there is more than one way, and what exists once per job."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from core_hosts import Wire, cluster, end_job  # noqa: F401 - a fixture
from hosts_samples import SOON, Member, Register

from mesh_core import HostMesh, Undeliverable, attach_to_workers, get_or_spawn_controller, shutdown, this_host
from mesh_core.testing import LocalCluster


@pytest.fixture
def hosts(cluster: LocalCluster) -> Iterator[HostMesh]:  # noqa: F811
    """In a job of its own."""
    yield cluster.attach()
    end_job(cluster)


@pytest.fixture
def members(hosts: HostMesh) -> Iterator[Any]:
    with hosts.spawn_procs() as procs:
        yield procs.spawn("members", Member)


def test_actors_spawn_on_their_own_and_on_other_hosts(hosts: HostMesh, members: Any) -> None:
    owner = members.slice(hosts=0)
    over_all = owner.spawn.call_one(hosts, 2).get(timeout=SOON)
    assert over_all.sizes == {"hosts": 3, "gpus": 2}
    assert [name for name, _ in over_all.where.call().get(timeout=SOON).values()] == [
        name for name in hosts.names for _ in range(2)
    ]
    other = members.slice(hosts=1).spawn.call_one(hosts.slice(hosts=2), 1).get(timeout=SOON)
    assert other.where.call().get(timeout=SOON).values()[0][0] == "host-2"
    # They use what they own.
    members.slice(hosts=2).meet.call_one(over_all).get(timeout=SOON)
    assert members.slice(hosts=2).ask.call_one(1).get(timeout=SOON) == [(n, 1) for n in range(6)]


def test_one_controller_for_all_hosts(members: Any) -> None:
    numbers = members.register.call().get(timeout=SOON).values()
    assert sorted(numbers) == [1, 2, 3]
    register: Any = get_or_spawn_controller("register", Register).get(timeout=SOON)
    assert register.next.call_one().get(timeout=SOON) == 4


@pytest.fixture
def wired(cluster: LocalCluster) -> Any:  # noqa: F811
    """A job of its own in which everyone reaches host 2 by a connection that can be held up."""
    shutdown()
    with Wire(cluster.addresses[2]) as wire:
        hosts = attach_to_workers([*cluster.addresses[:2], wire.address], credentials=cluster.credentials)
        with hosts.spawn_procs() as procs:
            members = procs.spawn("members", Member)
            members.where.call().get(timeout=SOON)
            assert wire.connections == 1
            # Host 1 is connected to host 2 first, then host 0.
            for n in (1, 0):
                members.slice(hosts=n).meet.call_one(members.slice(hosts=2)).get(timeout=SOON)
                members.slice(hosts=n).ask.call_one(0).get(timeout=SOON)
            assert wire.connections == 3
            yield wire, hosts, procs, members
        end_job(cluster)


def test_a_message_that_overtakes_the_spawn_of_its_receivers_process_waits(wired: Any) -> None:
    wire, hosts, _, members = wired
    first, second = members.slice(hosts=0), members.slice(hosts=1)
    with wire.hold(2):
        first.spawn_and_tell.call_one(hosts.slice(hosts=2), second).get(timeout=SOON)
        second.ask_later.call_one("early").get(timeout=SOON)
        # What the same host says afterwards has arrived, so the question has too.
        second.meet.call_one(members.slice(hosts=2)).get(timeout=SOON)
        assert second.ask.call_one("after").get(timeout=SOON) == [(2, "after")]
    assert second.answered.call_one().get(timeout=SOON) == [(0, "early")]


def test_a_message_that_overtakes_the_spawn_of_its_actor_waits(wired: Any) -> None:
    wire, _, procs, members = wired
    first, second = members.slice(hosts=0), members.slice(hosts=1)
    with wire.hold(2):
        first.spawn_actor_and_tell.call_one(procs.slice(hosts=2), second).get(timeout=SOON)
        second.ask_later.call_one("early").get(timeout=SOON)
        second.meet.call_one(members.slice(hosts=2)).get(timeout=SOON)
        assert second.ask.call_one("after").get(timeout=SOON) == [(2, "after")]
    assert second.answered.call_one().get(timeout=SOON) == [(0, "early")]


def test_what_has_ended_is_refused_at_once(members: Any) -> None:
    first, second = members.slice(hosts=0), members.slice(hosts=1)
    gone = this_host().spawn_procs()
    first.meet.call_one(gone.spawn("gone", Member)).get(timeout=SOON)
    assert first.ask.call_one(1).get(timeout=SOON) == [(0, 1)]
    gone.stop().get(timeout=SOON)
    with pytest.raises(Undeliverable):
        first.ask.call_one(1).get(timeout=2)
    # An actor whose process is alive.
    stopped = second.spawn.call_one(this_host(), 1).get(timeout=SOON)
    first.meet.call_one(stopped).get(timeout=SOON)
    assert first.ask.call_one(1).get(timeout=SOON) == [(0, 1)]
    stopped.stop().get(timeout=SOON)
    with pytest.raises(Undeliverable):
        first.ask.call_one(1).get(timeout=2)
