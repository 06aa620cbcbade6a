"""The launcher ssh between machines whose network fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Network, Process, wait_until
from launching import ended, heard

pytest.importorskip("mesh_launchers", reason="mesh-launchers is not installed here")

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
LIMIT = 60.0
pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        SSHD is None or shutil.which("ssh") is None, reason="there is no sshd: apt install openssh-server"
    ),
]

BEGIN = """
import os, sys, time
from mesh_core import Actor, MeshError, endpoint, set_fault_handler
from mesh_launchers import *

class Counter(Actor):
    def __init__(self):
        self.count = 0
    @endpoint
    def add(self):
        self.count += 1
        return self.count, os.getpid()

def say(*what):
    print(*what, sep=" | ", flush=True)

def wait_for(met):
    while not met():
        time.sleep(0.01)

def whys(job):
    return [each.why for each in job.state().hosts]

if __name__ == "__main__":
    set_fault_handler(lambda failure: True)
"""


class Machines:
    """Machines with an sshd each; scripts run on the first."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.folder = network, folder
        self.hosts = network.hosts
        for key in ("client", "server"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)],
                check=True,
                stdin=subprocess.DEVNULL,
            )
        server = {
            "HostKey": folder / "server",
            "AuthorizedKeysFile": folder / "client.pub",
            "StrictModes": "no",
            "UsePAM": "no",
            "PidFile": "none",
            "UseDNS": "no",
            "SetEnv": "XDG_RUNTIME_DIR=/run/user/0",
        }
        (folder / "sshd").write_text("".join(f"{name} {value}\n" for name, value in server.items()))
        public = " ".join((folder / "server.pub").read_text().split()[:2])
        (folder / "known").write_text("".join(f"{each.name} {public}\n" for each in self.hosts[1:]))
        client = {
            "IdentityFile": folder / "client",
            "UserKnownHostsFile": folder / "known",
            "CheckHostIP": "no",
        }
        (folder / "ssh").write_text("".join(f"{name} {value}\n" for name, value in client.items()))
        for each in self.hosts[1:]:
            command = f"mkdir -p /run/sshd && exec {SSHD} -D -e -f {folder}/sshd 2>>{folder}/{each.name}.log"
            each.start(["sh", "-c", command])
            wait_until(
                lambda each=each: each.run(["ss", "-Hltn", "sport", "=", "22"]).stdout, "sshd does not listen"
            )

    def script(self, text: str) -> Process:
        """Start a script that launches."""
        path = self.folder / "script.py"
        path.write_text(BEGIN + "".join(f"    {line}\n" for line in text.splitlines()))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return self.hosts[0].start(
            [sys.executable, "-u", path], env={"MESH_JOBS": str(self.folder / "jobs")}, **pipes
        )

    def launch(self, options: str = "") -> str:
        """Return the call that launches."""
        names = [each.name for each in self.hosts[1:]]
        return f"launch('ssh', hosts={names}, name='lab', config={str(self.folder / 'ssh')!r}, python=sys.executable{options})"


@pytest.fixture
def machines(network: Callable[[int], Network], tmp_path: Path) -> Iterator[Machines]:
    made = Machines(network(3), tmp_path)
    yield made
    for each in made.hosts[1:]:
        left = [pid for pid in each.pids() if b"mesh-host" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert not left, f"left behind on {each.name}: {left}"


def test_kept_hosts_outlive_a_network_that_is_cut_until_ssh_gives_up(machines: Machines) -> None:
    """HST-7, GTW-3: the call that waits is answered, and the same processes go on."""
    script = machines.script(
        f"""\
job = {machines.launch(", keep='1h'")}.wait(60)
counters = job.hosts.spawn_procs().spawn("counters", Counter)
before = counters.add.call().get(timeout=60).values()
say("runs")
input()
say("waits")
after = counters.add.call().get(timeout=120).values()
assert [each[0] for each in after] == [2, 2] and [each[1] for each in after] == [each[1] for each in before]
say("answered")
wait_for(lambda: not any(whys(job)))
say("whole")
assert [each[0] for each in counters.add.call().get(timeout=60).values()] == [3, 3]
job.stop()
"""
    )
    assert heard(script) == "runs"
    machines.network.wire.partition([machines.hosts[0]], machines.hosts[1:])
    assert script.stdin is not None
    script.stdin.write("\n")
    script.stdin.flush()
    assert heard(script) == "waits"

    def lost() -> bool:
        listed = machines.hosts[0].run(
            [sys.executable, "-m", "mesh_core.cli", "jobs", "lab"],
            env={"MESH_JOBS": str(machines.folder / "jobs")},
        )
        return listed.stdout.count("the connection to it is lost") == 2

    wait_until(lost, "ssh has not given up", LIMIT)
    machines.network.heal()
    assert heard(script) == "answered"
    assert heard(script) == "whole"
    ended(script)
