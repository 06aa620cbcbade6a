"""Jobs of hosts on this machine: what they are made of, how they change, and how they end."""

from __future__ import annotations

import importlib
import io
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from greeter import Greeter, host_pids, kill_host
from launched import LIMIT, leftovers, until
from scripts import Script

from mesh_core import Credentials, SupervisionError, configure, shutdown
from mesh_core.extensions import Extension, install
from mesh_launchers import (
    Job,
    JobExists,
    JobNotFound,
    LaunchError,
    Phase,
    attach_job,
    jobs,
    launch,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("failures")]


def greeted(job: Job, mesh: str | None = None) -> list[str]:
    """Return what processes on all hosts say."""
    hosts = job.hosts if mesh is None else job.meshes[mesh]
    procs = hosts.spawn_procs(per_host={"gpus": 1})
    return list(procs.spawn("greeters", Greeter).greet.call("you").get(timeout=LIMIT).values())


def test_hosts_are_used_before_they_are_there() -> None:
    with launch("local", hosts=2, name="two", env={"COLOUR": "blue"}, resources={"gpus": 2}) as job:
        procs = job.hosts.spawn_procs(per_host={"gpus": 1})
        greeters = procs.spawn("greeters", Greeter)
        assert greeters.environ.call("COLOUR").get(timeout=LIMIT).values() == ["blue", "blue"]
        assert job.hosts.sizes == {"hosts": 2}
        assert job.hosts.names == ["two-0", "two-1"]
        assert job.hosts.labels == [{"mesh": "hosts"}] * 2
        assert [each["gpus"] for each in job.hosts.resources] == [2, 2]
        state = job.wait(timeout=LIMIT).state()
        assert [each.phase for each in state.hosts] == [Phase.RUNNING] * 2
        assert (state.launcher, state.used_by, state.keep) == ("local", os.getpid(), None)
        assert [each.name for each in jobs()] == ["two"]
        # To look is to change nothing.
        assert len(job.scale(3).spawn_procs(per_host={"gpus": 1}).pids) == 3
        assert len(job.scale(2)) == 2
        assert all("listens at" in each for each in job.logs().values())
        assert len(job.logs(lines=1)["two-1"].splitlines()) == 1
        assert repr(job) == "<job two: 2 of 2 hosts run>"
    assert jobs() == []
    job.stop()
    with pytest.raises(JobNotFound, match="two"):
        job.state()
    with pytest.raises(JobNotFound, match="no job 'two' runs here"):
        attach_job("two")


def test_a_name_is_used_once(jobs_folder: Path) -> None:
    """FLD-1, KPR-2."""
    with launch("local", hosts=1, name="one"):
        with pytest.raises(JobExists, match=r"attach_job\('one'\) has it, `mesh stop one` ends it"):
            launch("local", hosts=1, name="one")
        with pytest.raises(JobExists, match=f"used by process {os.getpid()}"):
            attach_job("one")
    with launch("local", hosts=1, name="one") as job:
        assert greeted(job) == ["hello you"]


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"hosts": 1, "pyton": "x"}, TypeError, "'local' has no option 'pyton'; did you mean 'python'"),
        ({"hosts": 1, "zzz": "x"}, TypeError, "has no option 'zzz'; it has python, env, resources"),
        ({}, ValueError, "either hosts= or meshes="),
        ({"hosts": 0}, ValueError, "wants how many, such as 2, got 0"),
        ({"hosts": True}, ValueError, "wants how many"),
        ({"hosts": ["b1"]}, ValueError, "wants how many"),
        ({"hosts": 1, "spares": -1}, ValueError, "spares: the launcher 'local' wants how many"),
        ({"hosts": 1, "name": "no/name"}, ValueError, "a job's name has up to 64"),
        ({"hosts": 1, "keep": "long"}, ValueError, "keep must be a number of seconds"),
        ({"meshes": {"spares": 1}}, ValueError, "none of them 'spares'"),
        ({"meshes": {}}, ValueError, "one or more meshes"),
    ],
)
def test_impossible_arguments_are_errors_at_once(
    given: dict[str, Any], error: type[Exception], match: str, jobs_folder: Path
) -> None:
    with pytest.raises(error, match=match):
        launch("local", **given)
    assert leftovers(jobs_folder) == []


def test_several_meshes_and_spares() -> None:
    meshes = {"trainers": 1, "generators": {"hosts": 2, "env": {"ROLE": "generator"}}}
    with launch("local", meshes=meshes, spares=1, env={"ROLE": "none"}) as job:
        assert {name: mesh.sizes for name, mesh in job.meshes.items()} == {
            "trainers": {"hosts": 1},
            "generators": {"hosts": 2},
            "spares": {"hosts": 1},
        }
        procs = job.meshes["generators"].spawn_procs(per_host={"gpus": 1})
        roles = procs.spawn("greeters", Greeter).environ.call("ROLE").get(timeout=LIMIT)
        assert roles.values() == ["generator"] * 2
        with pytest.raises(LaunchError, match="has 2 meshes of hosts, 'trainers', 'generators'"):
            _ = job.hosts
        # A dead host's processes come back on the spare.
        assert job.spares is not None
        kill_host(job.state().hosts[1].name)
        until(procs.failed, "the death of a host is known")
        procs.respawn(on=job.spares).get(timeout=LIMIT)
        assert len(procs.spawn("more", Greeter).greet.call("x").get(timeout=LIMIT)) == 2


def test_a_hosts_death_is_reported_with_its_output() -> None:
    with launch("local", hosts=2) as job:
        procs = job.hosts.spawn_procs(per_host={"gpus": 1})
        greeters = procs.spawn("greeters", Greeter)
        greeters.greet.call("x").get(timeout=LIMIT)
        name = job.state().hosts[0].name
        kill_host(name)
        until(procs.failed, "the death of a host is known")
        with pytest.raises(SupervisionError):
            greeters.greet.call("x").get(timeout=LIMIT)
        until(lambda: job.state().hosts[0].phase is Phase.FAILED, "the host's end is told")
        why = job.state().hosts[0].why
        assert "its agent was ended by signal 9 (SIGKILL)" in why
        assert "listens at" in why
        with pytest.raises(LaunchError, match=f"host {name} of job .* signal 9"):
            job.wait()
        # Another takes its place.
        assert len(job.scale(2)) == 2
        assert greeted(job) == ["hello you"] * 2


def test_hosts_that_do_not_come_say_why() -> None:
    with launch("local", hosts=2, python="/nowhere/python") as job:
        with pytest.raises(LaunchError, match="/nowhere/python") as caught:
            job.wait(timeout=LIMIT)
        assert caught.value.host in (0, 1)
        procs = job.hosts.spawn_procs(per_host={"gpus": 1})
        with pytest.raises(Exception, match="/nowhere/python"):
            procs.spawn("greeters", Greeter).greet.call("x").get(timeout=LIMIT)


def test_more_and_fewer_hosts(failures: list[Any]) -> None:
    with launch("local", hosts=2) as job:
        assert greeted(job) == ["hello you"] * 2
        assert job.scale(4).sizes == {"hosts": 4}
        assert greeted(job) == ["hello you"] * 4
        names = job.hosts.names
        assert job.scale(1).sizes == {"hosts": 1}
        assert job.hosts.names == names[:1]
        assert all(host_pids(each) == [] for each in names[1:])
        assert greeted(job) == ["hello you"]
        assert job.scale(2).sizes == {"hosts": 2}
        assert greeted(job) == ["hello you"] * 2
        with pytest.raises(ValueError, match=r"hosts must be at least 1"):
            job.scale(0)
        with pytest.raises(LaunchError, match="has no mesh 'nix'"):
            job.scale(3, mesh="nix")
    assert failures == []


def test_two_jobs_of_one_script() -> None:
    """AUT-1."""
    with launch("local", hosts=1) as first, launch("local", hosts=1) as second:
        both = first.hosts.join(second.hosts)
        assert len(both.spawn_procs(per_host={"gpus": 1})) == 2
        assert greeted(first) + greeted(second) == ["hello you"] * 2
    with launch("local", hosts=1) as third:
        assert greeted(third) == ["hello you"]


def test_credentials_of_the_users_own(tmp_path: Path) -> None:
    credentials = Credentials.new(tmp_path / "train")
    with launch("local", hosts=1, credentials=credentials.path) as job:
        assert greeted(job) == ["hello you"]
    assert credentials.host_path.is_dir()


KEPT = """
    job = launch("local", hosts=2, name="kept", keep="60s").wait(60)
    job.hosts.initialized.get(timeout=60)
    print(*[each.address for each in job.state().hosts], flush=True)
    input()
"""


@pytest.mark.parametrize("how", ["ends", "detaches", "is killed"])
def test_a_job_that_is_kept_is_found_again(tmp_path: Path, how: str) -> None:
    script = Script(tmp_path, KEPT + ("    job.detach()\n" if how == "detaches" else ""))
    addresses = script.heard().split()
    with pytest.raises(JobExists, match=f"used by process {script.process.pid}"):
        attach_job("kept")
    if how == "is killed":
        script.kill()
    else:
        script.go()
        assert script.end() == (0, "", "")
    until(lambda: jobs()[0].used_by is None, "the script's end is known")
    (state,) = jobs()
    assert state.left is not None and 30 < state.left <= 60
    if how == "ends":
        kill_host("kept-1")
        until(lambda: jobs()[0].hosts[1].phase is Phase.FAILED, "the host's end is told")
        with attach_job("kept") as job:
            # What was lost before is none of this script's.
            assert job.wait(timeout=LIMIT).hosts.sizes == {"hosts": 1}
            assert greeted(job) == ["hello you"]
        return
    with attach_job("kept") as job:
        assert [each.address for each in job.state().hosts] == addresses
        assert greeted(job) == ["hello you"] * 2
        assert job.scale(3).sizes == {"hosts": 3}


@pytest.mark.parametrize("how", ["ends", "is killed", "is killed with a child"])
def test_a_job_that_is_not_kept_ends_with_its_script(tmp_path: Path, jobs_folder: Path, how: str) -> None:
    """KPR-1, KPR-3, AUT-1."""
    script = Script(
        tmp_path,
        """
        import os, time
        job = launch("local", hosts=2).wait(60)
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
        print(child, flush=True)
        input()
        os.kill(child, 9)
        os.waitpid(child, 0)
        """,
    )
    child = int(script.heard())
    assert leftovers(jobs_folder)
    if how == "ends":
        script.go()
        assert script.end()[0] == 0
    else:
        os.kill(script.process.pid, signal.SIGKILL)
        if how == "is killed":
            os.kill(child, signal.SIGKILL)
    until(lambda: not leftovers(jobs_folder), "the job ends")
    if how == "is killed with a child":
        os.kill(child, signal.SIGKILL)
    script.process.communicate()


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("seed", range(6))
def test_a_script_that_is_killed_at_any_moment(tmp_path: Path, jobs_folder: Path, seed: int) -> None:
    """KPR-1, KPR-3, HST-2."""
    script = Script(
        tmp_path,
        """
        print("begins", flush=True)
        launch("local", hosts=2).wait(60)
        print("runs", flush=True)
        input()
        """,
    )
    script.heard()
    try:
        script.process.wait(timeout=random.Random(seed).random() * 0.6)
    except subprocess.TimeoutExpired:
        script.kill()
    # What is there without a process goes when somebody looks.
    until(lambda: not jobs() and not leftovers(jobs_folder), "the job ends")


def test_a_job_expires(tmp_path: Path, jobs_folder: Path) -> None:
    script = Script(tmp_path, KEPT.replace("60s", "0.2s"))
    script.heard()
    script.go()
    assert script.end()[0] == 0
    until(lambda: not leftovers(jobs_folder), "the job ends")
    with pytest.raises(JobNotFound):
        attach_job("kept")


def test_a_job_that_is_not_kept_cannot_be_detached() -> None:
    with launch("local", hosts=1) as job, pytest.raises(LaunchError, match=r"launch\(keep='8h'\)"):
        job.wait(timeout=LIMIT).detach()


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_death_of_the_keeper_ends_the_hosts(jobs_folder: Path, number: int) -> None:
    """KPR-1, HST-2, FLD-1."""
    job = launch("local", hosts=2, name=f"orphan-{number}").wait(timeout=LIMIT)
    keeper = _keeper(jobs_folder / job.name)
    pids = [pid for each in job.state().hosts for pid in host_pids(each.name)]
    assert len(pids) == 2
    os.kill(keeper, number)
    until(lambda: not any(Path(f"/proc/{each}/exe").exists() for each in pids), "the hosts end")
    until(lambda: "has ended" in repr(job), "the job's end is known")
    with pytest.raises(JobNotFound, match=f"'{job.name}' has ended"):
        job.state()
    job.stop()
    # What it has left is in nobody's way.
    with launch("local", hosts=1, name=job.name) as job:
        job.wait(timeout=LIMIT)


def _keeper(folder: Path) -> int:
    found = subprocess.run(["pgrep", "-f", f"_keeper {folder}"], capture_output=True, text=True, check=True)
    return int(found.stdout.split()[0])


def test_ctrl_c_while_hosts_start(tmp_path: Path, jobs_folder: Path) -> None:
    script = Script(
        tmp_path,
        """
        import sys
        with launch("local", hosts=2, python=sys.argv[0]) as job:
            print("starts", flush=True)
            job.wait(60)
        """.replace("sys.argv[0]", repr(str(_sleeper(tmp_path)))),
    )
    assert script.heard() == "starts"
    os.kill(script.process.pid, signal.SIGINT)
    status, _, error = script.end()
    assert status != 0
    assert "KeyboardInterrupt" in error
    until(lambda: not leftovers(jobs_folder), "the job ends")


def _sleeper(folder: Path) -> Path:
    """Return an interpreter that never comes up."""
    path = folder / "sleeper"
    path.write_text("#!/bin/sh\nexec sleep 600\n")
    path.chmod(0o755)
    return path


def test_progress_is_shown_if_hosts_take_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What a thread writes while pytest's own captures are read may get lost.
    told = io.StringIO()
    monkeypatch.setattr(sys, "stderr", told)
    with launch("local", hosts=2, python=str(_sleeper(tmp_path)), name="slow", progress=True) as job:
        until(
            lambda: "job slow: 0 of 2 hosts run; slow-0, slow-1 starting" in told.getvalue(),
            "progress is told",
        )
        assert job.state().hosts[0].phase is Phase.STARTING


def test_packages_that_differ_are_named_by_host(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The hosts run with one more package than the script, and one of another version."""
    (tmp_path / "site" / "pluggy-0.1.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "pluggy-0.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: pluggy\nVersion: 0.1\n"
    )
    with launch("local", hosts=1, env={"PYTHONPATH": str(tmp_path / "site")}) as job:
        (host,) = job.wait(timeout=LIMIT).state().hosts
    assert len(host.differs) == 1
    assert host.differs[0].startswith("pluggy 0.1, and ")
    assert f"host {host.name} of job {job.name} is not like the script: pluggy 0.1" in caplog.text


def test_code_of_the_scripts_own_that_differs_is_named_by_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for side, text in {"here": "A = 1", "there": "A = 2"}.items():
        for name in ("mine", "alike"):
            (tmp_path / side / name).mkdir(parents=True)
            (tmp_path / side / name / "__init__.py").write_text(text if name == "mine" else "")
    monkeypatch.syspath_prepend(tmp_path / "here")
    for name in ("mine", "alike"):
        importlib.import_module(name)
    path = f"{tmp_path / 'there'}:{tmp_path / 'here'}"
    with launch("local", hosts=1, env={"PYTHONPATH": path}) as job:
        (host,) = job.wait(timeout=LIMIT).state().hosts
    for name in ("mine", "alike"):
        del sys.modules[name]
    assert host.differs == (
        f"mine has other source files in {tmp_path}/there/mine (hosts.sync_workspace() brings those of the script)",
    )


def test_a_host_with_another_python_is_refused() -> None:
    other = next(
        (each for each in ("3.12", "3.13", "3.11") if each != f"3.{sys.version_info[1]}" and _has(each)), None
    )
    if other is None:
        pytest.skip("there is no other Python here")
    with launch("local", hosts=1, python=f"python{other}") as job, pytest.raises(LaunchError) as caught:
        job.wait(timeout=LIMIT)
    assert "has no mesh-core" in str(caught.value) or f"it has Python {other}" in str(caught.value)


def _has(version: str) -> bool:
    done = (
        subprocess.run([f"python{version}", "-c", ""], capture_output=True, check=False)
        if _which(version)
        else None
    )
    return done is not None and done.returncode == 0


def _which(version: str) -> bool:
    import shutil

    return shutil.which(f"python{version}") is not None


class Looks(Extension):
    """One that stops after that of the credentials."""

    name = "looks"

    def start(self) -> None:
        self.found = 0

    def stop(self) -> None:
        self.found = len(list(Path(os.environ["MESH_JOBS"]).glob(".keys/*/credentials/crl.pem")))


def test_credentials_are_there_until_the_runtime_is_closed(jobs_folder: Path) -> None:
    """AUT-1: it looks at them every second, and would warn that they have gone."""
    looks = install(Looks)
    with launch("local", hosts=1) as job:
        job.wait(timeout=LIMIT)
    shutdown()
    assert looks.found == 1
    assert list(jobs_folder.glob(".keys/*")) == []


def test_what_was_to_run_on_hosts_that_have_not_come_is_no_failure(failures: list[Any]) -> None:
    """The script ends first."""
    with launch("local", hosts=2) as job:
        job.hosts.spawn_procs()
    assert failures == []


@pytest.mark.parametrize("keep", [None, "60s"])
def test_the_job_and_its_mesh_agree_on_a_host_that_is_silent(keep: str | None) -> None:
    """Its process is there, and the launcher knows nothing: only the mesh has found out, and says why."""
    before = configure().heartbeat_timeout
    configure(heartbeat_timeout=1)
    try:
        # A kept job waits for its hosts if all of them are silent.
        with launch("local", hosts=2, name="two", keep=keep) as job:
            procs = job.wait(timeout=LIMIT).hosts.spawn_procs()
            procs.spawn("greeters", Greeter).greet.call("you").get(timeout=LIMIT)
            stopped = host_pids("two-1")
            for each in stopped:
                os.kill(each, signal.SIGSTOP)
            try:
                until(procs.failed, "the mesh knows")
                until(lambda: job.state().hosts[1].phase is Phase.FAILED, "the job knows")
                assert job.state().hosts[1].why == "nothing was heard of it for 1 s"
                assert [each.phase for each in jobs()[0].hosts] == [Phase.RUNNING, Phase.FAILED]
            finally:
                for each in stopped:
                    os.kill(each, signal.SIGCONT)
    finally:
        configure(heartbeat_timeout=before)


def test_the_log_of_a_host_that_was_let_go_does_not_call_it_dead(jobs_folder: Path) -> None:
    with launch("local", hosts=2, name="two") as job:
        assert greeted(job) == ["hello you"] * 2
        job.scale(1)
        log = (jobs_folder / "two" / "launcher" / "1.log").read_text()
        assert "was let go" in log and "dead" not in log


def test_a_forked_child_that_leaves_the_block_does_not_end_the_job(tmp_path: Path) -> None:
    code = """
import os, sys
from mesh_launchers import launch

with launch("local", hosts=1, name="forked") as job:
    job.wait(timeout=60)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        sys.exit(6)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    print(len(job.hosts.spawn_procs(per_host={"gpus": 1}).pids), job.state().hosts[0].phase.value)
"""
    (tmp_path / "script.py").write_text(code)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.stdout.split() == ["6", "1", "running"], done.stderr
    assert done.returncode == 0
