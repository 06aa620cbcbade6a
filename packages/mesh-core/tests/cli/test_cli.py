"""The `mesh` command, mostly run as a user does, in its own process."""

import json
import os
import re
import resource
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from pathlib import Path

import pytest

from mesh_core.cli import _exit, main
from mesh_core.cli._summaries import SUMMARIES
from mesh_core.cli.checks import _interpreter, _kernel, _limits
from mesh_core.plugins import COMMANDS, PluginManager

pytestmark = pytest.mark.versions


def mesh(*arguments, site=None, status=0, interpreter=(sys.executable, "-m", "mesh_core.cli")):
    """Run `mesh` and return what it printed to stdout and stderr."""
    path = os.pathsep.join(filter(None, [str(site.path) if site else "", os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [*interpreter, *arguments],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout, done.stderr


def test_version_shows_mesh_packages_and_python_and_imports_no_plugin(site):
    site.command("talk", distribution="talker", version="4.5")
    out, _ = mesh("--version", site=site)
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert next(iter(rows)) == "mesh-core"
    assert rows["mesh-core"] == version("mesh-core")
    assert rows["talker"] == "4.5"
    assert rows["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert not list(site.path.glob("*.imported"))


def test_version_shows_only_packages_that_require_mesh_core(site):
    for name, needs in {
        "mesh-kin": "mesh-core>=0.1",
        "mesh-stranger": "numpy",
        "mesh-near": "mesh-core-tools",
    }.items():
        site.distribution(name, "")
        (site.path / f"{name.replace('-', '_')}-1.0.dist-info/METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: {needs}\n"
        )
    out, _ = mesh("--version", site=site)
    assert "mesh-kin" in out
    assert "mesh-stranger" not in out
    assert "mesh-near" not in out


def test_installed_script_is_the_same_program():
    script = Path(sysconfig.get_path("scripts"), "mesh")
    assert mesh("--version", interpreter=[script]) == mesh("--version")
    assert mesh("--version", interpreter=[sys.executable, "-m", "mesh_core"]) == mesh("--version")


def test_summaries_in_the_help_match_the_commands():
    manager = PluginManager()
    own = [each.name for each in manager.entries(COMMANDS) if each.distribution == "mesh-core"]
    assert {name: manager.get(COMMANDS, name).summary for name in own} == dict(SUMMARIES)


def test_help_lists_the_commands_and_imports_none(site):
    site.command("talk", distribution="talker")
    out, _ = mesh("--help", site=site)
    assert re.search(r"^  doctor +check that this machine is ready for Mesh$", out, re.MULTILINE)
    assert re.search(r"^  talk +from talker$", out, re.MULTILINE)
    with next(site.path.glob("talker-*.dist-info")).joinpath("METADATA").open("a") as metadata:
        metadata.write("Summary: talks\n")
    assert re.search(r"^  talk +talks \(from talker\)$", mesh("--help", site=site)[0], re.MULTILINE)
    assert not list(site.path.glob("*.imported"))


def test_missing_command_is_a_usage_error():
    out, err = mesh(status=2)
    assert not out
    assert err.startswith("usage: mesh")
    assert "plugins" in err


def test_unknown_option_is_a_usage_error():
    assert "--verion" in mesh("--verion", status=2)[1]


def test_unknown_command_suggests_the_nearest(site):
    site.command("talk", distribution="talker")
    _, err = mesh("tlak", site=site, status=2)
    assert err.startswith("mesh: no command is called 'tlak'; did you mean 'talk'?")
    assert len(err.splitlines()) == 1
    assert not list(site.path.glob("*.imported"))


def test_plugin_command_is_a_subcommand_and_the_only_one_imported(site):
    talk = site.command("talk", distribution="talker")
    site.command("sing", distribution="singer")
    assert mesh("talk", "--text", "good day", site=site)[0] == "talk says good day\n"
    assert [each.stem for each in site.path.glob("*.imported")] == [talk]
    out, _ = mesh("talk", "--help", site=site)
    assert out.startswith("usage: mesh talk")
    assert "what to say" in out
    mesh("talk", "--tex", "abbreviated", site=site, status=2)


FAULTS = {
    "missing module": ("import no_such_module_at_all\n", 3, "No module named 'no_such_module_at_all'"),
    "raises in the hook": (
        "@hookimpl\ndef mesh_register_commands(): raise OSError('no disk')\n",
        3,
        "no disk",
    ),
    "wrong type": (
        "@hookimpl\ndef mesh_register_commands(): yield 'bad'\n",
        3,
        "yields CommandPlugins; got str 'bad'",
    ),
    "too new": (
        "@hookimpl\ndef mesh_register_commands(): yield CommandPlugin(name='bad', api_version=99, create=dict)\n",
        3,
        "upgrade mesh-core",
    ),
    "cannot work here": (
        (
            "@hookimpl\ndef mesh_register_commands():\n"
            "    yield CommandPlugin(name='bad', api_version=1, create=dict, probe=lambda: ProbeResult.no('no screen', remedy='use ssh -X'))\n"
        ),
        3,
        "command 'bad' cannot work here: no screen; use ssh -X",
    ),
}


@pytest.mark.parametrize(("source", "status", "said"), FAULTS.values(), ids=FAULTS.keys())
def test_faulty_command_is_one_line_on_stderr(site, source, status, said):
    site.command("bad", distribution="bad", version="3.2", source=source)
    out, err = mesh("bad", site=site, status=status)
    assert not out
    assert said in err
    assert err.startswith("mesh: command 'bad' ")
    assert len(err.splitlines()) == 1


RUNS = (
    "import os, sys\n"
    "from mesh_core._common.errors import MeshError\n"
    "class Bad:\n"
    "    def configure(self, parser): pass\n"
    "    def run(self, args): {body}\n"
    "@hookimpl\n"
    "def mesh_register_commands(): yield CommandPlugin(name='bad', api_version=1, create=Bad)\n"
)


def test_status_of_a_command_is_the_exit_status(site):
    site.command("bad", distribution="bad", source=RUNS.format(body="return 42"))
    mesh("bad", site=site, status=42)


@pytest.mark.parametrize("value", ["None", "'done'"])
def test_what_is_no_exit_status_is_refused(site, value):
    site.command("bad", distribution="bad", version="3.2", source=RUNS.format(body=f"return {value}"))
    out, err = mesh("bad", site=site, status=_exit.UNUSABLE)
    assert out == ""
    assert err == (
        f"mesh: run() of command 'bad' must return its exit status, an int, got {value}; report this to the author of bad 3.2\n"
    )


def test_mesh_error_of_a_command_is_one_line(site):
    site.command("bad", distribution="bad", source=RUNS.format(body="raise MeshError('host b7 is gone')"))
    assert mesh("bad", site=site, status=1)[1] == "mesh: host b7 is gone\n"


def test_exception_in_a_command_names_its_package(site):
    site.command("bad", distribution="bad", version="3.2", source=RUNS.format(body="1 / 0"))
    _, err = mesh("bad", site=site, status=1)
    assert "ZeroDivisionError: division by zero" in err
    assert err.endswith("raised by command 'bad' of bad 3.2\n")


def test_ctrl_c_in_a_command_is_quiet(site):
    site.command("bad", distribution="bad", source=RUNS.format(body="os.kill(os.getpid(), 2)"))
    assert mesh("bad", site=site, status=130) == ("", "")


def test_closed_output_is_not_an_error(site):
    site.command("bad", distribution="bad", source=RUNS.format(body="print('x' * 1000000); return 0"))
    command = [sys.executable, "-m", "mesh_core.cli", "bad"]
    env = {**os.environ, "PYTHONPATH": str(site.path)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(50) == 141


def test_main_can_be_called(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("mesh-core")


def test_credentials_are_made_by_the_installed_command(tmp_path, capsys):
    assert main(["credentials", "new", str(tmp_path / "job")]) == 0
    assert main(["credentials", "new", str(tmp_path / "job")]) == 1
    out, err = capsys.readouterr()
    assert "created credentials for job" in out
    assert err.startswith("mesh: ") and "exists already" in err


# --- mesh plugins ---


def test_plugins_lists_good_and_bad_with_the_remedy(site):
    site.command("talk", distribution="talker", version="4.5")
    site.command("bad", distribution="bad", version="3.2", source="1 / 0\n")
    out, err = mesh("plugins", site=site)
    assert not err
    head, *rows = out.split("\n\n")[0].splitlines()
    assert head.split() == ["KIND", "NAME", "FROM", "STATUS"]
    kinds = [row.split()[0] for row in rows if not row.startswith(" ")]
    assert kinds == sorted(kinds)
    assert "command" in kinds
    assert len({row.index("mesh-core") for row in rows if "mesh-core" in row}) == 1, "columns are aligned"
    assert any(row.split() == ["command", "talk", "talker", "4.5", "available"] for row in rows)
    assert any(row.split() == ["command", "bad", "bad", "3.2", "broken"] for row in rows)
    assert (
        "command bad: its import raised: ZeroDivisionError: division by zero\n  -> reinstall or uninstall bad"
        in out
    )


def test_plugins_as_json(site):
    site.command("talk", distribution="talker", version="4.5")
    out, _ = mesh("plugins", "--json", site=site)
    shown = json.loads(out)
    assert shown["schema"] == 1
    assert {
        "kind": "command",
        "name": "talk",
        "distribution": "talker",
        "version": "4.5",
        "status": "available",
        "api_version": 1,
        "summary": "say something",
        "capabilities": {},
        "reason": "",
        "remedy": "",
    } in shown["plugins"]


def test_plugins_and_doctor_work_if_another_package_takes_their_names(site):
    site.command("plugins", distribution="taker")
    out, _ = mesh("plugins", site=site)
    assert any(
        row.split() == ["command", "plugins", "taker", "1.0", "unavailable"] for row in out.splitlines()
    )
    assert "the name belongs to mesh-core, whose command is used" in out
    assert "tell the author of taker to choose another name" in out


def test_a_misspelt_group_is_named_with_the_nearest(site):
    site.distribution("typo", "[mesh.command]\ntalk = made_up_talk\nsing = made_up_talk\n", version="2.0")
    site.distribution("other", "[mesh.io]\nread = made_up_read\n")
    out, err = mesh("plugins", site=site)
    assert not err
    assert any(row.split() == ["group", "mesh.command", "typo", "2.0", "broken"] for row in out.splitlines())
    assert (
        "group mesh.command: no installed package declares the entry-point group 'mesh.command'; "
        "did you mean 'mesh.commands'?" in out
    )
    assert "-> tell the author of typo; Mesh does not see what is in it (sing, talk)" in out
    assert "entry-point group 'mesh.io'; known groups are: mesh.bypasses, mesh.commands, " in out
    out, _ = mesh("doctor", site=site)
    assert re.search(
        r"^warn  plugins +group 'mesh.command' of typo 2.0: no installed package", out, re.MULTILINE
    )


# --- mesh doctor ---


def check_source(body):
    return (
        "from mesh_core.plugins import *\n"
        f"def check():\n    {body}\n"
        "@hookimpl\n"
        "def mesh_register_doctor_checks():\n"
        "    yield DoctorCheck(name='outside', api_version=1, create=lambda: check)\n"
        "    yield DoctorCheck(name='elsewhere', api_version=1, create=lambda: check, probe=lambda: ProbeResult.no('no GPU here', remedy='none'))\n"
    )


def doctor(site, body):
    site.module("made_up_check", check_source(body))
    site.distribution("checker", "[mesh.doctor]\noutside = made_up_check\nelsewhere = made_up_check\n")
    done = subprocess.run(
        [sys.executable, "-m", "mesh_core.cli", "doctor", "--json"],
        env={**os.environ, "PYTHONPATH": str(site.path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    shown = json.loads(done.stdout)
    assert done.returncode == (1 if shown["fail"] else 0), done.stderr
    return {each["name"]: each for each in shown["checks"]}


def test_doctor_finds_this_machine_ready():
    out, err = mesh("doctor")
    assert not err
    assert out.rstrip().endswith("0 failed")
    assert "native" in out


def test_doctor_runs_outside_checks_and_skips_what_does_not_apply(site):
    checks = doctor(site, "yield Finding(status='warn', detail='low', remedy='fill it')")
    assert checks["outside"]["findings"] == [{"status": "warn", "detail": "low", "remedy": "fill it"}]
    assert checks["outside"]["from"] == "checker 1.0"
    assert (checks["elsewhere"]["findings"], checks["elsewhere"]["skipped"]) == ([], "no GPU here")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0; yield", "the check itself failed: ZeroDivisionError: division by zero"),
        ("yield 'fine'", "a check must return one or more Findings, got str"),
        ("return []", "a check must return one or more Findings, got none"),
    ],
)
def test_misbehaving_check_fails_alone(site, body, said):
    checks = doctor(site, body)
    (finding,) = checks["outside"]["findings"]
    assert finding["status"] == "fail"
    assert said in finding["detail"]
    assert finding["remedy"] == "report this to the author of checker 1.0"
    assert checks["python"]["findings"][0]["status"] == "ok"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.once
def test_hanging_check_does_not_delay_the_others(site):
    site.module("made_up_check", check_source("import threading; threading.Event().wait(); yield"))
    site.distribution("checker", "[mesh.doctor]\noutside = made_up_check\n")
    command = [sys.executable, "-m", "mesh_core", "doctor", "--limit"]
    env = {**os.environ, "PYTHONPATH": str(site.path)}
    # Earlier findings are shown already.
    with subprocess.Popen([*command, "600"], env=env, stdout=subprocess.PIPE, text=True) as process:
        lines = iter(process.stdout.readline, "")
        assert any(" open-files " in line for line in lines)
        process.kill()
    done = subprocess.run([*command, "2"], env=env, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert re.search(r"^fail  outside +the check did not finish within 2 s$", done.stdout, re.MULTILINE)
    assert re.search(r"^ok    python ", done.stdout, re.MULTILINE)


def test_doctor_reports_broken_plugins(site):
    site.command("bad", distribution="bad", version="3.2", source="1 / 0\n")
    out, _ = mesh("doctor", site=site, status=1)
    assert "command 'bad' of bad 3.2: its import raised: ZeroDivisionError" in out
    assert "-> reinstall or uninstall bad" in out


# --- the built-in checks, on simulated machines ---


def statuses(findings):
    return [each.status for each in findings]


def test_old_python_is_a_failure():
    assert statuses(_interpreter.check_python((3, 10, 9))) == ["fail"]
    assert statuses(_interpreter.check_python((3, 11, 0))) == ["ok"]


@pytest.mark.parametrize(
    ("release", "status"), [("5.2.9-cloud", "fail"), ("5.3.0", "ok"), ("6.1.0-13-amd64", "ok"), ("odd", "ok")]
)
def test_kernel_and_c_library(release, status):
    assert statuses(_interpreter.check_kernel(release, "glibc 2.36")) == [status, "ok"]
    assert statuses(_interpreter.check_kernel(release, "")) == [status, "warn"]


def test_native_module_of_another_version_is_a_failure(monkeypatch):
    class Native:
        __version__ = "0.0.1"

    monkeypatch.setattr(_interpreter.importlib, "import_module", lambda name: Native)
    (finding,) = _interpreter.check_native()
    assert finding.status == "fail"
    assert finding.detail == f"the native module is 0.0.1, but the Python package is {version('mesh-core')}"


def test_native_module_of_the_same_version_passes(monkeypatch):
    class Native:
        __version__ = version("mesh-core")

    monkeypatch.setattr(_interpreter.importlib, "import_module", lambda name: Native)
    assert statuses(_interpreter.check_native()) == ["ok"]


def test_native_module_that_does_not_load_is_a_failure(monkeypatch):
    def fail(name):
        raise ImportError("GLIBC_9.99 not found")

    monkeypatch.setattr(_interpreter.importlib, "import_module", fail)
    (finding,) = _interpreter.check_native()
    assert finding.status == "fail"
    assert "GLIBC_9.99" in finding.detail


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_cgroup_2_cpu_limit_is_the_lowest_of_all_ancestors(tmp_path):
    write(tmp_path / "proc/self/cgroup", "0::/a/b\n")
    write(tmp_path / "sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
    write(tmp_path / "sys/fs/cgroup/a/cpu.max", "50000 100000\n")
    assert _limits.cgroup_cpus(tmp_path) == 0.5
    (finding,) = _limits.check_cpus(tmp_path)
    assert finding.status == "warn"
    assert "0.5" in finding.detail


def test_cgroup_1_cpu_limit(tmp_path):
    write(tmp_path / "proc/self/cgroup", "4:cpu,cpuacct:/job\n3:memory:/other\n")
    write(tmp_path / "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "250000\n")
    write(tmp_path / "sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
    assert _limits.cgroup_cpus(tmp_path) == 2.5
    write(tmp_path / "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "-1\n")
    assert _limits.cgroup_cpus(tmp_path) is None


def test_cgroup_of_a_container_is_at_the_top_of_the_mount(tmp_path):
    write(tmp_path / "proc/self/cgroup", "0::/only/on/the/host\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "150000 100000\n")
    assert _limits.cgroup_cpus(tmp_path) == 1.5


def test_no_cgroup_is_no_limit(tmp_path):
    assert statuses(_limits.check_cpus(tmp_path)) == ["ok"]


@pytest.mark.parametrize(
    ("limits", "status", "remedy"),
    [
        ((100, 200), "fail", "raise the hard limit"),
        ((100, 100_000), "fail", "ulimit -n 65536"),
        ((1024, resource.RLIM_INFINITY), "warn", "ulimit -n 65536"),
        ((1024, 2048), "warn", "ulimit -n 2048"),
        ((65536, 65536), "ok", ""),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), "ok", ""),
    ],
)
def test_open_files(limits, status, remedy):
    (finding,) = _limits.check_open_files(limits)
    assert finding.status == status
    assert (remedy in finding.remedy) if limits != (100, 200) else finding.remedy == "ulimit -n 200"


def test_processes_names_the_lowest_limit(tmp_path):
    write(tmp_path / "proc/self/cgroup", "0::/job\n")
    write(tmp_path / "sys/fs/cgroup/job/pids.max", "100\n")
    write(tmp_path / "proc/sys/kernel/pid_max", "4194304\n")
    (finding,) = _limits.check_processes(tmp_path, (5000, 5000))
    assert (finding.status, finding.remedy) == ("warn", "raise the cgroup's pids.max")
    write(tmp_path / "sys/fs/cgroup/job/pids.max", "max\n")
    (finding,) = _limits.check_processes(tmp_path, (10, 10))
    assert (finding.status, finding.remedy) == ("fail", "raise RLIMIT_NPROC (ulimit -u)")
    assert statuses(_limits.check_processes(tmp_path, (_limits.UNLIMITED, _limits.UNLIMITED))) == ["ok"]


def test_missing_dev_shm_is_a_warning(tmp_path):
    memfd, dev_shm = _kernel.check_shared_memory(tmp_path / "none")
    assert memfd.status == "ok"
    assert dev_shm.status == "warn"
    assert "mount a tmpfs" in dev_shm.remedy


def test_forbidden_memfd_is_a_failure(monkeypatch):
    def refuse(*args):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(_kernel.os, "memfd_create", refuse)
    first, *_ = _kernel.check_shared_memory()
    assert first.status == "fail"
    assert "seccomp" in first.remedy


def test_inaccessible_memory_of_a_sibling_is_a_failure(monkeypatch):
    monkeypatch.setattr(_kernel, "_SIBLING", "raise PermissionError(13, 'Permission denied')")
    (finding,) = _kernel.check_memory_sharing()
    assert finding.status == "fail"
    assert "Permission denied" in finding.detail


def test_a_masked_proc_is_a_warning(monkeypatch, tmp_path):
    monkeypatch.setattr(_kernel, "_SIBLING", "raise FileNotFoundError(2, 'No such file')")
    (finding,) = _kernel.check_memory_sharing(own=str(tmp_path / "none"))
    assert finding.status == "warn"
    assert "through sockets" in finding.detail


def test_forbidden_pidfd_is_a_failure(monkeypatch):
    def refuse(pid):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(_kernel.os, "pidfd_open", refuse)
    (finding,) = _kernel.check_pidfd()
    assert finding.status == "fail"
    assert "Function not implemented" in finding.detail


def test_folder_in_which_no_socket_can_be_bound_is_a_warning(tmp_path):
    (finding,) = _kernel.check_unix_sockets(tmp_path / "none")
    assert finding.status == "warn"
    assert "TMPDIR" in finding.remedy


def test_long_folder_is_a_warning():
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as base:
        middle, long = Path(base, "m" * 55), Path(base, "l" * 120)
        middle.mkdir()
        long.mkdir()
        assert statuses(_kernel.check_unix_sockets(middle)) == ["warn"]
        assert statuses(_kernel.check_unix_sockets(long)) == ["warn"]
