"""What the two ends say to each other, over a Unix socket."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable

SECRET = 16
HELLO = struct.Struct("<16sQIQ")
"""Secret and key of a buffer, as proof; the length of the agent's metadata, which follows; where its memory is."""
ASK = struct.Struct("<?16sQQQQ")
"""Whether it is a write; secret and key of the buffer; offset in it, place in the reader's memory, length."""
DONE, GONE, REFUSED, FAILED = b"K", b"G", b"R", b"F"

PLACES = 16
PLACE = 4 << 20
"""The reader's memory: so many places of so many bytes."""
MAX_METADATA = 1 << 16

Wait = Callable[[], None]


def fill(stream: socket.socket, view: memoryview, wait: Wait | None = None) -> None:
    """Read as many bytes as the view has. ``wait`` is called while there are none, of a socket with a time-out."""
    while view.nbytes:
        try:
            count = stream.recv_into(view)
        except TimeoutError:
            if wait is None:
                raise
            wait()
            continue
        if not count:
            raise ConnectionResetError("the other end has closed the connection")
        view = view[count:]


def take(stream: socket.socket, length: int, wait: Wait | None = None) -> bytes:
    """Read so many bytes."""
    data = bytearray(length)
    fill(stream, memoryview(data), wait)
    return bytes(data)


def push(stream: socket.socket, data: bytes, wait: Wait) -> None:
    """Send all of it."""
    view = memoryview(data)
    while view.nbytes:
        try:
            view = view[stream.send(view) :]
        except TimeoutError:
            wait()
