"""The messages between the owner of a publication and its readers: one JSON object in each packet of a Unix socket.

A connection is one lease. It ends with the connection, so a process that dies returns it, and each side notices the other's death.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
from typing import Any

LONGEST = 1 << 16
"""Longer than any packet."""
MOST_DESCRIPTORS = 2

_CREDENTIALS = struct.Struct("3i")


def address_of(name: str) -> str:
    """Return where a publication is found: in the abstract namespace, so that nothing is left behind."""
    return f"\0mesh-publication-{os.getuid()}-{name}"


def open_socket() -> socket.socket:
    """Return a socket that preserves packet boundaries."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process number and the user of the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def send(connection: socket.socket, message: dict[str, Any], descriptors: list[int] | None = None) -> None:
    """Send a packet, with descriptors of files."""
    socket.send_fds(connection, [json.dumps(message).encode()], descriptors or [])


def receive(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """Return the next packet, and the descriptors that the caller owns from now on; ``None`` at the end."""
    # socket.recv_fds ignores its flags: programs that start meanwhile would inherit the descriptors.
    fds = array.array("i")
    space = socket.CMSG_LEN(MOST_DESCRIPTORS * fds.itemsize)
    data, parts, _, _ = connection.recvmsg(LONGEST, space, socket.MSG_CMSG_CLOEXEC)
    for level, kind, part in parts:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
    descriptors = fds.tolist()
    if not data:
        return None, descriptors
    try:
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ValueError(f"a packet must be an object, got {type(message).__name__}")
    except (ValueError, RecursionError) as error:
        for each in descriptors:
            os.close(each)
        raise ValueError(f"not a packet of a publication: {error}") from None
    return message, descriptors
