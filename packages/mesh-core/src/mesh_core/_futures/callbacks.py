"""Functions that are called when a future is done.

CBK-1: each is called once, however the future ends, also if it was done before.
CBK-2: to be called is not to look: a failure that the function does not ask for is reported as any that nobody has seen.

One thread of a process, ``mesh-callbacks``, sleeps until one of the futures that have such functions is done. It is
started with the first of them, and never reads what comes for the process.
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

# The number by which the thread is woken for nothing in particular.
_WAKE = 0

# How many deadlines are kept without checking whether their futures are done.
_FEW = 64

# How long the end of the runtime waits for functions that are under way.
_MOMENT = 1.0


def add(future: Future[Any], function: Callable[[Any], object]) -> None:
    """Have ``function`` called with ``future`` when that is done."""
    if not callable(function):
        raise TypeError(f"add_done_callback() must be given a function of the future, got {function!r}")
    if future.done():
        try:
            function(future)
        except Exception as error:  # noqa: BLE001 - the same wherever it runs
            _log(error, future)
        return
    process = future._process
    process.slots.of(Callbacks, lambda: Callbacks(process)).add(future, function)


def _log(error: BaseException, future: Future[Any]) -> None:
    from mesh_core._serialize.exceptions import format_traceback

    # Text only: a record that held the error would hold the future.
    logging.getLogger("mesh").error(
        "a done-callback of %s has raised; the future is not affected:\n%s",
        future._what(),
        format_traceback(error),
    )


class Callbacks:
    """Those of one process, in its slots."""

    def __init__(self, process: Process) -> None:
        self._list = process.runtime.completion()
        self._pid = process.pid
        # What is done already: it puts a number into the list whenever it is asked to.
        self._wake = process.runtime.completion()
        self._wake.set(None, False, 0)
        # No code of others runs under it, but for what the garbage collector runs anywhere.
        self._lock = threading.RLock()
        self._waiting: dict[int, tuple[Future[Any], Callable[[Any], object]]] = {}
        self._last = _WAKE
        self._deadlines: list[tuple[float, int]] = []
        self._thread: threading.Thread | None = None
        self._ending = process.closed
        """Whether the thread ends as soon as nothing is waited for."""
        process.hooks.closed.append(self._end)

    def add(self, future: Future[Any], function: Callable[[Any], object]) -> None:
        if os.getpid() != self._pid:
            # A forked copy, whose lock nobody may ever release: this says so.
            future._listen(self._list, _WAKE)
        # Not under the lock: a gathering takes one of its own, under which code of others may run.
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
        """Have :meth:`_expire` look at a future then."""
        if due is not None:
            if len(self._deadlines) > _FEW + 2 * len(self._waiting):
                # Most are of futures that were done long before.
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
        except BaseException as error:  # noqa: BLE001 - somebody else's code, and the others are to be told too
            _log(error, future)

    def _expire(self) -> float | None:
        """End those whose deadline has passed; returns the seconds until the next one does."""
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
                # It tells the list, as whatever ends it does. A gathering may have further deadlines.
                found[0]._expire()
                due_next = None if found[0].done() else found[0]._due()
                with self._lock:
                    self._note(due_next, token)

    def _end(self) -> None:
        """The runtime is closed, and what still waited for it is done."""
        with self._lock:
            self._ending = True
            thread, idle = self._thread, not self._waiting
        self._wake.note(self._list, _WAKE)
        if thread is not None and thread is not threading.current_thread():
            # A promise may still be kept, and its function is called then; nobody waits for that here.
            thread.join(_MOMENT if idle else 0.0)
