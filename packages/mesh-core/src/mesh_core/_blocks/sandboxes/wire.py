"""The protocol between owner, template and boxes: JSON packets between processes that trust each other, frames to and from workers."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from mesh_core._system.descriptors import receive_descriptors

LONGEST_PACKET = 1 << 16
LONGEST_ANSWER = 256 << 20
_HEAD = struct.Struct(">Q")
_CHUNK = 1 << 20
_SMALL = 1 << 16


def send_packet(to: socket.socket, told: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one packet, with copies of these descriptors."""
    socket.send_fds(to, [json.dumps(told).encode()], fds)


def ending(text: str) -> str:
    """Return the end of a text that fits into a packet beside other things: escaped, it may be six times as long."""
    while len(json.dumps(text)) > LONGEST_PACKET // 2:
        text = text[-(len(text) // 2) :]
    return text


def receive_packet(source: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Wait for the next packet; ``None`` at the end."""
    try:
        data, fds = receive_descriptors(source, LONGEST_PACKET, 4)
    except ConnectionError:
        return None, []
    return (json.loads(data) if data else None), fds


def next_packet(source: socket.socket) -> dict[str, Any] | None:
    """Return the next packet: ``None`` if there is none yet, an empty one at the end. It has no descriptors."""
    try:
        data = source.recv(LONGEST_PACKET, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return None
    except ConnectionError:
        return {}
    told: dict[str, Any] = json.loads(data) if data else {}
    return told


def pack(parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """Make a frame for the worker: the number of parts, their sizes, and the parts."""
    sizes = [memoryview(part).nbytes for part in parts]
    head = b"".join(map(_HEAD.pack, [len(parts), *sizes]))
    # Each send may wake the other side.
    return [b"".join([head, *parts])] if sum(sizes) < _SMALL else [head, *parts]


def read_parts(fd: int) -> list[bytearray] | None:
    """Wait for the next frame from the owner; ``None`` at the end."""
    head = _read(fd, _HEAD.size)
    if head is None:
        return None
    sizes = [_read(fd, _HEAD.size) for _ in range(_HEAD.unpack(head)[0])]
    parts = [_read(fd, _HEAD.unpack(size)[0]) for size in sizes if size is not None]
    return None if None in sizes or None in parts else [part for part in parts if part is not None]


def write_answer(fd: int, data: bytes) -> None:
    """Send one frame to the owner: its size, and plain data."""
    left = memoryview(_HEAD.pack(len(data)) + data)
    while left:
        left = left[os.write(fd, left[:_CHUNK]) :]


def _read(fd: int, size: int) -> bytearray | None:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = os.readv(fd, [view[:_CHUNK]])
        if count == 0:
            return None
        view = view[count:]
    return data


class Answer:
    """A frame from the worker, as it comes in."""

    def __init__(self) -> None:
        self._data = bytearray()
        self.too_long = False

    def feed(self, data: bytes) -> bytes | None:
        """Add data; return the answer once it is complete."""
        self._data += data
        if len(self._data) < _HEAD.size:
            return None
        size: int = _HEAD.unpack_from(self._data)[0]
        if size > LONGEST_ANSWER or len(self._data) > size + _HEAD.size:
            self.too_long = True
            return None
        return bytes(self._data[_HEAD.size :]) if len(self._data) == size + _HEAD.size else None
