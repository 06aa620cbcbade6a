"""Messages between hosts: sizes, references that are passed on, controllers, and what a message may overtake."""

from __future__ import annotations

import os
import pickle
import threading
from typing import Any

import pytest
from core_hosts import Wire, cluster, hosts  # noqa: F401 - fixtures
from core_samples import Echo
from hosts_samples import SOON, Member

from mesh_core import (
    Actor,
    ActorError,
    Channel,
    HostMesh,
    Port,
    Undeliverable,
    endpoint,
    this_proc,
)
from mesh_core.testing import LocalCluster, patch_actor

pytestmark = pytest.mark.beside

MIB = 1 << 20


@pytest.fixture
def members(hosts: HostMesh) -> Any:  # noqa: F811
    with hosts.spawn_procs() as procs:
        yield procs.spawn("members", Member)


# Sizes.


@pytest.mark.parametrize("size", [0, 1, 64 * 1024, MIB, 64 * MIB])
def test_bytes_of_all_sizes_each_way(hosts: HostMesh, size: int) -> None:  # noqa: F811
    data = os.urandom(min(size, MIB)) * max(1, size // MIB) if size else b""
    with hosts.slice(hosts=slice(1, None)).spawn_procs() as procs:
        mesh: Any = procs.spawn("members", Member)
        assert mesh.echo.call(data).get(timeout=SOON).values() == [(0, data), (1, data)]
        # From one host to another.
        mesh.slice(hosts=0).meet.call_one(mesh.slice(hosts=1)).get(timeout=SOON)
        assert mesh.slice(hosts=0).ask.call_one(bytearray(data)).get(timeout=SOON) == [(1, bytearray(data))]


@pytest.mark.parametrize("count", [0, 8192, 131072, 8 * MIB])
def test_arrays_each_way(hosts: HostMesh, count: int) -> None:  # noqa: F811
    np = pytest.importorskip("numpy")
    array = np.arange(count, dtype=np.float64)
    with hosts.slice(hosts=2).spawn_procs() as procs:
        _, back = procs.spawn("member", Member).echo.call_one(array).get(timeout=SOON)  # type: ignore[call-overload]
        assert np.array_equal(back, array)
        back[:1] = 7  # the receiver's own copy


# References.


def test_a_reference_is_handed_on_and_used_from_host_to_host(members: Any) -> None:
    first, second, third = (members.slice(hosts=n) for n in range(3))
    first.meet.call_one(third).get(timeout=SOON)
    first.pass_on.call_one(second).get(timeout=SOON)
    assert second.ask.call_one("hi").get(timeout=SOON) == [(2, "hi")]
    # A mesh over several hosts, asked from another, and a slice of it.
    third.meet.call_one(members.slice(hosts=slice(0, 2))).get(timeout=SOON)
    assert third.ask.call_one("both").get(timeout=SOON) == [(0, "both"), (1, "both")]
    second.meet.call_one(members.slice(hosts=slice(0, None, 2))).get(timeout=SOON)
    assert second.ask.call_one("some").get(timeout=SOON) == [(0, "some"), (2, "some")]


def test_errors_name_the_host(cluster: LocalCluster, hosts: HostMesh, members: Any) -> None:  # noqa: F811
    for number in range(3):
        with pytest.raises(LookupError) as caught:
            members.slice(hosts=number).fail.call_one().get(timeout=SOON)
        error: Any = caught.value
        assert isinstance(error, ActorError)
        assert error.host == hosts.names[number] == f"host-{number}"
        assert f"host-{number}" in str(error)
    assert pickle.loads(pickle.dumps(error)).host == "host-2"


def test_actors_find_their_own_host(hosts: HostMesh, members: Any) -> None:  # noqa: F811
    assert [name for name, _ in members.where.call().get(timeout=SOON).values()] == hosts.names


class Mock(Member):
    """In place of a member."""

    @endpoint
    def where(self) -> tuple[str, int]:
        return "nowhere", 0


def test_a_patched_class_is_patched_on_other_hosts(hosts: HostMesh) -> None:  # noqa: F811
    with patch_actor(Member, Mock), hosts.spawn_procs() as procs:
        assert procs.spawn("m", Member).where.call().get(timeout=SOON).values() == [("nowhere", 0)] * 3  # type: ignore[call-overload]


def test_actors_of_the_scripts_own_process_are_called_from_other_hosts(members: Any) -> None:
    here: Any = this_proc().spawn("here", Echo)
    members.meet.call(here).get(timeout=SOON)
    assert members.ask.call(5).get(timeout=SOON).values() == [[5], [5], [5]]
    here.stop().get(timeout=SOON)


# Ports.


class Mailer(Actor):
    """Has a channel, and sends to those of others."""

    def __init__(self) -> None:
        self.port: Port[Any]
        self.port, self.receiver = Channel[Any].open()

    @endpoint
    def address(self) -> Port[Any]:
        return self.port

    @endpoint
    def post(self, port: Port[Any], *values: Any) -> None:
        for value in values:
            port.send(value)

    @endpoint
    def received(self, count: int) -> list[Any]:
        return [self.receiver.recv().get(timeout=SOON) for _ in range(count)]

    @endpoint
    def shut(self) -> None:
        self.receiver.close()

    @endpoint
    def post_until_closed(self, port: Port[Any]) -> str:
        """Send until told that nobody receives."""
        waiting = threading.Event()
        for n in range(100_000):
            try:
                port.send(n)
            except Undeliverable as closed:
                return str(closed)
            waiting.wait(0.001)
        return "never"


@pytest.fixture
def mailers(hosts: HostMesh) -> Any:  # noqa: F811
    with hosts.spawn_procs() as procs:
        yield procs.spawn("mailers", Mailer)


def test_a_port_is_used_from_any_host(mailers: Any) -> None:
    port = mailers.slice(hosts=1).address.call_one().get(timeout=SOON)
    mailers.slice(hosts=2).post.call_one(port, 1, bytes(MIB), 3).get(timeout=SOON)
    assert mailers.slice(hosts=1).received.call_one(3).get(timeout=SOON) == [1, bytes(MIB), 3]
    port.send("from the script")
    assert mailers.slice(hosts=1).received.call_one(1).get(timeout=SOON) == ["from the script"]
    # To the script from everywhere, in order from each sender.
    mine, receiver = Channel[Any].open()
    mailers.post.call(mine, *range(10)).get(timeout=SOON)
    assert sorted(receiver.recv().get(timeout=SOON) for _ in range(30)) == sorted([*range(10)] * 3)


def test_a_sender_on_another_host_hears_that_a_channel_is_closed(mailers: Any) -> None:
    one, other = mailers.slice(hosts=0), mailers.slice(hosts=2)
    port = one.address.call_one().get(timeout=SOON)
    told = other.post_until_closed.call_one(port)
    one.received.call_one(3).get(timeout=SOON)
    one.shut.call_one().get(timeout=SOON)
    assert "never" not in told.get(timeout=SOON)
    # So does a later sender.
    told_here = mailers.slice(hosts=1).post_until_closed.call_one(port).get(timeout=SOON)
    assert "never" not in told_here
