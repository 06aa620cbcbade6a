"""The protocol of a debugger's socket: one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
import time
from typing import Any

# Enough for a listing of a thousand stops.
_LINE_LIMIT = 1 << 23
# A peer that has stopped reading (Ctrl-Z) is treated as gone.
_SEND_LIMIT = struct.pack("ll", 5, 0)

Told = dict[str, Any]


class Garbled(ValueError):
    """The other end does not speak this protocol."""


class Wire:
    """One end of a connection.

    >>> here, there = map(Wire, socket.socketpair())
    >>> here.tell(line="p loss")
    True
    >>> there.hear()
    [{'line': 'p loss'}]
    >>> here.close(); there.close()
    """

    def __init__(self, peer: socket.socket) -> None:
        peer.settimeout(None)
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _SEND_LIMIT)
        self.peer = peer
        self._read: list[bytes] = []
        """The pieces of an incomplete line."""
        self._length = 0
        self._deaf = False
        """Whether the other end has stopped reading."""
        # A stopped thread and the server thread write to the same connection.
        self._lock = threading.Lock()

    def tell(self, **told: Any) -> bool:
        """Send an object; return whether the other end is still there.

        If the peer does not read within a time limit, the connection is closed, because part of an object may have been sent.
        """
        with self._lock:
            if self._deaf:
                return False
            try:
                self.peer.sendall(json.dumps(told).encode() + b"\n")
            except OSError:
                self._deaf = True
                with contextlib.suppress(OSError):
                    self.peer.shutdown(socket.SHUT_RDWR)
        return not self._deaf

    def hear(self, limit: float | None = None) -> list[Told] | None:
        """Return the next objects; ``None`` once the other end is gone. Raise ``TimeoutError`` after ``limit`` seconds."""
        poll = select.poll()
        poll.register(self.peer, select.POLLIN)
        until = None if limit is None else time.monotonic() + limit
        while True:
            # The limit is for the whole answer, even if it arrives byte by byte.
            if until is not None and not poll.poll(max(0.0, until - time.monotonic()) * 1000):
                raise TimeoutError("no answer")
            told = self.take()
            if told is None or told:
                return told

    def take(self) -> list[Told] | None:
        """Return the objects that have arrived; ``None`` once the other end is gone."""
        try:
            more = self.peer.recv(65536)
        except OSError:
            more = b""
        if not more:
            return None
        self._read.append(more)
        self._length += len(more)
        lines: list[bytes] = []
        if b"\n" in more:
            *lines, rest = b"".join(self._read).split(b"\n")
            self._read, self._length = [rest], len(rest)
        if self._length > _LINE_LIMIT:
            raise Garbled("a line is too long")
        try:
            told = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise Garbled(str(error)) from None
        if not all(isinstance(each, dict) for each in told):
            raise Garbled("not an object")
        return told

    def close(self) -> None:
        """End the connection."""
        self.peer.close()
