"""The processes in a box: the keeper, which is the first, and the worker, which runs what the owner asks for.

The keeper only checks the worker's limits, keeps the end of its output, and reports its end. If the box has its own process
namespace, the keeper is the ``init`` there: the other processes cannot harm it, and the kernel ends them with it.
"""

from __future__ import annotations

import gc
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from mesh_core import _serialize
from mesh_core._blocks.sandboxes import plain, wire
from mesh_core._blocks.sandboxes.isolation import Isolation
from mesh_core._blocks.sandboxes.memory import Memory
from mesh_core._blocks.sandboxes.outcome import tell_exception
from mesh_core._native import adopt_orphans, die_with_parent, let_look
from mesh_core._system import process_marks
from mesh_core._system.process_marks import Found, Hunt

_PAGE = os.sysconf("SC_PAGE_SIZE")
_KEPT = 16 << 10
_BUSY_LOOK_S, _IDLE_LOOK_S = 0.02, 0.25
# Checking takes at most 1 / n of a core.
_SHARE = 10


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a box's worker, and of what it starts."""

    memory: int | None
    pids: int | None
    cpu: float | None
    file_size: int | None


class Keeper:
    """The first process of a box, once that is set up."""

    def __init__(self, told: socket.socket, limits: Limits, isolation: Isolation) -> None:
        self._told = told
        self._limits = limits
        self._alone = Isolation.PROCESSES in isolation
        self._own_objects = Isolation.IPC in isolation
        self._output = b""
        self._limit = ""
        # Its pid as /proc has it, which may be that of another namespace.
        self._me = int(os.readlink("/proc/self"))  # noqa: PTH115 - a number

    def run(self, connection: socket.socket, folder: str) -> NoReturn:
        """Start the worker, and watch the box until it ends or the owner ends it."""
        if not self._alone:
            adopt_orphans()
        output, written = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        me = os.getpid()
        self._memory = Memory(system_v=self._own_objects)
        # Before there is anybody who could: the other processes of the box have the same user.
        with suppress(OSError):
            let_look(False)
        worker = os.fork()
        if worker == 0:
            os.close(output)
            with suppress(OSError):
                let_look(True)
            work(connection, self._told, folder, written, self._limits, keeper=me)
        connection.close()
        os.close(written)
        ended = os.pidfd_open(worker)
        status = self._keep(worker, ended, output)
        self._finish(worker, status, output)

    def _keep(self, worker: int, ended: int, output: int) -> int | None:
        """Return the worker's status, or ``None`` if the box must be ended."""
        poll = select.poll()
        for fd in (ended, output, self._told.fileno()):
            poll.register(fd, select.POLLIN)
        pause: float | None = None  # no checks until the box is taken
        due = 0.0
        while True:
            left = None if pause is None else max(0.0, due - time.monotonic()) * 1000 + 1
            for fd, events in poll.poll(left):
                if fd == self._told.fileno():
                    word = self._told.recv(16)
                    if word not in (b"busy", b"idle"):
                        gone, status = os.waitpid(worker, os.WNOHANG)
                        return status if gone else None
                    pause = _BUSY_LOOK_S if word == b"busy" else _IDLE_LOOK_S
                    due = min(due, time.monotonic() + pause)
                elif fd == output:
                    if not self._read(output) and events & select.POLLHUP:
                        poll.unregister(output)
                else:
                    return os.waitpid(worker, 0)[1]
            now = time.monotonic()
            if pause is not None and now >= due:
                self._reap(worker)
                if self._exceeds():
                    return None
                due = now + max(pause, _SHARE * (time.monotonic() - now))

    def _read(self, output: int) -> bool:
        """Read output, and keep the end of it."""
        try:
            data = os.read(output, 1 << 16)
        except BlockingIOError:
            return False
        self._output = (self._output + data)[-_KEPT:]
        return bool(data)

    def _exceeds(self) -> bool:
        memory, pids = self._limits.memory, self._limits.pids
        if memory is None and pids is None:
            return False
        found = self._below()
        if pids is not None and len(found) > pids:
            self._limit = "pids"
        elif memory is not None and self._memory.exceeds(found, memory):
            self._limit = "memory"
        return bool(self._limit)

    def _below(self) -> Found:
        """All living processes of the box except this one."""
        everyone = process_marks.look_at_all(process_marks.all_pids())
        return process_marks.living(process_marks.descendants([self._me], everyone) - {self._me}, everyone)

    def _reap(self, worker: int) -> None:
        """Reap orphans; the worker is waited for elsewhere."""
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid == worker:
                    return
                os.waitpid(ended.si_pid, 0)

    def _finish(self, worker: int, status: int | None, output: int) -> NoReturn:
        """End what is left of the box, report, and exit."""
        if not self._alone:
            Hunt(self._below, grace=0.0).run(lambda: self._reap(worker))
        while self._read(output):
            pass
        report = {
            "ended": None if status is None else os.waitstatus_to_exitcode(status),
            "limit": self._limit,
            "output": wire.ending(self._output[-_KEPT:].decode(errors="replace")),
        }
        with suppress(OSError):
            wire.send_packet(self._told, report)
        os._exit(0)


# --- the worker ------------------------------------------------------------------------------------------------


def work(
    connection: socket.socket, told: socket.socket, folder: str, output: int, limits: Limits, *, keeper: int
) -> NoReturn:
    """Be a worker: run what the owner asks for, one request after the other."""
    status = 1
    try:
        die_with_parent(keeper)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for fd, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(fd, number)
        # This end has its own file description: here, writes block when the pipe is full.
        os.set_blocking(1, True)
        os.close(output)
        os.close(nothing)
        os.chdir(folder)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _seed()
        _limit(limits)
        # A rehearsal: most of the time of a first call goes into touching memory for the first time.
        _answer([bytearray(part) for part in _serialize.dumps(("call", len, ("",), {}))[:1]], limits)
        gc.enable()
        serve = connection.detach()
        wire.send_packet(told, {"ready": True})
        told.close()
        while (parts := wire.read_parts(serve)) is not None:
            wire.write_answer(serve, _answer(parts, limits))
        status = 0
    except BaseException as error:  # noqa: BLE001 - the last line of defence of a process
        with suppress(BaseException):
            sys.stderr.write(f"mesh: the worker of a sandbox has failed: {error!r}\n")
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _seed() -> None:
    from mesh_core._common.import_hooks import Afterwards
    from mesh_core._system.seeds import Seeds, seed_process

    seed_process(Seeds(), Afterwards())


def _limit(limits: Limits) -> None:
    pages = int(Path("/proc/self/statm").read_bytes().split()[5])
    wanted: list[tuple[int, int]] = [(resource.RLIMIT_CORE, 0)]
    if limits.memory is not None:
        wanted.append((resource.RLIMIT_DATA, pages * _PAGE + limits.memory))
    if limits.file_size is not None:
        wanted.append((resource.RLIMIT_FSIZE, limits.file_size))
    for kind, most in wanted:
        _, hard = resource.getrlimit(kind)
        if hard == resource.RLIM_INFINITY or most < hard:
            resource.setrlimit(kind, (most, most))
    if limits.cpu is not None:
        seconds = max(1, -int(-limits.cpu // 1))
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        if hard == resource.RLIM_INFINITY or seconds < hard:
            # SIGXCPU first, which tells the cause; SIGKILL a second later, if that is ignored.
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))


def _answer(parts: list[bytearray], limits: Limits) -> bytes:
    try:
        told = _serialize.loads(parts[0], parts[1:])
        if told[0] == "tool":
            return plain.encode(("tool", _run_tool(told[1], limits)))
        _, function, args, kwargs = told
        value = function(*args, **kwargs)
        try:
            data = plain.encode(("value", value))
            if len(data) > wire.LONGEST_ANSWER:
                return plain.encode(("refused", f"result has {len(data)} bytes"))
            return data
        except plain.NotPlain as error:
            return plain.encode(("refused", str(error)))
    except BaseException as error:  # noqa: BLE001 - raised by whoever has asked
        return _raised(error)
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()


def _raised(error: BaseException) -> bytes:
    told = tell_exception(error)
    with suppress(plain.NotPlain):
        data = plain.encode(("raised", told))
        if len(data) <= wire.LONGEST_ANSWER:
            return data
    # Each part can be sent, but together they are too much.
    return plain.encode(("raised", {**told, "args": None, "fields": {}}))


def _run_tool(options: dict[str, Any], limits: Limits) -> dict[str, Any]:
    from mesh_core._blocks.tools import run_tool_as

    result = run_tool_as(process_marks.read(0), memory=limits.memory, pids=limits.pids, **options)
    return {**asdict(result), "limit": result.limit and str(result.limit)}
