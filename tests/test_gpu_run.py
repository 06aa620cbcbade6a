"""`./dev gpu`: steps that pass, fail, hang and cannot; the page; and what is brought along."""

from __future__ import annotations

import contextlib
import os
import select
import zipfile
from pathlib import Path

import workspace
from gpu_run import command, page, running, wheels
from gpu_run.running import Found, run
from gpu_run.steps import STEPS, Step
from levels import LEVEL


def program(tmp_path: Path, text: str, *, limit_s: float = 60) -> Step:
    path = tmp_path / "program.py"
    path.write_text(text)
    return Step("a program", (str(path),), limit_s, is_tests=False)


def done(tmp_path: Path, step: Step, left_s: float = 60) -> Found:
    tools = os.pathsep.join([str(workspace.ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])])
    more = {"PYTHONPATH": tools, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", LEVEL: "full"}
    return run(step, tmp_path, {**os.environ, **more}, left_s)


def test_a_program_says_what_it_has_found_in_short(tmp_path):
    found = done(tmp_path, program(tmp_path, "print('a row\\nin short: 1.05 times')"))
    assert (found.state, found.short, found.details) == ("passed", "1.05 times", "a row")


def test_a_program_that_fails_is_told_by_its_last_line(tmp_path):
    found = done(tmp_path, program(tmp_path, "raise RuntimeError('no such device')"))
    assert (found.state, found.short) == ("failed", "RuntimeError: no such device")
    assert "Traceback" in found.details


def test_a_program_that_cannot_is_not_a_failure(tmp_path):
    text = f"import sys; print('there is no such library'); sys.exit({running.CANNOT})"
    found = done(tmp_path, program(tmp_path, text))
    assert (found.state, found.short) == ("not run", "there is no such library")


def test_a_program_that_hangs_is_ended_with_what_it_has_started(tmp_path, monkeypatch):
    text = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
child.wait()
"""
    monkeypatch.setattr(running, "_GRACE_S", 0.1)
    found = done(tmp_path, program(tmp_path, text, limit_s=6))
    assert found.state == "out of time"
    with contextlib.suppress(ProcessLookupError):
        child = os.pidfd_open(int(found.details.splitlines()[-1]))
        try:
            # It ends soon after it was killed.
            assert select.select([child], [], [], 20)[0]
        finally:
            os.close(child)


def test_nothing_is_begun_without_time(tmp_path):
    found = done(tmp_path, program(tmp_path, "print('in short: done')"), left_s=1)
    assert (found.state, found.short) == ("not run", "no time is left")


def test_tests_are_counted_and_failures_are_shown(tmp_path):
    file = tmp_path / "test_some.py"
    file.write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 + 1 == 3\n"
        "def test_elsewhere(): pytest.skip('needs two GPUs')\n"
    )
    found = done(tmp_path, Step("some", (str(file), "--rootdir", str(tmp_path), "-c", "/dev/null"), 60))
    assert (found.state, found.short) == ("failed", "1 passed, 1 failed, 1 skipped")
    assert "test_bad" in found.details and "assert (1 + 1) == 3" in found.details
    assert found.skipped == {"needs two GPUs": 1}


def test_a_step_whose_tests_are_all_skipped_was_not_run(tmp_path):
    file = tmp_path / "test_none.py"
    file.write_text("import pytest\npytest.skip('no GPU', allow_module_level=True)\n")
    found = done(tmp_path, Step("none", (str(file), "--rootdir", str(tmp_path), "-c", "/dev/null"), 60))
    assert (found.state, found.short) == ("not run", "no GPU")


def test_all_steps_are_there_and_each_has_a_name_of_its_own():
    assert len({step.name for step in STEPS}) == len(STEPS)
    for step in STEPS:
        assert (workspace.ROOT / step.what[0]).is_file(), step


def test_the_page_of_a_project_that_no_gpu_has_run():
    path = workspace.ROOT / command.PAGE
    text = path.read_text(encoding="utf-8")
    assert all(f"| {step.name} |" in text for step in STEPS), (
        "run: python -m gpu_run.page > benchmarks/results/gpu.md"
    )
    assert page.NOT_YET in page.empty(STEPS)


def test_a_page_shows_failures_and_reasons():
    step = STEPS[0]
    text = page.page([Found(step, "failed", "1 | 2", 3.2, "why")], where="a GPU", rehearsed=False)
    assert f"| {step.name} | failed | 1 / 2 | 3 |" in text
    assert "```text\nwhy\n```" in text
    assert "rehearsal" in page.page([], where="", rehearsed=True)


def test_wheels_are_unpacked_without_pip(tmp_path):
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "some-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("some/__init__.py", "")
        archive.writestr("some-1.0.data/platlib/beside.py", "")
    assert wheels.unpacked(folder, tmp_path / "site") == ["some-1.0-py3-none-any.whl"]
    assert (tmp_path / "site" / "some" / "__init__.py").is_file()
    assert (tmp_path / "site" / "beside.py").is_file()


def test_missing_wheels_are_named(tmp_path):
    assert "there is no folder" in wheels.problem(tmp_path / "none")
    (tmp_path / "mesh_core-0.1.0-cp311-abi3-linux_x86_64.whl").touch()
    assert "mesh-rdma, mesh-tensor" in wheels.problem(tmp_path)
    for name in (*wheels.PACKAGES, *wheels.TOOLS):
        (tmp_path / f"{name.replace('-', '_')}-1-py3-none-any.whl").touch()
    assert wheels.problem(tmp_path) == ""


def test_without_wheels_it_says_how_to_bring_them(tmp_path, capsys):
    assert command.main(workspace.ROOT, lambda: "", ["--from", str(tmp_path / "none"), "--rehearse"]) == 1
    told = capsys.readouterr().err
    assert "./dev gpu --wheels" in told and "./dev gpu --from" in told
