"""What tests of jobs look for, and how long."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
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
    return found + [f"process {pid}: {words[:4]}" for pid, words in processes(folder).items()]


def processes(folder: Path) -> dict[int, list[bytes]]:
    """Return the command lines of processes of jobs there, by their ids."""
    return {
        pid: words
        for pid, words in command_lines().items()
        if any(each.startswith(os.fsencode(folder)) for each in words)
    }


def command_lines() -> dict[int, list[bytes]]:
    """Return the words of the command line of each process, by its id."""
    found = {}
    for process in Path("/proc").iterdir():
        # Those that end meanwhile have none.
        with suppress(OSError):
            if process.name.isdigit():
                found[int(process.name)] = (process / "cmdline").read_bytes().split(b"\0")
    return found


def until(met: Callable[[], object], what: str) -> None:
    """Look again until something is so."""
    end = time.monotonic() + LIMIT
    while not met():
        assert time.monotonic() < end, what
        time.sleep(0.005)
