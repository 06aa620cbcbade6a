"""The processes below a fork server: its workers, the processes that these started, and the minder.

The kernel makes orphans of the workers children of the fork server (a child subreaper). Every worker has a mark
(``process_marks.py``) that all its descendants inherit. After a worker ended, everything with its mark is ended, in rounds
between which the fork server continues its work. The minder is a copy of the fork server, forked before anything was
imported, that does the same if the fork server is killed. It also ends what others of this user have left, whose minders were killed as well.

BRD-1: a worker's number is reused only when nothing with its mark is left.
"""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Collection, Iterator
from typing import NoReturn

from mesh_core._native import adopt_orphans, name_process
from mesh_core._system import process_marks
from mesh_core._system.process_marks import Found, Hunt


class Brood:
    """All processes below a fork server. Created in a process with one thread and no children."""

    def __init__(self) -> None:
        self._wake = (-1, -1)
        self._numbers: dict[int, int] = {}  # of workers, by pid
        self._taken: set[int] = set()
        self._hunts: dict[int, Hunt] = {}  # by the number of a worker that has ended
        self._minder = 0
        try:
            self._owner = process_marks.new_owner()
            adopt_orphans()
        except OSError:
            # A sandbox that does not support this: workers end as usual, and what they leave behind is not ended.
            self._owner = 0

    @property
    def owner(self) -> int:
        """The mark of all processes created here, or 0."""
        return self._owner

    def is_free(self, number: int) -> bool:
        """Return whether no descendant is left of the worker that had this number."""
        return number not in self._taken

    def start_minder(self) -> None:
        """Fork the minder."""
        if not self._owner:
            return
        fork_server = os.pidfd_open(os.getpid())
        try:
            self._minder = os.fork()
        except OSError:
            self._minder = 0  # nothing can be forked now; the fork server does without one
        else:
            if self._minder == 0:
                try:
                    os.setsid()
                    # First of all: what has no mark is taken for a stray.
                    process_marks.exempt_self()
                    signal.set_wakeup_fd(-1)
                    name_process(
                        "mesh: minder of a fork server (mesh_core._process.fork_server)", "mesh-minder"
                    )
                finally:
                    process_marks.mind(self._owner, fork_server, _sweep)
        os.close(fork_server)

    def listen(self) -> int:
        """Return a descriptor that becomes readable when any child ends."""
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._wake = (read, write)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        return read

    def take_number(self) -> int:
        """Return a number for a worker that is about to be forked."""
        number = 1
        while number in self._taken:
            number += 1
        self._taken.add(number)
        return number

    def give_number(self, number: int) -> None:
        """Release a number: the worker was not created, or nothing of it is left."""
        self._taken.discard(number)

    def add(self, pid: int, number: int) -> None:
        """Record that a worker was created."""
        self._numbers[pid] = number

    def fledge(self, number: int) -> None:
        """Turn this copy of the fork server into a worker: all its descendants will have its mark."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in self._wake:
            os.close(fd)
        if self._owner:
            process_marks.mark_worker(self._owner, number)

    def ended(self) -> Iterator[tuple[int, int]]:
        """Yield the children that ended, and their statuses."""
        try:
            while os.read(self._wake[0], 4096):
                pass
        except BlockingIOError:
            pass
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self._minder:
                self.start_minder()
            number = self._numbers.pop(pid, None)
            if number is not None:
                self._hunts[number] = Hunt(lambda number=number: self._left_by(number))  # type: ignore[misc]
            yield pid, status

    def hunt(self, workers: Collection[int]) -> float | None:
        """Continue the hunts. Return how long to wait until the next round, if there is one."""
        if not self._hunts:
            return None
        if not self._strays(workers):
            # Almost always. What an ended worker left is among the fork server's children, or below them.
            self._taken.difference_update(self._hunts)
            self._hunts.clear()
            return None
        pauses = []
        for number, hunt in list(self._hunts.items()):
            pause = hunt.step()
            if pause is None:
                del self._hunts[number]
                self.give_number(number)
            else:
                pauses.append(pause)
        return min(pauses, default=None)

    def leave(self, workers: Collection[int]) -> NoReturn:
        """End, after everything below has ended."""
        waited = set(workers)
        while waited:
            waited.discard(self._wait(0))
        if self._owner and self._strays(()):
            Hunt(self._left).run(self._reap)
        if self._minder:
            os.kill(self._minder, signal.SIGKILL)
            os.waitpid(self._minder, 0)
        os._exit(0)

    def _wait(self, options: int) -> int:
        pid, _ = os.waitpid(-1, options)
        if pid == self._minder:
            self._minder = 0
        return pid

    def _reap(self) -> None:
        try:
            while self._wait(os.WNOHANG):
                pass
        except ChildProcessError:
            pass

    def _strays(self, known: Collection[int]) -> set[int]:
        """Return the children that are neither workers nor the minder."""
        children = process_marks.children(os.getpid())
        return {pid for pid in children if pid not in known and pid != self._minder}

    def _left_by(self, number: int) -> Found:
        """Return the processes that an ended worker left behind."""
        return process_marks.find(lambda mark: mark.owner == self._owner and mark.worker == number)

    def _left(self) -> Found:
        """Return everything below, including processes with another owner's mark."""
        marked = process_marks.find(lambda mark: mark.owner == self._owner)
        if marked:
            return marked
        everyone = process_marks.look_at_all(process_marks.all_pids())
        return process_marks.living(process_marks.below(self._strays(()), everyone), everyone)


def _sweep() -> None:
    """Remove what killed processes of this user have left."""
    process_marks.sweep().run()
    # It knows of more than this room.
    importlib.import_module("mesh_core._bundle.leftovers").sweep()
