"""What /proc says of a tree of processes: who they are, what memory and processor time they take."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

_PROC = Path("/proc")
_SETTLE = 0.05
"""Seconds in which whoever is to wait has begun to."""


class Killer(threading.Thread):
    """Kills a process a moment from now, and remembers when; the thread that waits for it has nothing else to do."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._at = 0.0

    def run(self) -> None:
        """Wait, then strike."""
        time.sleep(_SETTLE)
        self._at = time.perf_counter()
        os.kill(self._pid, signal.SIGKILL)

    def struck(self) -> float:
        """When it did, by `perf_counter`."""
        self.join()
        return self._at


def descendants(root: int) -> list[int]:
    """Process ids of the children of `root`, their children, and so on; `root` itself is left out.

    Example:
        >>> import os
        >>> os.getpid() in descendants(os.getppid())
        True
    """
    children: dict[int, list[int]] = defaultdict(list)
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue  # it ended while we looked
            # The command's name is in parentheses and may itself hold spaces and parentheses.
            children[int(stat.rpartition(")")[2].split()[1])].append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


def pss_bytes(pid: int) -> int:
    """Proportional set size: private pages, and of each shared page the share that falls to this process.

    Example:
        >>> import os
        >>> pss_bytes(os.getpid()) > 0
        True
    """
    for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/{pid}/smaps_rollup has no Pss line; the kernel must be 4.14 or later")


def cpu_seconds(pids: Iterable[int]) -> float:
    """Processor time that all threads of `pids` have had so far, to the nanosecond.

    `schedstat` is read because the counters in `stat` tick in hundredths of a second.
    """
    total = 0
    for pid in pids:
        for task in (_PROC / str(pid) / "task").iterdir():
            try:
                total += int((task / "schedstat").read_text().split()[0])
            except OSError:
                continue  # a thread that ended while we looked
    return total / 1e9


def running(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that have not ended; an orphan that nobody has reaped yet has.

    Example:
        >>> import os
        >>> running([os.getpid()]) == [os.getpid()]
        True
    """
    found = []
    for pid in pids:
        try:
            stat = (_PROC / str(pid) / "stat").read_text()
        except OSError:
            continue
        if stat.rpartition(")")[2].split()[0] not in ("Z", "X"):
            found.append(pid)
    return found


def alive(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that still exist, zombies included: an unreaped process is also left behind."""
    return [pid for pid in pids if (_PROC / str(pid)).exists()]
