"""One memory to ranks on other hosts, and theirs to one: over the network once for each host, also as hosts' processes die."""

import pytest
from agents import Site
from cluster import wait_until

pytest.importorskip("mesh_rdma", reason="mesh-rdma is not installed here")

pytestmark = [pytest.mark.network, pytest.mark.slow]

MIB = 1 << 20
HOSTS, RANKS = 3, 6


@pytest.fixture
def site(network, tmp_path):
    """Agents on three of four machines."""
    site = Site(network(HOSTS + 1), tmp_path, window=6)
    site.start(1, 2, 3)
    return site


def test_each_host_gets_the_bytes_once_and_passes_them_on(site):
    """TRE-1."""
    size = 12 * MIB
    site.network.wire.lose(site.hosts, site.hosts, 0.003)
    job = site.job(0, program="ranks.py")
    job.ask("offer", size=size)
    before = job.ask("sent")
    said = job.ask("broadcast", size=size, seed=1)
    assert said["failed"] == []
    assert job.ask("look") == [said["is"]] * RANKS
    wire = [after - then for after, then in zip(job.ask("sent"), before, strict=True)]
    # Three hosts get them: each once, whoever gives them; the controller to two at the most. A fifth for what is sent again.
    assert 3 * size <= sum(wire) <= 3.6 * size, wire
    assert wire[0] <= 2.4 * size, wire
    before = job.ask("sent")
    assert job.ask("gather") == {"is": [said["is"]] * RANKS}
    wire = [after - then for after, then in zip(job.ask("sent"), before, strict=True)]
    assert RANKS * size <= sum(wire) <= 1.2 * RANKS * size, wire
    assert job.end() == 0


def test_a_rank_that_dies_on_another_host_takes_no_other_with_it(site):
    """TRE-2, TRE-4."""
    size = 24 * MIB
    site.network.wire.limit(site.hosts[0], up=150_000_000)
    job = site.job(0, program="ranks.py")
    job.ask("offer", size=size)
    # The first rank of the first host: what reads from another host, and gives to others.
    broadcasting = job.begin("broadcast", size=size, seed=2)
    wait_until(lambda: job.ask("begun", rank=0), "nothing has come")
    job.ask("kill", host=0)
    said = broadcasting.result()
    assert said["failed"] == [0], said
    assert job.ask("look") == [None, *[said["is"]] * (RANKS - 1)]
    gathered = job.ask("gather")
    assert gathered["failed"] == [0], gathered
    assert job.ask("gather", alone=[1, 5]) == {"is": [said["is"]] * 2}
    assert job.end() == 0
