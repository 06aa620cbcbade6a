"""The local socket through which other programs look into a running job, without being able to change it.

The controller listens in a folder private to the user (PRV-1). No thread waits there: the runtime watches the descriptor
and reports a connection, and only then are threads started and modules imported (``inspect._socket_server``). The other end
of the protocol is in ``inspect/_remote.py``. A visitor from another machine arrives through a socket of the same kind, which
the runtime makes (``gateway/visits`` in Rust, VIS-1 and VIS-2).

* INS-1: each end checks that the other is the same user, or has a certificate that allows looking. Only questions are
  answered; none of them changes the job.
* INS-2: without a connection, there is neither a thread nor a wake-up.
* INS-3: a program that asks too much or reads too slowly loses its connection and delays nobody.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from mesh_core._common.errors import MeshError

if TYPE_CHECKING:
    import socket

    from mesh_core._process.process import Process
    from mesh_core.inspect._socket_server import Guest

_END_S = 1.0


class Inspection:
    """A job's inspection socket and its connections."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.lock = threading.Lock()
        self.guests: set[Guest] = set()
        self.closed = False
        self._listener: socket.socket | None = None
        self._path = ""

    def open(self) -> None:
        """Start accepting connections. Without a suitable folder, the job runs without an inspection socket."""
        from mesh_core._features.debug import places

        with self.lock, contextlib.suppress(OSError):
            if self._listener is None and not self.closed:
                self._listener, self._path = places.listen(self.process.pid, places.INSPECTION)
                self._listener.setblocking(False)
        self.wait()

    def wait(self) -> None:
        """Have the runtime report the next connection."""
        with self.lock, contextlib.suppress(MeshError, OSError):
            if self._listener is not None and not self.closed:
                self.process.runtime.watch_inspection(self._listener.fileno())

    def knocked(self) -> None:
        """Start a thread for a new connection."""
        from mesh_core.inspect._socket_server import receive

        with contextlib.suppress(RuntimeError):  # no thread can be started: the visitor gets no answer
            threading.Thread(target=receive, args=(self,), name="mesh-inspect", daemon=True).start()

    def accept(self) -> socket.socket | None:
        """Return the next connection, if there is one; raise ``OSError`` if it cannot be accepted."""
        import socket

        with self.lock:
            if self.closed:
                return None
            listener = self._listener
        # A visitor from another machine, whose certificate was checked by the runtime.
        if (visitor := self.process.runtime.take_visitor()) is not None:
            return socket.socket(fileno=visitor)
        if listener is None:
            return None
        try:
            peer, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            return None
        return peer

    def close(self) -> None:
        """Accept no more connections or questions. Followers still receive what is left."""
        import socket

        from mesh_core._features.debug import places

        with self.lock:
            self.closed = True
            listener, self._listener = self._listener, None
            guests = list(self.guests)
        if listener is not None:
            places.unlink(self._path)
            listener.close()
        for guest in guests:
            guest.end(socket.SHUT_RD)

    def join(self) -> None:
        """Wait for the answering threads, after everything that they follow has ended."""
        until = time.monotonic() + _END_S
        with self.lock:
            guests = list(self.guests)
        for guest in guests:
            guest.join(max(0.0, until - time.monotonic()))
            guest.end()
