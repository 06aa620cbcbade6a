"""Certificates of a job's hosts are renewed while it runs."""

from __future__ import annotations

import base64
import json
import logging
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from counter import Counter
from launched import LIMIT, until
from sshd import SSHD, Servers, free_port

from mesh_core import Credentials
from mesh_core.testing import DoctorCheckConformance
from mesh_launchers import _authority, _doctor, attach_job, jobs, launch
from mesh_launchers._renewal import CredentialsState, Renewal

LIFE = timedelta(seconds=100)


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.begun = self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        return self.now

    def at(self, share: float) -> None:
        """Let so large a part of a certificate's life be over."""
        self.now = self.begun + LIFE * share


def told(order: str | None) -> dict[str, bytes]:
    """Return the files of an order."""
    assert order is not None
    word, text = order.split(" ")
    assert word == "renew"
    return {name: base64.b64decode(data) for name, data in json.loads(base64.b64decode(text)).items()}


def test_renewed_at_half_of_their_life(tmp_path: Path) -> None:
    """CRT-1."""
    credentials = Credentials.new(tmp_path / "train", lifetime=LIFE - timedelta(seconds=2))
    clock = Clock()
    renewal = Renewal(credentials.path, LIFE.total_seconds(), clock)
    first = renewal.state
    assert first.is_renewed and not first.trouble and renewal.pause == 1.0
    clock.at(0.45)
    assert renewal.look() is None and len(credentials.certificates) == 2
    clock.at(0.55)
    order = told(renewal.look())
    assert order["host.pem"] == (credentials.host_path / "host.pem").read_bytes()
    assert b"PRIVATE" not in b"".join(order.values())
    # Until the hosts have them, the old ones count; and they are not made twice.
    clock.at(0.0)
    assert renewal.state.until == first.until
    assert told(renewal.look()) == order and len(credentials.certificates) == 4
    renewal.reached("the network is gone")
    assert renewal.state.until == first.until and "the network is gone" in renewal.state.trouble
    assert told(renewal.look()) == order
    renewal.reached()
    assert renewal.state.until > first.until and not renewal.state.trouble
    assert renewal.look() is None


def test_certificates_of_the_users_own_are_passed_on_and_reported(tmp_path: Path) -> None:
    """CRT-1, CRT-2: from a quarter of their life on."""
    credentials = Credentials.new(tmp_path / "train", lifetime=LIFE)
    clock = Clock()
    renewal = Renewal(credentials.path, None, clock)
    clock.at(0.74)
    assert renewal.look() is None and not renewal.state.trouble
    clock.at(0.76)
    assert renewal.look() is None and len(credentials.certificates) == 2
    assert f"run `mesh credentials renew {credentials.path}`" in renewal.state.trouble
    credentials.renew(lifetime=LIFE * 2)
    assert told(renewal.look())["host.pem"] == (credentials.host_path / "host.pem").read_bytes()
    renewal.reached()
    assert not renewal.state.trouble and not renewal.state.is_renewed
    credentials.revoke(credentials.host_path / "host.pem")
    assert told(renewal.look())["crl.pem"] == (credentials.path / "crl.pem").read_bytes()


def test_what_keeps_them_from_being_renewed_is_reported(tmp_path: Path) -> None:
    """CRT-2."""
    credentials = Credentials.new(tmp_path / "train", lifetime=LIFE)
    clock = Clock()
    renewal = Renewal(credentials.path, LIFE.total_seconds(), clock)
    clock.at(0.6)
    shutil.move(credentials.path / "ca.key", tmp_path / "ca.key")
    assert renewal.look() is None
    assert "cannot be renewed: " in renewal.state.trouble
    shutil.move(tmp_path / "ca.key", credentials.path / "ca.key")
    assert renewal.look() is not None and not renewal.state.trouble


@pytest.mark.parametrize(
    ("left", "words"),
    [
        (timedelta(days=6, hours=23, seconds=9), "6 d, renewed"),
        (timedelta(minutes=95), "1 h, renewed"),
        (timedelta(seconds=-5), "0 s, renewed"),
    ],
)
def test_state_in_words(left: timedelta, words: str) -> None:
    state = CredentialsState(datetime.now(UTC) + left, is_renewed=True)
    assert str(state) == words
    assert CredentialsState.of(json.loads(json.dumps(state.as_dict()))) == state


def outlives(job: Any, lives: int) -> None:
    """Call actors of a job without a pause until so many lives of its first certificates are over."""
    counters: Any = job.hosts.spawn_procs({"gpus": 1}).spawn("counters", Counter)
    first = job.wait(timeout=LIMIT).state().credentials
    assert first is not None and first.is_renewed
    life, count = first.remaining, 0
    assert life < timedelta(seconds=10)
    while datetime.now(UTC) < first.until + life * (lives - 1) + timedelta(seconds=2):
        count += 1
        assert counters.add.call(1).get(timeout=LIMIT).values() == [count] * len(counters)
    now = job.state().credentials
    assert now is not None and now.until > first.until and not now.trouble


@pytest.mark.slow
@pytest.mark.usefixtures("failures")
def test_a_job_outlives_its_first_certificates(monkeypatch: pytest.MonkeyPatch, failures: list[Any]) -> None:
    """CRT-1."""
    monkeypatch.setattr(_authority, "LIFETIME", timedelta(seconds=8))
    with launch("local", hosts=2) as job:
        outlives(job, 1)
        # Hosts that come later have the new ones from the start.
        assert len(job.scale(3).spawn_procs().spawn("later", Counter).add.call(1).get(timeout=LIMIT)) == 3
    assert failures == []


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("launcher", ["local", "ssh", "ssh, dialing"])
def test_a_kept_job_outlives_several_lives_of_its_certificates(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, failures: list[Any], launcher: str
) -> None:
    """CRT-1: with and without a script; keep= may be longer than a certificate's life."""
    monkeypatch.setattr(_authority, "LIFETIME", timedelta(seconds=8))
    servers: Servers | None = None
    if launcher == "local":
        job = launch("local", hosts=2, name="kept", keep="10d")
    else:
        if SSHD is None or shutil.which("ssh") is None:
            pytest.skip("there is no sshd: apt install openssh-server")
        servers = Servers(tmp_path / "sshd", 2)
        dial = {"dial": f"127.0.0.1:{free_port('127.0.0.1')}"} if launcher == "ssh, dialing" else {}
        job = servers.launch(name="kept", keep="10d", **dial)
    try:
        outlives(job, 2)
        job.detach()
        until(lambda: jobs()[0].used_by is None, "the script's end is known")
        before = jobs()[0].credentials
        assert before is not None
        until(lambda: datetime.now(UTC) > before.until, "nobody has the job for a whole life")
        with attach_job("kept") as again:
            assert len(again.actors["counters"].add.call(1).get(timeout=LIMIT)) == 2
    finally:
        if servers is not None:
            servers.close()
    assert failures == []


@pytest.mark.slow
@pytest.mark.usefixtures("failures")
def test_certificates_of_the_users_own_in_a_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """CRT-2: a warning while there is time; and what the user renews is in use at once."""
    credentials = Credentials.new(tmp_path / "train", lifetime=6)
    with (
        caplog.at_level(logging.WARNING, "mesh_launchers"),
        launch("local", hosts=1, name="own", credentials=credentials.path) as job,
    ):
        counters: Any = job.hosts.spawn_procs().spawn("counters", Counter)
        counters.add.call(1).get(timeout=LIMIT)
        until(lambda: job.state().credentials.trouble, "the end of its certificates is near")
        assert "mesh credentials renew" in str(job.state())
        found = list(_doctor.look())
        assert [each.status for each in found] == ["warn"] and "mesh credentials renew" in str(
            found[0].remedy
        )
        listed = subprocess.run(
            [sys.executable, "-m", "mesh_core.cli", "jobs", "own"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "credentials: they hold until " in listed
        credentials.renew(lifetime=3600)
        until(lambda: not job.state().credentials.trouble, "the new ones are with the hosts")
        assert job.state().credentials.remaining > timedelta(minutes=50)
        assert counters.add.call(1).get(timeout=LIMIT).values() == [2]
    assert [each.getMessage().startswith("credentials of job own: ") for each in caplog.records] == [True]


class TestJobsCheck(DoctorCheckConformance):
    """The suite for checks of `mesh doctor`."""

    plugin = next(iter(_doctor.mesh_register_doctor_checks()))
    distribution = "mesh-launchers"
