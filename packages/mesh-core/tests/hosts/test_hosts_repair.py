"""Meshes that are repaired on other hosts than the script's, and moved from one host to another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import core_hosts
import pytest
import test_repair
from core_repair import WITHIN, Asker, Counter, Keeper, Losses, ranks

from mesh_core import HostMesh, ProcMesh, SupervisionError, concat, inspect

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.slow]

cluster, hosts, runtime = core_hosts.cluster, core_hosts.hosts, core_hosts.runtime
globals().update(core_hosts.over_hosts(test_repair))


@pytest.fixture
def procs(losses: Losses, hosts: HostMesh) -> Iterator[ProcMesh]:
    """Four processes of another host, instead of this one's."""
    with hosts.slice(hosts=1).spawn_procs({"gpus": 4}, name="workers", supervise=losses) as procs:
        yield procs


def spawn(procs: ProcMesh) -> Any:
    return procs.spawn("counters", Counter, supervise=lambda failure: True)


def where(mesh: Any) -> list[int]:
    return [rank for rank, *_ in mesh.who.call().get(timeout=WITHIN).values()]


def test_ranks_of_several_hosts_are_restarted_in_place(hosts: HostMesh) -> None:
    losses = Losses()
    with hosts.spawn_procs({"gpus": 2}, supervise=losses) as procs:
        counters = spawn(procs)
        asker = procs.slice(hosts=2, gpus=1).spawn("asker", Asker, counters)
        asker.who.call_one().get(timeout=WITHIN)
        for rank in (1, 2, 3):
            losses.slay(procs, rank)
        procs.respawn().get(timeout=WITHIN)
        counters.respawn().get(timeout=WITHIN)
        assert procs.incarnations == [0, 1, 1, 1, 0, 0]
        assert where(counters) == list(range(6))
        assert [rank for rank, *_ in asker.who.call_one().get(timeout=WITHIN)] == list(range(6))
        assert where(counters.slice(gpus=1)) == [1, 3, 5]
        assert counters.listed.with_options(reduce="concat").call().get(timeout=WITHIN) == list(range(6))
        data = bytes(range(256)) * 2048
        assert counters.echo.call(data).get(timeout=WITHIN).values() == [data] * 6
        for n in range(50):
            counters.hear.broadcast(n)
        assert counters.all.call().get(timeout=WITHIN).values() == [list(range(50))] * 6


def test_a_mesh_grows_onto_other_hosts(hosts: HostMesh) -> None:
    losses = Losses()
    with hosts.slice(hosts=slice(0, 1)).spawn_procs({"gpus": 2}, supervise=losses) as procs:
        grown = procs.grow(hosts=2, on=hosts.slice(hosts=slice(1, 3)))
        grown.initialized.get(timeout=WITHIN)
        assert grown.sizes == {"hosts": 3, "gpus": 2}
        assert where(spawn(grown)) == list(range(6))
        found = {
            proc.name: host.name
            for host in inspect.snapshot().hosts
            for proc in host.procs
            if proc.mesh == grown.name
        }
        assert len(found) == 6
        assert losses.slay(grown, 5).rank == 5
        smaller = grown.shrink(hosts=1)
        smaller.initialized.get(timeout=WITHIN)
        assert (len(smaller), ranks(grown.failed())) == (4, [4, 5])


def test_meshes_of_several_hosts_are_joined(hosts: HostMesh) -> None:
    losses = Losses()
    here, there = hosts.slice(hosts=slice(0, 2)), hosts.slice(hosts=slice(2, 3))
    with (
        here.spawn_procs({"gpus": 2}, supervise=losses) as first,
        there.spawn_procs({"gpus": 2}, supervise=losses) as last,
    ):
        both = concat([last, first], dim="hosts")
        counters = both.spawn("counters", Counter, supervise=lambda failure: True)
        assert where(counters) == list(range(6))
        losses.slay(first, 3)
        assert [dict(point) for point in both.failed()] == [{"hosts": 2, "gpus": 1}]
        first.respawn().get(timeout=WITHIN)
        counters.respawn().get(timeout=WITHIN)
        assert where(counters) == list(range(6))
        asker = last.slice(hosts=0, gpus=0).spawn("asker", Asker, counters.slice(hosts=slice(1, 3)))
        assert [rank for rank, *_ in asker.who.call_one().get(timeout=WITHIN)] == [2, 3, 4, 5]


def test_an_actor_of_another_host_repairs_what_it_owns(hosts: HostMesh) -> None:
    with hosts.spawn_procs() as procs:
        keeper = procs.slice(hosts=1).spawn("keeper", Keeper)
        counters = keeper.mesh.call_one().get(timeout=WITHIN)
        asker = procs.slice(hosts=2).spawn("asker", Asker, counters)
        before = asker.who.call_one().get(timeout=WITHIN)
        assert keeper.lose_and_repair.call_one(1).get(timeout=WITHIN) == [0, 1, 0]
        assert where(counters) == [0, 1, 2]
        while True:
            try:
                now = asker.who.call_one().get(timeout=WITHIN)
                break
            except SupervisionError:
                continue  # the notice is on its way: only the owner's host waits for it
        assert (now[0], now[2]) == (before[0], before[2])
        assert now[1] != before[1]


def test_hosts_that_are_not_contiguous_are_joined_and_used_like_any_mesh(hosts: HostMesh) -> None:
    losses = Losses()
    apart = hosts.slice(hosts=2).join(hosts.slice(hosts=0))
    assert (apart.sizes, apart.names) == ({"hosts": 2}, [hosts.names[2], hosts.names[0]])
    with apart.spawn_procs({"gpus": 2}, name="apart", supervise=losses) as procs:
        counters = spawn(procs)
        assert where(counters) == [0, 1, 2, 3]
        assert where(counters.slice(hosts=1)) == [2, 3]
        assert counters.listed.with_options(reduce="concat").call().get(timeout=WITHIN) == [0, 1, 2, 3]
        found = {
            proc.name: host.name
            for host in inspect.snapshot().hosts
            for proc in host.procs
            if proc.mesh == "apart"
        }
        assert found == {f"apart[{rank}]": apart.names[rank // 2] for rank in range(4)}
        failure = losses.slay(procs, 1)
        assert (failure.rank, failure.host) == (1, apart.names[0])
        procs.respawn().get(timeout=WITHIN)
        counters.respawn().get(timeout=WITHIN)
        assert procs.incarnations == [0, 1, 0, 0]
        assert where(counters) == [0, 1, 2, 3]
        asker = procs.slice(hosts=1, gpus=0).spawn("asker", Asker, counters)
        assert [rank for rank, *_ in asker.who.call_one().get(timeout=WITHIN)] == [0, 1, 2, 3]
    both = hosts.slice(hosts=slice(0, 2)).join(hosts.slice(hosts=2))
    assert both.names == hosts.names
    assert both.slice(hosts=slice(1, 3)).names == hosts.names[1:]


def test_what_cannot_be_joined_says_why(hosts: HostMesh) -> None:
    with pytest.raises(ValueError, match="is in both meshes, and a mesh contains a host once"):
        hosts.join(hosts.slice(hosts=1))
    with pytest.raises(ValueError, match="both must have exactly one dimension"):
        hosts.slice(hosts=slice(0, 2)).rename(hosts="racks").join(hosts.slice(hosts=slice(2, 3)))
    with pytest.raises(TypeError, match="join\\(\\) takes a mesh of hosts"):
        hosts.join("b7")  # type: ignore[arg-type]  # on purpose
