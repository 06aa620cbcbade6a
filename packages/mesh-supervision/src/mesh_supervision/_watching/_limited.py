"""HTTP servers in the process of a script, or beside it, that every user of the machine can connect to.

LIM-1: however many connect, and whatever they send or do not send, a server has at most so many threads and connections, each for a limited time.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MOST = 32
"""How many requests are answered at once; further connections are closed at once."""
_SILENT_S = 5.0
"""For how long a request may pause."""
_LONGEST_S = 30.0
"""How long a request may take as a whole: one that comes byte by byte is cut off."""


class LimitedHandler(BaseHTTPRequestHandler):
    """Answers one request, which has to come soon."""

    timeout = _SILENT_S


class LimitedServer(ThreadingHTTPServer):
    """Answers requests, each in a thread, and not too many (LIM-1)."""

    daemon_threads = True
    request_queue_size = 4 * MOST
    """How many may wait for the server's own thread."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._until: dict[Any, float] = {}
        """When each request is cut off."""
        self._lock = threading.Lock()
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a request, if there is room."""
        with self._lock:
            if has_room := len(self._until) < MOST:
                self._until[request] = time.monotonic() + _LONGEST_S
        if has_room:
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection: by the thread that has answered it, or because there is none for it."""
        with self._lock:
            self._until.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Cut off what takes too long; called several times a second."""
        now = time.monotonic()
        with self._lock:
            late = [each for each, until in self._until.items() if now > until]
            for each in late:
                # Its thread closes it, which waits for this lock.
                _shut(each)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: whoever has connected is gone, or was cut off."""


def _shut(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)
