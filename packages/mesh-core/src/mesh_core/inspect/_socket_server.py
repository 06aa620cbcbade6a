"""Answer programs that inspect a running job; imported when the first one connects."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from mesh_core._common.checks import is_number
from mesh_core._common.errors import MeshError
from mesh_core._common.peers import require_same_namespaces
from mesh_core._features.debug.wire import Garbled, Told, Wire
from mesh_core._native import serve_to_the_end

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh_core._process.process import Process
    from mesh_core.inspect._socket import Inspection

MOST = 32
"""How many programs may be connected at once."""

ALIVE_S = 1.0
"""After this many seconds without news, a follower is told that the job is alive."""

_NO_ROOM_S = 0.1
_LONGEST_S = 60.0
_LINES = 10_000


def receive(inspection: Inspection) -> None:
    """Accept pending connections, then wait for the next one."""
    # It takes a lock that the end of the job needs (EXIT-1).
    serve_to_the_end()
    while True:
        try:
            peer = inspection.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                # The connection is still pending: without a pause, this would use a whole core until descriptors are free.
                time.sleep(_NO_ROOM_S)
            break
        if peer is None:
            break
        _admit(inspection, peer)
    inspection.wait()


def _admit(inspection: Inspection, peer: socket.socket) -> None:
    try:
        require_same_namespaces(peer)
    except OSError:
        peer.close()
        return
    guest = Guest(inspection, peer)
    with inspection.lock:
        refused = "the job is ending" if inspection.closed else ""
        if len(inspection.guests) >= MOST:
            refused = f"{MOST} programs are looking into this job, which is the limit; end one of them"
        if not refused:
            inspection.guests.add(guest)
    try:
        if not refused:
            guest.start()
            return
    except RuntimeError:
        refused = "the job cannot start a thread to answer"
        with inspection.lock:
            inspection.guests.discard(guest)
    guest.wire.tell(error=refused)
    guest.wire.close()


class Guest(threading.Thread):
    """One connection, and the thread that answers it."""

    def __init__(self, inspection: Inspection, peer: socket.socket) -> None:
        super().__init__(name="mesh-look", daemon=True)
        self._inspection = inspection
        self._process = inspection.process
        self.wire = Wire(peer)

    def run(self) -> None:
        """Answer the questions of a program that inspects this process, until it disconnects."""
        # Followers must also be told of the end.
        serve_to_the_end()
        try:
            while (told := self.wire.hear()) is not None:
                for each in told:
                    if not self._answer(each):
                        return
        except Garbled as error:
            self.wire.tell(error=f"invalid question: {error}")
        finally:
            with self._inspection.lock:
                self._inspection.guests.discard(self)
            self.wire.close()

    def end(self, how: int = socket.SHUT_RDWR) -> None:
        """Shut the connection down; with ``SHUT_RD``, answers can still be sent."""
        with contextlib.suppress(OSError):
            self.wire.peer.shutdown(how)

    def _answer(self, told: Told) -> bool:
        questions: dict[object, Callable[[Told], bool]] = {
            "describe": self._describe,
            "snapshot": self._snapshot,
            "waits": self._waits,
            "stacks": self._stacks,
            "events": self._events,
            "logs": self._logs,
        }
        do = told.get("do")
        known = questions.get(do) if isinstance(do, str) else None
        if known is None:
            return self.wire.tell(
                error=f"unknown question {do!r}; the questions are {', '.join(map(str, questions))}"
            )
        try:
            return known(told)
        except (MeshError, ValueError, TypeError) as error:
            return self.wire.tell(error=str(error))
        except Exception as error:  # noqa: BLE001 - reported to the program that asked
            return self.wire.tell(error=f"the job failed to answer: {error!r}")

    def _describe(self, _told: Told) -> bool:
        return self.wire.tell(ok=describe(self._process))

    def _snapshot(self, told: Told) -> bool:
        from mesh_core.inspect import snapshot

        return self.wire.tell(ok=snapshot(_seconds(told), pss=told.get("pss") is not False).as_dict())

    def _waits(self, told: Told) -> bool:
        from mesh_core.inspect import waits

        return self.wire.tell(ok=waits(_seconds(told)).as_dict())

    def _stacks(self, told: Told) -> bool:
        from dataclasses import asdict

        from mesh_core.inspect._stacks import stacks_of_job

        mesh = told.get("mesh", "")
        if not isinstance(mesh, str):
            raise TypeError(f"mesh must be the name of a mesh of processes, got {mesh!r}")
        return self.wire.tell(ok=[asdict(one) for one in stacks_of_job(self._process, mesh, _seconds(told))])

    def _events(self, told: Told) -> bool:
        from mesh_core.inspect import events

        missed = 0
        with events(past=told.get("past") is True) as happening:
            self.wire.tell(ok={})
            while True:
                event = happening.get(ALIVE_S)
                if event is None and happening.over:
                    return False
                if happening.missed > missed:
                    self.wire.tell(missed=happening.missed - missed)
                    missed = happening.missed
                if not self.wire.tell(**({"alive": True} if event is None else {"event": event.as_dict()})):
                    return False

    def _logs(self, _told: Told) -> bool:
        from mesh_core._features.logs.console import Console

        process = self._process
        console = process.slots.of(Console, lambda: Console(process))
        lines = Lines()
        console.taps.add(lines.take)
        try:
            self.wire.tell(ok={})
            while True:
                over = console.over
                found, missed = lines.wait(0.0 if over else ALIVE_S)
                if missed:
                    self.wire.tell(missed=missed)
                for is_error, text in found:
                    if text:
                        self.wire.tell(text=text, error_stream=is_error)
                if not found and (over or not self.wire.tell(alive=True)):
                    return False
        finally:
            console.taps.discard(lines.take)


class Lines:
    """A buffer of output for a slow reader. When it is full, the oldest output is dropped and counted."""

    def __init__(self) -> None:
        self._kept: deque[tuple[bool, str]] = deque(maxlen=_LINES)
        self._missed = 0
        self._changed = threading.Condition()

    def take(self, is_error: bool, text: str) -> None:
        """Add output to the buffer."""
        with self._changed:
            self._missed += len(self._kept) == _LINES
            self._kept.append((is_error, text))
            self._changed.notify()

    def wait(self, limit: float) -> tuple[list[tuple[bool, str]], int]:
        """Return the output that arrives within ``limit`` seconds, and how many texts were dropped before it."""
        with self._changed:
            self._changed.wait_for(lambda: self._kept, limit)
            found, missed = list(self._kept), self._missed
            self._kept.clear()
            self._missed = 0
        return found, missed


def _seconds(told: Told) -> float:
    given: Any = told.get("timeout", 1.0)
    if not is_number(given) or not 0 <= given <= _LONGEST_S:
        raise ValueError(f"timeout must be between 0 and {_LONGEST_S:g} seconds, got {given!r}")
    return float(given)


def describe(process: Process) -> dict[str, Any]:
    """Describe this job, as :class:`JobInfo` has it."""
    from mesh_core._native import __version__

    return {
        "pid": process.pid,
        "script": process.job[1],
        "host": process.identity.host,
        "began": process.began_ns / 1e9,
        "folder": os.getcwd(),  # noqa: PTH109 - a text is wanted
        "version": __version__,
        "id": f"{process.runtime.job:016x}",
    }
