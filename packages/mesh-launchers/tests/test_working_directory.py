"""The processes of a job import nothing from the working directory of its script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_launchers import _ray
from mesh_launchers.agents import shell

pytestmark = [pytest.mark.slow, pytest.mark.python]

MODULES = ("json", "types", "runpy", "asyncio", "mesh_core", "mesh_launchers", "ray", "socket", "hashlib")
HOSTILE = """
with open({seen!r}, "a") as file: file.write(__name__ + "\\n")
raise ImportError("not the module that was wanted")
"""
SCRIPT = """
from mesh_core import Actor, endpoint
from mesh_launchers import launch
class Greeter(Actor):
    @endpoint
    def greet(self):
        return "hello"
if __name__ == "__main__":
    with launch("local", hosts=1, keep={keep}) as job:
        job.wait(timeout=60)
        print(job.hosts.spawn_procs().spawn("greeter", Greeter).greet.call_one().get(60))
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory with modules of somebody else."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(HOSTILE.format(seen=str(tmp_path / "seen")))
    return folder


@pytest.mark.parametrize("keep", [None, 60])
def test_a_job(hostile: Path, tmp_path: Path, keep: int | None) -> None:
    """PTH-1, for the keeper, the program of a host, and its agent."""
    script = tmp_path / "script" / "job.py"
    script.parent.mkdir()
    script.write_text(SCRIPT.format(keep=keep))
    ran = subprocess.run(
        [sys.executable, str(script)], cwd=hostile, capture_output=True, text=True, check=False
    )
    assert not (tmp_path / "seen").exists(), (tmp_path / "seen").read_text()
    assert ran.stdout == "hello\n", ran.stderr


def test_the_process_that_talks_with_ray(hostile: Path, tmp_path: Path) -> None:
    """PTH-1, as far as it gets without Ray."""
    words = _ray.driver("lab")
    assert words[0] == sys.executable
    # Isolated from what is installed, it finds neither this package nor Ray; and what is here it does not look for.
    ran = subprocess.run(
        [*words[:1], "-S", *words[1:]],
        cwd=hostile,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert not (tmp_path / "seen").exists(), (tmp_path / "seen").read_text()
    assert "No module named 'mesh_launchers'" in ran.stderr


@pytest.mark.parametrize("has", [True, False])
def test_a_host_without_a_named_interpreter_uses_the_scripts_own_where_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has: bool
) -> None:
    for name in ("own", "python3"):
        stand_in = tmp_path / name
        stand_in.write_text('#!/bin/sh\nfor last; do :; done; echo "${0##*/} $1 $last"\n')
        stand_in.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ("own" if has else "missing")))
    ran = subprocess.run(
        ["sh", "-c", shell(None, "b 1")],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == f"{'own' if has else 'python3'} -Pc b 1\n"
