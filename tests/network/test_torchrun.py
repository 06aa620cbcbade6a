"""Hosts in a real torchrun: nodes on machines of their own, one of them with two ranks each (TRN-1 to TRN-3)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Host, Network, wait_until
from launching import LIFE_S, OUTLIVES

pytest.importorskip("mesh_launchers", reason="mesh-launchers is not installed here")
pytest.importorskip("torch.distributed", reason="PyTorch is not installed here")

HERE = Path(__file__).parent
COMPILED = {"PYTHONDONTWRITEBYTECODE": ""}
"""PyTorch imports so much that compiling it anew in each process takes longer than all else here."""
LIMIT = 120.0
"""Six processes import PyTorch, each for seconds."""
pytestmark = [pytest.mark.network, pytest.mark.slow, pytest.mark.timeout(300)]

BEGIN = """
import os, sys, time
from mesh_core import Actor, configure, endpoint, set_fault_handler
from mesh_launchers import LaunchError, torchrun

class Where(Actor):
    @endpoint
    def where(self):
        import socket
        return socket.gethostname(), os.environ.get("RANK")

def where(hosts):
    return hosts.spawn_procs(per_host={"gpus": 1}).spawn("where", Where).where.call().get(timeout=60).values()

def say(*what):
    with open(os.environ["SAID"], "a") as file:
        file.write(" | ".join(map(str, what)) + "\\n")

if __name__ == "__main__":
    configure(heartbeat_timeout=15)
"""


class Torchruns:
    """The process that starts them: PyTorch is imported once for all of them."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, HERE / "programs" / "torchruns.py"],
            stdin=subprocess.PIPE,
            env={**os.environ, **COMPILED},
            text=True,
            start_new_session=True,
        )

    def start(self, host: Host, folder: Path, env: dict[str, str], words: list[str]) -> Torchrun:
        """Start one on a machine."""
        told = {
            "machine": host.machine,
            "folder": str(folder),
            "name": host.name,
            "env": {**os.environ, **env},
            "words": words,
        }
        assert self.process.stdin is not None
        self.process.stdin.write(f"{json.dumps(told)}\n")
        self.process.stdin.flush()
        return Torchrun(folder / host.name)

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(LIMIT)


class Torchrun:
    """One torchrun."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        pid = self._path.with_suffix(".pid")
        wait_until(pid.exists, "it does not start", LIMIT)
        os.kill(int(pid.read_text()), number)

    def wait(self, limit: float) -> int:
        """Wait for its end; how it has ended."""
        status = self._path.with_suffix(".status")
        wait_until(status.exists, "it does not end", limit)
        return int(status.read_text())


@pytest.fixture(scope="module")
def torchruns() -> Iterator[Torchruns]:
    """What starts them."""
    torchruns = Torchruns()
    yield torchruns
    torchruns.close()


class Job:
    """A torchrun on each machine."""

    def __init__(
        self, torchruns: Torchruns, network: Network, folder: Path, text: str, *words: str, ranks: int = 1
    ) -> None:
        self.network = network
        self.folder = folder
        self._said = folder / "said"
        self._said.touch()
        self._read = 0
        script = folder / "script.py"
        script.write_text(BEGIN + "".join(f"    {line}\n" for line in text.splitlines()))
        head = network.hosts[0].address
        command = [
            f"--nnodes={len(network.hosts)}",
            f"--nproc-per-node={ranks}",
            *(
                ["--rdzv-backend=c10d", f"--rdzv-endpoint={head}:29400", "--rdzv-id=lab"]
                if len(network.hosts) > 1
                else ["--standalone"]
            ),
            *(*words, str(script)),
        ]
        self.processes = [self._start(torchruns, host, command) for host in network.hosts]

    def _start(self, torchruns: Torchruns, host: Host, command: list[str]) -> Torchrun:
        runtime = self.folder / f"run-{host.name}"
        runtime.mkdir(mode=0o700)
        env = {
            "MESH_JOBS": str(self.folder / "state" / "jobs"),
            "XDG_RUNTIME_DIR": str(runtime),
            "SAID": str(self._said),
            **COMPILED,
        }
        return torchruns.start(host, self.folder, env, command)

    def log(self) -> str:
        """What all have written."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob("host*.log")))

    def heard(self) -> str:
        """Return the script's next line."""
        lines = wait_until(
            lambda: self._said.read_text().splitlines()[self._read :],
            lambda: f"nothing was said: {self.log()}",
            LIMIT,
        )
        self._read += 1
        return str(lines[0])

    def ended(self) -> list[int]:
        """Wait for all; how they have ended. Nothing of them is left."""
        statuses = [each.wait(LIMIT) for each in self.processes]
        wait_until(lambda: not self.left(), lambda: f"left behind: {self.left()}")
        return statuses

    def left(self) -> list[Any]:
        """Hosts, and keys."""
        found: list[Any] = [each for host in self.network.hosts for each in hosts_on(host)]
        found += self.folder.glob("run-*/mesh-host-*")
        return [*found, *(self.folder / "state" / "torchrun").glob("*")]


def hosts_on(host: Host) -> list[int]:
    """Return the processes of Mesh's host on a machine."""
    found = []
    for pid in host.pids():
        try:
            if b"\0mesh-host\0" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return sorted(found)


def test_all_nodes_are_hosts_in_the_order_of_their_ranks(
    torchruns: Torchruns, network: Callable[[int], Network], tmp_path: Path
) -> None:
    """TRN-1: no key is in the store, nor anywhere else where it can be read."""
    job = Job(
        torchruns,
        network(3),
        tmp_path,
        """
with torchrun.hosts() as hosts:
    hosts.initialized.get(timeout=60)
    say(*hosts.names, *[each["hostname"] for each in hosts.labels])
    say(*where(hosts))
    from mesh_launchers._authority import authority
    key = next(authority().credentials().rglob("host.key")).read_text().splitlines()[1]
    from torch.distributed import TCPStore
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    prefix = "mesh/lab/"
    keys = [f"{prefix}node/{node}" for node in (1, 2)]
    values = [store.get(each) for each in keys]
    for value in list(values):
        import json
        welcome = store.get(f"{prefix}welcome/{json.loads(value)['me']}")
        values += [welcome, store.get(f"{prefix}{json.loads(welcome)['token']}/{json.loads(value)['me']}")]
    say(len(values), any(key.encode() in each or b"PRIVATE" in each for each in values), store.num_keys() > 4)
    try:
        with torchrun.hosts():
            pass
    except LaunchError as error:
        say(error)
say("after")
""",
        ranks=2,
    )
    assert job.heard() == "node0 | node1 | node2 | host0 | host1 | host2"
    nodes = job.heard()
    assert [nodes.find(f"('host{at}', None)") >= 0 for at in range(3)] == [True] * 3, nodes
    assert job.heard() == "6 | False | True"
    assert job.heard() == (
        "torchrun.hosts() can be used once in a script: the other ranks have ended with its block"
    )
    assert job.heard() == "after"
    assert job.ended() == [0, 0, 0], job.log()


def test_a_job_outlives_its_first_certificates(
    torchruns: Torchruns, network: Callable[[int], Network], tmp_path: Path
) -> None:
    """CRT-1, TRN-1."""
    job = Job(
        torchruns,
        network(2),
        tmp_path,
        OUTLIVES
        + f"""
with torchrun.hosts() as hosts:
    hosts.initialized.get(timeout=60)
    say("begun")
    counters = outlives(hosts, datetime.now(UTC) + timedelta(seconds=2 * {LIFE_S}))
    later = hosts.spawn_procs().spawn("later", Counter).count.call().get(timeout=60)
    say("outlived", later.values())
""",
    )
    assert job.heard() == "begun"
    assert job.heard() == "outlived | [1, 1]"
    assert job.ended() == [0, 0], job.log()


def test_a_rank_that_fails_has_all_started_again(
    torchruns: Torchruns, network: Callable[[int], Network], tmp_path: Path
) -> None:
    """TRN-2, TRN-3: the second attempt has hosts of its own, and SIGTERM ends all of it."""
    job = Job(
        torchruns,
        network(2),
        tmp_path,
        """
with torchrun.hosts() as hosts:
    hosts.initialized.get(timeout=60)
    say("attempt", len(where(hosts)))
    time.sleep(1000)
""",
        "--max-restarts=1",
    )
    assert job.heard() == "attempt | 2"
    # The agent of a node: its rank fails with it, and torchrun starts all again.
    agent = hosts_on(job.network.hosts[1])[-1]
    os.kill(agent, signal.SIGKILL)
    assert job.heard() == "attempt | 2"
    assert agent not in hosts_on(job.network.hosts[1])
    assert "node 1 (host1): its agent has ended: its agent was ended by signal 9" in job.log()
    for each in job.processes:
        each.send_signal(signal.SIGTERM)
    assert all(job.ended()), job.log()


def test_torchruns_sigterm_is_a_notice_to_jobs(
    torchruns: Torchruns, network: Callable[[int], Network], tmp_path: Path
) -> None:
    """TRN-2, HST-5: the script hears of it in time to take its processes away, and goes on without that node."""
    job = Job(
        torchruns,
        network(2),
        tmp_path,
        """
from mesh_core import inspect
set_fault_handler(lambda failure: True)
with torchrun.hosts(preemption_grace=25) as hosts:
    hosts.initialized.get(timeout=60)
    here, there = (hosts.slice(hosts=slice(at, at + 1)).spawn_procs({"gpus": 1}) for at in range(2))
    for each in (here, there):
        each.spawn("where", Where).where.call().get(timeout=60)
    say("runs")
    with inspect.events(past=True, actors=False) as happening:
        event = next(each for each in happening if each.kind == "host_leaving")
    say(event.host, event.grace)
    there.stop().get(timeout=60)
    say(*here.spawn("again", Where).where.call().get(timeout=60).values())
    while not os.path.exists(os.environ["SAID"] + ".go"):
        time.sleep(0.05)
say("after")
""",
    )
    assert job.heard() == "runs"
    job.processes[1].send_signal(signal.SIGTERM)
    assert job.heard() == "node1 | 25.0"
    assert job.heard() == "('host0', None)"
    words = "its agent has ended: it was taken away: SIGTERM came"
    wait_until(lambda: words in job.log(), job.log, LIMIT)
    assert job.processes[1].wait(LIMIT)
    Path(f"{tmp_path / 'said'}.go").touch()
    assert job.heard() == "after"
    # torchrun itself waits for the node that has gone, for five minutes.
    job.processes[0].send_signal(signal.SIGTERM)
    assert all(job.ended()), job.log()


def test_a_script_that_fails_is_an_end_of_all(
    torchruns: Torchruns, network: Callable[[int], Network], tmp_path: Path
) -> None:
    job = Job(
        torchruns,
        network(2),
        tmp_path,
        """
with torchrun.hosts() as hosts:
    say(len(where(hosts)))
    raise ValueError("as was to be")
""",
    )
    assert job.heard() == "2"
    statuses = job.ended()
    assert all(statuses), (statuses, job.log())
    assert "node 1 (host1): rank 0 has failed: ValueError: as was to be" in job.log()


def test_credentials_of_the_users_own_and_a_node_that_lacks_them(
    torchruns: Torchruns, network: Callable[[int], Network], tmp_path: Path
) -> None:
    from mesh_core import Credentials

    given = Credentials.new(tmp_path / "credentials")
    job = Job(
        torchruns,
        network(2),
        tmp_path,
        f"""
mine = {str(given.path)!r} if os.environ["GROUP_RANK"] == "0" else {str(given.host_path)!r}
with torchrun.hosts(credentials=mine) as hosts:
    say(len(where(hosts)))
""",
    )
    assert job.heard() == "2"
    assert job.ended() == [0, 0], job.log()
    second = tmp_path / "second"
    second.mkdir()
    job = Job(
        torchruns,
        job.network,
        second,
        """
try:
    with torchrun.hosts(folder=f"/run/{os.environ['GROUP_RANK']}") as hosts:
        pass
except LaunchError as error:
    say(error)
    sys.exit(3)
""",
    )
    said = job.heard()
    assert said.startswith("node 1 has not started its host: there is no /run/1/mesh-"), said
    assert "name a folder= that all nodes see" in said
    assert all(job.ended())


def test_a_single_node_and_a_script_that_exits(
    torchruns: Torchruns, network: Callable[[int], Network], tmp_path: Path
) -> None:
    job = Job(
        torchruns,
        network(1),
        tmp_path,
        """
with torchrun.hosts() as hosts:
    say(len(where(hosts)))
    sys.exit(0)
""",
    )
    assert job.heard() == "1"
    assert job.ended() == [0], job.log()
