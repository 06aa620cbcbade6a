"""Requests of scripts and commands to a job's keeper, line by line."""

from __future__ import annotations

import itertools
import json
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any

from mesh_launchers._errors import JobExists, JobNotFound, LaunchError
from mesh_launchers._state import JobState

_LIMIT_S = 60.0
_KINDS: dict[str, type[Exception]] = {
    each.__name__: each for each in (JobExists, JobNotFound, ValueError, TypeError)
}
"""Errors that arrive as what they are; all others are a :class:`LaunchError`."""


class Door:
    """A connection to a job's keeper. Answers, and states for those who watch, arrive on a thread."""

    def __init__(
        self, name: str, connection: socket.socket, watch: Callable[[JobState | None], None] | None = None
    ) -> None:
        self._name = name
        self._connection = connection
        self._watch = watch
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Any]] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._why = ""
        """Why the keeper has closed the connection, if that is not its end."""
        self._thread = threading.Thread(target=self._read, name="mesh-launchers-door", daemon=True)
        self._thread.start()

    def ask(self, do: str, *, timeout: float = _LIMIT_S, **what: Any) -> Any:
        """Send a request, and return the answer."""
        answer = self.begin(do, **what)
        try:
            return answer.result(timeout)
        except FutureTimeoutError:
            raise LaunchError(f"job {self._name!r} has not answered within {timeout:g} s") from None

    def begin(self, do: str, **what: Any) -> Future[Any]:
        """Send a request that may take long."""
        answer: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise self.gone()
            number = next(self._numbers)
            self._asked[number] = answer
            line = json.dumps({"number": number, "do": do, **what}).encode() + b"\n"
            try:
                self._connection.sendall(line)
            except OSError:
                del self._asked[number]
                raise self.gone() from None
        return answer

    def gone(self) -> LaunchError:
        """Return the error for all that is asked after the connection was closed."""
        return JobNotFound(self._why or f"job {self._name!r} has ended")

    def _read(self) -> None:
        with suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            for line in lines:
                self._hear(json.loads(line))
        with self._lock:
            self._closed = True
            waiting, self._asked = self._asked, {}
        for each in waiting.values():
            each.set_exception(self.gone())
        if self._watch is not None:
            self._watch(None)

    def _hear(self, what: dict[str, Any]) -> None:
        if "out" in what:
            is_error, text = what["out"]
            with suppress(Exception):  # it may be closed, or anybody's own
                stream = sys.stderr if is_error else sys.stdout
                stream.write(text)
                stream.flush()
            return
        if "gone" in what:
            self._why = str(what["gone"])
            return
        if "state" in what:
            if self._watch is not None:
                self._watch(JobState.of(what["state"]))
            return
        with self._lock:
            answer = self._asked.pop(what["to"], None)
        if answer is None:
            return
        if "error" in what:
            answer.set_exception(_KINDS.get(what["error"], LaunchError)(what["why"]))
        else:
            answer.set_result(what["is"])

    def wait_closed(self, timeout: float) -> bool:
        """Wait until the keeper has ended; return whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Close it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._connection.close()
