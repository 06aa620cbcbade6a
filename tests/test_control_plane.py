"""The tool that builds the control plane for tests; what it builds is tried in `network/test_launch_kubernetes.py`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import control_plane


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have nothing built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_is_missing_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "python3 tools/control_plane" in control_plane.missing()
    control_plane.binary().parent.mkdir(parents=True)
    control_plane.binary().touch()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "etcd-server" in control_plane.missing()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert control_plane.missing() == ""


def test_what_is_built_is_not_built_again(cache: Path) -> None:
    path = control_plane.binary()
    assert path.is_relative_to(cache)
    assert control_plane.VERSION in path.name
    path.parent.mkdir(parents=True)
    path.touch()
    assert control_plane.build() == path


def test_a_build_that_fails_says_why_and_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: "false")
    with pytest.raises(control_plane.BuildError, match="has failed with status 1"):
        control_plane.build()
    assert [each.name for each in control_plane.folder().iterdir()] == ["lock"]


def test_without_go_the_tool_says_what_to_install(cache: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, 'tools'); import control_plane, pathlib, shutil;"
        "control_plane._GO = pathlib.Path('/nowhere'); shutil.which = lambda name: None;"
        "from control_plane.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        check=False,
    )
    assert done.returncode == 1
    assert "install Go" in done.stderr
