"""The owner's end: threads that check what is asked for, and have the agent do it."""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from mesh_nixl._agent import Agent, Span, span_of
from mesh_nixl._wire import (
    ASK,
    DONE,
    FAILED,
    GONE,
    HELLO,
    MAX_METADATA,
    PLACE,
    PLACES,
    REFUSED,
    SECRET,
    take,
)
from mesh_rdma import Exported

_PATIENCE = 10.0
"""Seconds that a stranger has to say who it is."""


class Offered:
    """Memory of this process. It is registered when it is first asked for."""

    def __init__(self, export: Exported) -> None:
        self.secret = secrets.token_bytes(SECRET)
        self.lock = threading.Lock()
        self.nbytes, self.writable = export.nbytes, export.writable
        # They keep the memory.
        self._memory = [piece for piece in export.memory if piece.nbytes]
        self._spans: list[Span] = []
        self._registered: Any = None
        self.is_live = True

    def window(self, offset: int, length: int) -> Iterator[Span]:
        """Where these bytes are; under the lock."""
        for start, nbytes in self._spans:
            count = min(max(nbytes - offset, 0), length)
            if count:
                yield start + offset, count
            offset, length = max(offset - nbytes, 0), length - count

    def register(self, agent: Agent) -> None:
        """Have it ready for transfers; under the lock."""
        if self._registered is None:
            self._spans = [span_of(piece) for piece in self._memory]
            first = min(start for start, _ in self._spans)
            end = max(start + nbytes for start, nbytes in self._spans)
            self._registered = agent.register((first, end - first))

    def end(self, agent: Callable[[], Agent]) -> None:
        """Let go of it, once nobody is at work on it (NXL-3)."""
        with self.lock:
            self.is_live = False
            if self._registered is not None:
                agent().deregister(self._registered)
            self._memory.clear()


class Server:
    """Listens for readers of this process's memory."""

    def __init__(self, agent: Callable[[], Agent]) -> None:
        self._agent = agent
        self._lock = threading.Lock()
        self._offered: dict[int, Offered] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.name = b"\0mesh-nixl-" + secrets.token_hex(8).encode()
        self._socket.bind(self.name)
        self._socket.listen(128)
        threading.Thread(target=self._listen, name="mesh-nixl", daemon=True).start()

    def offer(self, export: Exported) -> bytes:
        """Return the secret of the memory."""
        offered = Offered(export)
        with self._lock:
            self._offered[export.key] = offered
        return offered.secret

    def withdraw(self, key: int) -> None:
        """Have nobody reach it from now on."""
        with self._lock:
            offered = self._offered.pop(key)
        offered.end(self._agent)

    def _find(self, key: int, secret: bytes) -> Offered | bytes:
        with self._lock:
            offered = self._offered.get(key)
        if offered is None:
            return GONE
        return offered if secrets.compare_digest(offered.secret, secret) else REFUSED

    def _listen(self) -> None:
        while True:
            try:
                stream, _ = self._socket.accept()
            except OSError:  # no descriptor left: who connects waits
                select.select([], [], [], 0.05)
                continue
            with suppress(RuntimeError):  # no thread left: the connection ends, and its other end says so
                threading.Thread(
                    target=self._serve, args=(stream,), name="mesh-nixl-serve", daemon=True
                ).start()

    def _serve(self, stream: socket.socket) -> None:
        with stream, suppress(OSError):
            stream.settimeout(_PATIENCE)
            _, uid, _ = struct.unpack(
                "3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            )
            secret, key, length, base = HELLO.unpack(take(stream, HELLO.size))
            found = self._find(key, secret)
            # What NIXL reads is of somebody who may read memory of this process, and no stranger's.
            if uid not in {0, os.geteuid()} or length > MAX_METADATA:
                found = REFUSED
            if isinstance(found, bytes):
                return stream.sendall(found)
            metadata = take(stream, length)
            try:
                agent = self._agent()
                name = agent.meet(metadata)
            except Exception:  # noqa: BLE001 - NIXL has many, and none is more than: not by this transport
                return stream.sendall(FAILED)
            try:
                stream.sendall(DONE)
                stream.settimeout(None)
                while True:
                    stream.sendall(self._answer(agent, name, base, stream))
            finally:
                with suppress(Exception):
                    agent.part(name)

    def _answer(self, agent: Agent, name: str, base: int, stream: socket.socket) -> bytes:
        write, secret, key, offset, place, length = ASK.unpack(take(stream, ASK.size))
        found = self._find(key, secret)
        if isinstance(found, bytes):
            return found
        if offset + length > found.nbytes or (write and not found.writable) or not length:
            return REFUSED
        if place + length > PLACE * PLACES or length > PLACE:
            return REFUSED

        def check() -> None:
            """Raise if the reader has ended."""
            if select.select([stream], [], [], 0)[0] and not stream.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError("the reader has ended")

        with found.lock:
            if not found.is_live:
                return GONE
            try:
                found.register(agent)
                here, there, at = list(found.window(offset, length)), [], base + place
                for _, count in here:
                    there.append((at, count))
                    at += count
                # A write of the reader is read by the owner.
                agent.move(not write, here, there, name, check)
            except OSError:
                raise
            except Exception:  # noqa: BLE001 - of NIXL
                return FAILED
        return DONE
