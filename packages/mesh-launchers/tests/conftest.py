"""What tests of jobs share: a place of their own for jobs, and a look at what is left."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_core import set_fault_handler, shutdown

# Workers have the same path, and import the tests' actors from there.
sys.path.insert(0, str(Path(__file__).parent))

LIMIT = 30.0


@pytest.fixture(autouse=True)
def jobs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Have jobs in a folder of the test's own, and none of them left, nor a process or a key."""
    folder = tmp_path / "jobs"
    monkeypatch.setenv("MESH_JOBS", str(folder))
    # What hosts keep in memory; a short path, as sockets lie there too.
    with tempfile.TemporaryDirectory(prefix="mesh-run-") as run:
        monkeypatch.setenv("XDG_RUNTIME_DIR", run)
        yield folder
        shutdown()
        until = time.monotonic() + LIMIT
        while left := [*leftovers(folder), *map(str, Path(run).glob("mesh-host-*"))]:
            assert time.monotonic() < until, f"left behind: {left}"
            time.sleep(0.01)


def leftovers(folder: Path) -> list[str]:
    """Return processes and files of jobs there."""
    found = [
        f"{at}/{name}"
        for at, folders, files in os.walk(folder)
        for name in (*folders, *files)
        if name != ".keys"
    ]
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(each.startswith(os.fsencode(folder)) for each in words):
                found.append(f"process {process.name}: {words[:4]}")
    return found


@pytest.fixture
def failures() -> list[Any]:
    """Have the script go on when something dies."""
    heard: list[Any] = []

    def hear(failure: Any) -> bool:
        heard.append(failure)
        return True

    set_fault_handler(hear)
    return heard


def until(met: Callable[[], object], what: str) -> None:
    """Look again until something is so."""
    end = time.monotonic() + LIMIT
    while not met():
        assert time.monotonic() < end, what
        time.sleep(0.005)
