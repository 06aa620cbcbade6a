"""A tree of hosts, of which an inner one dies or is slow: what hangs on it goes on."""

import signal

import pytest
from agents import Site
from cluster import wait_until

pytestmark = [pytest.mark.network, pytest.mark.slow]

HOSTS = 7


def tree(network, tmp_path, window):
    """Seven hosts of which none relays to more than two: 1 and 2 are the controller's, 3 and 4 hang on 1."""
    site = Site(network(HOSTS + 1), tmp_path, window=window, fan_out=2)
    site.start(*range(1, HOSTS + 1))
    job = site.job(0)
    return site, job


def test_below_a_relay_that_is_killed_all_goes_on_exactly_once(network, tmp_path):
    site, job = tree(network, tmp_path, 4)
    job.ask("load", first=1)
    site.agents[1].process.send_signal(signal.SIGKILL)
    outcome = job.ask("call", host=2, timeout=20)
    assert outcome.get("answers") == [4], outcome
    settled = job.ask("settle")
    assert settled["wrong"] == [] and settled["answered"] > 0, settled
    wait_until(job.failed_hosts, "the handler has heard of nothing", 20)
    assert job.failed_hosts() == {0}
    assert job.end() == 0


def test_a_relay_that_is_frozen_is_routed_around_and_comes_back(network, tmp_path):
    site, job = tree(network, tmp_path, 6)
    job.ask("load", first=1)
    site.hosts[1].pause()
    outcome = job.ask("call", host=2, timeout=20)
    assert outcome.get("answers") == [4], outcome
    # It is suspect after a quarter of the window, and nobody waits for the rest of it.
    assert job.ask("failures") == []
    for host in (3, 6):
        assert job.ask("call", host=host, timeout=20).get("answers") == [4]
    site.hosts[1].resume()
    assert job.ask("call", host=0, timeout=20).get("answers") == [4]
    settled = job.ask("settle")
    assert settled["wrong"] == [] and job.ask("failures") == [], settled
    assert job.end() == 0


def test_a_relay_whose_machine_loses_its_power_takes_nobody_with_it(network, tmp_path):
    site, job = tree(network, tmp_path, 2)
    job.ask("load", first=1)
    site.hosts[1].power_off()
    assert job.ask("call", host=2, timeout=20).get("answers") == [4]
    assert job.ask("call", host=0, timeout=20)["error"] == "SupervisionError"
    settled = job.ask("settle")
    assert settled["wrong"] == [], settled
    wait_until(job.failed_hosts, "the handler has heard of nothing", 20)
    assert job.failed_hosts() == {0}
    assert job.end() == 0


def test_one_relay_after_the_other_dies_under_load(network, tmp_path):
    site, job = tree(network, tmp_path, 4)
    job.ask("load", first=3)
    for number in (1, 2, 3):
        site.agents[number].process.send_signal(signal.SIGKILL)
        for host in range(3, HOSTS):
            assert job.ask("call", host=host, timeout=20).get("answers") == [4]
    settled = job.ask("settle")
    assert settled["wrong"] == [], settled
    # The handler runs on a thread of its own, beside all those that call: the last death may be news to it yet.
    wait_until(lambda: job.failed_hosts() >= {0, 1, 2}, "the handler has not heard of all", 20)
    assert job.failed_hosts() == {0, 1, 2}
    assert job.end() == 0
