"""The launcher slurm on a real Slurm, of three nodes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import slurm
from cluster import Network, Process, files_of_jobs, wait_until
from launching import LIFE_S, OUTLIVES, ended, heard, keeper
from slurm import Slurm

pytest.importorskip("mesh_launchers", reason="mesh-launchers is not installed here")

pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.skipif(slurm.missing() is not None, reason=str(slurm.missing())),
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
    def environ(self, name):
        import os
        return os.environ.get(name)

def where(hosts):
    return sorted(hosts.spawn_procs(per_host={"gpus": 1}).spawn("where", Where).where.call().get(timeout=60).values())

def say(*what):
    print(*what, sep=" | ", flush=True)

def failed(job, why=""):
    # With `why`, once Slurm has said that, which may take longer than the mesh needs.
    found = []
    while not found:
        time.sleep(0.01)
        hosts = job.state().hosts
        found = [(each.name, each.why) for each in hosts if each.phase is Phase.FAILED and why in each.why]
    return found

if __name__ == "__main__":
    configure(heartbeat_timeout=5)
    set_fault_handler(lambda failure: True)
"""


@pytest.fixture
def cluster(network: Callable[[int], Network], tmp_path: Path) -> Slurm:
    """Three nodes."""
    return Slurm(network(4), tmp_path / "slurm")


def run(cluster: Slurm, text: str, *before: str) -> Process:
    """Start a script that launches."""
    options = f"python={sys.executable!r}"
    body = "".join(f"    {line}\n" for line in text.replace("OPTIONS", options).splitlines())
    return cluster.script(BEGIN + body, *before)


def nothing_is_left(cluster: Slurm) -> None:
    """No job in the queue, no process on a node, no file."""
    wait_until(lambda: not cluster.ask("squeue", "-h").strip(), "jobs are in the queue")
    wait_until(
        lambda: cluster.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split().count("idle") == 3,
        "nodes are not idle",
    )
    assert files_of_jobs(cluster.folder / "jobs") == []
    assert list((cluster.folder / "run").glob("mesh-host-*")) == []


def test_hosts_of_slurm(cluster: Slurm) -> None:
    """SLR-1."""
    script = run(
        cluster,
        """
with launch("slurm", hosts=2, name="lab", exclusive=True, OPTIONS) as job:
    say(*where(job.hosts))
    say(*job.hosts.names, *sorted(job.hosts.labels[0].items()))
    say("listens at" in job.logs()["lab-0"], job.logs()["lab-0"].startswith("$ srun --job-name=mesh-lab-0 "))
    say(*where(job.scale(3)))
    say(*where(job.scale(1)))
    input()
""",
    )
    assert heard(script) == "host1 | host2"
    assert heard(script) == "lab-0 | lab-1 | ('mesh', 'hosts')"
    assert heard(script) == "True | True"
    assert heard(script) == "host1 | host2 | host3"
    # A job of its own for those that came later.
    assert {"mesh-lab-0", "mesh-lab-1"} >= {*cluster.ask("squeue", "-h", "-o", "%j").split()}
    assert heard(script).startswith("host")
    ended(script)
    nothing_is_left(cluster)


@pytest.mark.timeout(150)
def test_a_job_outlives_its_first_certificates(cluster: Slurm) -> None:
    """CRT-1, SLR-1."""
    script = run(
        cluster,
        OUTLIVES
        + """
with launch("slurm", hosts=2, name="old", exclusive=True, OPTIONS) as job:
    job_outlives(job)
""",
    )
    assert heard(script) == "outlived | [1, 1, 1]"
    ended(script)
    nothing_is_left(cluster)


@pytest.mark.timeout(150)
def test_hosts_may_wait_for_longer_than_certificates_hold(cluster: Slurm) -> None:
    """CRT-1: what Slurm starts late has those of that time."""
    script = run(
        cluster,
        OUTLIVES
        + f"""
first = launch("slurm", hosts=3, name="first", exclusive=True, OPTIONS).wait(60)
second = launch("slurm", hosts=1, name="second", exclusive=True, OPTIONS)
while "PENDING" not in str(second.state()):
    time.sleep(0.01)
outlives(first.hosts, datetime.now(UTC) + timedelta(seconds=2 * {LIFE_S}))
first.stop()
say("came", second.wait(60).hosts.spawn_procs().spawn("late", Counter).count.call().get(timeout=60).values())
second.stop()
""",
    )
    assert heard(script) == "came | [1]"
    ended(script)
    nothing_is_left(cluster)


@pytest.mark.timeout(150)
def test_passes_the_suite(cluster: Slurm) -> None:
    suite = f"""
import pytest
from mesh_core.plugins import PluginManager
from mesh_launchers import LAUNCHERS
from mesh_launchers.testing import LauncherConformance

class TestSlurm(LauncherConformance):
    plugin = PluginManager().get(LAUNCHERS, "slurm")
    distribution = "mesh-launchers"
    options = {{"python": {sys.executable!r}}}
"""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    tests = cluster.script(suite, *words, name="test_suite.py")
    out, _ = tests.communicate(timeout=140)
    assert tests.returncode == 0, out
    nothing_is_left(cluster)


def test_in_an_allocation_its_nodes_are_the_hosts(cluster: Slurm) -> None:
    script = run(
        cluster,
        """
with launch("slurm", hosts=2, OPTIONS) as job:
    say(*where(job.hosts))
""",
        *("salloc", "-Q", "-N2", "--exclusive", sys.executable),
    )
    assert heard(script) == "host1 | host2"
    ended(script)
    nothing_is_left(cluster)


@pytest.mark.timeout(150)
def test_the_death_of_a_node_and_of_a_host(cluster: Slurm) -> None:
    script = run(
        cluster,
        """
with launch("slurm", hosts=3, name="lab", OPTIONS) as job:
    say(*where(job.hosts))
    say(*failed(job, "its node has left the job")[0])
    say(*where(job.scale(2)))
""",
    )
    assert heard(script) == "host1 | host2 | host3"
    cluster.network.hosts[2].power_off()
    assert heard(script).startswith("lab-1 | its node has left the job")
    while "host1 | host3" not in heard(script):
        pass
    ended(script)


def test_refusals_by_slurm_are_reported_in_its_words(cluster: Slurm) -> None:
    """SLR-2."""
    script = run(
        cluster,
        """
for options in ({"hosts": 1, "partition": "nix"}, {"hosts": 9}):
    with launch("slurm", OPTIONS, **options) as job:
        try:
            job.wait(60)
        except LaunchError as error:
            say(" ".join(str(error).split()))
with launch("slurm", hosts=1, python="/nowhere/python") as job:
    try:
        job.wait(60)
    except LaunchError as error:
        say(" ".join(str(error).split()))
""",
    )
    assert "Invalid partition name specified" in heard(script)
    assert "Slurm will not start it: PartitionNodeLimit" in heard(script)
    assert "/nowhere/python: No such file or directory" in heard(script)
    ended(script)
    nothing_is_left(cluster)


def test_hosts_that_wait_say_why_and_end_with_the_script(cluster: Slurm) -> None:
    """SLR-1, SLR-2."""
    script = run(
        cluster,
        """
first = launch("slurm", hosts=3, name="first", exclusive=True, OPTIONS).wait(60)
second = launch("slurm", hosts=1, name="second", exclusive=True, OPTIONS)
while "Resources" not in str(second.state()):
    pass
say(second.state())
third = launch("slurm", hosts=1, exclusive=True, queue_timeout=0.5, OPTIONS)
say(failed(third)[0][1].splitlines()[0])
input()
""",
    )
    assert heard(script) == "job second: 0 of 1 hosts run; second-0 waiting: PENDING: Resources"
    assert heard(script).startswith("it has waited 0.5 in Slurm's queue: PENDING: ")
    # One that waits in the queue does not look at its input.
    os.kill(keeper(cluster.folder / "jobs", "second"), signal.SIGKILL)
    wait_until(lambda: "mesh-second-0" not in cluster.ask("squeue", "-h", "-o", "%j"), "it is in the queue")
    assert "mesh-first-0" in cluster.ask("squeue", "-h", "-o", "%j")
    script.kill()
    script.communicate()
    wait_until(lambda: not cluster.ask("squeue", "-h").strip(), "jobs are in the queue")


@pytest.mark.timeout(150)
def test_ends_by_slurm_are_reported_in_its_words(cluster: Slurm) -> None:
    """Cancelled while it runs, and in the queue; and for another job."""
    script = run(
        cluster,
        """
first = launch("slurm", hosts=2, name="first", exclusive=True, OPTIONS).wait(60)
say("runs")
say(*failed(first, "Slurm says CANCELLED")[0])
first.stop()
first = launch("slurm", hosts=3, name="first", exclusive=True, OPTIONS).wait(60)
second = launch("slurm", hosts=1, name="second", exclusive=True, OPTIONS)
while "PENDING" not in str(second.state()):
    pass
say("waits")
say(*failed(second)[0])
with launch("slurm", hosts=3, name="third", exclusive=True, partition="urgent", OPTIONS) as third:
    say(*failed(first, "Slurm says PREEMPTED")[0])
    say(*where(third.hosts))
""",
    )
    assert heard(script) == "runs"
    cluster.ask("scancel", "-n", "mesh-first-0")
    line = heard(script)
    # Either of them may be the first to end.
    assert line.startswith(("first-0 | ", "first-1 | ")) and "; Slurm says CANCELLED" in line
    while (line := heard(script)) != "waits":
        pass
    cluster.ask("scancel", "-n", "mesh-second-0")
    line = heard(script)
    assert line.startswith("second-0 | srun has ended with status ") and "; Slurm says CANCELLED" in line
    while not (line := heard(script)).startswith("first-"):
        pass
    assert "; Slurm says PREEMPTED" in line
    while (line := heard(script)) != "host1 | host2 | host3":
        pass
    ended(script)
    nothing_is_left(cluster)


def test_failures_in_the_mesh_have_slurm_s_words(cluster: Slurm) -> None:
    """What dies with a job that is cancelled: for the owner, and for a call. Processes may end before their hosts do."""
    script = run(
        cluster,
        """
import queue
lost = queue.SimpleQueue()
set_fault_handler(lost.put)
with launch("slurm", hosts=2, name="first", exclusive=True, OPTIONS).wait(60) as job:
    actors = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("where", Where)
    actors.where.call().get(timeout=60)
    say("runs")
    for _ in range(2):
        failure = lost.get(timeout=60)
        say(failure.rank, failure.kind, failure.reason)
    for place in range(2):
        try:
            actors.slice(hosts=place).where.call().get(timeout=60)
        except Exception as error:
            say(type(error).__name__, *str(error).splitlines())
""",
    )
    assert heard(script) == "runs"
    cluster.ask("scancel", "-n", "mesh-first-0")
    reasons = [heard(script) for _ in range(2)]
    assert {line[0] for line in reasons} == {"0", "1"}
    errors = [heard(script) for _ in range(2)]
    for line in [*reasons, *errors]:
        # Alone, if the process was seen to be killed before its host was.
        assert re.search(r"(; |\| +)Slurm says (STEP|JOB) \S+ ON host\d CANCELLED AT ", line), line
    assert all(line.startswith("SupervisionError | ") for line in errors)
    ended(script)
    nothing_is_left(cluster)


def test_slurm_gives_notice_before_it_kills(cluster: Slurm) -> None:
    """HST-5: agents get SIGTERM, and know how long they have: KillWait less two seconds, unless something else is said."""
    script = run(
        cluster,
        """
for options in ({}, {"preemption_grace": 4}):
    with launch("slurm", hosts=1, name="lab", exclusive=True, OPTIONS, **options) as job:
        say(*job.hosts.spawn_procs().spawn("where", Where).environ.call("MESH_PREEMPTION_GRACE").get(timeout=60).values())
        failed(job)
        say("SIGTERM" in job.logs()["lab-0"])
""",
    )
    for grace in ("3", "4"):
        assert heard(script) == grace
        cluster.ask("scancel", "-n", "mesh-lab-0")
        assert heard(script) == "True"
    ended(script)
    nothing_is_left(cluster)


@pytest.mark.timeout(150)
def test_a_time_limit_is_reported_before_and_after(cluster: Slurm) -> None:
    """SLR-2."""
    script = run(
        cluster,
        """
with launch("slurm", hosts=1, name="lab", exclusive=True, time=1, OPTIONS) as job:
    job.wait(60)
    say("runs")
    while "at its time limit" not in str(job.state().hosts[0].why):
        time.sleep(0.01)
    say(job.state().hosts[0].why)
    say(*failed(job, "Slurm says TIMEOUT")[0])
""",
    )
    assert heard(script) == "runs"
    # Limits are minutes; an administrator may say when a job ends.
    [number] = cluster.ask("squeue", "-h", "-n", "mesh-lab-0", "-o", "%i").split()
    cluster.ask("scontrol", "update", f"jobid={number}", "EndTime=now+10seconds")
    line = heard(script)
    assert line.startswith("Slurm ends it in ") and line.endswith(" s, at its time limit"), line
    line = heard(script)
    assert "; Slurm says TIMEOUT" in line, line
    while "TIMEOUT" not in line:
        line = heard(script)
    ended(script)
    nothing_is_left(cluster)


@pytest.mark.timeout(300)
def test_a_requeued_job_starts_again_with_hosts_of_its_own(cluster: Slurm) -> None:
    """SLR-1: of a script in an allocation, nothing is left on the nodes before Slurm starts it anew."""
    said = cluster.folder / "said"
    said.touch()
    body = """
with launch("slurm", hosts=2, OPTIONS) as job:
    with open(os.environ["SAID"], "a") as file:
        print(os.environ.get("SLURM_RESTART_COUNT", "0"), *where(job.hosts), file=file)
    while os.environ.get("SLURM_RESTART_COUNT") != "1":
        time.sleep(1)
"""
    options = f"python={sys.executable!r}"
    text = "".join(f"    {line}\n" for line in body.replace("OPTIONS", options).splitlines())
    script = cluster.folder / "requeued.py"
    script.write_text("import os\n" + BEGIN + text)
    batch = cluster.folder / "batch.sh"
    batch.write_text(f"#!/bin/sh\nexec {sys.executable} {script}\n")
    runtime = cluster.folder / "run"
    runtime.mkdir(mode=0o700)
    variables = {"MESH_JOBS": cluster.folder / "jobs", "XDG_RUNTIME_DIR": runtime, "SAID": said}
    words = ["env", *(f"{name}={value}" for name, value in variables.items())]
    words += ["sbatch", "--parsable", "-N2", "--exclusive", "--requeue", "--open-mode=append"]
    number = cluster.ask(*words, f"--output={cluster.folder}/out", str(batch)).strip()

    def lines() -> list[str]:
        return said.read_text().splitlines()

    def about() -> str:
        out = cluster.folder / "out"
        return f"{lines()}, {cluster.ask('squeue')}, {out.read_text() if out.exists() else ''}"

    wait_until(lambda: len(lines()) == 1, lambda: f"it does not run: {about()}", 100)
    assert re.fullmatch(r"0 host\d host\d", lines()[0])
    cluster.ask("scontrol", "requeue", number)
    wait_until(
        lambda: cluster.ask("squeue", "-h", "-j", number, "-o", "%T").strip() == "PENDING",
        "it is not requeued",
    )
    wait_until(
        lambda: cluster.ask("sinfo", "-h", "-N", "-p", "main", "-o", "%T").split().count("idle") == 3,
        "nodes are not idle",
    )
    assert list(runtime.glob("mesh-host-*")) == []
    # By itself Slurm waits for two minutes.
    cluster.ask("scontrol", "update", f"jobid={number}", "StartTime=now")
    wait_until(lambda: len(lines()) == 2, lambda: f"it does not run again: {about()}", 100)
    assert re.fullmatch(r"1 host\d host\d", lines()[1])
    nothing_is_left(cluster)


def test_meshes_are_jobs_with_options_of_their_own(cluster: Slurm) -> None:
    script = run(
        cluster,
        """
meshes = {"trainers": {"hosts": 1, "nodelist": "host3", "exclusive": True}, "generators": {"hosts": 2, "cpus": 2}}
with launch("slurm", meshes=meshes, name="lab", OPTIONS) as job:
    say(*where(job.meshes["trainers"]))
    say(*where(job.meshes["generators"]))
    input()
""",
    )
    assert heard(script) == "host3"
    assert heard(script) == "host1 | host2"
    assert sorted(cluster.ask("squeue", "-h", "-o", "%j %N").splitlines()) == [
        "mesh-lab-0 host3",
        "mesh-lab-1 host[1-2]",
    ]
    ended(script)
    nothing_is_left(cluster)


def test_components_of_a_heterogeneous_job_are_meshes(cluster: Slurm) -> None:
    """Of one allocation, whose parts Slurm starts together."""
    script = run(
        cluster,
        """
meshes = {"trainers": {"hosts": 1, "het_group": 0}, "generators": {"hosts": 2, "het_group": 1}}
with launch("slurm", meshes=meshes, OPTIONS) as job:
    say(*where(job.meshes["trainers"]))
    say(*where(job.meshes["generators"]))
""",
        *("salloc", "-Q", "-N1", "--exclusive", ":", "-N2", "--exclusive", sys.executable),
    )
    assert heard(script) == "host1"
    assert heard(script) == "host2 | host3"
    ended(script)
    nothing_is_left(cluster)


def test_run_shows_what_it_submits(cluster: Slurm) -> None:
    words = [
        sys.executable,
        "-m",
        "mesh_core.cli",
        "run",
        "--launcher",
        "slurm",
        "--hosts",
        "2",
        "--name",
        "lab",
    ]
    options = ["--opt", f"python={sys.executable!r}", "--opt", "partition='main'"]
    text = """
from mesh_launchers import attach_job
print(attach_job().hosts.initialized.get(timeout=60))
"""
    for dry in (["--dry-run"], []):
        done = cluster.script(text, *words, *options, *dry)
        out, error = done.communicate(timeout=60)
        assert done.returncode == 0, error
        assert error.startswith("mesh: $ srun --job-name=mesh-lab-0 --nodes=2 --ntasks=2 ")
        assert " --partition=main " in error.splitlines()[0]
        assert out == ("" if dry else "None\n")
    nothing_is_left(cluster)


@pytest.mark.skipif(shutil.which("munged") is None, reason="there is no munged: apt install munge")
def test_where_slurm_authenticates_by_munge(network: Callable[[int], Network], tmp_path: Path) -> None:
    cluster = Slurm(network(3), tmp_path / "slurm", munge=True)
    script = run(
        cluster,
        """
with launch("slurm", hosts=2, exclusive=True, OPTIONS) as job:
    say(*where(job.hosts))
""",
    )
    assert heard(script) == "host1 | host2"
    ended(script)
    wait_until(lambda: not cluster.ask("squeue", "-h").strip(), "jobs are in the queue")
