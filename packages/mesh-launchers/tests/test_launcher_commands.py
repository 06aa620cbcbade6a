"""The commands of mesh for jobs of hosts, as a user runs them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launched import LIMIT, until
from scripts import Script
from test_jobs import KEPT

from mesh_core.plugins import COMMANDS, PluginManager
from mesh_core.testing import CommandPluginConformance
from mesh_launchers import LaunchError, attach_job, jobs, launch

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from mesh_launchers import attach_job
from greeter import Greeter

if __name__ == "__main__":
    job = attach_job()
    greeters = job.hosts.spawn_procs(per_host={"gpus": 1}).spawn("greeters", Greeter)
    print(*greeters.greet.call(sys.argv[1]).get(timeout=60).values(), sep=", ", flush=True)
    if sys.argv[2:] == ["wait"]:
        sys.stdin.read()
    sys.exit(3)
"""


def mesh(*arguments: str, at: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    return subprocess.run(
        [sys.executable, "-m", "mesh_core.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=at,
        check=False,
    )


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script that says hello on all hosts."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    (tmp_path / "hello.py").write_text(SCRIPT)
    return str(tmp_path / "hello.py")


def test_run_gives_a_script_its_hosts_and_ends_them(script: str) -> None:
    done = mesh("run", "--hosts", "2", script, "you")
    assert (done.returncode, done.stdout, done.stderr) == (3, "hello you, hello you\n", "")
    assert jobs() == []


def test_run_takes_targets(script: str, tmp_path: Path) -> None:
    (tmp_path / "mesh.toml").write_text('[targets.pair]\nlauncher = "local"\nhosts = 2\n')
    (tmp_path / "below").mkdir()
    done = mesh("run", "--target", "pair", script, "x", at=tmp_path / "below")
    assert (done.returncode, done.stdout) == (3, "hello x, hello x\n"), done.stderr
    done = mesh("run", "--target", "pair", "--hosts", "1", script, "x", at=tmp_path)
    assert (done.returncode, done.stdout) == (3, "hello x\n"), done.stderr
    done = mesh("run", "--target", "par", script, "x", at=tmp_path)
    assert done.returncode != 0
    assert done.stderr == f"mesh: {tmp_path}/mesh.toml has no target 'par'; it has pair\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--opt", "pyton=x"], "the launcher 'local' has no option 'pyton'; did you mean 'python'?"),
        (["--hosts", "b1,b2"], "the launcher 'local' wants how many"),
        (["--opt", "python"], "--opt python: write NAME=VALUE"),
    ],
)
def test_run_says_what_is_wrong(script: str, arguments: list[str], says: str) -> None:
    hosts = [] if "--hosts" in arguments else ["--hosts", "1"]
    done = mesh("run", *hosts, *arguments, script)
    assert done.returncode != 0
    assert done.stderr.startswith("mesh: ") and says in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_run_that_is_ended_leaves_nothing(script: str, number: int) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "mesh_core.cli", "run", "--hosts", "1", script, "you", "wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None and run.stdin is not None
    assert run.stdout.readline() == "hello you\n"
    os.kill(run.pid, number)
    status = run.wait(timeout=LIMIT)
    # A script whose starter was killed goes on, and has its hosts until it ends.
    assert status == (-number if number == signal.SIGKILL else 128 + number)
    run.stdin.close()
    run.stdout.close()
    until(lambda: jobs() == [], "the job ends")


@pytest.mark.full
def test_jobs_logs_scale_and_stop(tmp_path: Path) -> None:
    assert mesh("jobs").stdout == "no jobs\n"
    script = Script(tmp_path, KEPT)
    script.heard()
    row = mesh("jobs").stdout.splitlines()[1].split()
    assert row[:7] == ["kept", "local", "2", "of", "2", "pid", str(script.process.pid)]
    refused = mesh("scale", "kept", "3")
    assert f"used by process {script.process.pid}" in refused.stderr and refused.returncode != 0
    script.go()
    assert script.end()[0] == 0
    until(lambda: jobs()[0].used_by is None, "the script's end is known")
    assert "nobody, " in mesh("jobs").stdout
    assert mesh("scale", "kept", "3").returncode == 0
    until(lambda: sum(each.address is not None for each in jobs()[0].hosts) == 3, "a third host runs")
    (told,) = json.loads(mesh("jobs", "--json").stdout)
    assert [each["phase"] for each in told["hosts"]] == ["running"] * 3
    assert mesh("scale", "kept", "1").returncode == 0
    shown = mesh("jobs", "kept").stdout.splitlines()
    assert len(shown) == 3 and shown[1].split()[:3] == ["kept-0", "hosts", "running"]
    log = mesh("logs", "kept", "--host", "kept-0")
    assert "[kept-0] " in log.stdout and "listens at" in log.stdout
    assert "has no host 'nix'" in mesh("logs", "kept", "--host", "nix").stderr
    follow = subprocess.Popen(
        [sys.executable, "-m", "mesh_core.cli", "logs", "-f", "kept"], stdout=subprocess.PIPE, text=True
    )
    assert follow.stdout is not None
    assert "listens at" in follow.stdout.readline()
    assert mesh("stop", "kept").returncode == 0
    follow.communicate(timeout=LIMIT)
    assert follow.returncode == 0
    assert mesh("jobs").stdout == "no jobs\n"
    gone = mesh("stop", "kept")
    assert gone.returncode != 0 and "no job 'kept' runs here" in gone.stderr


@pytest.mark.full
def test_exec_runs_a_command_on_all_hosts(tmp_path: Path) -> None:
    script = Script(tmp_path, KEPT)
    script.heard()
    script.go()
    script.end()
    until(lambda: jobs()[0].used_by is None, "the script's end is known")
    done = mesh("exec", "kept", "--", "sh", "-c", "echo out; echo err >&2; exit 3")
    assert done.returncode == 3, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[exec hosts=0 on kept-0] out",
        "[exec hosts=1 on kept-1] out",
    ]
    assert sorted(done.stderr.splitlines()) == [
        "[exec hosts=0 on kept-0] err",
        "[exec hosts=1 on kept-1] err",
    ]
    one = mesh("exec", "--on", "1", "kept", "--", "sh", "-c", "echo $PPID; kill -9 $$")
    assert one.returncode == 137
    assert len(one.stdout.splitlines()) == 1
    assert mesh("exec", "kept", "--", "/nowhere/program").returncode == 127
    assert "there are 2" in mesh("exec", "--on", "1:3", "kept", "--", "true").stderr
    assert "has no mesh 'nix'; it has hosts" in mesh("exec", "--mesh", "nix", "kept", "--", "true").stderr
    assert "mesh exec kept -- COMMAND" in mesh("exec", "kept").stderr
    assert mesh("stop", "kept").returncode == 0


def test_a_job_is_scaled_by_another_terminal_and_taken(tmp_path: Path) -> None:
    script = Script(tmp_path, KEPT)
    script.heard()
    script.go()
    script.end()
    until(lambda: jobs()[0].used_by is None, "the script's end is known")
    assert mesh("scale", "kept", "3").returncode == 0
    with attach_job("kept") as job:
        assert job.hosts.sizes == {"hosts": 3}


class TestJobs(CommandPluginConformance):
    plugin = PluginManager().get(COMMANDS, "jobs")
    distribution = "mesh-launchers"


class TestExec(CommandPluginConformance):
    plugin = PluginManager().get(COMMANDS, "exec")
    distribution = "mesh-launchers"


class TestRun(CommandPluginConformance):
    plugin = PluginManager().get(COMMANDS, "run")
    distribution = "mesh-launchers"


class TestScale(CommandPluginConformance):
    plugin = PluginManager().get(COMMANDS, "scale")
    distribution = "mesh-launchers"


class TestStop(CommandPluginConformance):
    plugin = PluginManager().get(COMMANDS, "stop")
    distribution = "mesh-launchers"


class TestLogs(CommandPluginConformance):
    plugin = PluginManager().get(COMMANDS, "logs")
    distribution = "mesh-launchers"


def test_what_other_machines_say_does_not_control_terminals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ssh passes on what servers and shells write."""
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nprintf 'ssh: \\033]0;mine\\007 is down\\n' >&2\nexit 255\n")
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with launch("ssh", hosts=["b1"], name="lab") as job:
        with pytest.raises(LaunchError, match=r"mine"):
            job.wait(timeout=LIMIT)
        why = job.state().hosts[0].why
        assert r"\x1b]0;mine\x07 is down" in why
        shown = mesh("jobs", "lab")
    assert "mine" in shown.stdout
    assert "\x1b" not in shown.stdout
