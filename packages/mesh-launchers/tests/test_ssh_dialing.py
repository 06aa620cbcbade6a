"""Hosts of ssh that connect to the script, and what is said where neither side can connect to the other."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from greeter import Greeter, host_pids, kill_host
from launched import LIMIT, until
from sshd import SSHD, Servers, free_port
from terminals import InTerminal
from test_launcher_commands import mesh
from test_visits import quick_to_be_missed, runs

from mesh_core import HostMesh
from mesh_launchers import Job, LaunchError, Phase, attach_job, launch
from mesh_launchers._door import Door
from mesh_launchers._folder import JobFolder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.full,
    pytest.mark.usefixtures("failures"),
    pytest.mark.skipif(
        SSHD is None or shutil.which("ssh") is None, reason="there is no sshd: apt install openssh-server"
    ),
]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    """Three servers."""
    servers = Servers(tmp_path / "sshd", 3)
    yield servers
    servers.close()


def start(servers: Servers, hosts: Any = None, **options: Any) -> Job:
    hosts = {"hosts": hosts or servers.names} if "meshes" not in options else {}
    return launch("ssh", **hosts, **{"config": str(servers.config), "python": sys.executable, **options})


def greeted(hosts: HostMesh) -> list[str]:
    procs = hosts.spawn_procs(per_host={"gpus": 1})
    return list(procs.spawn("greeters", Greeter).greet.call("you").get(timeout=LIMIT).values())


def test_hosts_connect_to_the_script(servers: Servers) -> None:
    """DIA-1: in any order, each has its place."""
    meshes = {"one": ["b3"], "two": ["b2"]}
    dial = f"127.0.0.1:{free_port('127.0.0.1')}"
    with start(servers, meshes=meshes, spares=["b1"], dial=dial) as job:
        assert {name: each.names for name, each in job.meshes.items()} == {
            "one": ["b3"],
            "two": ["b2"],
            "spares": ["b1"],
        }
        assert greeted(job.meshes["one"].join(job.meshes["two"])) == ["hello you"] * 2
        assert [each.address for each in job.state().hosts] == [None] * 3
        visited = mesh("exec", "--mesh", "one", job.name, "--", "true")
        assert visited.returncode == 0, visited.stderr


def test_hosts_that_dial_are_kept_and_scaled(servers: Servers) -> None:
    dial = f"127.0.0.1:{free_port('127.0.0.1')}"
    with start(servers, ["b1", "b2"], dial=dial, keep="60s", name="kept") as job:
        assert greeted(job.hosts) == ["hello you"] * 2
        job.detach()
        with attach_job("kept") as again:
            assert again.hosts.names == ["b1", "b2"]
            assert greeted(again.hosts) == ["hello you"] * 2
            assert again.scale(["b1", "b2", "b3"]).names == ["b1", "b2", "b3"]
            assert again.scale(["b3", "b2"]).names == ["b2", "b3"]
            until(lambda: host_pids("b1") == [], "a host ends")
            assert greeted(again.hosts) == ["hello you"] * 2


def begun(*words: str) -> subprocess.Popen[str]:
    """Return a ``mesh exec`` whose commands have all begun."""
    running = subprocess.Popen(
        [sys.executable, "-m", "mesh_core.cli", "exec", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=quick_to_be_missed(),
    )
    assert running.stdout is not None
    assert running.stdout.readline(), running.communicate()[1]
    return running


def test_exec_reaches_hosts_that_connect_to_the_script(servers: Servers) -> None:
    """VST-1, HST-6: they connect to the command as well, and the script notices nothing of it."""
    dial = f"127.0.0.1:{free_port('127.0.0.1')}"
    with start(servers, ["b1", "b2", "b3"], dial=dial, name="dialed") as job:
        assert greeted(job.hosts) == ["hello you"] * 3
        agents = {each: host_pids(each) for each in servers.names}
        done = mesh("exec", "dialed", "--", "sh", "-c", "echo out; exit 3")
        assert done.returncode == 3, done.stderr
        assert sorted(each.partition("] ")[0] for each in done.stdout.splitlines()) == [
            f"[exec hosts={at} on b{at + 1}" for at in range(3)
        ]
        chosen = mesh("exec", "--on", "b3,b1", "dialed", "--", "echo", "out")
        assert {each.partition("] ")[0] for each in chosen.stdout.splitlines()} == {
            "[exec hosts=0 on b3",
            "[exec hosts=1 on b1",
        }
        # At another address that is open to the hosts.
        elsewhere = mesh("exec", "--dial", f"127.0.0.5:{free_port('127.0.0.5')}", "dialed", "--", "true")
        assert elsewhere.returncode == 0, elsewhere.stderr
        until(lambda: {each: host_pids(each) for each in servers.names} == agents, "agents for visitors end")
        assert greeted(job.hosts) == ["hello you"] * 3


def test_an_address_to_dial_is_no_order(servers: Servers) -> None:
    """KPR-4: hosts are told it in a line, and `over` would be another one."""
    dial = f"127.0.0.1:{free_port('127.0.0.1')}"
    with start(servers, ["b1"], dial=dial, name="dialed") as job:
        assert greeted(job.hosts) == ["hello you"]
        door = Door("dialed", JobFolder.of("dialed").connect(LIMIT))
        for wrong in ("127.0.0.1:1\nover\nx:1", "127.0.0.1\nend 0\n:1", "127.0.0.1 x:1", "x" * 10_000):
            with pytest.raises(ValueError, match="dial must be HOST:PORT"):
                door.ask("dial", hosts=[0], address=wrong)
        door.close()
        assert greeted(job.hosts) == ["hello you"]


def test_a_visitor_that_is_killed_leaves_nothing_on_such_hosts(servers: Servers) -> None:
    """VST-1, HST-6."""
    dial = f"127.0.0.1:{free_port('127.0.0.1')}"
    with start(servers, ["b1", "b2"], dial=dial, name="dialed") as job:
        assert greeted(job.hosts) == ["hello you"] * 2
        agents = {each: host_pids(each) for each in servers.names}
        running = begun("dialed", "--", "sh", "-c", "echo $PPID; sleep 5151")
        assert {each: len(host_pids(each)) for each in ("b1", "b2")} != {
            each: len(agents[each]) for each in ("b1", "b2")
        }
        running.kill()
        running.communicate()
        until(lambda: not runs("sleep\x005151"), "the commands end")
        until(lambda: {each: host_pids(each) for each in servers.names} == agents, "agents for visitors end")
        assert greeted(job.hosts) == ["hello you"] * 2


@pytest.mark.parametrize("what", [0, 1], ids=["program", "agent"])
def test_visitors_are_notified_of_the_end_of_such_a_host_and_of_its_job(servers: Servers, what: int) -> None:
    """HST-6."""
    dial = f"127.0.0.1:{free_port('127.0.0.1')}"
    with start(servers, ["b1", "b2"], dial=dial, name="dialed") as job:
        job.wait(timeout=LIMIT)
        _ = job.hosts
        killed = host_pids("b2")[what]
        running = begun("--on", "b2", "dialed", "--", "sh", "-c", "echo up; sleep 5252")
        # The agent for the visitor ends with either of them.
        os.kill(killed, signal.SIGKILL)
        _, error = running.communicate(timeout=LIMIT)
        assert running.returncode == 255 and "mesh: b2: " in error, error
        running = begun("--on", "b1", "dialed", "--", "sh", "-c", "echo up; sleep 5353")
        job.stop()
        _, error = running.communicate(timeout=LIMIT)
        assert "mesh: job 'dialed' has ended, and what ran on its hosts with it" in error, error
    until(lambda: not runs("sleep\x005252") and not runs("sleep\x005353"), "the commands end")


def test_a_visitor_that_such_hosts_cannot_reach(servers: Servers) -> None:
    dial = f"127.0.0.1:{free_port('127.0.0.1')}"
    with start(servers, ["b1"], dial=dial, name="dialed") as job:
        _ = job.hosts
        agents = host_pids("b1")
        port = free_port("127.0.0.1")
        refused = mesh("exec", "--dial", f"nowhere.invalid:{port}", "dialed", "--", "true")
        assert refused.returncode != 0
        assert f"b1 cannot connect to nowhere.invalid:{port}: " in refused.stderr
        assert "--dial HOST:PORT" in refused.stderr
        wrong = mesh("exec", "--dial", "nowhere", "dialed", "--", "true")
        assert "dial must be HOST:PORT" in wrong.stderr
        until(lambda: host_pids("b1") == agents, "agents for visitors end")
        assert greeted(job.hosts) == ["hello you"]


def test_a_shell_on_a_host_that_connects_to_the_script(servers: Servers) -> None:
    dial = f"127.0.0.1:{free_port('127.0.0.1')}"
    with start(servers, ["b1", "b2"], dial=dial, name="dialed") as job:
        _ = job.hosts
        shell = InTerminal("shell", "dialed", "b2", "--", "sh", "-c", "tty; exit 7")
        try:
            shell.sees("/dev/pts/")
            assert shell.ends() == 7
        finally:
            shell.close()


def test_neither_side_can_connect(servers: Servers) -> None:
    """The error names who could not connect, and to what."""
    dial = f"nowhere.invalid:{free_port('0.0.0.0')}"
    with start(servers, ["b1"], dial=dial, start_timeout=6) as job:
        words = f"b1 cannot connect to the script at {dial}: "
        until(lambda: words in str(job.state()), "what fails is told while it is tried")
        with pytest.raises(
            LaunchError, match=rf"{words}.*after 6 s: dial= must be an address of the script's"
        ):
            _ = job.hosts
    with start(servers, ["b1", "b2"], address={"b1": "127.0.0.9"}, listen="127.0.0.2:0") as job:
        with pytest.raises(
            LaunchError,
            match=r"the script's machine cannot connect to b1 at tcp://127.0.0.9:\d+: Connection refused\. .*dial=",
        ):
            job.wait(timeout=LIMIT)
        until(lambda: job.state().hosts[1].phase is Phase.RUNNING, "the other one runs")


def test_a_host_that_ends_before_all_have_come(servers: Servers) -> None:
    with start(servers, ["b1", "b2"], dial=f"127.0.0.1:{free_port('127.0.0.1')}") as job:
        job.wait(timeout=LIMIT)
        kill_host("b2")
        until(lambda: job.state().hosts[1].phase is Phase.FAILED, "the host's end is told")
        # It may have come before.
        with pytest.raises(Exception, match="b2"):
            greeted(job.hosts)


def test_the_address_of_the_script(servers: Servers) -> None:
    for wrong in ("login1", "login1:0", ":26700", "login1:x"):
        with pytest.raises(ValueError, match=r"dial must be HOST:PORT, .* got "):
            start(servers, ["b1"], dial=wrong)
    with pytest.raises(ValueError, match="the same for all meshes"):
        start(servers, meshes={"one": ["b1"], "two": {"hosts": ["b2"], "dial": "login1:26700"}})
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            start(servers, ["b1"], dial=f"127.0.0.1:{port}") as job,
            pytest.raises(Exception, match=rf"0\.0\.0\.0:{port}.*in use"),
        ):
            _ = job.hosts
