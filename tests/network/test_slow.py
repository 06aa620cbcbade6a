"""A slow link beside fast ones: it slows down nobody else, and is not taken for a dead one."""

import pytest
from agents import Site

pytestmark = [pytest.mark.network, pytest.mark.slow]

MBIT = 1_000_000
MIB = 1 << 20


def test_calls_to_others_are_not_slowed_by_a_slow_link(network, tmp_path):
    site = Site(network(4), tmp_path, window=3)
    site.start(1, 2, 3)
    job = site.job(0)
    site.network.wire.slow(site.hosts[0], site.hosts[1], 20 * MBIT)
    transfer = job.begin("transfer", host=0, size=8 * MIB)
    job.ask("latencies", first=1, last=3, calls=100)
    assert not transfer.answered(), "calls to others have waited for the transfer"
    took = transfer.result()
    assert took["came"] == 8 * MIB and took["took"] > 2.0, took
    assert job.ask("failures") == []
    assert job.end() == 0


@pytest.mark.timeout(90)
def test_a_long_transfer_over_a_slow_link_is_not_taken_for_death(network, tmp_path):
    # Several windows long; what arrives is a sign of life itself.
    site = Site(network(3), tmp_path, window=1.5)
    site.start(1, 2)
    job = site.job(0)
    site.network.wire.limit(site.hosts[1], down=200 * MBIT)
    beside = job.begin("beside", host=0, seconds=4)
    other = job.begin("latencies", first=1, last=2, calls=10_000, seconds=4)
    transfer = job.begin("transfer", host=0, size=200 * MIB)
    # Small messages do not wait for the whole: neither to another host, nor to other processes of this one.
    assert other.result() and beside.result()
    assert not transfer.answered()
    took = transfer.result()
    assert took["came"] == 200 * MIB and took["took"] > 2 * site.window, took
    assert job.ask("failures") == []
    assert job.end() == 0


def test_what_comes_back_over_a_slow_link_is_not_taken_for_death(network, tmp_path):
    site = Site(network(3), tmp_path, window=1)
    site.start(1, 2)
    job = site.job(0)
    site.network.wire.limit(site.hosts[1], up=40 * MBIT)
    fetched = job.begin("fetch", host=0, size=20 * MIB)
    assert job.ask("call", host=1)["answers"] == [4]
    took = fetched.result()
    assert took["came"] == 20 * MIB and took["took"] > 2 * site.window, took
    assert job.ask("failures") == []
    assert job.end() == 0
