"""Snapshots in the memory of hosts: SNP-4, SNP-5. Several hosts on this machine, of which some die."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from healing import Replica
from kept import Counter
from supervised import WITHIN

from mesh_core import HostMesh, MeshError, ProcMesh, SupervisionError, this_host
from mesh_core.extensions import uninstall
from mesh_core.testing import LocalCluster
from mesh_supervision import Ignore, Snapshots, Version, heal_mesh, keep_snapshots
from mesh_supervision._shelves import Ring, Shelf
from mesh_supervision._store import Kept, Owner, Placed, Store

pytestmark = [pytest.mark.slow]


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(hosts=3) as cluster:
        yield cluster
    with contextlib.suppress(MeshError):
        uninstall(Snapshots.name)


def begun(cluster: LocalCluster, hosts: HostMesh, cls: Any = Counter) -> tuple[ProcMesh, Any]:
    """An actor on each of the hosts."""
    procs = hosts.spawn_procs({"gpus": 1}, supervise=Ignore())
    actors: Any = procs.spawn("counters", cls, supervise=Ignore())
    actors.initialized.get(timeout=WITHIN)
    return procs, actors


def keep(snapshots: Snapshots, actors: Any) -> None:
    """Take snapshots until each has a copy on its host and the next."""
    names = [f"host-{number}" for number in range(len(actors))]
    around = list(zip(names, names[1:] + names[:1], strict=True))
    # A host that has not begun yet is no neighbour: the next one is, or the script.
    while snapshots.places(actors) != around:
        snapshots.take(actors).get(timeout=WITHIN)


def kill(procs: ProcMesh, rank: int) -> None:
    pid = procs.pids[rank]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def end_host(cluster: LocalCluster, procs: ProcMesh, number: int) -> None:
    cluster.kill(number)
    while number not in {point["hosts"] for point in procs.failed()}:
        pass


def test_a_neighbour_has_what_a_dead_host_kept(cluster: LocalCluster, told: Any) -> None:
    """SNP-4: what was acknowledged outlives the host that had it, and the next host is the neighbour."""
    snapshots = keep_snapshots()
    with cluster.attach() as hosts:
        procs, counters = begun(cluster, hosts)
        counters.slice(hosts=1).add.call_one(5).get(timeout=WITHIN)
        keep(snapshots, counters)
        (version,) = snapshots.newest(counters.slice(hosts=1))
        counters.slice(hosts=1).add.call_one(1).get(timeout=WITHIN)  # lost with the process
        end_host(cluster, procs, 1)
        heal_mesh(counters, on=hosts.slice(hosts=2), replicas=False)
        count, lives = counters.slice(hosts=1).tell.call_one().get(timeout=WITHIN)
        assert (count, lives) == (5, ["constructed", "restored"])
        (after,) = snapshots.newest(counters.slice(hosts=1))
        assert after is not None
        assert version is not None
        assert after >= version
        # The next ones are kept by those that are left.
        taken = snapshots.take(counters).get(timeout=WITHIN).values()
        assert all(each > version for each in taken[1:2])
        assert all("host-1" not in places for places in snapshots.places(counters))


def test_a_life_that_has_moved_is_kept_where_it_is(cluster: LocalCluster, told: Any) -> None:
    """Restored on a host that had no copy: it has one before anything else is taken."""
    snapshots = keep_snapshots()
    with cluster.attach() as hosts:
        used, spare = hosts.slice(hosts=slice(0, 2)), hosts.slice(hosts=2)
        procs, counters = begun(cluster, used)
        counters.add.call(5).get(timeout=WITHIN)
        keep(snapshots, counters)
        end_host(cluster, procs, 0)
        heal_mesh(counters, on=spare, replicas=False)
        first = counters.slice(hosts=0)
        while snapshots.places(first) != [("host-2", "host-1")]:
            pass
        assert snapshots.newest(first) == [Version(2, 1)]
        kill(procs, 0)
        while not procs.failed():
            pass
        heal_mesh(counters, replicas=False)
        assert first.tell.call_one().get(timeout=WITHIN)[0] == 5


def test_replicas_without_survivors_continue_from_a_neighbour(cluster: LocalCluster, told: Any) -> None:
    snapshots = keep_snapshots()
    with cluster.attach() as hosts:
        procs, replicas = begun(cluster, hosts.slice(hosts=slice(0, 2)), Replica)
        replicas.step.call(3).get(timeout=WITHIN)
        keep(snapshots, replicas)
        kill(procs, 1)
        end_host(cluster, procs, 0)
        while len(procs.failed()) < 2:
            pass
        heal_mesh(replicas, on=hosts.slice(hosts=2))
        assert replicas.step.call(1).get(timeout=WITHIN).values() == [4, 4]


def test_what_no_host_has_any_more_is_not_begun_from_something_older(
    cluster: LocalCluster, told: Any
) -> None:
    """SNP-5."""
    snapshots = keep_snapshots()
    with cluster.attach() as hosts:
        procs, counters = begun(cluster, hosts)
        counters.add.call(5).get(timeout=WITHIN)
        keep(snapshots, counters)
        for number in (0, 1):
            end_host(cluster, procs, number)
        with pytest.raises(
            MeshError, match=r"(?s)cannot be read from any host.*older one; after forget\(\) it starts"
        ):
            heal_mesh(counters, on=hosts.slice(hosts=2), replicas=False)
        snapshots.forget(counters)
        counters.respawn(0).get(timeout=WITHIN)
        assert counters.add.call(0).get(timeout=WITHIN).values() == [0, 5, 5], "rank 1 had a copy on host-2"


def test_those_that_die_with_their_host_while_they_keep_lose_nothing_acknowledged(
    cluster: LocalCluster, told: Any
) -> None:
    """SNP-4, SNP-5: killed at any moment; ``__restore__`` looks whether the block is of one piece."""
    chance = random.Random(14)
    snapshots = keep_snapshots()
    with cluster.attach() as hosts:
        procs, counters = begun(cluster, hosts)
        counters.add_and_keep.call(1).get(timeout=WITHIN)
        keep(snapshots, counters)
        first = counters.slice(hosts=0)
        for number in (0, 1):  # first its own host, then the neighbour that it has moved beside
            flood = first.flood.call_one()
            for _ in range(chance.randrange(2, 5)):
                (now,) = snapshots.newest(first)
                while snapshots.newest(first) == [now]:
                    pass
            cluster.kill(number)
            if number == 0:
                assert isinstance(flood.exception(timeout=WITHIN), SupervisionError)
                (acknowledged,) = snapshots.newest(first)
            else:
                # It goes on, with another neighbour.
                while "host-1" in snapshots.places(first)[0]:
                    pass
                kill(procs, 0)
                flood.exception(timeout=WITHIN)
                (acknowledged,) = snapshots.newest(first)
            while 0 not in {point.rank for point in procs.failed()}:
                pass
            heal_mesh(first, on=hosts.slice(hosts=2), replicas=False)
            count, lives = first.tell.call_one().get(timeout=WITHIN)
            assert lives[-1] == "restored"
            assert count > 1
            (after,) = snapshots.newest(first)
            assert after is not None
            assert acknowledged is not None
            assert after >= acknowledged


def test_what_is_kept_in_the_script_if_that_is_wanted(cluster: LocalCluster, told: Any) -> None:
    snapshots = keep_snapshots(on="script")
    with cluster.attach() as hosts:
        _, counters = begun(cluster, hosts)
        snapshots.take(counters).get(timeout=WITHIN)
        assert snapshots.places(counters) == [(this_host().names[0],)] * 3
    with pytest.raises(ValueError, match="on must be 'hosts' or 'script', got 'disk'"):
        keep_snapshots(on="disk")  # type: ignore[arg-type]


class Proc(NamedTuple):
    """As much of a process as a ring looks at."""

    address: tuple[int, int, int]

    @classmethod
    def of(cls, host: int) -> Any:
        return cls((0, 0, host))


def test_the_neighbour_is_the_next_host_around() -> None:
    """On paper."""
    keeper = Proc.of(0)
    ring = Ring(keeper)
    hosts = [Proc.of(number) for number in (2, 5, 9)]
    assert ring.neighbour(hosts[0]) is keeper, "no other host is known"
    for each in hosts:
        ring.add(each)
    assert [ring.neighbour(each) for each in hosts] == [hosts[1], hosts[2], hosts[0]]
    ring.lose(hosts[1])
    assert [ring.neighbour(each) for each in hosts] == [hosts[2], hosts[2], hosts[0]]
    ring.lose(hosts[2])
    assert ring.neighbour(hosts[0]) is keeper
    ring.add(hosts[2])
    assert ring.neighbour(hosts[0]) is hosts[2]


def test_copies_that_nobody_will_ask_for_are_dropped() -> None:
    """On paper: hosts that have a newer copy see to the older ones themselves, all others are told."""
    dropped: list[Any] = []
    store = Store(ended_bytes=10, dropped=lambda *told: dropped.append(told))
    owner, (a, b, c) = Owner(1, 0), [Proc.of(number) for number in (1, 2, 3)]

    def placed(life: int, number: int, *places: Any) -> Placed:
        return Placed(owner, Version(life, number), 100, places)

    store.begin(owner)
    assert store.save(owner, placed(1, 1, a, b))
    assert store.save(owner, placed(1, 2, a, c))
    assert dropped.pop() == (owner, Version(1, 1), (b,))
    assert not store.save(owner, placed(1, 1, a, b))
    assert not dropped, "what does not count is removed by whoever has sent it"
    assert store.save(owner, placed(1, 3, a, c))
    assert not dropped
    store.plant(owner, Kept(Version(9, 9), b"other"))
    assert dropped.pop() == (owner, Version(1, 3), (a, c))
    store.begin(owner)
    assert store.save(owner, placed(3, 1, a, b))
    store.end(owner, 3)
    assert dropped.pop() == (owner, Version(3, 1), (a, b)), "there is room for 10 bytes"
    store.begin(owner)
    assert store.save(owner, placed(4, 1, a, b))
    store.forget(1)
    assert dropped.pop() == (owner, Version(4, 1), (a, b))


def test_a_shelf_has_exactly_the_version_that_is_asked_for() -> None:
    """SNP-5, on paper."""
    shelf, owner = Shelf(), Owner(1, 0)
    for life, number in ((1, 8), (1, 9), (2, 1)):
        shelf.put(owner, Kept(Version(life, number), bytes(10)))
    assert shelf.get(owner, Version(1, 7)) is None
    assert shelf.nbytes == 30
    shelf.drop(owner, Version(1, 8))
    assert shelf.get(owner, Version(1, 8)) is None
    shelf.remove(owner, Version(2, 1))
    assert shelf.get(owner, Version(2, 1)) is None
    found = shelf.get(owner, Version(1, 9))
    assert found is not None
    assert found.version == Version(1, 9)
    shelf.drop(owner, Version(2, 0))
    assert shelf.nbytes == 0
