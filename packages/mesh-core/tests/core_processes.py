"""Processes, threads and descriptors: what a test looks at from outside."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from warm_scripts import WarmScripts

_ENDS_WITHIN = 2.0
"""Seconds that a thread may take to end of itself after the test that has let it go."""


def family(pid: int | str = "self") -> dict[int, str]:
    """All processes below this one, with their command lines."""
    found: dict[int, str] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            children = (task / "children").read_text().split()
        except OSError:
            continue  # it has ended since
        for child in children:
            try:
                found[int(child)] = Path(f"/proc/{child}/cmdline").read_text()
                found |= family(child)
            except OSError:
                continue
    return found


def fork_servers(processes: dict[int, str]) -> int:
    """How many of them fork workers; those stay until `shutdown()`."""
    return sum("fork_server" in command and "minder" not in command for command in processes.values())


def descriptors() -> list[str]:
    """What the open descriptors of this process are. Shared memory is kept for the next message, and tested apart."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # the one that lists the folder
        if "memfd:mesh-slab" not in target:
            found.append(target)
    return sorted(found)


def descriptors_to(folder: Path) -> list[str]:
    """What this process has open in a folder."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith(str(folder)):
            found.append(target)
    return found


def runtime_files() -> set[str]:
    """What this run has put into its runtime folder. /dev/shm and /tmp have the files of every other job too."""
    folder = os.environ.get("XDG_RUNTIME_DIR")
    # The sockets of a script that was killed stay until somebody looks for jobs.
    sockets = f"mesh-{os.geteuid()}"
    return {each.name for each in Path(folder).iterdir() if each.name != sockets} if folder else set()


class Traces:
    """What this process has, at one moment."""

    def __init__(self) -> None:
        processes = family()
        self.fork_servers = fork_servers(processes) + sum(
            "tool_minder" in each for each in processes.values()
        )
        self.workers = {
            pid
            for pid, command in processes.items()
            if "minder" not in command and ("fork_server" not in command or is_fork(pid))
        }
        self.threads = {thread.name for thread in threading.enumerate()}
        self.descriptors = descriptors()
        self.files = runtime_files()

    def left_behind(self) -> str:
        """What has come since and stays, once garbage is gone and what was ending has ended; empty if all is tidy."""
        if left := Traces().left_since(self):
            gc.collect()  # a cycle may hold the last reference
            until = time.monotonic() + _ENDS_WITHIN
            while (left := Traces().left_since(self)) and time.monotonic() < until:
                time.sleep(0.002)
        return left

    def left_since(self, before: Traces) -> str:
        """What is here that was not; empty if all is tidy."""
        complaints = []
        if extra := self.workers - before.workers:
            complaints.append(f"processes {sorted(extra)}")
        if extra_threads := self.threads - before.threads:
            complaints.append(f"threads {sorted(extra_threads)}")
        # A fork server that was started meanwhile is reached by a socket, and so is the minder of this process's tools.
        allowed = len(before.descriptors) + max(0, self.fork_servers - before.fork_servers)
        if len(self.descriptors) > allowed:
            more, fewer = (
                Counter(a.descriptors) - Counter(b.descriptors) for a, b in ((self, before), (before, self))
            )
            complaints.append(f"descriptors: {sorted(more.elements())} instead of {sorted(fewer.elements())}")
        if extra_files := self.files - before.files:
            complaints.append(f"files in the runtime folder: {sorted(extra_files)}")
        return "; ".join(complaints)


def is_fork(pid: int) -> bool:
    """A worker has its fork server's command line, and that for a parent."""
    try:
        parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        return "fork_server" in Path(f"/proc/{parent}/cmdline").read_text()
    except OSError:
        return False


def inherited_path() -> list[str]:
    """PYTHONPATH, as a list."""
    return [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]


def search_path() -> list[str]:
    """Where scripts find what the tests share, test modules too, beside what they would find anyway."""
    here = Path(__file__).parent
    return [str(here), *sorted(str(room) for room in here.iterdir() if room.is_dir()), *inherited_path()]


def script_environment() -> dict[str, str]:
    """What scripts find in their environment."""
    return {
        **os.environ,
        # Newer interpreters warn of what some of these scripts do on purpose.
        "PYTHONWARNINGS": "ignore:This process:DeprecationWarning",
        "PYTHONPATH": os.pathsep.join(search_path()),
    }


class Script:
    """A Python script in a process of its own."""

    def __init__(self, path: Path, source: str, *args: str, warm: WarmScripts | None = None) -> None:
        path.write_text(textwrap.dedent(source))
        env = script_environment()
        if warm is not None and warm.suits(env):
            # Scripts import this module too, and do not find that one.
            from warm_scripts import WarmProcess

            self.process: subprocess.Popen[str] = WarmProcess(warm, [str(path), *args], env)
            return
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(path), *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )

    def line(self) -> str:
        """The next line that it prints; reading is how a test waits for it."""
        assert self.process.stdout is not None
        line = b""
        # Not readline(): of what it reads ahead, communicate() sees nothing.
        while not line.endswith(b"\n"):
            byte = os.read(self.process.stdout.fileno(), 1)
            if not byte:
                raise AssertionError(f"the script ended early:\n{self.finish()[1]}")
            line += byte
        return line.decode().rstrip("\n")

    def say(self, line: str) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def finish(self) -> tuple[str, str]:
        """Wait for its end; the rest of what it has printed, and its stderr."""
        return self.process.communicate(timeout=50)

    def watch(self) -> Watch:
        """All its processes, to be waited for."""
        return Watch(family(self.process.pid))


class Watch:
    """Processes that are going to end."""

    def __init__(self, processes: Iterable[int]) -> None:
        self.pids = sorted(processes)
        self._fds: dict[int, int] = {}
        for pid in self.pids:
            # One that has ended meanwhile needs no watching.
            with contextlib.suppress(ProcessLookupError):
                self._fds[os.pidfd_open(pid)] = pid

    def wait(self, limit: float = 20.0) -> list[int]:
        """Wait until all have ended; those that have not within the limit."""
        poll = select.poll()
        for fd in self._fds:
            poll.register(fd, select.POLLIN)
        until = time.monotonic() + limit
        while self._fds and (left := until - time.monotonic()) > 0:
            for fd, _ in poll.poll(left * 1000):
                poll.unregister(fd)
                os.close(fd)
                del self._fds[fd]
        alive = sorted(self._fds.values())
        self.close()
        return alive

    def close(self) -> None:
        """Do not wait for them any longer."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    __del__ = close
