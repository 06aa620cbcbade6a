"""What the tests of both engines do by the transport `ibverbs`."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from mesh_rdma import RDMABuffer

NAME = "ibverbs"
MIB = 1 << 20
STAGE = 64 << 10
"""What goes through memory that is always registered."""


def read(buffer: RDMABuffer, **options: Any) -> bytes:
    """Read all of it, by the devices unless another transport is named."""
    copy = bytearray(buffer.size())
    buffer.read_into(copy, **{"transport": NAME, **options}).get(timeout=60)
    return bytes(copy)


def write(buffer: RDMABuffer, data: Any, **options: Any) -> None:
    """Write it at the beginning, or at an `offset`."""
    buffer.write_from(data, transport=NAME, **options).get(timeout=60)


def knock(where: tuple[str, int], magic: bytes, realm: bytes) -> list[socket.socket]:
    """Ask an owner for a queue pair without knowing its key; check what it says, and return connections that say nothing.

    They are more than an owner has places for strangers.
    """
    hello = magic + bytes(16) + realm
    web = b"GET / HTTP/1.0\r\n\r\n" + bytes(40)
    for said in [web, magic + bytes(32), hello + bytes(32), hello + bytes(77)] * 10:
        with socket.create_connection(where, timeout=30) as stream, contextlib.suppress(ConnectionError):
            stream.sendall(said)
            answer = b""
            while part := stream.recv(100):
                answer += part
            # Its nonce and its proof, for whom names the owner; and nothing for a wrong proof.
            assert len(answer) == (48 if realm in said else 0)
    return [socket.create_connection(where, timeout=30) for _ in range(10)]
