"""Who starts the programs of :func:`~mesh_core.run_tool`, and waits for them.

TOOL-3: what a tool has started is found whatever it does to its own limits: it stays below a child subreaper of ours. For a script that
is a minder, which starts the tools; for a worker its fork server. Or it is a child of whoever has started the tool, if the tool says so (`CLONE_PARENT`).
"""

from __future__ import annotations

import marshal
import os
import resource
import signal
import socket
import sys
import threading
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from mesh_core._common.errors import MeshError
from mesh_core._native import start_marked
from mesh_core._system import process_marks
from mesh_core._system.process_marks import Found

Env = list[tuple[str, str]]
Stdio = tuple[int, int, int]


class Ended(NamedTuple):
    """How the first process of a tool has ended."""

    status: int
    cpu_s: float
    peak: int
    """Bytes."""


class Starter(Protocol):
    """Starts tools. All have the same owner."""

    owner: int

    def start(self, argv: tuple[str, ...], env: Env | None, cwd: str | None, stdio: Stdio) -> int:
        """Start a program in a session of its own; returns its pid, which is in its mark."""

    def wait(self, pid: int) -> Ended:
        """Wait for a tool's first process, which is ending, and release its pid."""

    def strays(self) -> Found:
        """Return running processes that tools have begun, and that have no mark any longer."""


class Here:
    """Starts tools as children of this process, with a mark of its owner, or without any."""

    def __init__(self, mark: tuple[int, int] | None, *, reaper: int = 0) -> None:
        self._mark = mark
        self._reaper = reaper
        """The fork server that orphans of this process come to."""
        self.owner = 0 if mark is None else mark[1]

    def start(self, argv: tuple[str, ...], env: Env | None, cwd: str | None, stdio: Stdio) -> int:
        return start_marked(argv, env, cwd, self._mark, stdio)

    def wait(self, pid: int) -> Ended:
        _, status, usage = os.wait4(pid, 0)
        return Ended(status, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)

    def strays(self) -> Found:
        # If the fork server has ended, this process is about to.
        reaper = self._reaper if self._reaper == os.getppid() else 0
        if not reaper:
            return {}
        return process_marks.strays(reaper, self.owner) | process_marks.strays(os.getpid(), self.owner)


class ToolMinder:
    """Starts a script's tools below a process of its own (``_system/tool_minder.py``), which stays for later ones. Thread-safe."""

    def __init__(self, owner: int, inherited: object) -> None:
        self.owner = owner
        self.inherited = inherited
        """What its tools have inherited from this process, by way of it."""
        self.tools = 0
        """How many run."""
        self._lock = threading.Lock()
        self._number = 0
        self._running: set[int] = set()
        self._ended: dict[int, Ended] = {}
        """Of those whose wait was interrupted."""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        watched = os.pidfd_open(os.getpid())
        try:
            program = os.path.join(os.path.dirname(process_marks.__file__), "tool_minder.py")  # noqa: PTH118, PTH120
            words = [sys.executable, "-I", "-S", program, str(owner), "4", "3"]
            devnull = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
            # In this order: neither may be in the place of the other.
            high = [os.dup(theirs.fileno()), os.dup(watched)]
            try:
                moved = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
                self.pid = os.posix_spawn(sys.executable, words, os.environ, file_actions=[*devnull, *moved])
            finally:
                for fd in high:
                    os.close(fd)
        except BaseException:
            self._orders.close()
            raise
        finally:
            theirs.close()
            os.close(watched)

    def start(self, argv: tuple[str, ...], env: Env | None, cwd: str | None, stdio: Stdio) -> int:
        pid: int
        fds = [os.memfd_create("mesh-tool", os.MFD_CLOEXEC)]
        try:
            fds.append(os.open("." if cwd is None else cwd, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            with os.fdopen(os.dup(fds[0]), "wb") as file:
                whole = dict(os.environ) if env is None else dict(env)
                marshal.dump((argv, whole, _umask(), process_marks.soft_of(0)), file)
            os.lseek(fds[0], 0, os.SEEK_SET)
            with self._lock:
                (pid, errno), interrupt = self._ask("", [*fds, *stdio])
                if not errno:
                    self._running.add(pid)
        finally:
            for fd in fds:
                os.close(fd)
        if interrupt is not None:
            if not errno:
                self._give_up(pid)
            raise interrupt
        if errno:
            raise OSError(errno, os.strerror(errno), argv[0])
        return pid

    def _give_up(self, pid: int) -> None:
        """End a tool that nobody will know of."""
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        self.wait(pid)

    def wait(self, pid: int) -> Ended:
        ended = self._ended.pop(pid, None)
        if ended is None:
            with self._lock:
                self._running.discard(pid)
                (status, user, system, peak), interrupt = self._ask(f" {pid}", [])
            ended = Ended(status, user + system, peak * 1024)
            if interrupt is not None:
                self._ended[pid] = ended
                raise interrupt
        return ended

    def strays(self) -> Found:
        # What is being started has no mark yet. What runs is ended by its own call.
        with self._lock:
            return process_marks.strays(self.pid, self.owner, self._running)

    def is_alive(self) -> bool:
        """Whether it can be given orders."""
        seen = process_marks.look(self.pid)
        return seen is not None and not seen.ended

    def close(self) -> None:
        """End it; it has no tools."""
        self._orders.close()
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _ask(self, what: str, fds: list[int]) -> tuple[Any, BaseException | None]:
        """Give an order, and return its answer, and what has interrupted this meanwhile."""
        self._number += 1
        interrupt: BaseException | None = None
        while True:
            try:
                socket.send_fds(self._orders, [f"{self._number}{what}".encode()], fds)
                while answer := self._orders.recv(4096):
                    number, found = marshal.loads(answer)
                    if number == self._number:
                        return found, interrupt
                break
            except (KeyboardInterrupt, SystemExit) as error:
                # Sent again, it is not followed again.
                interrupt = error
            except OSError:
                break
        raise MeshError(
            f"the process that minds the tools of this script (pid {self.pid}) has ended; was it killed?"
        ) from interrupt


def can_be_minded() -> bool:
    """Whether a minder can be started: not where the interpreter is a part of another program."""
    return bool(sys.executable)


def inherited() -> object:
    """Return what a program inherits from this process, beside what is given to it."""
    return (
        os.getpid(),
        os.getresuid(),
        os.getresgid(),
        os.getgroups(),
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getaffinity(0),
        [resource.getrlimit(limit) for limit in _LIMITS],
    )


_LIMITS = sorted({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})


def _umask() -> int:
    with open("/proc/thread-self/status", "rb") as file:  # noqa: PTH123
        for line in file:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o022
