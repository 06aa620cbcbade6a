"""The tests of `on_soft_roce/`, on a real kernel driver: in a virtual machine with Soft-RoCE devices, which is booted once for all."""

import os
import select
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

import cuda_stand_in
import soft_roce
from soft_roce.image import image

FOLDER = Path(__file__).with_name("on_soft_roce")
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
LIMIT = 900
"""Seconds for all of them, which take about seventy of one processor."""

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(2 * LIMIT)]


def missing():
    if os.environ.get("MESH_SOFT_ROCE") == "0":
        return "MESH_SOFT_ROCE=0 leaves out what runs in a virtual machine"
    if reason := soft_roce.missing():
        return reason
    if not PYVERBS.exists():
        return "the tests on Soft-RoCE need pyverbs: apt-get install python3-pyverbs ibverbs-providers"
    if not list(PYVERBS.glob(f"device.{sys.implementation.cache_tag}-*.so")):
        return f"the system's pyverbs is for another Python than {sys.version_info.major}.{sys.version_info.minor}"
    return None


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with what the tests have said, and what the machine has printed."""
    if reason := missing():
        pytest.skip(reason)
    # What they import is compiled here: it takes a twentieth of the time, and stays.
    subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-qq", "-p", "no:cacheprovider", str(FOLDER)],
        env={**os.environ, "SOFT_ROCE": "0"},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    folder = tmp_path_factory.mktemp("soft-roce")
    command = [sys.executable, str(FOLDER / "run.py")]
    environment = dict(os.environ)
    if cuda_stand_in.missing() is None:
        libraries = (cuda_stand_in.build(folder), cuda_stand_in.build_verbs(folder))
        environment["SOFT_ROCE_DMA_BUF"] = os.pathsep.join(map(str, libraries))
    with (folder / "console").open("wb") as console:
        try:
            status = soft_roce.run(
                command, devices=2, limit=LIMIT, env=environment, share=folder, output=console.fileno()
            )
        except soft_roce.CannotBoot as error:
            pytest.skip(str(error))
        except (RuntimeError, TimeoutError) as error:
            pytest.fail(f"{error}\n{(folder / 'console').read_text(errors='replace')[-5000:]}")
    assert status == 0, (folder / "console").read_text(errors="replace")[-5000:]
    return folder


@pytest.mark.parametrize(
    ("engine", "files"),
    [
        ("native", {"test_ibverbs", "test_each_other"}),
        ("pyverbs", {"test_pyverbs", "test_each_other"}),
        ("gpu", {"test_dma_buf"}),
    ],
    ids=["native", "pyverbs", "gpu"],
)
def test_passes_on_soft_roce(results, engine, files):
    if engine == "gpu" and (reason := cuda_stand_in.missing()):
        pytest.skip(reason)
    console = (results / "console").read_text(errors="replace")
    report = results / f"{engine}.xml"
    assert report.exists(), f"no test of {engine} was run\n{console[-5000:]}"
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    assert {case.get("classname").split("on_soft_roce.")[1].split(".")[0] for case in cases} == files
    wrong = [
        case.get("name")
        for case in cases
        if any(case.find(tag) is not None for tag in ("failure", "error", "skipped"))
    ]
    assert not wrong, f"{wrong}\n{console[-20000:]}"


def with_tools():
    folder = str(Path(soft_roce.__file__).parents[1])
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
    }


COPIES = """
import os, sys
from soft_roce.fork_server import Copy, end, start

def answer():
    for line in sys.stdin:
        print(os.environ["IT_IS"], line, end="", flush=True)

path = sys.argv[1]
programs = {"answer": answer, "fail": lambda: sys.exit(3)}
server = start(path, programs, lambda: os.environ.update(IT_IS="prepared"))
first, second, third = Copy(path, "answer"), Copy(path, "answer"), Copy(path, "fail")
for copy in (first, second):
    copy.stdin.write(b"asked\\n")
    copy.stdin.flush()
    assert copy.stdout.readline() == b"prepared asked\\n"
first.kill()
assert (first.wait(60), first.wait()) == (-9, -9)
second.stdin.close()
assert second.stdout.read() == b"" and second.wait(60) == 0
assert third.wait(60) == 3
first.kill()  # nothing happens to another process of that number
end(server)
"""


def test_copies_of_a_fork_server_are_like_processes(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", COPIES, str(tmp_path / "server")],
        env=with_tools(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Have a shell script in the place of qemu."""
    if reason := missing():
        pytest.skip(reason)
    try:
        image()
    except soft_roce.CannotBoot as error:
        pytest.skip(str(error))

    def make(script):
        qemu = tmp_path / "qemu-system-x86_64"
        qemu.write_text(f"#!/bin/sh\n{script}\n")
        qemu.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


SHARE = 'share=$(echo "$*" | sed "s/.*id=share,path=\\([^,]*\\),.*/\\1/")'
"""Of a script that stands for qemu: where the folder for results is."""


def script(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "soft_roce", *arguments],
        env=with_tools(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*arguments):
    with script(*arguments) as started:
        said, complained = started.communicate(timeout=300)
    return subprocess.CompletedProcess(arguments, started.returncode, said, complained)


def test_a_machine_that_takes_too_long_is_ended(machine, tmp_path):
    machine(f"echo $$ >{tmp_path}/pid; exec sleep 600")
    done = run("--limit", "3", "--", "true")
    assert (done.returncode, done.stdout) == (124, "")
    assert "still running after 3 s" in done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_machine_that_does_not_come_up_is_tried_once_more(machine):
    machine("echo Kernel panic")
    done = run("--", "true")
    assert (done.returncode, done.stdout) == (125, "Kernel panic\nKernel panic\n")
    assert "ended before it was up, twice" in done.stderr


def test_a_machine_that_ends_without_a_status_is_a_failure(machine):
    machine(f"{SHARE}; echo up >$share/up; echo Kernel panic")
    done = run("--", "true")
    assert (done.returncode, done.stdout) == (125, "Kernel panic\n")
    assert "without the exit status" in done.stderr


def test_nothing_is_left_of_one_whose_script_was_killed(machine, tmp_path):
    """What is in its folder is deleted by the next one."""
    os.mkfifo(tmp_path / "fifo")
    machine(f"{SHARE}; echo $$ $share >{tmp_path}/fifo; exec sleep 600")
    with script("--", "true") as first:
        pid, share = (tmp_path / "fifo").read_text().split()
        handle = os.pidfd_open(int(pid))
        first.kill()
        first.communicate()
    assert select.select([handle], [], [], 60)[0]
    os.close(handle)
    machine("exit 0")
    assert run("--", "true").returncode == 125
    assert not Path(share).exists()
