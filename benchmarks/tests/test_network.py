"""Agents are waited for without being talked to, and are gone afterwards, whatever became of them."""

import os
import socket
import sys

import pytest
from meshbench.network import LOOPBACK, Agents, free_ports, listening, octets_sent
from meshbench.processes import running

SERVE = f"import socket; s = socket.create_server(({LOOPBACK!r}, {{}})); s.accept()"


def serving(port):
    return [sys.executable, "-c", SERVE.format(port)]


def test_agents_listen_when_they_are_there_and_end_when_told():
    ports = free_ports(2)
    agents = Agents([serving(port) for port in ports], ports, timeout=30)
    pids = agents.pids()
    assert listening(ports) == set(ports)
    assert running(pids) == pids
    agents.end()
    assert running(pids) == []
    assert listening(ports) == set()


def test_an_agent_that_ends_at_once_is_told_and_takes_the_others_with_it():
    ports = free_ports(2)
    with pytest.raises(RuntimeError, match="1 of 2 agents have ended"):
        Agents([serving(ports[0]), [sys.executable, "-c", ""]], ports, timeout=30)
    assert listening(ports) == set()


def test_an_agent_that_never_listens_is_given_up():
    idle = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(RuntimeError, match="0 of 1 agents listen"):
        Agents([idle], free_ports(1), timeout=0.1)


def test_an_agent_that_ignores_the_request_is_killed():
    (port,) = ports = free_ports(1)
    stubborn = (
        f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SERVE.format(port)}; signal.pause()"
    )
    agents = Agents([[sys.executable, "-c", stubborn]], ports, timeout=30)
    agents.end(grace=0.1)
    assert running(agents.pids()) == []


def test_a_child_that_nobody_has_reaped_does_not_count_as_running():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is left for later
    assert running([pid]) == []
    os.waitpid(pid, 0)


def test_what_is_sent_over_loopback_counts():
    before = octets_sent()
    with (
        socket.create_server((LOOPBACK, 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        accepted, _ = server.accept()
        with accepted:
            client.sendall(bytes(100_000))
            accepted.recv(100_000, socket.MSG_WAITALL)
    assert octets_sent() - before >= 100_000
