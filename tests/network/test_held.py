"""Jobs that are held: the machine of the script sleeps, or its network is cut, for longer than silence is a death otherwise."""

import time

import pytest
from agents import Site
from cluster import wait_until
from test_partition import account

pytestmark = [pytest.mark.network, pytest.mark.slow]

WINDOW = 2.5


def cut_off(site, seconds):
    """Keep the machine of the script from all others for a while."""
    site.network.wire.partition([site.hosts[0]], site.hosts[1:])
    time.sleep(seconds)
    site.network.wire.heal()


@pytest.mark.parametrize(
    ("hosts", "options"), [(1, {}), (3, {}), (3, {"fan_out": 1})], ids=["one", "tree", "chain"]
)
def test_nothing_is_lost_or_repeated_while_the_script_is_cut_off(network, tmp_path, hosts, options):
    """GTW-3, GTW-4."""
    site = Site(network(hosts + 1), tmp_path, window=WINDOW)
    site.start(*range(1, hosts + 1))
    job = site.job(0, hold=60.0, **options)
    job.ask("load")
    works = {number: set(site.agents[number].works()) for number in range(1, hosts + 1)}
    cut_off(site, 3 * WINDOW)
    settled = account(job)
    assert job.ask("failures") == [], settled
    assert works == {number: set(site.agents[number].works()) for number in works}
    assert job.end() == 0


def test_the_scripts_machine_sleeps_with_its_cable_out(network, tmp_path):
    """GTW-3, GTW-4."""
    site = Site(network(3), tmp_path, window=WINDOW)
    site.start(1, 2)
    job = site.job(0, hold=60.0)
    job.ask("load")
    machine = site.hosts[0]
    site.network.wire.unplug(machine)
    machine.pause()
    time.sleep(3 * WINDOW)
    machine.resume()
    site.network.wire.plug(machine)
    settled = account(job)
    assert job.ask("failures") == [], settled
    assert job.end() == 0


def test_a_host_that_is_dead_alone_is_reported_as_usual(network, tmp_path):
    """GTW-4."""
    site = Site(network(4), tmp_path, window=WINDOW)
    site.start(1, 2, 3)
    job = site.job(0, hold=60.0)
    job.ask("load", first=1)
    # Also of those that are gone when the script is back.
    for first in (True, False):
        if first:
            site.network.wire.unplug(site.hosts[1])
            assert job.ask("call", host=0, timeout=20)["error"] == "SupervisionError"
            account(job)
        else:
            site.network.wire.partition([site.hosts[0]], site.hosts[2:])
            time.sleep(2 * WINDOW)
            site.network.wire.unplug(site.hosts[2])
            site.network.heal()
            site.network.wire.unplug(site.hosts[2])
            assert job.ask("call", host=1, timeout=20)["error"] == "SupervisionError"
            assert job.ask("call", host=2)["answers"] == [4]
    wait_until(lambda: job.failed_hosts() >= {0, 1}, "the handler has heard of nothing", 20)
    job.end(within=3)


def test_hosts_end_by_themselves_when_they_were_held_for_long_enough(network, tmp_path):
    """GTW-3."""
    site = Site(network(3), tmp_path, window=WINDOW)
    site.start(1, 2)
    job = site.job(0, hold=2 * WINDOW)
    site.network.wire.partition([site.hosts[0]], site.hosts[1:])
    time.sleep(1.5 * WINDOW)
    assert site.agents[1].works() and site.agents[2].works()
    wait_until(lambda: not site.agents[1].works() and not site.agents[2].works(), "they work on", 20)
    assert job.ask("call", host=0, timeout=20)["error"] == "SupervisionError"
    site.network.heal()
    assert job.ask("call", host=1, timeout=20)["error"] == "SupervisionError"
    job.end(within=3)
