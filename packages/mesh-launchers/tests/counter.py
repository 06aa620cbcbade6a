"""An actor with a state, for tests of jobs that outlive their scripts."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from mesh_core import Actor, ProcMesh, context, endpoint, this_host


class Counter(Actor):
    """Counts."""

    def __init__(self) -> None:
        self.count = 0
        self.procs: list[ProcMesh] = []

    @endpoint
    def add(self, n: int) -> int:
        self.count += n
        return self.count

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def say(self, what: str) -> None:
        sys.stdout.write(f"{what}\n")
        sys.stdout.flush()

    @endpoint
    def wait_for(self, path: str) -> int:
        """Count once a file is there."""
        Path(path + ".begun").touch()
        while not Path(path).exists():
            pass
        self.count += 100
        Path(path + ".done").touch()
        return self.count

    @endpoint
    def touch_later(self, path: str, seconds: float) -> None:
        """Make a file after so long a time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        Path(path).touch()

    @endpoint
    def spawn(self) -> list[int | None]:
        """Spawn processes of its own."""
        procs = this_host().spawn_procs({"gpus": 1})
        self.procs.append(procs)
        return procs.pids

    @endpoint
    def fail(self) -> None:
        context().actor_instance.kill("a test")


class Held(Actor):
    """Holds what its constructor was given."""

    def __init__(self, what: bytes) -> None:
        self.what = what

    @endpoint
    def length(self) -> int:
        return len(self.what)


def lives(pid: int) -> bool:
    """Whether there is such a process, that is not a zombie."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
