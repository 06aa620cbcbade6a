"""Hosts and controllers that die: who notices, by what, and what is left of the job."""

import signal
import time

import pytest
from agents import Site
from cluster import wait_until

pytestmark = [pytest.mark.network, pytest.mark.slow]


def noticed(job, rank):
    """When the fault handler was told of a host's end."""
    wait_until(lambda: rank in job.failed_hosts(), f"the handler hears nothing of {rank}", 20)
    return min(failure["at"] for failure in job.ask("failures") if failure["rank"] == rank)


def left(site, *numbers):
    """The processes of jobs on these machines."""
    return {number: works for number in numbers if (works := site.agents[number].works())}


def test_a_killed_agent_is_noticed_at_once_and_the_others_go_on(network, tmp_path):
    site = Site(network(4), tmp_path, window=4)
    site.start(1, 2, 3)
    job = site.job(0)
    job.ask("load", first=1)
    site.agents[1].process.send_signal(signal.SIGKILL)
    outcome = job.ask("call", host=0, timeout=20)
    assert outcome["error"] == "SupervisionError", outcome
    assert "is dead" in outcome["text"] and site.agents[1].address in outcome["text"], outcome
    # Its connection has ended: nobody waits for silence.
    assert "nothing was heard" not in outcome["text"], outcome
    noticed(job, 0)
    settled = job.ask("settle")
    assert settled["wrong"] == [] and settled["answered"] > 0, settled
    assert job.failed_hosts() == {0}
    # All of it went with the agent.
    wait_until(lambda: not left(site, 1), "processes are left on the machine of the killed agent")
    assert job.end() == 0


def test_a_machine_without_power_is_dead_when_its_window_has_passed(network, tmp_path):
    site = Site(network(4), tmp_path, window=2)
    site.start(1, 2, 3)
    job = site.job(0)
    job.ask("load", first=1)
    waiting = job.begin("call", host=0)
    waiting.result()
    began = time.monotonic()
    site.hosts[1].power_off()
    outcome = job.ask("call", host=0, timeout=20)
    assert outcome["error"] == "SupervisionError", outcome
    # The window counts from the last sign of life, which is some heartbeats old.
    assert "nothing was heard" in outcome["text"], outcome
    assert noticed(job, 0) - began > 0.7 * site.window
    settled = job.ask("settle")
    assert settled["wrong"] == [] and job.failed_hosts() == {0}, settled
    assert job.end() == 0


def test_agents_serve_the_next_job_at_once_when_a_controller_was_killed(network, tmp_path):
    site = Site(network(3), tmp_path, window=2)
    site.start(1, 2)
    job = site.job(0)
    job.ask("load")
    first = {pid for works in left(site, 1, 2).values() for pid in works}
    assert first
    job.process.send_signal(signal.SIGKILL)
    # At once: what the last job has left is still there perhaps, and in nobody's way.
    second = site.job(0)
    assert second.ask("call")["answers"] == [4, 4]

    def lingering():
        return first & {pid for works in left(site, 1, 2).values() for pid in works}

    wait_until(lambda: not lingering(), "processes of the killed controller's job are left", 20)
    assert second.ask("call")["answers"] == [4, 4]
    assert second.end() == 0
    wait_until(lambda: not left(site, 1, 2), "processes are left after the job's end")


def test_hosts_stop_their_work_when_the_machine_of_the_controller_has_lost_its_power(network, tmp_path):
    site = Site(network(4), tmp_path, window=2)
    site.start(1, 2, 3)
    job = site.job(0)
    job.ask("load")
    assert set(left(site, 1, 2, 3)) == {1, 2, 3}
    began = time.monotonic()
    site.hosts[0].power_off()
    wait_until(lambda: not left(site, 1, 2, 3), "processes of the job are left", 20)
    assert time.monotonic() - began > 0.7 * site.window
    for agent in site.agents.values():
        wait_until(lambda agent=agent: "could not be reached" in agent.log(), "the agent does not say why")
    site.hosts[0].boot()
    again = site.job(0)
    assert again.ask("call")["answers"] == [4, 4, 4]
    assert again.end() == 0


def test_two_jobs_at_once_know_nothing_of_each_other(network, tmp_path):
    site = Site(network(3), tmp_path, window=2)
    site.start(1, 2)
    one, other = site.job(0), site.job(0)
    one.ask("load")
    other.ask("load")
    before = {pid for works in left(site, 1, 2).values() for pid in works}
    one.process.send_signal(signal.SIGKILL)
    wait_until(
        lambda: len(before & {pid for works in left(site, 1, 2).values() for pid in works}) <= len(before) // 2,
        "the killed controller's job is left", 20,
    )  # fmt: skip
    settled = other.ask("settle")
    assert settled["wrong"] == [] and other.ask("failures") == [], settled
    assert other.end() == 0


def test_spawning_and_stopping_on_hosts_of_which_one_is_dead_waits_for_nobody(network, tmp_path):
    site = Site(network(4), tmp_path, window=4)
    site.start(1, 2, 3)
    job = site.job(0)
    site.agents[2].process.send_signal(signal.SIGKILL)
    noticed(job, 1)
    # The three hosts: an error which says whom it cannot have.
    with pytest.raises(RuntimeError, match=f"(?s)Error.*{site.agents[2].address}"):
        job.ask("spawn", first=0, last=3)
    assert job.ask("spawn", first=2, last=3) == [4]
    assert job.ask("stop") is None
    assert job.end() == 0


def test_an_agent_that_dials_out_serves_the_next_controller_when_one_was_killed(network, tmp_path):
    site = Site(network(2), tmp_path, window=2)
    address = f"{site.hosts[0].address}:7500"
    site.dialer(1, address)
    job = site.job(0, workers=[], listen=address, expect=1)
    assert job.ask("call")["answers"] == [4]
    job.process.send_signal(signal.SIGKILL)
    again = site.job(0, workers=[], listen=address, expect=1)
    assert again.ask("call")["answers"] == [4]
    assert again.end() == 0
    wait_until(lambda: not left(site, 1), "processes are left")
