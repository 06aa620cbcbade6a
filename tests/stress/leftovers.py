"""What a run leaves behind: processes, threads, descriptors, files."""

from __future__ import annotations

import collections
import faulthandler
import gc
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKEN = "STRESS_RUN"
"""An environment variable that marks all processes of one run."""


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found += [int(word) for word in (task / "children").read_text().split()]
        except OSError:
            continue
    return found


def command(pid: int) -> str:
    """What a process runs."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def marked(mark: str) -> list[int]:
    """All processes of this run but this one, whoever their parent is by now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"{TOKEN}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def _descriptors() -> dict[str, str]:
    held = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            held[entry.name] = str(entry.readlink())
        except OSError:
            continue
    return {fd: what for fd, what in held.items() if "/proc/" not in what}


def resident() -> int:
    """The bytes of memory that this process holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    return 0


def growth(sizes: list[int]) -> int:
    """By how much the process has grown over many rounds; a few tell nothing, as what it holds after each varies."""
    half = len(sizes) // 2
    return min(sizes[half:]) - max(sizes[:half]) if len(sizes) >= 8 else 0


@contextmanager
def runtime_folder() -> Iterator[None]:
    """Have the run's files in a folder of its own; where they lie otherwise, those of other jobs come and go too."""
    with tempfile.TemporaryDirectory(prefix="mesh-run-") as folder:
        os.environ["XDG_RUNTIME_DIR"] = folder
        yield


def _files() -> set[str]:
    return {f"{at}/{name}" for at, _, names in os.walk(os.environ["XDG_RUNTIME_DIR"]) for name in names}


def eventually(condition: Callable[[], Any], limit: float = 5.0) -> Any:
    """What is still there after a while; processes that were killed take a moment to vanish."""
    end = time.monotonic() + limit
    while (left := condition()) and time.monotonic() < end:
        time.sleep(0.01)
    return left


def _tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@dataclass
class Before:
    """What there was before a round."""

    descriptors: dict[str, str]
    threads: int
    files: set[str]
    mark: str

    @classmethod
    def now(cls, mark: str) -> Before:
        gc.collect()
        return cls(_descriptors(), _tasks(), _files(), mark)

    def leftovers(self) -> list[str]:
        """What there is now that there was not."""
        found = []
        if left := eventually(lambda: children(os.getpid())):
            found.append(f"child processes {[(pid, command(pid)[:120]) for pid in left]}")
        if left := eventually(lambda: marked(self.mark)):
            found.append(f"processes that lost their parent {[(pid, command(pid)[:120]) for pid in left]}")
        gc.collect()
        if eventually(lambda: _tasks() > self.threads):
            faulthandler.dump_traceback(all_threads=True)
            found.append(f"threads {[thread.name for thread in threading.enumerate()]}")
        now = _descriptors()
        if len(now) > len(self.descriptors):
            extra = collections.Counter(now.values()) - collections.Counter(self.descriptors.values())
            found.append(f"{len(now) - len(self.descriptors)} descriptors {dict(extra)}")
        if left := _files() - self.files:
            found.append(f"files {sorted(left)}")
        return found
