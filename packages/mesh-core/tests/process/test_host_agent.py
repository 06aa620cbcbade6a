"""The agent of a host as a child process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from core_processes import Watch, family
from hosts_samples import SOON, Member

from mesh_core import Credentials, HostAgent, MeshError, attach_to_workers, shutdown, this_host


@pytest.fixture
def job(tmp_path: Path) -> Credentials:
    credentials = Credentials.new(tmp_path / "job")
    credentials.issue_host(tmp_path / "host")
    return credentials


@pytest.fixture
def agent(job: Credentials, tmp_path: Path) -> Iterator[HostAgent]:
    with HostAgent(tmp_path / "host", name="first") as agent:
        yield agent
        shutdown()


def test_it_serves_a_job(agent: HostAgent, job: Credentials) -> None:
    hosts = attach_to_workers([agent.address], credentials=job)
    with hosts.spawn_procs() as procs:
        assert procs.spawn("member", Member).echo.call_one(1).get(timeout=SOON)[1] == 1  # type: ignore[call-overload]
    assert hosts.names == ["first"]
    assert hosts.addresses == [agent.address]
    while "begins here" not in agent.log():
        time.sleep(0.01)


def test_this_host_has_no_address() -> None:
    assert this_host().addresses == [""]
    shutdown()


def test_it_ends_in_order_and_starts_again_at_the_same_address(agent: HostAgent, job: Credentials) -> None:
    address, pid = agent.address, agent.pid
    agent.stop()
    assert not agent.is_running
    assert agent.wait() == 0
    agent.start()
    assert agent.address == address
    assert agent.pid != pid
    attach_to_workers([address], credentials=job).initialized.get(timeout=SOON)


def test_one_that_serves_once_ends_with_its_job(job: Credentials, tmp_path: Path) -> None:
    with HostAgent(tmp_path / "host", once=True) as agent:
        hosts = attach_to_workers([agent.address], credentials=job)
        hosts.initialized.get(timeout=SOON)
        shutdown()
        assert agent.wait(SOON) == 0


def test_unsupported_requests_are_errors(tmp_path: Path) -> None:
    agent = HostAgent(tmp_path / "nothing", name="first")
    with pytest.raises(
        MeshError, match="host agent 'first'> exited with status 1; it has written:"
    ) as caught:
        agent.start()
    assert "nothing" in str(caught.value)
    assert not agent.is_running
    for ask in (lambda: agent.address, lambda: HostAgent(tmp_path).pid):
        with pytest.raises(MeshError, match=r"start\(\) it first"):
            ask()


def test_a_running_agent_is_not_started_again(agent: HostAgent) -> None:
    with pytest.raises(MeshError, match="it is running"):
        agent.start()
    assert agent.is_running


def test_a_wait_has_a_limit(agent: HostAgent) -> None:
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.01 s"):
        agent.wait(0.01)


def test_signals_are_waited_for(agent: HostAgent) -> None:
    agent.send_signal(signal.SIGSTOP)
    stat = Path(f"/proc/{agent.pid}/stat").read_text()
    assert stat.rpartition(")")[2].split()[0] == "T"
    agent.send_signal(signal.SIGKILL)
    assert agent.wait(0) == -signal.SIGKILL


def test_it_ends_with_its_parent(job: Credentials, tmp_path: Path) -> None:
    script = f"""
import os, sys
from mesh_core import HostAgent
agent = HostAgent({str(tmp_path / "host")!r}, log={str(tmp_path / "log")!r}).start()
print(agent.pid, flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        watch = Watch([pid, *family(pid)])
        os.kill(parent.pid, signal.SIGKILL)
        assert watch.wait() == []


def test_its_environment_can_be_changed(job: Credentials, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with HostAgent(tmp_path / "host", env={"MESH_TEST_MARK": "there"}, log=log) as agent:
        assert b"MESH_TEST_MARK=there" in Path(f"/proc/{agent.pid}/environ").read_bytes()
        assert log.exists()
