"""What mypy says of a program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def mypy(path: Path, *options: str) -> list[str]:
    """Its output, line by line. In a process of its own: what it keeps would slow down every collection after it."""
    checked = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--hide-error-context"),
            *("--no-color-output", f"--cache-dir={path.parent / 'cache'}", *options, str(path)),
        ],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert not checked.stderr, checked.stderr
    return checked.stdout.splitlines()
