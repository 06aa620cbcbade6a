"""Weights that are published to other hosts: one copy each on the wire, and nobody waits for the dead."""

import pytest
from agents import Site
from cluster import wait_until

pytest.importorskip("mesh_rdma", reason="mesh-rdma is not installed here")

pytestmark = [pytest.mark.network, pytest.mark.slow]

MIB = 1 << 20
CONTROLLER = -1


@pytest.fixture
def site(network, tmp_path):
    """Agents on three of four machines."""
    site = Site(network(4), tmp_path, window=6)
    site.start(1, 2, 3)
    return site


def test_each_host_has_one_copy_and_a_late_one_has_it_from_another(site):
    """CPS-1, CPS-3."""
    size = 24 * MIB
    job = site.job(0, program="weights.py")
    job.ask("open", size=size, hosts=[0, 1])
    before = job.ask("sent", host=CONTROLLER)
    for seed in (1, 2):
        published = job.ask("publish", seed=seed)
        # Four readers on each of two hosts, and one that copies.
        assert job.ask("read", hosts=[0, 1], least=published["version"]) == [published] * 8
        assert job.ask("load", host=1, least=published["version"]) == published
    # Twice to two hosts; a tenth for what goes around it.
    wire = job.ask("sent", host=CONTROLLER) - before
    assert 4 * size <= wire <= 4.4 * size
    before = job.ask("sent", host=CONTROLLER)
    job.ask("add", hosts=[2])
    assert job.ask("read", hosts=[2], least=published["version"]) == [published] * 4
    assert job.ask("sent", host=CONTROLLER) - before <= 0.1 * size
    # It is one of them from then on; the third has it from one of the first two, whichever they are.
    before = job.ask("sent", host=CONTROLLER)
    published = job.ask("publish", seed=3)
    assert job.ask("read", hosts=[0, 2], least=published["version"]) == [published] * 12
    assert job.ask("sent", host=CONTROLLER) - before <= 2.3 * size
    job.ask("close")
    gone = job.ask("read", hosts=[2], least=published["version"] + 1)
    assert {each["error"] for each in gone} <= {"PublicationGone", "VersionUnavailable"}, gone
    assert job.end() == 0


def test_other_hosts_are_sent_what_has_changed(site):
    """DLT-1."""
    pytest.importorskip("numpy", reason="numpy is not installed here")
    size = 4 * MIB
    job = site.job(0, program="weights.py")
    job.ask("open", size=size, hosts=[0, 1])
    published = job.ask("publish", seed=1)
    assert job.ask("read", hosts=[0, 1], least=published["version"]) == [published] * 8
    before = job.ask("sent", host=CONTROLLER)
    for seed in (2, 3):
        published = job.ask("publish", seed=seed, changes=size // 100)
        assert job.ask("read", hosts=[0, 1], least=published["version"]) == [published] * 8
    # Of each 100 bytes one has changed, and has one beside it that says where.
    assert job.ask("sent", host=CONTROLLER) - before <= 4 * 0.03 * size
    # Who has not the one before gets everything, and so does everybody if most has changed.
    job.ask("add", hosts=[2])
    assert job.ask("read", hosts=[2], least=published["version"]) == [published] * 4
    published = job.ask("publish", seed=4, changes=size // 3)
    assert job.ask("read", hosts=[0, 2], least=published["version"]) == [published] * 12
    assert job.ask("failures") == []
    assert job.end() == 0


def test_a_killed_copy_is_reported_at_both_ends_and_blocks_nobody(site):
    job = site.job(0, program="weights.py")
    job.ask("open", size=MIB, hosts=[0, 2])
    published = job.ask("publish", seed=1)
    assert job.ask("read", hosts=[0, 2], least=published["version"]) == [published] * 12
    waiting = job.begin("read", hosts=[1], least=published["version"] + 1)
    job.ask("kill_copy", host=1)
    for each in waiting.result():
        assert each["error"] == "PublicationGone", each
    published = job.ask("publish", seed=2)
    assert job.ask("read", hosts=[0], least=published["version"]) == [published] * 4
    wait_until(lambda: len(job.ask("copies")) == 2, "the dead copy is counted")
    # A new one takes its place.
    job.ask("add", hosts=[1])
    assert job.ask("read", hosts=[1], least=published["version"]) == [published] * 4
    assert job.end() == 0


def test_a_version_that_is_under_way_as_its_host_dies_is_given_back(site):
    """CPS-2: more versions follow than there is room for."""
    site.network.wire.limit(site.hosts[1], down=100_000_000)
    job = site.job(0, program="weights.py")
    job.ask("open", size=32 * MIB, hosts=[0, 1])
    job.ask("publish", seed=1)
    site.agents[1].process.kill()
    for seed in (2, 3, 4):
        published = job.ask("publish", seed=seed)
    assert job.ask("read", hosts=[1], least=published["version"]) == [published] * 4
    wait_until(lambda: job.ask("copies") == [published["version"]], "the dead host's copy is counted")
    job.end()


def test_a_host_that_reaches_no_other_copy_has_it_from_the_owner(site):
    """CPS-3, VER-3."""
    job = site.job(0, program="weights.py")
    job.ask("open", size=MIB, hosts=[0, 1])
    published = job.ask("publish", seed=1)
    assert job.ask("read", hosts=[0, 1], least=published["version"]) == [published] * 8
    site.network.wire.partition([site.hosts[3]], site.hosts[1:3])
    job.ask("add", hosts=[2])
    for seed in (2, 3):
        assert job.ask("read", hosts=[2], least=published["version"]) == [published] * 4
        published = job.ask("publish", seed=seed)
    assert job.ask("read", hosts=[0, 2], least=published["version"]) == [published] * 12
    assert job.end() == 0
