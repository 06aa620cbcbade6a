"""Descriptors that arrive by a socket."""

from __future__ import annotations

import array
import socket


def receive_descriptors(source: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive a packet and at most so many descriptors, which programs that this process starts do not inherit.

    ``socket.recv_fds`` ignores its flags, and what it returns is inherited by whatever starts meanwhile.
    """
    fds = array.array("i")
    data, parts, _, _ = source.recvmsg(size, socket.CMSG_LEN(most * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, part in parts:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(part[: len(part) - len(part) % fds.itemsize])
    return data, fds.tolist()
