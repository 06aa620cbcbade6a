"""Certificates that expire, are revoked or renewed in mid-run, and those of another job."""

import re
import shutil
import time

import pytest
from agents import Site
from cluster import wait_until

from mesh_core import Credentials

pytestmark = [pytest.mark.network, pytest.mark.slow]

RECHECK = 1.0
"""Certificates of who is connected are looked at again so often."""


def dead(job, host, limit=20):
    """What a call to a host raises, once it does."""
    found = wait_until(
        lambda: (out := job.ask("call", host=host, timeout=5)).get("error") and out, "it lives", limit
    )
    assert found["error"] == "SupervisionError", found
    return found


def test_a_certificate_that_expires_ends_its_connections_and_no_others(network, tmp_path):
    site = Site(network(3), tmp_path, window=2)
    holds = 6.0
    begun = time.monotonic()
    site.credentials.issue_host(tmp_path / "host1", lifetime=holds)
    site.start(1, 2)
    job = site.job(0)
    job.ask("load", first=1)
    assert job.ask("call", host=0)["answers"] == [4]
    outcome = dead(job, 0)
    assert "certificate" in outcome["text"] and "expired" in outcome["text"], outcome["text"]
    assert time.monotonic() - begun > holds - 1
    wait_until(lambda: not site.agents[1].works(), "it works on without credentials", 10)
    settled = job.ask("settle")
    assert settled["wrong"] == [], settled
    assert job.end() == 0


def test_a_certificate_that_is_revoked_ends_its_connections_at_once(network, tmp_path):
    site = Site(network(4), tmp_path, window=4)
    site.start(1, 2, 3)
    job = site.job(0)
    job.ask("load", first=1)
    site.credentials.revoke(tmp_path / "host1" / "host.pem")
    outcome = dead(job, 0)
    assert "revoked" in outcome["text"], outcome["text"]
    wait_until(lambda: not site.agents[1].works(), "it works on", 10)
    settled = job.ask("settle")
    assert settled["wrong"] == [], settled
    assert job.ask("call", host=1)["answers"] == [4]
    assert job.end() == 0
    # Nor does a later job have it.
    with pytest.raises(RuntimeError, match="AuthenticationError"):
        site.job(0, workers=[1])


def test_what_is_renewed_in_time_goes_on(network, tmp_path):
    site = Site(network(3), tmp_path, window=2)
    holds = 6.0
    begun = time.monotonic()
    for number in (1, 2):
        site.credentials.issue_host(tmp_path / f"host{number}", lifetime=holds)
    site.start(1, 2)
    job = site.job(0)
    job.ask("load")
    for number in (1, 2):
        site.credentials.renew(tmp_path / f"host{number}", lifetime=3600)
    # Connections that are there have shown the old certificate; a new one shows the new.
    wait_until(lambda: time.monotonic() - begun > holds + 2 * RECHECK, "time passes", 20)
    settled = job.ask("settle")
    assert settled["wrong"] == [] and job.ask("failures") == [], settled
    assert job.ask("call")["answers"] == [4, 4]
    assert job.end() == 0
    again = site.job(0)
    assert again.ask("call")["answers"] == [4, 4]
    assert again.end() == 0


def test_credentials_of_another_job_open_nothing(network, tmp_path):
    site = Site(network(3), tmp_path, window=2)
    site.start(1, 2)
    job = site.job(0)
    job.ask("load")
    other = Credentials.new(tmp_path / "other")
    # A controller of that job, and one that has only a host's certificate of this one.
    with pytest.raises(RuntimeError, match="AuthenticationError"):
        site.job(0, credentials=other.path)
    posing = tmp_path / "posing"
    shutil.copytree(tmp_path / "host1", posing)
    with pytest.raises(RuntimeError, match=r"Error"):
        site.job(0, credentials=posing)
    # Which of the two sides ends the handshake first is theirs to find out.
    wait_until(
        lambda: re.search(r"was refused|did not accept this host", site.agents[1].log()) is not None,
        "the agent does not say who was not let in",
        10,
    )
    settled = job.ask("settle")
    assert settled["wrong"] == [] and job.ask("failures") == [], settled
    assert job.end() == 0
