"""How processes belong to a job of several hosts, as reported to packages that open their own connections."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from core_hosts import cluster, hosts  # noqa: F401 - fixtures
from hosts_samples import SOON

from mesh_core import Actor, Credentials, HostMesh, endpoint, shutdown, this_host
from mesh_core.extensions import Membership, membership
from mesh_core.testing import LocalCluster

pytestmark = pytest.mark.slow


class Member(Actor):
    @endpoint
    def told(self) -> tuple[Membership | None, bool]:
        return membership(), membership() is membership()

    @endpoint
    def is_there(self, path: Path) -> bool:
        return path.exists()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_job_on_one_machine_has_no_membership() -> None:
    with this_host().spawn_procs() as procs:
        assert membership() is None
        assert procs.spawn("members", Member).told.call_one().get(timeout=SOON) == (None, True)
    shutdown()


def test_each_is_told_its_own_credentials(hosts: HostMesh, cluster: LocalCluster) -> None:  # noqa: F811
    mine = membership()
    assert mine is not None and mine is membership()
    assert (mine.credentials, mine.revocations) == (Path(cluster.credentials).absolute(), None)
    # They all listen on this machine only.
    assert mine.addresses == ("127.0.0.1",)
    with hosts.spawn_procs() as procs:
        for rank, (told, same) in enumerate(
            procs.spawn("members", Member).told.call().get(timeout=SOON).values()
        ):
            assert told is not None and same
            assert told.credentials == Path(cluster.credentials).parent / f"host-{rank}"
            assert told.revocations is not None and not told.revocations.exists()
            assert (told.addresses, told.silence) == (("127.0.0.1",), 10.0)


@pytest.mark.usefixtures("hosts")
def test_workers_get_the_same_news_as_the_script() -> None:
    with this_host().spawn_procs() as procs:
        told, _ = procs.spawn("members", Member).told.call_one().get(timeout=SOON)
    assert told == membership()


def test_a_list_of_revocations_is_handed_on(hosts: HostMesh, cluster: LocalCluster) -> None:  # noqa: F811
    credentials = Credentials.load(cluster.credentials)
    spare = Path(cluster.credentials).parent / "spare"
    with hosts.spawn_procs() as procs:
        members = procs.spawn("members", Member)
        told = [told.revocations for told, _ in members.told.call().get(timeout=SOON).values()]
        credentials.revoke(credentials.issue_host(spare))
        for rank, path in enumerate(told):
            one = members.slice(hosts=rank)
            until(lambda one=one, path=path: one.is_there.call_one(path).get(timeout=SOON))
