"""The owner's end: shakes hands with those who know its key, and makes a queue pair for each. What they do then, the device does.

PYV-1: the connection over which hands were shaken lives as long as the queue pair, whichever end closes it.
PYV-2: a stranger has a bounded place, bounded bytes and bounded time.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from ipaddress import IPv6Address

from mesh_rdma._errors import RDMAError
from mesh_rdma._pyverbs._devices import Device, Pair
from mesh_rdma._pyverbs._sockets import exactly
from mesh_rdma._pyverbs._wire import (
    ASK,
    CONNECT,
    HELLO,
    MAGIC,
    NONCE,
    PROOF,
    READY,
    Answer,
    Connect,
    Side,
    Talk,
    decode_ask,
    encode_accept,
)

CONNECTIONS = 256
"""Queue pairs that are served at once."""
STRANGERS = 16
"""Connections that have not proved who they are."""
HANDSHAKE = 5.0
"""Seconds that each message of a stranger may take."""
BREATH = 0.05
"""How long to wait with the next connection where there is no descriptor for it."""


class Door:
    """Who lets peers in. Ends with the process."""

    def __init__(
        self,
        devices: list[Device],
        address: IPv6Address,
        realm: bytes,
        token_of: Callable[[int], bytes | None],
    ) -> None:
        self.key = secrets.token_bytes(16)
        self.address = address
        self._devices, self._realm, self._token_of = devices, realm, token_of
        mapped = address.ipv4_mapped
        family = socket.AF_INET6 if mapped is None else socket.AF_INET
        self._guard = devices[0].guard
        listener = socket.create_server((str(mapped or address), 0), family=family, backlog=128)
        self._listener = self._guard.own(listener)
        self.port: int = self._listener.getsockname()[1]
        self._strangers = threading.BoundedSemaphore(STRANGERS)
        self._served = threading.BoundedSemaphore(CONNECTIONS)
        threading.Thread(target=self._listen, name="mesh-verbs", daemon=True).start()

    def _listen(self) -> None:
        while True:
            try:
                stream, _ = self._listener.accept()
            except OSError:
                # Out of descriptors, most likely.
                time.sleep(BREATH)
                continue
            self._guard.own(stream)
            self._strangers.acquire()
            try:
                threading.Thread(target=self._serve, args=(stream,), name="mesh-verbs", daemon=True).start()
            except RuntimeError:  # no thread: the connection ends, and its other end says so
                self._strangers.release()
                stream.close()

    def _serve(self, stream: socket.socket) -> None:
        with stream:
            try:
                talk = self._greet(stream)
            except (OSError, RDMAError):
                return
            finally:
                self._strangers.release()
            if not self._served.acquire(blocking=False):
                return
            try:
                self._talk(stream, talk)
            except (OSError, RDMAError):
                pass  # the other end sees that it is over
            finally:
                self._served.release()

    def _greet(self, stream: socket.socket) -> Talk:
        """VRB-1."""
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = exactly(stream, HELLO, time.monotonic() + HANDSHAKE)
        if not hello.startswith(MAGIC) or hello[len(MAGIC) + NONCE :] != self._realm:
            raise ConnectionRefusedError("whoever it is wants another process")
        client, server = hello[len(MAGIC) :][:NONCE], secrets.token_bytes(NONCE)
        talk = Talk(self.key, self._realm, client, server)
        stream.sendall(server + talk.prove(Side.SERVER))
        if not talk.proves(Side.CLIENT, exactly(stream, PROOF, time.monotonic() + HANDSHAKE)):
            raise ConnectionRefusedError("whoever it is does not know the key")
        return talk

    def _talk(self, stream: socket.socket, talk: Talk) -> None:
        asked = Connect.decode(exactly(stream, CONNECT, time.monotonic() + HANDSHAKE), talk)
        pair = self._answer(stream, asked, talk)
        if pair is None:
            return
        try:
            if exactly(stream, len(READY), time.monotonic() + HANDSHAKE) == READY:
                self._attend(stream)
        finally:
            pair.close()

    def _answer(self, stream: socket.socket, asked: Connect, talk: Talk) -> Pair | None:
        """Make the queue pair, if it can be made."""
        if asked.rail >= len(self._devices):
            stream.sendall(encode_accept(None, talk))
            return None
        pair = None
        try:
            pair = self._devices[asked.rail].pair(0)
            agreed = asked.end.agreed(pair.end)
            pair.connect(agreed, asked.gid, asked.lid)
        except Exception:  # noqa: BLE001 - of the library, which raises kinds of its own
            if pair is not None:
                pair.close()
            stream.sendall(encode_accept(None, talk))
            return None
        try:
            stream.sendall(encode_accept(pair.end.agreed(agreed), talk))
        except OSError:
            pair.close()
            raise
        return pair

    def _attend(self, stream: socket.socket) -> None:
        """Answer whether exports are live, until the other end has closed the connection."""
        while True:
            stream.settimeout(None)
            first = stream.recv(1)
            if not first:
                return
            key, token = decode_ask(first + exactly(stream, ASK - 1, time.monotonic() + HANDSHAKE))
            expected = self._token_of(key)
            if expected is None:
                answer = Answer.GONE
            else:
                answer = Answer.LIVE if hmac.compare_digest(expected, token) else Answer.REFUSED
            stream.sendall(bytes([answer]))
