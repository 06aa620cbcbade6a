"""Large parts of messages between hosts, which travel past their agents: where packets are lost, cables cut, and senders killed."""

import pytest
from agents import Site
from cluster import wait_until

pytest.importorskip("mesh_rdma", reason="mesh-rdma is not installed here")

pytestmark = [pytest.mark.network, pytest.mark.slow]

MIB = 1 << 20
MBIT = 1_000_000


def site_of(network, folder, *, window):
    """Agents on two of three machines."""
    site = Site(network(3), folder, window=window, bypass=MIB)
    site.start(1, 2)
    return site


def acquaint(job, *hosts):
    """Have the script, and the sender of host 0, and these receivers try the ways: what they send until then comes through the agents."""
    for host in hosts:

        def came(host=host):
            before = job.ask("counts", host=host)["parts_past_gateways"]
            job.ask("send", source=0, target=host, numbers=[0], size=2 * MIB)
            return job.ask("counts", host=host)["parts_past_gateways"] > before

        wait_until(came, "its memory is not reached")


def is_clean(job, host):
    """Whether a process keeps nothing for messages, and waits for no part."""
    found = job.ask("counts", host=host)
    return found["landing"] == found["kept"] == found["kept_bytes"] == 0


def test_they_come_whole_and_in_order_where_packets_are_lost(network, tmp_path):
    site = site_of(network, tmp_path, window=6)
    site.network.wire.lose(site.hosts, site.hosts, 0.01)
    job = site.job(0, program="parts.py")
    acquaint(job, 1)
    before = job.ask("counts", host=1)["parts_past_gateways"]
    numbers = list(range(6))
    assert job.ask("send", source=0, target=1, numbers=numbers, size=2 * MIB + 5) == [2 * MIB + 5] * 6
    assert job.ask("came", host=1)[-6:] == [[number, 2 * MIB + 5] for number in numbers]
    assert job.ask("counts", host=1)["parts_past_gateways"] == before + 6

    def script_has_some():
        job.ask("time", host=0, size=3 * MIB)
        return job.ask("counts", host=-1)["parts_past_gateways"] > 0

    wait_until(script_has_some, "no result comes past the agents")
    for host in (-1, 0, 1):
        wait_until(lambda host=host: is_clean(job, host), "something is kept")
    assert job.end() == 0


def test_where_the_two_cannot_reach_each_other_they_come_through_the_agents(network, tmp_path):
    site = site_of(network, tmp_path, window=2)
    job = site.job(0, program="parts.py")
    site.network.wire.partition([site.hosts[1]], [site.hosts[2]])
    assert job.ask("send", source=0, target=1, numbers=[1, 2], size=2 * MIB) == [2 * MIB] * 2
    assert job.ask("counts", host=1)["parts_past_gateways"] == 0
    assert job.ask("came", host=1) == [[1, 2 * MIB], [2, 2 * MIB]]
    site.network.heal()
    wait_until(lambda: is_clean(job, 1), "something is kept")
    assert job.end() == 0


def test_a_sender_that_is_killed_in_the_middle_holds_nobody_up(network, tmp_path):
    site = site_of(network, tmp_path, window=6)
    job = site.job(0, program="parts.py")
    acquaint(job, 1)
    site.network.wire.limit(site.hosts[1], up=100 * MBIT)
    sending = job.begin("send", source=0, target=1, numbers=[0, 1, 2], size=32 * MIB)
    wait_until(lambda: job.ask("counts", host=1)["landing"] > 0, "nothing is on its way")
    job.ask("kill", host=0)
    with pytest.raises(RuntimeError, match="killed by signal 9"):
        sending.result()
    assert job.ask("send", source=1, target=1, numbers=[7], size=2 * MIB) == [2 * MIB]
    wait_until(lambda: is_clean(job, 1), "something is kept")
    came = job.ask("came", host=1)
    assert came[-1] == [7, 2 * MIB] and all(size in (2 * MIB, 32 * MIB) for _, size in came)
    assert job.end() == 0
