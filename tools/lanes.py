"""Sessions of nox side by side: as many at once as the machine has processors for, each with a log of its own.

Some sessions keep one processor busy (`narrow`), such as a type checker; the others run their tests in several processes.
Each kind has its lanes, and a lane runs one session after the other. A lane for narrow sessions that has none left helps
the others: it takes their last ones, with fewer processes. The session `wheels` comes first, alone: what it builds, the
others install.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

NARROW = "narrow"
LONG = "long"
FIRST = "wheels"
WORKERS = "MESH_TEST_WORKERS"
"""The variable that tells sessions how many processes of pytest to run their tests in."""
_NICER = 5
"""By how much narrow sessions give way to those whose tests have deadlines."""


@dataclass(frozen=True)
class Session:
    """A session, as nox lists it."""

    name: str
    narrow: bool = False
    long: bool = False
    """Whether it begins early, so that lanes end together."""


@dataclass(frozen=True)
class Shape:
    """How a machine is shared out."""

    wide: int
    """Lanes for sessions that run their tests in several processes."""
    workers: int
    """How many processes that is, for each of them."""
    narrow: int
    """Lanes for the other sessions."""

    @property
    def helpers(self) -> int:
        """How many processes a wide session has in a lane for narrow ones."""
        return max(1, self.workers * 2 // 3)

    @classmethod
    def of(cls, cores: int) -> Shape:
        """Three test processes for two processors, since tests wait too.

        Example:
            >>> Shape.of(2), Shape.of(8)
            (Shape(wide=1, workers=3, narrow=1), Shape(wide=2, workers=6, narrow=2))
        """
        wide = max(1, cores // 4)
        return cls(wide=wide, workers=max(2, cores * 3 // 2 // wide), narrow=max(1, min(3, cores // 4)))


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass
class Ended:
    """A session that has run."""

    session: Session
    status: int
    seconds: float
    log: Path
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    """The last lines of its log."""


@dataclass
class _Running:
    session: Session
    in_narrow: bool
    process: subprocess.Popen[bytes]
    log: IO[str]
    started: float
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=60))
    rest: bytes = b""


class Lanes:
    """Runs sessions; reports lines and ends as they come."""

    def __init__(
        self,
        shape: Shape,
        command: Callable[[Session], Sequence[str]],
        *,
        folder: Path,
        env: Mapping[str, str],
        on_line: Callable[[Session, str], None],
        on_end: Callable[[Ended], None],
    ) -> None:
        self._shape = shape
        self._command = command
        self._folder = folder
        self._env = env
        self._on_line = on_line
        self._on_end = on_end
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, _Running] = {}

    def run(self, sessions: Iterable[Session]) -> None:
        """Run all of them; return when the last has ended. None starts after the first if that one fails."""
        try:
            self._run(list(sessions))
        finally:
            # None is left where this was interrupted.
            for each in self._running.values():
                each.process.terminate()
                each.process.wait()

    def _run(self, waiting: list[Session]) -> None:
        first = [each for each in waiting if each.name == FIRST]
        if first:
            waiting.remove(first[0])
            self._start(first[0], in_narrow=False)
            if any(ended.status for ended in self._wait_for_all()):
                return
        while waiting or self._running:
            for session, in_narrow in self._next(waiting):
                waiting.remove(session)
                self._start(session, in_narrow=in_narrow)
            self._wait()

    def _wait_for_all(self) -> list[Ended]:
        ended: list[Ended] = []
        while self._running:
            ended += self._wait()
        return ended

    def _next(self, waiting: Sequence[Session]) -> list[tuple[Session, bool]]:
        """What begins now, and whether in a lane for narrow sessions."""
        narrow = [each for each in waiting if each.narrow]
        wide = [each for each in waiting if not each.narrow]
        chosen = [(each, False) for each in wide[: self._free(self._shape.wide, in_narrow=False)]]
        # At the front are those that will take longest.
        others = wide[len(chosen) :][::-1]
        free = self._free(self._shape.narrow, in_narrow=True)
        return chosen + [(each, True) for each in [*narrow, *others][:free]]

    def _free(self, lanes: int, *, in_narrow: bool) -> int:
        return max(0, lanes - sum(each.in_narrow == in_narrow for each in self._running.values()))

    def _start(self, session: Session, *, in_narrow: bool) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{session.name.replace('/', '-')}.log"
        nice = ["nice", "-n", str(_NICER)] if session.narrow else []
        workers = self._shape.helpers if in_narrow else self._shape.workers
        process = subprocess.Popen(
            [*nice, *self._command(session)],
            env={**self._env, WORKERS: str(workers)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        log = path.open("w", encoding="utf-8")
        running = _Running(session, in_narrow, process, log, time.monotonic())
        self._running[process.pid] = running
        self._selector.register(process.stdout, selectors.EVENT_READ, (process.pid, False))
        # A process that a session has left behind may hold its output open: the end of the session itself counts.
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, (process.pid, True))

    def _wait(self) -> list[Ended]:
        """Take what sessions print, and the ends of those that have ended."""
        found = []
        # Output first: after a session's end its descriptors are closed.
        for key, _ in sorted(self._selector.select(), key=lambda each: each[0].data[1]):
            pid, ended = key.data
            self._take(self._running[pid], key.fd if not ended else None)
            if ended:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                found.append(self._end(self._running.pop(pid)))
        return found

    def _take(self, running: _Running, fd: int | None) -> None:
        """Take what there is to read; from a session that has ended (``fd`` is ``None``) all of it."""
        assert running.process.stdout is not None
        if running.process.stdout.closed:
            return
        while True:
            try:
                data = os.read(running.process.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                if fd is not None:
                    break
                data = b""
            *lines, running.rest = (running.rest + data).split(b"\n")
            if not data and running.rest:
                lines, running.rest = [*lines, running.rest], b""
            for raw in lines:
                line = raw.decode("utf-8", "replace") + "\n"
                running.log.write(line)
                running.tail.append(line.rstrip("\n"))
                self._on_line(running.session, line)
            if not data:
                self._selector.unregister(running.process.stdout)
                running.process.stdout.close()
                break
        running.log.flush()

    def _end(self, running: _Running) -> Ended:
        status = running.process.wait()
        running.log.close()
        seconds = time.monotonic() - running.started
        ended = Ended(running.session, status, seconds, Path(running.log.name), running.tail)
        self._on_end(ended)
        return ended
