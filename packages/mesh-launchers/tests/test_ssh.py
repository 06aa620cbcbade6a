"""The launcher ssh, by real servers on loopback."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from greeter import Greeter, host_pids, kill_host
from launched import LIMIT, until
from sshd import SSHD, Servers, free_port

from mesh_launchers import LaunchError, Phase, attach_job, jobs, launch

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


def start(servers: Servers, *names: str, **options: Any) -> Any:
    return launch(
        "ssh",
        hosts=list(names or servers.names),
        config=str(servers.config),
        **{"python": sys.executable, **options},
    )


def test_hosts_by_their_names(servers: Servers) -> None:
    with start(servers, name="lab") as job:
        procs = job.hosts.spawn_procs(per_host={"gpus": 1})
        assert (
            procs.spawn("greeters", Greeter).greet.call("you").get(timeout=LIMIT).values()
            == ["hello you"] * 3
        )
        assert job.hosts.names == ["b1", "b2", "b3"]
        assert [each.rpartition(":")[0] for each in job.hosts.addresses] == [
            f"tcp://127.0.0.{n}" for n in (1, 2, 3)
        ]
        assert all("listens at" in each for each in job.logs().values())
        # Which hosts they are is said by their names.
        assert job.scale(["b1", "b3"]).names == ["b1", "b3"]
        assert host_pids("b2") == []
        assert job.scale(["b1", "b2", "b3"]).sizes == {"hosts": 3}


def test_scale_wants_names(servers: Servers) -> None:
    """KPR-4: a number is an error that says so, and changes nothing."""
    with start(servers, "b1", "b2", name="lab") as job:
        job.wait(timeout=LIMIT)
        greeters = job.hosts.spawn_procs().spawn("greeters", Greeter)
        for wanted, words in (
            (
                3,
                r"the launcher 'ssh' wants the names of all hosts .*: those that it has, \['b1', 'b2'\], and",
            ),
            (["b1", "b3", "b3"], "b3 would be in job 'lab' twice"),
            (["b1", ""], "wants the names"),
        ):
            with pytest.raises(ValueError, match=words):
                job.scale(wanted)
        assert [(each.name, str(each.phase)) for each in job.state().hosts] == [
            ("b1", "running"),
            ("b2", "running"),
        ]
        assert greeters.greet.call("you").get(timeout=LIMIT).values() == ["hello you"] * 2
        # Fewer hosts need no names.
        assert job.scale(1).names == ["b1"]


def test_the_command_scale_wants_names(servers: Servers) -> None:
    """KPR-4."""
    with start(servers, "b1", keep="60s", name="lab") as job:
        job.wait(timeout=LIMIT)
        job.detach()
        until(lambda: jobs()[0].used_by is None, "the script's end is known")
        refused = scale("lab", "2")
        assert refused.returncode == 1
        assert refused.stderr.startswith("mesh: scale: the launcher 'ssh' wants the names of all hosts")
        assert len(jobs()[0].hosts) == 1
        assert scale("lab", "b1,b2").returncode == 0
        until(lambda: [str(each.phase) for each in jobs()[0].hosts] == ["running"] * 2, "a second host runs")
        assert scale("lab", "b2").returncode == 0
        with attach_job("lab") as again:
            assert again.hosts.names == ["b2"]


def scale(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mesh_core.cli", "scale", *words], capture_output=True, text=True, check=False
    )


def test_several_meshes_and_spares_by_their_names(servers: Servers) -> None:
    options = {"config": str(servers.config), "python": sys.executable}
    with launch("ssh", meshes={"one": ["b1"], "two": {"hosts": ["b2"]}}, spares=["b3"], **options) as job:
        assert {name: mesh.sizes for name, mesh in job.meshes.items()} == {
            "one": {"hosts": 1},
            "two": {"hosts": 1},
            "spares": {"hosts": 1},
        }
        # What a host is called it says when it is attached.
        job.meshes["two"].initialized.get(timeout=LIMIT)
        assert job.meshes["two"].names == ["b2"]


def test_a_name_that_ssh_does_not_take(servers: Servers) -> None:
    with start(servers, "b1;ls") as job:
        with pytest.raises(LaunchError, match="b1;ls"):
            job.wait(timeout=LIMIT)
        with pytest.raises(Exception, match="b1;ls"):
            job.hosts.initialized.get(timeout=LIMIT)


def test_a_key_that_has_changed(servers: Servers) -> None:
    servers.forget("b2")
    with start(servers) as job:
        with pytest.raises(LaunchError, match=r"host b2 .*ssh: Host key verification failed\.") as caught:
            job.wait(timeout=LIMIT)
        assert "REMOTE HOST IDENTIFICATION HAS CHANGED" in str(caught.value) or "has changed" in str(
            caught.value
        )
        # The others are there, for who goes on with them.
        until(lambda: [each.phase for each in job.state().hosts].count(Phase.RUNNING) == 2, "two hosts run")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (
            {"python": "/nowhere/python"},
            r"no such interpreter on the host: .*/nowhere/python: No such file or directory",
        ),
        ({"python": "/usr/bin/env python3 -S"}, "/usr/bin/env python3 -S"),
        ({"arguments": ["-o", "IdentityFile=none", "-o", "IdentityAgent=none", "-F", "none"]}, "ssh: "),
    ],
)
def test_the_message_of_the_other_end_is_reported(
    servers: Servers, options: dict[str, Any], match: str
) -> None:
    with start(servers, "b1", **options) as job, pytest.raises(LaunchError, match=match):
        job.wait(timeout=LIMIT)


def test_an_invalid_name(servers: Servers) -> None:
    with (
        start(servers, "no-such-host.invalid") as job,
        pytest.raises(LaunchError, match="Could not resolve hostname"),
    ):
        job.wait(timeout=LIMIT)
    with pytest.raises(ValueError, match=r"wants their names, such as \['b1', 'b2'\], got 2"):
        launch("ssh", hosts=2)
    with pytest.raises(ValueError, match="b1 is named more than once"):
        start(servers, "b1", "b1")


def test_a_server_that_drops_logins_is_tried_again(tmp_path: Path) -> None:
    """From the third login at once on it drops every one."""
    servers = Servers(tmp_path / "sshd", 1, "MaxStartups 2:100:2")
    names = [f"alias{at}" for at in range(5)]
    block = servers.config.read_text().partition("Host *")
    server = block[0].partition("\n")[2]
    servers.config.write_text("".join(f"Host {name}\n{server}" for name in names) + block[1] + block[2])
    try:
        with start(servers, *names) as job:
            job.wait(timeout=LIMIT)
        dropped = (servers.folder / "b1.log").read_text()
        assert "drop connection" in dropped or "beginning MaxStartups throttling" in dropped
    finally:
        servers.close()


def test_half_of_the_hosts_come(servers: Servers) -> None:
    """Each of the others says why it has not, in ssh's words; those that run can be used."""
    closed = free_port("127.0.0.1")
    with servers.config.open("a") as config:
        config.write(f"\nHost closed\n  HostName 127.0.0.1\n  Port {closed}\n")
        config.write("Host unrouted\n  HostName 255.255.255.255\n")
    with start(servers, "b1", "closed", "b2", "nowhere.invalid", "unrouted") as job:
        until(lambda: sum(each.phase is Phase.FAILED for each in job.state().hosts) == 3, "three have failed")
        whys = {each.name: each.why for each in job.state().hosts}
        assert "Connection refused" in whys["closed"]
        assert "Could not resolve hostname nowhere.invalid" in whys["nowhere.invalid"]
        assert whys["unrouted"].startswith("ssh: connect to host 255.255.255.255 port 22: ")
        with pytest.raises(LaunchError, match=r"host closed .*\(3 hosts have failed\): ssh: connect to host"):
            job.wait(timeout=LIMIT)
        # Scaled to those that are there, the job is whole.
        hosts = job.scale(["b1", "b2"])
        procs = hosts.spawn_procs(per_host={"gpus": 1})
        assert (
            procs.spawn("greeters", Greeter).greet.call("you").get(timeout=LIMIT).values()
            == ["hello you"] * 2
        )
        job.wait(timeout=LIMIT)


def test_a_host_that_is_killed_and_a_connection_that_ends(servers: Servers) -> None:
    """HST-2, HST-3."""
    with start(servers, "b1", "b2", "b3") as job:
        job.wait(timeout=LIMIT)
        kill_host("b1")
        until(lambda: job.state().hosts[0].phase is Phase.FAILED, "the host's end is told")
        assert "its agent was ended by signal 9 (SIGKILL)" in job.state().hosts[0].why
        agents = host_pids("b2")
        os.kill(_session(servers.processes[1].pid), signal.SIGKILL)
        until(lambda: job.state().hosts[1].phase is Phase.FAILED, "the connection's end is told")
        assert "ssh: " in job.state().hosts[1].why
        # Nothing goes on there.
        until(lambda: not any(Path(f"/proc/{each}/exe").exists() for each in agents), "the host ends")
        assert job.state().hosts[2].phase is Phase.RUNNING


def _session(server: int) -> int:
    """Return the server's process for a connection."""
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return int(children[0])
