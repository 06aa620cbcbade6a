"""The tests of `on_soft_roce/`, on a real kernel driver: in a virtual machine with Soft-RoCE devices, which is booted once for all."""

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import soft_roce

FOLDER = Path(__file__).with_name("on_soft_roce")
FILES = sorted(file.stem for file in FOLDER.glob("test_*.py"))
LIMIT = 600

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT + 60)]


def missing():
    if not os.environ.get("MESH_SOFT_ROCE") and not os.environ.get("MESH_TEST_ALL"):
        return "it takes minutes: set MESH_SOFT_ROCE=1, or run `./dev test --all`"
    if reason := soft_roce.missing():
        return reason
    if not Path("/usr/lib/python3/dist-packages/pyverbs").exists():
        return "the tests on Soft-RoCE need pyverbs: apt-get install python3-pyverbs ibverbs-providers"
    return None


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with what the tests have said, and what the machine has printed."""
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("soft-roce")
    command = [sys.executable, str(FOLDER / "run.py")]
    with (folder / "console").open("wb") as console:
        try:
            status = soft_roce.run(command, devices=2, limit=LIMIT, share=folder, output=console.fileno())
        except soft_roce.CannotBoot as error:
            pytest.skip(str(error))
        except (RuntimeError, TimeoutError) as error:
            pytest.fail(f"{error}\n{(folder / 'console').read_text(errors='replace')[-5000:]}")
    assert status == 0, (folder / "console").read_text(errors="replace")[-5000:]
    return folder


@pytest.mark.parametrize("file", FILES)
def test_passes_on_soft_roce(results, file):
    console = (results / "console").read_text(errors="replace")
    report = results / f"{file}.xml"
    assert report.exists(), f"{file} was not run\n{console[-5000:]}"
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    assert cases, f"{file} has no tests\n{console[-5000:]}"
    wrong = [
        case.get("name")
        for case in cases
        if any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
    ]
    assert not wrong, f"{wrong}\n{console[-20000:]}"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Have a shell script in the place of qemu."""
    if reason := missing():
        pytest.skip(reason)

    def make(script):
        qemu = tmp_path / "qemu-system-x86_64"
        qemu.write_text(f"#!/bin/sh\n{script}\n")
        qemu.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def run(*arguments):
    path = os.pathsep.join(
        filter(None, [str(Path(soft_roce.__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )
    return subprocess.run(
        [sys.executable, "-m", "soft_roce", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_machine_that_takes_too_long_is_ended(results, machine, tmp_path):
    machine(f"echo $$ >{tmp_path}/pid; exec sleep 600")
    done = run("--limit", "3", "--", "true")
    assert (done.returncode, done.stdout) == (124, "")
    assert "still running after 3 s" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_machine_that_ends_without_a_status_is_a_failure(results, machine):
    machine("echo Kernel panic")
    done = run("--", "true")
    assert (done.returncode, done.stdout) == (125, "Kernel panic\n")
    assert "without the exit status" in done.stderr
