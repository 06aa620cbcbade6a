"""What tests of jobs look for, and how long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LIMIT = 30.0


def leftovers(folder: Path) -> list[str]:
    """Return processes and files of jobs there."""
    found = [
        f"{at}/{name}"
        for at, folders, files in os.walk(folder)
        for name in (*folders, *files)
        if name not in (".keys", ".audit.log")
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


def until(met: Callable[[], object], what: str) -> None:
    """Look again until something is so."""
    end = time.monotonic() + LIMIT
    while not met():
        assert time.monotonic() < end, what
        time.sleep(0.005)
