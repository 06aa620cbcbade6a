"""The process that starts a script's tools and waits for them, run as a program; it imports only the standard library.

It is a child subreaper: whatever a tool does to its limits, sessions and parents, its processes stay below this one, and the script
finds them there. If the script ends, whether or not it could tell, everything below is ended. If this process is killed too, the first
process of each tool ends with it, and the next process of this kind ends the others.

An order is a packet with a number, and perhaps a pid and descriptors. Its answer is a packet with that number. An order that is repeated
gets its answer again, since the script may have been interrupted:

* with a file (argv, environment, umask, mark), a directory, and the tool's stdin, stdout and stderr: start it; the answer is its pid,
  or an error's number;
* with a pid: wait for this tool, which has ended; the answer is its status, processor seconds and peak memory in KiB.
"""

from __future__ import annotations

import errno
import importlib.util
import marshal
import os
import resource
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_PACKET = 256
_ENDED = 127
_FIRST_PAUSE_S = 0.1


class Minder:
    """The loop that follows orders until the script has ended."""

    def __init__(
        self, owner: int, watched: int, orders: int, signals: Mapping[int, Any], prctl: Callable[..., object]
    ) -> None:
        self._owner = owner
        self._prctl = prctl
        self._me = os.getpid()
        self._watched = watched
        self._orders = socket.socket(fileno=orders)
        # Files beside this one, which has no package here.
        self._marks = _beside("process_marks")
        self._receive = _beside("descriptors").receive_descriptors
        self._signals = signals
        """What tools do with signals."""
        self._answered: tuple[int, tuple[float, ...]] = (0, ())
        """The latest order, and its answer."""
        self._tools: set[int] = set()
        """First processes of tools, which are reaped when the script says so (TOOL-2)."""
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def survive(self) -> None:
        """Be exempt from whatever ends the script's processes, until the work here is done."""
        self._marks.detach_one(0)

    def run(self) -> NoReturn:
        poll = select.poll()
        for fd in (self._watched, self._orders.fileno(), self._wake):
            poll.register(fd, select.POLLIN)
        # What others of this user have left is ended between orders.
        sweep, pause = self._marks.sweep(), _FIRST_PAUSE_S
        while True:
            ready = poll.poll(None if pause is None else pause * 1000)
            if not ready:
                pause = sweep.step()
            for fd, _ in ready:
                if fd == self._wake:
                    os.read(self._wake, 4096)
                    self._reap()
                elif fd == self._watched or not self._follow():
                    self._leave()

    def _follow(self) -> bool:
        """Follow an order; false if there will be none."""
        try:
            packet, fds = self._receive(self._orders, _PACKET, 5)
        except OSError:
            return False
        if not packet:
            return False
        number, _, pid = packet.partition(b" ")
        try:
            if int(number) != self._answered[0]:
                self._answered = (int(number), self._answer(fds, pid))
        finally:
            for fd in fds:
                os.close(fd)
        try:
            self._orders.send(marshal.dumps(self._answered))
        except OSError:
            return False
        return True

    def _answer(self, fds: list[int], pid: bytes) -> tuple[float, ...]:
        try:
            return self._start(fds) if fds else self._wait(int(pid))
        except OSError as error:
            return (0, error.errno or 0)

    def _start(self, fds: list[int]) -> tuple[int, int]:
        with os.fdopen(os.dup(fds[0]), "rb") as file:
            program = marshal.load(file)
        report, failed = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.fork()
            if pid == 0:
                self._become(fds[1:], failed, *program)
            os.close(failed)
            failed = -1
            said = os.read(report, 16)
        finally:
            os.close(report)
            if failed >= 0:
                os.close(failed)
        if said:
            os.waitpid(pid, 0)
            return 0, int(said)
        self._tools.add(pid)
        return pid, 0

    def _become(self, fds: list[int], failed: int, *program: Any) -> NoReturn:
        argv, env, umask, soft = program
        directory, *stdio = fds
        try:
            signal.set_wakeup_fd(-1)
            for number, before in self._signals.items():
                signal.signal(number, before)
            os.setsid()
            self._prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != self._me:
                os._exit(_ENDED)
            resource.setrlimit(self._marks.LOCKS, (soft + os.getpid(), self._owner))
            for place, fd in enumerate(stdio):
                os.dup2(fd, place)
            os.umask(umask)
            os.fchdir(directory)
            _execute(argv, env)
        except OSError as error:
            os.write(failed, str(error.errno).encode())
        except ValueError:  # a null byte, or a variable without a name
            os.write(failed, str(errno.EINVAL).encode())
        finally:
            os._exit(_ENDED)

    def _wait(self, pid: int) -> tuple[int, float, float, int]:
        self._tools.discard(pid)
        _, status, usage = os.wait4(pid, 0)
        return status, usage.ru_utime, usage.ru_stime, usage.ru_maxrss

    def _reap(self) -> None:
        """Reap orphans that have ended."""
        seen = self._marks.look_at_all(self._marks.children(os.getpid()))
        for pid, each in seen.items():
            if each.ended and pid not in self._tools:
                os.waitpid(pid, os.WNOHANG)

    def _left(self) -> Any:
        marks = self._marks
        everyone = marks.look_at_all(marks.all_pids())
        below = marks.below(marks.children(os.getpid()), everyone)
        return {
            **marks.find(lambda mark: mark.owner == self._owner),
            **marks.living(below, everyone),
        }

    def _leave(self) -> NoReturn:
        self._tools.clear()
        self._marks.Hunt(self._left).run(self._reap)
        os._exit(0)


def _execute(argv: tuple[str, ...], env: dict[str, str]) -> NoReturn:
    """Become a program as the C library does it: what has no known format is a shell's."""
    name, *arguments = argv
    refused: OSError | None = None
    for folder in [""] if "/" in name else os.get_exec_path(env):
        path = os.path.join(folder, name)  # noqa: PTH118
        try:
            os.execve(path, argv, env)
        except OSError as error:
            if error.errno == errno.ENOEXEC:
                os.execve("/bin/sh", ["/bin/sh", path, *arguments], env)
            if error.errno not in (errno.ENOENT, errno.ENOTDIR) and refused is None:
                refused = error
    raise refused or OSError(errno.ENOENT, "not found")


_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


def _beside(name: str) -> Any:
    """Import a file of this folder."""
    path = os.path.join(os.path.dirname(__file__), f"{name}.py")  # noqa: PTH118, PTH120
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _prctl() -> Callable[..., object]:
    try:
        # The extension module of Mesh takes longer to load.
        import ctypes

        found: Callable[..., object] = ctypes.CDLL(None).prctl
    except (ImportError, AttributeError, OSError):
        # An interpreter without ctypes: what a tool started is found by its mark alone.
        return lambda *_: -1
    else:
        return found


def main(owner: int, watched: int, orders: int) -> NoReturn:
    """Serve a script until it has ended."""
    signals: dict[int, Any] = {signal.SIGCHLD: signal.SIG_DFL}
    for number in _IGNORED:
        before = signal.signal(number, signal.SIG_IGN)
        # What the script ignores, its tools do; Python itself ignores one.
        ignores = before == signal.SIG_IGN and number != signal.SIGPIPE
        signals[number] = signal.SIG_IGN if ignores else signal.SIG_DFL
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        prctl = _prctl()
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        os.setsid()
        os.chdir("/")
        for fd in (watched, orders):
            # Nothing of this is for tools.
            os.set_inheritable(fd, False)
        os.closerange(5, 1 << 20)
        minder = Minder(owner, watched, orders, signals, prctl)
        minder.survive()
        minder.run()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
