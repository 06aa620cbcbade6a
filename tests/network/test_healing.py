"""A host is cut off from the others, and what was on it goes on elsewhere."""

import pytest
from agents import Site
from cluster import wait_until

pytest.importorskip("mesh_supervision", reason="mesh-supervision is not installed here")

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture
def site(network, tmp_path):
    """Agents on three of four machines: two with counters, and a spare."""
    site = Site(network(4), tmp_path, window=1.5)
    site.start(1, 2, 3)
    return site


def cut_off(site, number):
    others = [host for host in site.hosts if host.number != number]
    site.network.wire.partition([site.hosts[number]], others)


@pytest.mark.parametrize("number", [1, 2])
def test_a_host_that_is_cut_off_is_healed_onto_a_spare(site, number):
    job = site.job(0, program="healing.py")
    assert job.ask("step", by=3) == [3, 3]
    cut_off(site, number)
    assert job.ask("heal", replicas=True) == [str({"hosts": number - 1})]
    # The replicas have the state of the one that lives.
    assert job.ask("step", by=1) == [4, 4]
    where = job.ask("where")
    assert where[number - 1] == "host3"
    assert where[2 - number] == f"host{3 - number}"
    # What was cut off has ended by itself: nobody does a step twice.
    wait_until(lambda: not site.agents[number].works(), "the host that was cut off works on", 15)
    site.network.heal()
    assert job.ask("step", by=1) == [5, 5]
    assert job.end() == 0


def test_a_snapshot_on_a_host_that_is_cut_off_comes_from_its_neighbour(site):
    """SNP-4."""
    job = site.job(0, program="healing.py")
    assert job.ask("step", by=5, host=0) == [5]
    wait_until(lambda: job.ask("keep") == [["host1", "host2"], ["host2", "host1"]], "no neighbour has begun")
    assert job.ask("step", by=1) == [6, 1]
    cut_off(site, 1)
    assert job.ask("heal", replicas=False) == [str({"hosts": 0})]
    assert job.ask("where") == ["host3", "host2"]
    # The last step of the first was not kept; the second has lost nothing.
    assert job.ask("step", by=0) == [5, 1]
    # The spare takes copies from when its own process has said that it is there; until then the keeper does.
    wait_until(lambda: job.ask("keep") == [["host3", "host2"], ["host2", "host3"]], "the spare has no copy")
    assert job.end() == 0
