"""Whole messages over TCP, each within its time."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable


def exactly(
    stream: socket.socket, length: int, deadline: float, check: Callable[[], None] | None = None
) -> bytes:
    """Read so many bytes; a dribble of single ones buys no time. `check` raises if they are no longer wanted."""
    data = bytearray()
    while len(data) < length:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end took too long")
        # Asked now and then: the caller may give up without this socket's knowing.
        stream.settimeout(left if check is None else min(left, 0.1))
        try:
            part = stream.recv(length - len(data))
        except TimeoutError:
            if check is not None:
                check()
            continue
        if not part:
            raise ConnectionResetError("the other end has closed the connection")
        data += part
    return bytes(data)
