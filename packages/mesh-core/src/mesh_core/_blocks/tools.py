"""Run other programs under limits, and end them together with everything that they started.

TOOL-1: when :func:`run_tool` returns or raises, nothing of the tool still runs, except what was detached.
TOOL-2: the first process of a tool is waited for last. Until then its pid, which is part of the mark of all its descendants, is
not reused.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from mesh_core._blocks.in_thread import in_thread
from mesh_core._blocks.tool_starts import Ended, Here, Starter, ToolMinder, can_be_minded, inherited
from mesh_core._common.checks import check_positive
from mesh_core._common.current import holder
from mesh_core._common.errors import MeshError
from mesh_core._system import process_marks
from mesh_core._system.child_status import require_child_status
from mesh_core._system.process_marks import Found, Hunt, Mark

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_CHUNK = 1 << 16
_KEPT_OUTPUT = 1 << 20
_LOOK_S = 0.02
# Checking takes at most 1 / n of a core.
_SHARE = 10


class ToolLimit(StrEnum):
    """The limit that ended a tool."""

    TIMEOUT = "timeout"
    MEMORY = "memory"
    PIDS = "pids"


@dataclass(frozen=True, slots=True)
class ToolUsage:
    """Resources that a tool and everything that it started have used."""

    wall_s: float
    """Seconds from start to end."""
    cpu_s: float
    """Processor time in seconds, user and system."""
    peak_memory: int
    """Bytes: the peak of its largest process, or the highest sum of all processes that was measured, whichever is more. Never less than
    the size of the process that started the tool, because the tool begins as a copy of that: the actor's process, or in a script a small one."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The outcome of a tool."""

    argv: tuple[str, ...]
    returncode: int
    """The exit status; negative for a signal."""
    stdout: bytes
    stderr: bytes
    truncated: bool
    """Whether it wrote more than was kept in ``stdout`` or ``stderr``."""
    limit: ToolLimit | None
    """The limit that ended it, if one did."""
    usage: ToolUsage

    @property
    def ok(self) -> bool:
        """Whether it ended by itself, with status 0."""
        return self.returncode == 0 and self.limit is None

    @property
    def text(self) -> str:
        """Its stdout as text; bytes that are not UTF-8 are replaced."""
        return self.stdout.decode(errors="replace")


def run_tool(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout: float | None = None,
    memory: int | None = None,
    pids: int | None = None,
    input: bytes | str | None = None,  # noqa: A002 - as subprocess.run has it
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str | None] | None = None,
    max_output: int = _KEPT_OUTPUT,
) -> ToolResult:
    r"""Run a program and wait for its end; everything that it has started ends with it.

    >>> from mesh_core import run_tool
    >>> run_tool(["echo", "hello"], timeout=10).text
    'hello\n'
    >>> run_tool(["sh", "-c", "sleep 60 & sleep 60"], timeout=0.1).limit
    <ToolLimit.TIMEOUT: 'timeout'>

    It works in scripts and in actors. It blocks; in a coroutine use :func:`run_tool_async`. No shell is used.
    When the program ends or exceeds a limit, or the wait is interrupted, everything that it has started is killed, daemons
    included. :func:`detach` exempts a process.

    Args:
        argv: the program and its arguments; it is searched for in ``PATH``.
        timeout: seconds after which it is killed.
        memory: bytes of memory that its processes may use together. They are checked at most fifty times a second, so
            a program that allocates quickly may exceed the limit for a moment.
        pids: how many processes it may have at once, itself included; checked in the same way.
        input: its stdin; empty by default.
        cwd: its working directory.
        env: changes to the environment; ``None`` removes a variable.
        max_output: how many bytes of stdout, and of stderr, are kept: the first ones.

    Raises:
        OSError: it cannot be started, for example ``FileNotFoundError``.
    """
    request = _Request.of(argv, timeout, memory, pids, data=input, cwd=cwd, env=env, max_output=max_output)
    return _Run(request, -1).run()


async def run_tool_async(
    argv: Sequence[str | os.PathLike[str]],
    *,
    timeout: float | None = None,  # noqa: ASYNC109 - it limits the tool, and the result reports it
    memory: int | None = None,
    pids: int | None = None,
    input: bytes | str | None = None,  # noqa: A002 - as subprocess.run has it
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str | None] | None = None,
    max_output: int = _KEPT_OUTPUT,
) -> ToolResult:
    r"""Like :func:`run_tool`, without blocking the event loop. If this is cancelled, the tool is killed.

    >>> import asyncio
    >>> from mesh_core import run_tool_async
    >>> asyncio.run(run_tool_async(["echo", "hello"])).text
    'hello\n'
    """
    request = _Request.of(argv, timeout, memory, pids, data=input, cwd=cwd, env=env, max_output=max_output)
    cancel = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        return await in_thread(_Run(request, cancel).run, "mesh-tool", lambda: os.eventfd_write(cancel, 1))
    finally:
        os.close(cancel)


def run_tool_as(
    mark: Mark | None,
    argv: Sequence[str],
    *,
    timeout: float | None,
    memory: int | None,
    pids: int | None,
    data: bytes | str | None,
    cwd: str | None,
    env: Mapping[str, str | None] | None,
    max_output: int,
) -> ToolResult:
    """Like :func:`run_tool`, for a process whose mark is managed elsewhere."""
    request = _Request.of(argv, timeout, memory, pids, data=data, cwd=cwd, env=env, max_output=max_output)
    return _Run(request, -1).run_by(Here(None if mark is None else (mark.soft, mark.owner)))


def detach(pid: int) -> None:
    """Let a process, and everything that it has started or will start, outlive the actor that started it.

    >>> import subprocess
    >>> from mesh_core import Actor, detach, endpoint, this_host
    >>> class Board(Actor):
    ...     @endpoint
    ...     def show(self) -> int:
    ...         viewer = subprocess.Popen(["sleep", "1"])
    ...         detach(viewer.pid)
    ...         return viewer.pid

    What an actor starts ends with the actor's process; what a tool starts ends with the tool. Nobody ends a detached
    process: that is up to the program that detaches it. The first process of a tool, for which :func:`run_tool`
    waits, cannot be detached from it.

    Args:
        pid: a child of this process, or another descendant.

    Raises:
        ProcessLookupError: there is no such process.
        PermissionError: it belongs to another user.
    """
    if pid == os.getpid():
        raise MeshError("a process cannot detach itself: it ends with its owner. Detach what it has started.")
    if process_marks.look(pid) is None:
        raise ProcessLookupError(f"there is no process {pid} to detach")
    process_marks.detach_one(pid)
    # Its descendants have their own marks. Those that it starts from now on are detached already.
    while True:
        everyone = process_marks.look_at_all(process_marks.all_pids())
        due = [
            each
            for each in process_marks.descendants([pid], everyone)
            if each != pid and (mark := process_marks.read(each)) is not None and not mark.detached
        ]
        if not due:
            return
        for each in due:
            with suppress(ProcessLookupError):
                process_marks.detach_one(each)


def checked_words(argv: Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return the program and its arguments as strings."""
    if isinstance(argv, str | bytes):
        raise TypeError(
            f"argv must be a list of strings, got {argv!r}. No shell is used; to use one, run "
            '["sh", "-c", command].'
        )
    return tuple(os.fsdecode(word) for word in argv)


@dataclass(frozen=True, slots=True)
class _Request:
    """The checked arguments of a run."""

    argv: tuple[str, ...]
    timeout: float | None
    memory: int | None
    pids: int | None
    input: bytes
    cwd: str | None
    env: list[tuple[str, str]] | None
    max_output: int

    @classmethod
    def of(
        cls,
        argv: Sequence[str | os.PathLike[str]],
        timeout: float | None,
        memory: int | None,
        pids: int | None,
        *,
        data: bytes | str | None,
        cwd: str | os.PathLike[str] | None,
        env: Mapping[str, str | None] | None,
        max_output: int,
    ) -> _Request:
        words = checked_words(argv)
        if not words:
            raise ValueError("argv must name a program, got an empty list")
        check_positive(timeout=timeout, memory=memory, pids=pids)
        if max_output < 0:
            raise ValueError(f"max_output must not be negative, got {max_output!r}")
        folder = None if cwd is None else os.fsdecode(cwd)
        if folder is not None and not Path(folder).is_dir():
            raise NotADirectoryError(f"cwd={folder!r} is not a folder")
        whole: list[tuple[str, str]] | None = None
        if env is not None:
            changed = {**os.environ, **env}
            whole = [(name, value) for name, value in changed.items() if value is not None]
        given = data.encode() if isinstance(data, str) else data or b""
        return cls(words, timeout, memory, pids, given, folder, whole, max_output)


class _Starts:
    """Who starts the tools of this process.

    Workers start their own: these have the worker's mark, and the fork server and its minder end what is left of them. A script has a minder.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._owner = 0
        self._minder: ToolMinder | None = None

    def begin(self) -> Starter:
        """Return who is to start a tool."""
        process = holder().process
        own = process_marks.read(0)
        worker = process is not None and process.in_charge and not process.identity.is_script
        if worker and own is not None and own.tool == 0 and not own.detached:
            return Here((own.soft, own.owner), reaper=os.getppid())
        with self._lock:
            if self._pid != os.getpid():
                # This may be a forked copy, whose parent's minder is not its own.
                self._pid, self._minder = os.getpid(), None
                try:
                    self._owner = process_marks.new_owner()
                except OSError:
                    self._owner = 0
            if not self._owner:
                return Here(None)
            minder, now = self._minder, inherited()
            if minder is not None and not (minder.inherited == now and minder.is_alive()):
                if minder.tools == 0:
                    minder.close()
                # Another one ends by itself, after its last tool.
                minder = self._minder = None
            if minder is None:
                if not can_be_minded():
                    return Here((process_marks.soft_of(0), self._owner))
                minder = self._minder = ToolMinder(self._owner, now)
            minder.tools += 1
            return minder

    def end(self, start: Starter) -> None:
        """Note that nothing is left of a tool."""
        if not isinstance(start, ToolMinder):
            return
        with self._lock:
            start.tools -= 1
            if start.tools == 0 and start is not self._minder and self._pid == os.getpid():
                start.close()


class _Output:
    """The output of a tool on one descriptor."""

    def __init__(self, limit: int) -> None:
        self.kept = bytearray()
        self.truncated = False
        self._limit = limit

    def read(self, fd: int) -> bool:
        """Read what is available. Returns whether there may be more later."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return True
        room = self._limit - len(self.kept)
        self.kept += data[:room]
        self.truncated = self.truncated or len(data) > room
        return bool(data)

    def read_rest(self, fd: int) -> None:
        """Read the rest, once all writers have ended."""
        while True:
            before = len(self.kept)
            if not self.read(fd) or self.truncated or len(self.kept) == before:
                return


class _Run:
    """A tool from its start to its end."""

    def __init__(self, request: _Request, cancel: int) -> None:
        self._request = request
        self._cancel = cancel
        self._pid = 0
        self._start: Starter = Here(None)
        self._limit: ToolLimit | None = None
        self._out = _Output(request.max_output)
        self._err = _Output(request.max_output)
        self._cpu_left = 0.0
        self._peak = 0
        self._beside: set[int] = set()
        self._next_look = 0.0
        self._ended = False

    def run(self) -> ToolResult:
        require_child_status(f"the tool {self._request.argv[0]!r}")
        starts = holder().slots.of(_Starts)
        start = starts.begin()
        try:
            return self.run_by(start)
        finally:
            starts.end(start)

    def run_by(self, start: Starter) -> ToolResult:
        """Run the tool as a process that this starts."""
        self._start = start
        fds: list[int] = []
        try:
            stdin, stdout, stderr = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
            fds = [*stdin, *stdout, *stderr]
            request = self._request
            began = time.monotonic()
            theirs = (stdin[0], stdout[1], stderr[1])
            self._pid = start.start(request.argv, request.env, request.cwd, theirs)
            for fd in theirs:
                os.close(fd)
                fds.remove(fd)
            ours = (stdin[1], stdout[0], stderr[0])
            try:
                self._talk(ours, fds, began)
            finally:
                ended = self._finish()
            wall = time.monotonic() - began
            for fd, output in ((stdout[0], self._out), (stderr[0], self._err)):
                if fd in fds:
                    output.read_rest(fd)
            return ToolResult(
                argv=request.argv,
                returncode=os.waitstatus_to_exitcode(ended.status),
                stdout=bytes(self._out.kept),
                stderr=bytes(self._err.kept),
                truncated=self._out.truncated or self._err.truncated,
                limit=self._limit,
                usage=ToolUsage(
                    wall_s=wall,
                    cpu_s=ended.cpu_s + self._cpu_left,
                    peak_memory=max(ended.peak, self._peak),
                ),
            )
        finally:
            for fd in fds:
                os.close(fd)

    def _talk(self, ours: tuple[int, int, int], fds: list[int], began: float) -> None:
        """Pass its input and output on until it ends, a limit is exceeded, or this is interrupted."""
        stdin, stdout, stderr = ours
        ended = os.pidfd_open(self._pid)
        fds.append(ended)
        poll = select.poll()
        for fd in (stdout, stderr, ended):
            poll.register(fd, select.POLLIN)
        poll.register(stdin, select.POLLOUT)
        if self._cancel >= 0:
            poll.register(self._cancel, select.POLLIN)
        for fd in ours:
            os.set_blocking(fd, False)
        given = memoryview(self._request.input)
        outputs = {stdout: self._out, stderr: self._err}

        def go_on(fd: int) -> bool:
            nonlocal given
            if fd != stdin:
                return outputs[fd].read(fd)
            given = _write(stdin, given)
            return len(given) > 0

        while True:
            pause = self._look(began)
            if self._limit is not None:
                return
            for fd, _ in poll.poll(pause):
                if fd in (ended, self._cancel):
                    self._ended = fd == ended
                    return
                if not go_on(fd):
                    poll.unregister(fd)
                    fds.remove(fd)
                    os.close(fd)

    def _look(self, began: float) -> float | None:
        """Check the limits. Returns the milliseconds until the next check."""
        now = time.monotonic()
        due = []
        request = self._request
        if request.timeout is not None:
            due.append(began + request.timeout)
            if now >= due[0]:
                self._limit = ToolLimit.TIMEOUT
                return None
        if request.memory is not None or request.pids is not None:
            if now >= self._next_look:
                self._compare()
                self._next_look = now + max(_LOOK_S, _SHARE * (time.monotonic() - now))
            due.append(self._next_look)
        return max(0.0, min(due) - now) * 1000 + 1 if due else None

    def _matches(self, mark: Mark) -> bool:
        return mark.owner == self._start.owner and mark.tool == self._pid

    def _find(self) -> Found:
        """All living processes of the tool."""
        found = process_marks.find(self._matches, (self._pid,) if self._ended else ())
        if not found and not self._ended:
            # It is nobody's, or has lost its mark.
            everyone = process_marks.look_at_all(process_marks.all_pids())
            found = process_marks.living(process_marks.below([self._pid], everyone), everyone)
        return self._noted(found)

    def _strays(self) -> Found:
        return self._noted(self._start.strays())

    def _noted(self, found: Found) -> Found:
        """Note which of them this process has to wait for: a tool may make children of whoever has started it."""
        me = os.getpid()
        self._beside.update(pid for pid, seen in found.items() if seen.parent == me and pid != self._pid)
        return found

    def _compare(self) -> None:
        request = self._request
        # Count first, which is fast, because a fork bomb keeps forking meanwhile. The count may include processes that have ended.
        if (
            request.pids is not None
            and process_marks.count(self._matches) <= request.pids
            and request.memory is None
        ):
            return
        found = self._find()
        self._peak = max(self._peak, memory := sum(map(_resident, found)))
        if request.pids is not None and len(found) > request.pids:
            self._limit = ToolLimit.PIDS
        elif request.memory is not None and memory > request.memory:
            self._limit = ToolLimit.MEMORY

    def _end(self) -> None:
        """Kill what is left of it."""
        if self._limit is ToolLimit.PIDS:
            self._kill_group()
        left = self._find()
        for pid in left:
            self._cpu_left += 0.0 if pid == self._pid else _processor_time(pid)
        self._peak = max(self._peak, sum(map(_resident, left)))
        if left:
            self._kill_group()
            Hunt(self._find, grace=0.0).run()
        # They may be another tool's, which has left them behind: nothing that changes its mark outlives a parent (TOOL-3).
        Hunt(self._strays, grace=0.0).run()
        # Even if it was detached: this is the process that is waited for. It is gone if its minder was killed.
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def _finish(self) -> Ended:
        """Kill what is left, and wait for the first process. A further Ctrl-C is raised only after that (TOOL-1)."""
        interrupt: BaseException | None = None
        ended: Ended | None = None
        while ended is None:
            try:
                self._end()
                ended = self._start.wait(self._pid)
                # What it had begun came to the subreaper with its end.
                Hunt(self._strays, grace=0.0).run()
            except (KeyboardInterrupt, SystemExit) as error:
                interrupt = error
        for pid in self._beside:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        if interrupt is not None:
            raise interrupt
        return ended

    def _kill_group(self) -> None:
        """Kill the whole process group at once, so that a fork bomb cannot escape."""
        if not process_marks.detached_of(self._start.owner):
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)


def _write(fd: int, data: memoryview) -> memoryview:
    """Write what fits, and return the rest; nothing if the reader has gone."""
    try:
        return data[os.write(fd, data[:_CHUNK]) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return data[:0]


def _resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{process_marks.task_of(pid)}/statm").read_bytes().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def _processor_time(pid: int) -> float:
    try:
        fields: list[Any] = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / _TICKS
