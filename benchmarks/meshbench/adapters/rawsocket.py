"""The floor: two Python processes, one Unix socket pair, pickle, blocking reads; no actors, no system."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections import deque
from time import perf_counter
from typing import Any

from meshbench.adapter import PAYLOAD
from meshbench.timing import sample

_HEAD = struct.Struct("!IH")  # length of the pickle, number of large buffers; then their lengths
_LENGTH = struct.Struct("!Q")
_READ = 1 << 16  # a small message and what follows it come in one read
_WINDOW = 64  # calls in flight when pipelining: more could fill both directions and stop both ends for good


class _Peer:
    """One end of the connection. A message is a head, the pickle, and the buffers that pickle left out."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._ahead = b""  # read already, not yet asked for

    def send(self, message: Any) -> None:
        """Head and pickle go in one write; large buffers follow from where they lie."""
        buffers: list[pickle.PickleBuffer] = []
        envelope = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
        head = _HEAD.pack(len(envelope), len(buffers))
        if not buffers:
            self._sock.sendall(head + envelope)
            return
        parts = [buffer.raw() for buffer in buffers]
        self._sock.sendall(head + b"".join(_LENGTH.pack(part.nbytes) for part in parts) + envelope)
        for part in parts:
            self._sock.sendall(part)

    def receive(self) -> Any:
        """The next message; EOFError when the other end is gone."""
        size, count = _HEAD.unpack(self._exactly(_HEAD.size))
        lengths = self._exactly(count * _LENGTH.size)
        envelope = self._exactly(size)
        return pickle.loads(
            envelope, buffers=[self._large(length) for (length,) in _LENGTH.iter_unpack(lengths)]
        )

    def _exactly(self, size: int) -> bytes:
        while len(self._ahead) < size:
            more = self._sock.recv(_READ)
            if not more:
                raise EOFError("the other end of the socket pair is closed")
            self._ahead += more
        taken, self._ahead = self._ahead[:size], self._ahead[size:]
        return taken

    def _large(self, size: int) -> bytearray:
        data = bytearray(size)
        known = self._exactly(min(size, len(self._ahead)))
        data[: len(known)] = known
        view = memoryview(data)[len(known) :]
        while view:
            got = self._sock.recv_into(view)
            if not got:
                raise EOFError("the other end of the socket pair is closed")
            view = view[got:]
        return data

    def close(self) -> None:
        """End the connection."""
        self._sock.close()


def _serve(peer: _Peer) -> None:
    while True:
        try:
            method, args = peer.receive()
        except EOFError:
            return
        if method == "echo":
            peer.send(args[0])


class System:
    """See `meshbench.adapter.Floor`."""

    def start(self, procs: int) -> None:
        """Fork one process; this one has no threads yet."""
        if procs != 1:
            raise ValueError(f"a socket pair joins two processes, not {procs + 1}")
        if os.environ.get("MESH_BENCH_ONE_CORE"):
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        ours, theirs = socket.socketpair()
        self._pid = os.fork()
        if self._pid == 0:
            status = 1
            try:
                ours.close()
                _serve(_Peer(theirs))
                status = 0
            finally:
                os._exit(status)
        theirs.close()
        self._peer = _Peer(ours)
        self._call(PAYLOAD)

    def _call(self, x: Any) -> Any:
        self._peer.send(("echo", (x,)))
        return self._peer.receive()

    def close(self) -> None:
        """Hang up and reap."""
        self._peer.close()
        os.waitpid(self._pid, 0)

    def call_sync(self, calls: int) -> list[float]:
        """Blocking round trips."""
        return sample(calls, lambda: self._call(PAYLOAD))

    def pipelined(self, calls: int) -> float:
        """A window of calls in flight."""
        in_flight: deque[None] = deque()
        start = perf_counter()
        for _ in range(calls):
            if len(in_flight) == _WINDOW:
                self._peer.receive()
                in_flight.popleft()
            self._peer.send(("echo", (PAYLOAD,)))
            in_flight.append(None)
        for _ in in_flight:
            self._peer.receive()
        return perf_counter() - start

    def tensor(self, data: Any, times: int) -> list[float]:
        """Out-of-band buffers straight through the socket."""
        return sample(times, lambda: self._call(data), warm_up=1)
