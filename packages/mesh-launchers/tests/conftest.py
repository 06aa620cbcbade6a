"""What tests of jobs share: a place of their own for jobs, and a look at what is left."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mesh_core import set_fault_handler, shutdown

# Workers have the same path, and import the tests' actors from there.
sys.path.insert(0, str(Path(__file__).parent))

from launched import LIMIT, leftovers, processes


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
            if time.monotonic() > until:
                # Their hosts end with them: one failure, and not also those of whom they would disturb.
                for keeper in processes(folder):
                    with suppress(ProcessLookupError):
                        os.kill(keeper, signal.SIGKILL)
                pytest.fail(f"left behind: {left}")
            time.sleep(0.01)


@pytest.fixture
def failures() -> list[Any]:
    """Have the script go on when something dies."""
    heard: list[Any] = []

    def hear(failure: Any) -> bool:
        heard.append(failure)
        return True

    set_fault_handler(hear)
    return heard
