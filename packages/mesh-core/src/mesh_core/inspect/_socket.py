"""The one way into a running job for other programs: a local socket at which it can be looked at, and not changed.

The job's controller has a socket in a folder that is the user's alone (PRV-1). Nobody waits at it: the runtime's own set of
descriptors has it, and tells when somebody connects; only then threads are started and modules imported
(``inspect._socket_server``). What is said there is in ``inspect/_remote.py``, the other end. Who looks in from another machine
arrives at a socket of the same kind, which the runtime makes (``gateway/visits`` in Rust, VIS-1 and VIS-2).

* INS-1: each end checks that the other is the same user, or has a certificate that may look; and only questions are
  answered: nothing that is said there changes the job.
* INS-2: without a connection there is neither a thread nor a wake-up.
* INS-3: who asks too much, or reads too slowly, loses its connection, and holds up nobody.
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
        """Accept connections from now on. If there is no suitable folder, the job runs without an inspection socket."""
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
        """Somebody has connected."""
        from mesh_core.inspect._socket_server import receive

        with contextlib.suppress(
            RuntimeError
        ):  # no thread can be started: whoever has connected hears nothing
            threading.Thread(target=receive, args=(self,), name="mesh-inspect", daemon=True).start()

    def accept(self) -> socket.socket | None:
        """The next connection, if there is one. ``OSError`` if it cannot be taken."""
        import socket

        with self.lock:
            if self.closed:
                return None
            listener = self._listener
        # From another machine; who may was checked there.
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
        """The job ends: no more connections or questions are accepted. Followers still get the rest."""
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
        """Wait for the threads that answer; what they follow has ended."""
        until = time.monotonic() + _END_S
        with self.lock:
            guests = list(self.guests)
        for guest in guests:
            guest.join(max(0.0, until - time.monotonic()))
            guest.end()
