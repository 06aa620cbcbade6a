"""The launcher ray on a real Ray cluster: a head, and three nodes of one processor each."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray_nodes
from cluster import Network, Process, files_of_jobs, missing, wait_until
from launching import OUTLIVES, ended, heard, keeper
from ray_nodes import Ray

pytest.importorskip("mesh_launchers", reason="mesh-launchers is not installed here")

LIMIT = 60.0
pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(ray_nodes.missing() is not None, reason=str(ray_nodes.missing())),
]

BEGIN = """
import sys, time
from mesh_core import Actor, configure, endpoint, set_fault_handler
from mesh_launchers import *

class Where(Actor):
    @endpoint
    def where(self):
        import socket
        return socket.gethostname()

    @endpoint
    def environ(self, *names):
        import os
        return [os.environ.get(each) for each in names]

def where(hosts):
    return sorted(hosts.spawn_procs(per_host={"gpus": 1}).spawn("where", Where).where.call().get(timeout=60).values())

def say(*what):
    print(*what, sep=" | ", flush=True)

def wait_for(met):
    while not met():
        time.sleep(0.01)

def failed(job):
    return [(each.name, " ".join(each.why.split())) for each in job.state().hosts if each.phase is Phase.FAILED]

if __name__ == "__main__":
    configure(heartbeat_timeout=15)
    set_fault_handler(lambda failure: True)
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: Any) -> Iterator[Ray]:
    """A head and three nodes."""
    if reason := missing():
        pytest.skip(reason)
    with Network(4) as network, pytest.MonkeyPatch.context() as patch:
        # A node that is off is dead after two seconds, and not after fifteen.
        patch.setenv("RAY_health_check_initial_delay_ms", "1000")
        patch.setenv("RAY_health_check_period_ms", "1000")
        patch.setenv("RAY_health_check_timeout_ms", "5000")
        patch.setenv("RAY_health_check_failure_threshold", "2")
        # And a driver gives a head up after five, and not after sixty.
        patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "5")
        yield Ray(network, tmp_path_factory.mktemp("ray") / "cluster")


@pytest.fixture
def cluster(nodes: Ray) -> Iterator[Ray]:
    """The cluster, in which nothing of the test is left afterwards."""
    yield nodes
    nodes.end_scripts()
    nothing_is_left(nodes)


def run(cluster: Ray, text: str) -> Process:
    """Start a script that launches."""
    return cluster.script(BEGIN + "".join(f"    {line}\n" for line in text.splitlines()))


def named(cluster: Ray, *words: str) -> list[int]:
    """Return the processes, on all machines of the cluster, whose arguments end with these."""
    end = "\0".join(["", *words, ""]).encode()
    found = []
    for host in cluster.network.hosts:
        for pid in host.pids():
            with contextlib.suppress(OSError):  # it has ended since
                if Path(f"/proc/{pid}/cmdline").read_bytes().endswith(end):
                    found.append(pid)
    return found


def nothing_is_left(cluster: Ray) -> None:
    """No process, no key, no job's folder."""

    def left() -> list[Any]:
        found: list[Any] = [*files_of_jobs(cluster.folder / "jobs")]
        found += (cluster.folder / "run").glob("mesh-host-*")
        for host in cluster.network.hosts:
            for pid in host.pids():
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if b"mesh-host" in words or any(b"mesh_launchers" in each for each in words):
                    found.append(words)
        return found

    wait_until(lambda: not left(), lambda: f"left behind: {left()}", LIMIT)


def test_hosts_of_ray(cluster: Ray) -> None:
    """RAY-1, HST-1: launched, called, one killed and replaced, more of them and fewer, stopped twice."""
    script = run(
        cluster,
        """
with launch("ray", hosts=2, name="lab", runtime_env={"env_vars": {"COLOUR": "blue"}}) as job:
    there = where(job.hosts)
    say(len({*there}), *job.hosts.names, *sorted(job.hosts.labels[0].items()))
    actors = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("where", Where)
    say(actors.environ.call("COLOUR", "OMP_NUM_THREADS", "RAY_JOB_ID").get(timeout=60).values()[0])
    say("listens at" in job.logs()["lab-1"])
    from mesh_launchers._authority import authority
    keys = [path.read_text().splitlines()[1] for path in authority().credentials().rglob("host.key")]
    say(keys[0])
    input()
    wait_for(lambda: failed(job))
    say(*failed(job)[0])
    say(len({*where(job.scale(2))}), *job.hosts.names)
    say(*where(job.scale(3)))
    say(len(where(job.scale(1))))
    input()
    job.stop()
say("over")
""",
    )
    assert heard(script) == "2 | lab-0 | lab-1 | ('mesh', 'hosts')"
    assert heard(script) == "['blue', '1', None]"
    assert heard(script) == "True"
    key = heard(script)
    for host in cluster.network.hosts:
        found = host.run(
            ["sh", "-c", f"grep -rslF -- '{key}' /run/ray /proc/[0-9]*/cmdline /proc/[0-9]*/environ"],
            check=False,
        ).stdout.split()
        # That command's own.
        assert not [each for each in found if Path(each).exists() and "/run/ray" in each], host.name
    agent = max(named(cluster, "mesh-host", "lab-0"))
    os.kill(agent, signal.SIGKILL)
    assert script.stdin is not None
    script.stdin.write("\n")
    script.stdin.flush()
    assert heard(script).startswith("lab-0 | its agent was ended by signal 9 (SIGKILL)")
    assert heard(script) == "2 | lab-1 | lab-2"
    assert heard(script) == "host1 | host2 | host3"
    assert heard(script) == "1"
    table = "[(each['state'], len(each['bundles'])) for each in placement_group_table().values()]"
    assert cluster.ask(f"sorted(each for each in {table} if each[0] != 'REMOVED')") == "[('CREATED', 2)]"
    script.stdin.write("\n")
    script.stdin.flush()
    assert heard(script) == "over"
    ended(script)
    assert cluster.ask(f"[each for each in {table} if each[0] != 'REMOVED']") == "[]"


def test_a_job_outlives_its_first_certificates(cluster: Ray) -> None:
    """CRT-1, RAY-1."""
    script = run(
        cluster,
        OUTLIVES
        + """
with launch("ray", hosts=2, name="old") as job:
    job_outlives(job)
""",
    )
    assert heard(script) == "outlived | [1, 1, 1]"
    ended(script)


def test_passes_the_suite(cluster: Ray) -> None:
    suite = """
from mesh_core.plugins import PluginManager
from mesh_launchers import LAUNCHERS
from mesh_launchers.testing import LauncherConformance

class TestRay(LauncherConformance):
    plugin = PluginManager().get(LAUNCHERS, "ray")
    distribution = "mesh-launchers"
    limit = 120.0
"""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = cluster.script(suite, *words, name="test_suite.py")
    out, _ = tests.communicate(timeout=500)
    assert tests.returncode == 0, out


def test_what_cannot_come_fails_at_once_in_rays_words(cluster: Ray) -> None:
    """RAY-2."""
    script = run(
        cluster,
        """
meshes = {
    "many": {"hosts": 4},
    "gpus": {"hosts": 1, "gpus": 1},
    "pythons": {"hosts": 1, "python": "/nowhere/python"},
    "reds": {"hosts": 1, "labels": {"colour": "red"}},
}
with launch("ray", meshes=meshes) as job:
    wait_for(lambda: len(failed(job)) == 7)
    for mesh in meshes:
        say(next(" ".join(each.why.split()) for each in job.state().hosts if each.mesh == mesh))
try:
    launch("ray", hosts=1, address="10.77.0.1:9").wait(60)
except LaunchError as error:
    say(error)
try:
    launch("ray", hosts=1, cpu=1)
except TypeError as error:
    say(error)
try:
    launch("ray", hosts=1, address="ray://host0:10001")
except ValueError as error:
    say(error)
""",
    )
    said = heard(script)
    assert "Ray cannot place it, PENDING: NO_RESOURCES, asked for 4 x {CPU: 1}, STRICT_SPREAD" in said
    assert "10.77.0.2 {CPU: 1}" in said and "No autoscaler" in said
    said = heard(script)
    assert "INFEASIBLE, asked for 1 x {CPU: 1, GPU: 1}" in said
    assert "No such file or directory: '/nowhere/python'" in heard(script)
    assert "on nodes with {'colour': 'red'}" in heard(script)
    assert "no Ray cluster can be used at 10.77.0.1:9: ConnectionRefusedError" in heard(script)
    assert "did you mean 'cpus'?" in heard(script)
    assert "launch from a node of the cluster" in heard(script)
    ended(script)


def test_hosts_that_wait_say_why_and_come_when_there_is_room(cluster: Ray) -> None:
    """RAY-2; hosts of a job that is stopped while it waits leave no request behind."""
    script = run(
        cluster,
        """
first = launch("ray", hosts=3, name="first").wait(60)
second = launch("ray", hosts=1, name="second")
wait_for(lambda: "NO_RESOURCES" in str(second.state()))
say(second.state())
third = launch("ray", hosts=1, name="third", queue_timeout=0.5)
wait_for(lambda: failed(third))
say(failed(third)[0][1])
fourth = launch("ray", hosts=1, name="fourth", gpus=8, autoscaler=True)
wait_for(lambda: "waiting for the autoscaler" in str(fourth.state()))
fourth.stop()
try:
    launch("ray", hosts=1, name="second")
except JobExists as error:
    say(type(error).__name__)
first.stop()
say(len(where(second.hosts)))
second.stop()
third.stop()
""",
    )
    assert heard(script).startswith(
        "job second: 0 of 1 hosts run; second-0 waiting: PENDING: NO_RESOURCES, asked for 1 x {CPU: 1}"
    )
    assert " (queue_timeout) for Ray, PENDING: NO_RESOURCES" in heard(script)
    assert heard(script) == "JobExists"
    assert heard(script) == "1"
    ended(script)
    states = "{each['state'] for each in placement_group_table().values()}"
    assert cluster.ask(states) == "{'REMOVED'}"


def test_whatever_ends_hosts_end(cluster: Ray) -> None:
    """RAY-1: the keeper that is killed, a script that is interrupted while hosts start, an actor that Ray loses."""
    script = run(
        cluster,
        """
job = launch("ray", hosts=2, name="lab").wait(60)
say("run")
wait_for(lambda: failed(job))
say(*failed(job)[0])
input()
""",
    )
    assert heard(script) == "run"
    # The process of Ray's around the program.
    actor = int(
        Path(f"/proc/{min(named(cluster, 'mesh-host', 'lab-0'))}/stat")
        .read_text()
        .rpartition(") ")[2]
        .split()[1]
    )
    os.kill(actor, signal.SIGKILL)
    said = heard(script)
    assert said.startswith("lab-0 | The actor died"), said
    wait_until(lambda: not named(cluster, "mesh-host", "lab-0"), "a host has outlived its actor", LIMIT)
    assert named(cluster, "mesh-host", "lab-1")
    os.kill(keeper(cluster.folder / "jobs", "lab"), signal.SIGKILL)
    nothing_runs(cluster)
    script.kill()
    script.communicate()
    script = run(cluster, "launch('ray', hosts=3, name='soon')\nsay('begun')\ninput()")
    assert heard(script) == "begun"
    script.send_signal(signal.SIGINT)
    script.communicate(timeout=LIMIT)
    nothing_runs(cluster)


def nothing_runs(cluster: Ray) -> None:
    """No host, and no process that keeps one."""
    hosts = [("mesh-host", f"{job}-{number}") for job in ("lab", "soon") for number in range(3)]
    wait_until(lambda: not any(named(cluster, *each) for each in hosts), "hosts are there", LIMIT)
    drivers = [("mesh_launchers._ray_driver", job) for job in ("lab", "soon")]
    wait_until(lambda: not any(named(cluster, *each) for each in drivers), "drivers are there", LIMIT)
    # What a killed keeper has left is removed by whoever launches, or looks, next.
    script = run(cluster, "say(jobs())")
    assert heard(script) == "[]"
    ended(script)


def test_a_node_that_dies_and_a_cluster_that_goes_away(cluster: Ray) -> None:
    script = run(
        cluster,
        """
job = launch("ray", hosts=3, name="lab").wait(60)
say("run")
wait_for(lambda: failed(job))
say(*failed(job)[0])
say(job.scale(3).sizes)
wait_for(lambda: failed(job))
say(*failed(job)[0])
say(len(where(job.scale(2))))
wait_for(lambda: len(failed(job)) == 2)
say(*failed(job)[0])
job.stop()
""",
    )
    assert heard(script) == "run"
    cluster.network.hosts[2].power_off()
    said = heard(script)
    assert "node" in said and "died" in said, said
    assert heard(script) == "{'hosts': 3}"
    # Ray looks for another node in place of the dead one, and there is none.
    said = heard(script)
    assert said.startswith("lab-3 | Ray cannot place it, RESCHEDULING: "), said
    assert heard(script) == "2"
    cluster.network.hosts[0].run(["pkill", "-KILL", "-f", "gcs_server|raylet/raylet"], check=False)
    said = heard(script)
    assert "the process that talks with Ray has ended" in said, said
    ended(script)
