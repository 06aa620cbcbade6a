"""Networks that fall apart, for shorter and for longer than the window, in one direction and in both."""

import time

import pytest
from agents import PORT, Site
from cluster import wait_until
from relay import Relay

pytestmark = [pytest.mark.network, pytest.mark.slow]


def account(job):
    """End the load; all of it has to be right."""
    settled = job.ask("settle")
    assert settled["wrong"] == [], settled["wrong"]
    assert settled["answered"] > 0
    return settled


def part(site, one, other, seconds):
    """Keep two groups of machines from each other for a while."""
    site.network.wire.partition([site.hosts[n] for n in one], [site.hosts[n] for n in other])
    time.sleep(seconds)
    site.network.wire.heal()


def test_nothing_is_lost_or_repeated_in_partitions_shorter_than_the_window(network, tmp_path):
    site = Site(network(4), tmp_path, window=4)
    site.start(1, 2, 3)
    job = site.job(0)
    job.ask("load")
    part(site, [0], [1], 1.0)
    part(site, [0, 1], [2, 3], 1.0)
    # Hosts that cannot see each other, while the controller sees both.
    part(site, [1], [2], 1.0)
    settled = account(job)
    assert job.ask("failures") == [], settled
    assert job.end() == 0


def test_beyond_the_window_a_host_is_dead_for_all_and_stops_its_own_work(network, tmp_path):
    """GTW-3, GTW-2."""
    site = Site(network(4), tmp_path, window=1.5)
    site.start(1, 2, 3)
    job = site.job(0)
    job.ask("load", first=1)
    site.network.wire.partition([site.hosts[1]], [site.hosts[n] for n in (0, 2, 3)])
    outcome = job.ask("call", host=0, timeout=20)
    assert outcome["error"] == "SupervisionError", outcome
    # It has stopped its work where nobody can tell it to.
    wait_until(lambda: not site.agents[1].works(), "the host that was cut off works on", 10)
    account(job)
    site.network.heal()
    # Healed, the job does not have it back; a new job does.
    assert job.ask("call", host=0)["error"] == "SupervisionError"
    assert job.ask("call", host=1)["answers"] == [4]
    fresh = site.job(0)
    assert fresh.ask("call")["answers"] == [4, 4, 4]
    wait_until(job.failed_hosts, "the handler has heard of nothing", 20)
    assert job.failed_hosts() == {0}
    assert fresh.end() == 0 and job.end(within=3) == 0


@pytest.mark.parametrize("deaf", [False, True], ids=["mute", "deaf"])
def test_a_host_that_only_hears_or_only_speaks_is_dead_on_both_sides_beyond_the_window(
    network, tmp_path, deaf
):
    site = Site(network(3), tmp_path, window=1.5)
    site.start(1, 2)
    job = site.job(0)
    job.ask("load", first=1)
    host, others = [site.hosts[1]], [site.hosts[0], site.hosts[2]]
    site.network.wire.cut(others if deaf else host, host if deaf else others)
    outcome = job.ask("call", host=0, timeout=20)
    assert outcome["error"] == "SupervisionError", outcome
    wait_until(lambda: not site.agents[1].works(), "it works on", 10)
    account(job)
    assert job.end() == 0


def test_a_host_declared_dead_that_comes_back_is_refused_and_stops_its_work(network, tmp_path):
    """GTW-2."""
    # Paused with its cable out: for its own clocks nothing has happened.
    site = Site(network(3), tmp_path, window=1.5)
    site.start(1, 2)
    job = site.job(0)
    job.ask("load", first=1)
    host = site.hosts[1]
    site.network.wire.unplug(host)
    host.pause()
    outcome = job.ask("call", host=0, timeout=20)
    assert outcome["error"] == "SupervisionError", outcome
    assert site.agents[1].works()
    host.resume()
    site.network.wire.plug(host)
    wait_until(lambda: not site.agents[1].works(), "a dead host works on", 10)
    assert job.ask("call", host=0)["error"] == "SupervisionError"
    account(job)
    wait_until(job.failed_hosts, "the handler has heard of nothing", 20)
    assert job.failed_hosts() == {0}
    assert job.end() == 0
    # The agent itself is as good as before.
    again = site.job(0)
    assert again.ask("call")["answers"] == [4, 4]
    assert again.end() == 0


def test_a_machine_paused_for_less_than_the_window_takes_nobody_for_dead(network, tmp_path):
    site = Site(network(4), tmp_path, window=4)
    site.start(1, 2, 3)
    job = site.job(0)
    job.ask("load")
    for cable in (False, True):
        host = site.hosts[1]
        if cable:
            site.network.wire.unplug(host)
        host.pause()
        time.sleep(1.0)
        host.resume()
        if cable:
            site.network.wire.plug(host)
        assert len(job.ask("call")["answers"]) == 3
    account(job)
    assert job.ask("failures") == []
    assert job.end() == 0


def test_a_paused_controller_finds_its_hosts_alive_if_they_have_waited(network, tmp_path):
    site = Site(network(3), tmp_path, window=4)
    site.start(1, 2)
    job = site.job(0)
    job.ask("load")
    job.process.pause()
    time.sleep(1.5)
    job.process.resume()
    account(job)
    assert job.ask("failures") == []
    assert job.end() == 0


def test_connections_that_are_half_closed_or_reset_or_frozen_are_made_again(network, tmp_path):
    site = Site(network(3), tmp_path, window=4)
    site.start(1, 2)
    with Relay((site.hosts[1].address, PORT), host=site.hosts[0], seed=3) as relay:
        job = site.job(0, at={1: "{}:{}".format(*relay.address)})
        job.ask("load")
        for direction in ("up", "down"):
            assert relay.half_close(direction) >= 1
            assert len(job.ask("call")["answers"]) == 2
        assert relay.reset() >= 1
        assert len(job.ask("call")["answers"]) == 2
        # Whoever is cut off while it says who it is has not been found out.
        relay.new_connections("reset")
        relay.reset()
        time.sleep(0.5)
        relay.new_connections("forward")
        assert len(job.ask("call")["answers"]) == 2
        # One direction is dead, and nobody is told: half open.
        for direction in ("up", "down"):
            relay.freeze(direction)
            time.sleep(1)
            relay.thaw(direction)
            assert len(job.ask("call")["answers"]) == 2
        account(job)
        assert job.ask("failures") == []
        assert job.end() == 0


def test_a_connection_that_is_half_open_for_good_ends_with_the_window(network, tmp_path):
    site = Site(network(3), tmp_path, window=1.5)
    site.start(1, 2)
    with Relay((site.hosts[1].address, PORT), host=site.hosts[0], seed=3) as relay:
        job = site.job(0, at={1: "{}:{}".format(*relay.address)})
        job.ask("load", first=1, talks=False)
        relay.new_connections("hold")
        relay.freeze("down")
        outcome = job.ask("call", host=0, timeout=20)
        assert outcome["error"] == "SupervisionError", outcome
        wait_until(lambda: not site.agents[1].works(), "it works on", 10)
        account(job)
        assert job.end() == 0


def test_an_agent_behind_a_firewall_that_lets_nobody_in_dials_out(network, tmp_path):
    site = Site(network(4), tmp_path, window=4)
    address = f"{site.hosts[0].address}:7500"
    for number in (1, 2):
        site.hosts[number].run(["nft", FIREWALL])
        site.dialer(number, address)
    job = site.job(0, workers=[], listen=address, expect=2)
    assert sorted(job.ask("names")) == ["host1", "host2"]
    job.ask("load")
    # Between each other they have no way but the controller's.
    for _ in range(2):
        site.hosts[1].reset_connections()
        part(site, [0], [2], 0.5)
    account(job)
    assert job.ask("failures") == []
    assert job.end() == 0
    wait_until(lambda: not site.agents[1].works() and not site.agents[2].works(), "processes are left")


FIREWALL = """
add table inet wall;
add chain inet wall input { type filter hook input priority 0; policy drop; };
add rule inet wall input tcp flags & (syn | ack) != syn accept;
add rule inet wall input iifname "lo" accept
"""
