"""What the tests of launchers do with the scripts that they start."""

from __future__ import annotations

import os
from pathlib import Path

from cluster import Process

END_S = 90.0
"""So long a script may take to end, with its hosts, on a busy machine."""


def heard(script: Process) -> str:
    """Return the script's next line."""
    assert script.stdout is not None
    line: str = script.stdout.readline()
    assert line, f"the script has ended: {script.communicate(timeout=30)[1]}"
    return line.strip()


def ended(script: Process) -> None:
    """Wait for a script's good end."""
    out, error = script.communicate("\n", timeout=END_S)
    assert script.returncode == 0, out + error


def keeper(jobs: Path, job: str) -> int:
    """Return the process that keeps a job of that folder."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if any(b"mesh_launchers._keeper" in each for each in words) and os.fsencode(jobs / job) in words:
                return int(process.name)
    raise AssertionError(f"nobody keeps {job}")
