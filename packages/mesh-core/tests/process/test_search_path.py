"""Where the interpreters that Mesh starts look for modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hosts_samples import SOON

from mesh_core import Actor, Credentials, HostAgent, attach_to_workers, endpoint, python_command, shutdown
from mesh_core._system.search_path import why_unsafe

pytestmark = pytest.mark.python

MODULES = ("json", "types", "linecache", "readline", "random", "socket", "subprocess", "mesh_core")
"""What interpreters import first, and what Mesh does."""

HOSTILE = """
import os
with open({seen!r}, "a") as file: file.write(__name__ + "\\n")
raise ImportError("not the module that was wanted")
"""

SCRIPT = """
import subprocess, sys, tempfile
from mesh_core import *
class Facts(Actor):
    @endpoint
    def facts(self):
        return sys.path, sys.flags.safe_path, subprocess._args_from_interpreter_flags()
def of(procs):
    return procs.spawn("facts", Facts).facts.call_one().get(60)
def forked():
    with this_host().spawn_procs() as procs: return of(procs)
def fresh():
    with this_host().spawn_procs(start="exec") as procs: return of(procs)
def other():
    with this_host().spawn_procs(start="exec", python=sys.argv[2]) as procs: return of(procs)
def boxed():
    def facts():
        import subprocess, sys
        return sys.path, sys.flags.safe_path, subprocess._args_from_interpreter_flags()
    with Sandboxes() as boxes, boxes.take() as box: return box.call(facts, timeout=60)
def afar():
    with tempfile.TemporaryDirectory() as folder:
        job = Credentials.new(folder + "/job")
        job.issue_host(folder + "/host")
        with HostAgent(folder + "/host") as agent:
            hosts = attach_to_workers([agent.address], credentials=job)
            return of(hosts.spawn_procs()), of(hosts.spawn_procs(start="exec"))
if __name__ == "__main__":
    found = globals()[sys.argv[1]]()
    shutdown()
    mine = sys.path, sys.flags.safe_path, subprocess._args_from_interpreter_flags()
    if sys.argv[1] == "afar":
        # There, the script's folders come before those of that interpreter: the same ones here.
        assert [each[1:] for each in found] == [mine[1:]] * 2, (found, mine)
        assert [set(each[0]) for each in found] == [set(mine[0])] * 2, (found, mine)
    else:
        assert tuple(found) == mine, (found, mine)
    print("as in the script")
"""


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """A working directory with modules of somebody else."""
    folder = tmp_path / "shared"
    folder.mkdir()
    for name in MODULES:
        (folder / f"{name}.py").write_text(HOSTILE.format(seen=str(tmp_path / "seen")))
    return folder


def run_script(hostile: Path, *words: str, flags: tuple[str, ...] = (), **env: str) -> str:
    """Run the script from there, and return what was imported from there."""
    script = hostile.parent / "bin" / "app.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    ran = subprocess.run(
        [sys.executable, *flags, str(script), *words],
        cwd=hostile,
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SOON * 2,
        check=False,
    )
    seen = hostile.parent / "seen"
    assert not seen.exists(), f"imported from the working directory: {seen.read_text().split()}"
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forked", "fresh", "boxed", "afar"])
def test_nothing_comes_from_the_working_directory(hostile: Path, kind: str) -> None:
    """PTH-1 and PTH-3."""
    assert run_script(hostile, kind) == "as in the script\n"


@pytest.mark.slow
def test_an_interpreter_with_flags_of_its_own(hostile: Path, tmp_path: Path) -> None:
    """PTH-1, for a program of the user that starts an interpreter."""
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -u -X faulthandler "$@"\n')
    wrapper.chmod(0o755)
    ran = run_script(hostile, "other", str(wrapper), flags=("-u", "-X", "faulthandler"))
    assert ran == "as in the script\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forked", "fresh", "boxed"])
@pytest.mark.parametrize(("flags", "env"), [(("-P",), {}), ((), {"PYTHONSAFEPATH": "1"})])
def test_a_script_that_asks_for_a_safe_path_has_one_everywhere(
    hostile: Path, kind: str, flags: tuple[str, ...], env: dict[str, str]
) -> None:
    """PTH-3."""
    assert run_script(hostile, kind, flags=flags, **env) == "as in the script\n"


@pytest.mark.slow
def test_nothing_is_imported_before_the_first_line(hostile: Path) -> None:
    """PTH-1: some versions of Python import modules before that, and so they do if they are to become interactive."""
    ran = subprocess.run(
        python_command("print('ran')"),
        cwd=hostile,
        env={**os.environ, "PYTHONINSPECT": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "ran\n"
    assert not (hostile.parent / "seen").exists()


# Other hosts.


class Importer(Actor):
    @endpoint
    def value(self, module: str) -> str:
        import importlib

        return str(importlib.import_module(module).VALUE)

    @endpoint
    def path(self) -> list[str]:
        return sys.path


@pytest.mark.slow
@pytest.mark.parametrize("start", ["fork", "exec"])
def test_other_hosts_do_not_import_from_folders_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], start: Any
) -> None:
    """PTH-2."""
    for name, mode in (("mine", 0o755), ("everybodys", 0o777)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / f"of_{name}.py").write_text("VALUE = 1\n")
        folder.chmod(mode)
        monkeypatch.syspath_prepend(str(folder))
    job = Credentials.new(tmp_path / "job")
    job.issue_host(tmp_path / "host")
    with HostAgent(tmp_path / "host") as agent:
        hosts = attach_to_workers([agent.address], credentials=job)
        actor = hosts.spawn_procs(start=start).spawn("importer", Importer)
        assert actor.value.call_one("of_mine").get(timeout=SOON) == "1"
        assert str(tmp_path / "everybodys") not in actor.path.call_one().get(timeout=SOON)
        with pytest.raises(ModuleNotFoundError):
            actor.value.call_one("of_everybodys").get(timeout=SOON)
        shutdown()
        said = agent.log() + "".join(capfd.readouterr())
    assert f"modules of {tmp_path / 'everybodys'} are not found: everybody may write to" in said


def test_a_folder_is_as_safe_as_the_way_to_it(tmp_path: Path) -> None:
    """PTH-2."""
    mine = tmp_path / "mine"
    (mine / "code").mkdir(parents=True)
    assert why_unsafe(str(mine / "code")) == ""
    assert why_unsafe("/tmp") == "everybody may write to /tmp"
    assert why_unsafe(str(mine / "absent")).startswith(f"{mine / 'absent'}: ")
    # Anybody can add folders beside it, but not replace it.
    mine.chmod(0o1777)
    assert why_unsafe(str(mine / "code")) == ""
    mine.chmod(0o777)
    assert why_unsafe(str(mine / "code")) == f"everybody may write to {mine}"
    # Whoever can replace a link decides where it leads.
    (mine / "link").symlink_to(tmp_path)
    (tmp_path / "other").symlink_to("mine/link")
    assert why_unsafe(str(tmp_path / "other")) == f"everybody may write to {mine}"
    mine.chmod(0o755)
    assert why_unsafe(str(tmp_path / "other" / ".." / tmp_path.name)) == ""
    (tmp_path / "round").symlink_to("round")
    assert "leads nowhere" in why_unsafe(str(tmp_path / "round"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_belongs_to_another_user_is_not_safe(tmp_path: Path) -> None:
    """PTH-2."""
    folder = tmp_path / "code"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    assert why_unsafe(str(folder)) == f"{folder} belongs to another user (uid 12345)"
    (tmp_path / "safe").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "safe")
    os.lchown(tmp_path / "link", 12345, 12345)
    assert why_unsafe(str(tmp_path / "link")) == f"{tmp_path / 'link'} belongs to another user (uid 12345)"
