"""Functions that are called when a future is done (:meth:`Future.add_done_callback`).

CBK-1: each is called once, however the future ends, and also if it was done already.
CBK-2: a call does not count as looking at the future: a failure that the function does not ask for is reported as unseen.

Each process has one thread for this, ``mesh-callbacks``. It starts with the first function, sleeps until one of the futures is
done, and never reads incoming messages.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh_core._futures.future import Future
    from mesh_core._process.process import Process

# The token that wakes the thread without a future.
_WAKE = 0

# The number of deadlines that are kept without checking whether their futures are done.
_FEW = 64

# How long the end of the runtime waits for functions that are running.
_MOMENT = 1.0


def add(future: Future[Any], function: Callable[[Any], object]) -> None:
    """Call ``function`` with ``future`` when it is done."""
    if not callable(function):
        raise TypeError(f"add_done_callback() must be given a function of the future, got {function!r}")
    if future.done():
        try:
            function(future)
        except Exception as error:  # noqa: BLE001 - logged, as on the other thread
            _log(error, future)
        return
    process = future._process
    process.slots.of(Callbacks, lambda: Callbacks(process)).add(future, function)


def _log(error: BaseException, future: Future[Any]) -> None:
    from mesh_core._serialize.exceptions import format_traceback

    # Text only: a log record that held the error would keep the future alive.
    logging.getLogger("mesh").error(
        "a done-callback of %s raised an exception; the future is not affected:\n%s",
        future._what(),
        format_traceback(error),
    )


class Callbacks:
    """The done-callbacks of one process; an instance is kept in its slots."""

    def __init__(self, process: Process) -> None:
        self._list = process.runtime.completion()
        self._pid = process.pid
        # Already done: it puts a token into the list whenever it is asked to.
        self._wake = process.runtime.completion()
        self._wake.set(None, False, 0)
        # Reentrant: a garbage collection may run other code while it is held.
        self._lock = threading.RLock()
        self._waiting: dict[int, tuple[Future[Any], Callable[[Any], object]]] = {}
        self._last = _WAKE
        self._deadlines: list[tuple[float, int]] = []
        self._thread: threading.Thread | None = None
        self._ending = process.closed
        """Whether the thread ends as soon as no callback is left."""
        process.hooks.closed.append(self._end)

    def add(self, future: Future[Any], function: Callable[[Any], object]) -> None:
        if os.getpid() != self._pid:
            # In a forked copy, the lock may never be released. This call raises an error there.
            future._listen(self._list, _WAKE)
        # Without the lock: a gathering takes its own lock, under which other code may run.
        due = future._due()
        with self._lock:
            self._last += 1
            token = self._last
            future._listen(self._list, token)
            self._waiting[token] = (future, function)
            self._note(due, token)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mesh-callbacks", daemon=True)
                self._thread.start()

    def _note(self, due: float | None, token: int) -> None:
        """Make :meth:`_expire` check a future at the time ``due``."""
        if due is not None:
            if len(self._deadlines) > _FEW + 2 * len(self._waiting):
                # Most of them are of futures that have been done for a while.
                self._deadlines = [each for each in self._deadlines if each[1] in self._waiting]
                heapq.heapify(self._deadlines)
            heapq.heappush(self._deadlines, (due, token))
            if self._deadlines[0] == (due, token):
                self._wake.note(self._list, _WAKE)

    def _run(self) -> None:
        limit = None
        while True:
            self._list.wait_aside(limit)
            for token in self._list.take():
                self._tell(token)
            limit = self._expire()
            with self._lock:
                if self._ending and not self._waiting:
                    self._thread = None
                    return

    def _tell(self, token: int) -> None:
        with self._lock:
            found = self._waiting.get(token)
        if found is None:
            return
        future, function = found
        try:
            if not future._progress():
                future._listen(self._list, token)
                return
        except BaseException:
            logging.getLogger("mesh").exception("cannot tell whether %s is done", future._what())
        with self._lock:
            del self._waiting[token]
        del found
        try:
            function(future)
        except BaseException as error:  # noqa: BLE001 - the user's code; the other callbacks must still run
            _log(error, future)

    def _expire(self) -> float | None:
        """End futures whose deadline has passed; returns the seconds until the next deadline."""
        while True:
            with self._lock:
                if not self._deadlines:
                    return None
                due, token = self._deadlines[0]
                found = self._waiting.get(token)
                if found is not None and due > (now := time.monotonic()):
                    return due - now
                heapq.heappop(self._deadlines)
            if found is not None:
                # This puts its token into the list, like any other end. A gathering may have further deadlines.
                found[0]._expire()
                due_next = None if found[0].done() else found[0]._due()
                with self._lock:
                    self._note(due_next, token)

    def _end(self) -> None:
        """The runtime was closed: end the thread when all callbacks have run."""
        with self._lock:
            self._ending = True
            thread, idle = self._thread, not self._waiting
        self._wake.note(self._list, _WAKE)
        if thread is not None and thread is not threading.current_thread():
            # A promise may still be kept and its function called. That is not waited for.
            thread.join(_MOMENT if idle else 0.0)
