"""Connections that fall silent: what another connection still reaches, and who learns of whose death."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from core_hosts import Wire, cluster, end_job  # noqa: F401 - a fixture
from core_owners import Told
from hosts_samples import SOON, Member
from test_hosts_failure import told, wait_until  # noqa: F401 - a fixture

from mesh_core import HostMesh, SupervisionError, attach_to_workers, configured, shutdown
from mesh_core.testing import LocalCluster

pytestmark = [pytest.mark.slow]

WINDOW = 2.0


@pytest.fixture
def wires(cluster: LocalCluster) -> Iterator[list[Wire]]:  # noqa: F811
    """A connection to each host, by which everyone reaches it."""
    shutdown()
    wires = [Wire(address) for address in cluster.addresses]
    yield wires
    end_job(cluster)
    for wire in wires:
        wire.close()


@pytest.fixture
def hosts(cluster: LocalCluster, wires: list[Wire]) -> Iterator[HostMesh]:  # noqa: F811
    with configured(heartbeat_timeout=WINDOW):
        hosts = attach_to_workers([wire.address for wire in wires], credentials=cluster.credentials)
        hosts.initialized.get(timeout=SOON)
        yield hosts


@pytest.fixture
def members(hosts: HostMesh) -> Any:
    members = hosts.spawn_procs().spawn("members", Member)
    members.where.call().get(timeout=SOON)
    return members


def test_a_silent_connection_is_replaced_by_one_beside_it(
    wires: list[Wire],
    members: Any,
    told: Told,  # noqa: F811
) -> None:
    wire = wires[1]
    assert wire.connections == 1
    with wire.hold(0):
        # What is in flight is neither lost nor repeated.
        called = [members.slice(hosts=1).echo.call_one(n) for n in range(20)]
        assert [future.get(timeout=SOON)[1] for future in called] == list(range(20))
        assert wire.connections > 1
    assert members.echo.call(7).get(timeout=SOON).values() == [(0, 7), (1, 7), (2, 7)]
    assert told.empty(), "its host is dead to nobody"


def test_a_silence_that_ends_before_another_connection_is_up_ends_nothing(
    wires: list[Wire],
    members: Any,
    told: Told,  # noqa: F811
) -> None:
    wire = wires[0]
    with wire.hold(0, later=True):
        called = members.slice(hosts=0).echo.call_one(1)
        wire.wait_for(2)
    assert called.get(timeout=SOON) == (0, 1)
    assert told.empty()


def test_the_death_of_one_host_is_no_other_hosts_death(
    cluster: LocalCluster,  # noqa: F811
    wires: list[Wire],
    hosts: HostMesh,
    members: Any,
    told: Told,  # noqa: F811
) -> None:
    lost, deaf, well = (members.slice(hosts=n) for n in range(3))
    # They are connected to each other.
    for one, others in ((lost, [deaf, well]), (deaf, [well])):
        for other in others:
            one.meet.call_one(other).get(timeout=SOON)
            one.ask.call_one(0).get(timeout=SOON)
    # It receives more than it sends.
    with wires[0].hold(0, later=True, mute=True):
        wait_until(lambda: "1 suspect" in repr(hosts))
        # The controller's report of the death reaches this one late, and reports from peers that know it do not arrive.
        with wires[1].hold(0):
            with pytest.raises(SupervisionError):
                lost.echo.call_one(1).get(timeout=SOON)
            assert well.echo.call_one(2).get(timeout=SOON) == (2, 2)
            # With its last messages to its peers.
            wait_until(lambda: "stops its work" in cluster.log(0))
        assert deaf.echo.call_one(3).get(timeout=SOON) == (1, 3)
    told.next()
    assert told.empty()
    assert members.slice(hosts=slice(1, None)).echo.call(4).get(timeout=SOON).values() == [(1, 4), (2, 4)]
