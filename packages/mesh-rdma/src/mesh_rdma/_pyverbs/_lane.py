"""One queue pair to an owner, with the connection that it lives by.

PYV-3: what a transfer has lent to the device is back when it ends, however it ends: the queue pair is destroyed before that,
unless all of its operations have completed.
"""

from __future__ import annotations

import mmap
import secrets
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from mesh_rdma._contract import Copy, Watch
from mesh_rdma._errors import BufferGone, HandleRefused, RDMAError, TransportUnavailable
from mesh_rdma._pyverbs._devices import Device, Pair
from mesh_rdma._pyverbs._library import address_of
from mesh_rdma._pyverbs._pieces import STAGED, Piece, cut
from mesh_rdma._pyverbs._sockets import exactly
from mesh_rdma._pyverbs._wire import (
    ACCEPT,
    MAGIC,
    NONCE,
    PROOF,
    READY,
    WELCOME,
    Answer,
    Connect,
    Section,
    Side,
    Talk,
    decode_accept,
    encode_ask,
)

WINDOW = 16
"""Operations that are under way at once."""
CONNECTING = 5.0
"""How many seconds to wait for a connection and the owner's proof."""
_REFUSED = (9, 10, 11)
"""The owner's device has refused: an invalid request; a wrong key, or a place outside; an error of its own."""
_SPINS = 50
"""How often to look for a completion before sleeping in between: most operations take some microseconds."""
_NAP = 1
"""For so many milliseconds. The library has no call that waits without holding the interpreter."""


class LaneBroken(TransportUnavailable):
    """The queue pair or its connection has failed; another one may not."""


class _RefusedByDevice(Exception):
    """The owner's device refuses; the owner knows why."""


class Lane:
    """Used by one thread at a time."""

    def __init__(self, rail: int, pair: Pair, stream: socket.socket) -> None:
        self.device, self.rail = pair.device, rail
        self._pair, self._stream = pair, stream
        self._poller = select.poll()
        self._poller.register(stream, select.POLLIN)
        self._stage: mmap.mmap | None = None
        self._staged: Any = None
        self._stage_at = 0
        self._is_closed = False

    @classmethod
    def open(cls, section: Section, realm: bytes, device: Device, rail: int, watch: Watch) -> Lane:
        """Connect to the owner. `OSError` if nobody is there, `BufferGone` if somebody else is."""
        watch.check()
        left = watch.left
        limit = CONNECTING if left is None else max(0.001, min(CONNECTING, left))
        deadline = time.monotonic() + limit
        where = (str(section.address.ipv4_mapped or section.address), section.port)
        stream = device.guard.own(socket.create_connection(where, timeout=limit))
        pair = None
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            talk = _greet(stream, section.door, realm, deadline, watch.check)
            pair = device.pair(WINDOW)
            stream.sendall(Connect(rail, device.port.gid, device.port.lid, pair.end).encode(talk))
            theirs = decode_accept(exactly(stream, ACCEPT, deadline, watch.check), talk)
            if theirs is None:
                raise LaneBroken(
                    "the owner cannot make a queue pair: it has none left, or its device does not work"
                )
            own = section.rails[rail]
            pair.connect(theirs.agreed(pair.end), own.gid, own.lid)
            stream.sendall(READY)
            return cls(rail, pair, stream)
        except BaseException:
            if pair is not None:
                pair.close()
            stream.close()
            raise

    def is_sound(self) -> bool:
        """Whether the owner has kept its end."""
        return not self._is_closed and not self._poller.poll(0)

    def close(self) -> None:
        """End it."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._pair.close()
            if self._staged is not None:
                self.device.close(self._staged)
        finally:
            self._stream.close()

    def ask(self, section: Section, token: bytes, watch: Watch) -> Answer:
        """Ask the owner whether it offers an export."""
        self._stream.settimeout(CONNECTING)
        self._stream.sendall(encode_ask(section.slot, section.generation, token))
        said = exactly(self._stream, 1, time.monotonic() + CONNECTING, watch.check)[0]
        if said not in list(Answer):
            raise LaneBroken("the owner answers in another protocol")
        return Answer(said)

    def run(self, asked: Sequence[tuple[Copy, Section]], watch: Watch) -> None:
        """Do all of it. After an error the lane is closed."""
        flight: deque[Piece] = deque()
        registered: list[Any] = []
        try:
            self._run(asked, flight, registered, watch)
        except _RefusedByDevice:
            try:
                # Operations complete in order: it is the first that has not.
                raise self._why(flight[0], watch) from None
            finally:
                self.close()
        except BaseException:
            self.close()
            raise
        finally:
            # PYV-3
            for each in registered:
                self.device.close(each)

    def _run(
        self, asked: Sequence[tuple[Copy, Section]], flight: deque[Piece], registered: list[Any], watch: Watch
    ) -> None:
        numbers = count()
        for copy, section in asked:
            if not copy.nbytes:
                self._ask_for(copy, section, watch)

            def register(view: memoryview, write: bool = copy.write) -> Any:
                try:
                    made = self.device.use(address_of(view), view.nbytes, not write)
                except Exception:  # noqa: BLE001 - of the library; the limit of locked memory, or pages that cannot be locked
                    return None
                registered.append(made)
                return made

            for piece in cut(copy, section, register):
                while len(flight) >= WINDOW:
                    self._land(flight, registered, watch)
                self._post(next(numbers), piece)
                flight.append(piece)
                watch.check()
        while flight:
            self._land(flight, registered, watch)

    def _post(self, number: int, piece: Piece) -> None:
        if piece.registered is None:
            stage, key = self._stage_of()
            start = number % WINDOW * STAGED
            here = (self._stage_at + start, piece.length, key)
            if piece.copy.write:
                for part in piece.parts:
                    stage[start : start + part.nbytes] = part
                    start += part.nbytes
        else:
            here = (piece.address, piece.length, piece.registered.lkey)
        rkey = piece.section.rails[self.rail].rkey
        self._pair.post(number, piece.copy.write, here, (piece.section.at + piece.at, rkey))

    def _land(self, flight: deque[Piece], registered: list[Any], watch: Watch) -> None:
        """Wait for at least one to complete."""
        for number, status in self._completions(watch):
            if status in _REFUSED:
                raise _RefusedByDevice
            if status:
                raise LaneBroken(f"the device has given up an operation, status {status} of ibv_wc_status")
            piece = flight.popleft()
            if piece.registered is None and not piece.copy.write:
                stage, _ = self._stage_of()
                start = number % WINDOW * STAGED
                for part in piece.parts:
                    part[:] = stage[start : start + part.nbytes]
                    start += part.nbytes
            if piece.is_last:
                registered.remove(piece.registered)
                self.device.close(piece.registered)

    def _completions(self, watch: Watch) -> list[tuple[int, int]]:
        for turn in count():
            # Other threads of Python run meanwhile. Looked at also while operations complete: a fork of an owner that has ended may
            # keep its queue pair alive.
            if self._poller.poll(0 if turn < _SPINS else _NAP):
                raise LaneBroken("the owner has closed the connection")
            found = self._pair.completed(WINDOW)
            if found:
                return found
            watch.check()
        raise AssertionError("unreachable")

    def _ask_for(self, copy: Copy, section: Section, watch: Watch) -> None:
        answer = self.ask(section, copy.token, watch)
        if answer is Answer.GONE:
            raise BufferGone("the buffer was dropped by its owner")
        if answer is Answer.REFUSED:
            raise HandleRefused("the owner does not recognise this handle")

    def _why(self, piece: Piece, watch: Watch) -> RDMAError:
        """What the refusal of the owner's device means."""
        try:
            self._ask_for(piece.copy, piece.section, watch)
        except RDMAError as error:
            return error
        except OSError as error:
            return LaneBroken(f"the owner's device has refused, and the owner does not say why ({error})")
        return HandleRefused("the owner's device refuses: the handle names more than the owner offers")

    def _stage_of(self) -> tuple[memoryview, int]:
        """The memory for short pieces, with its key; made when it is first needed."""
        if self._stage is None:
            # Shared with forks, so that one of this process's does not have it moved.
            self._stage = mmap.mmap(-1, WINDOW * STAGED)
            self._view = memoryview(self._stage)
            self._stage_at = address_of(self._view)
            self._staged = self.device.use(self._stage_at, WINDOW * STAGED, True)
        return self._view, self._staged.lkey


def _greet(
    stream: socket.socket, door: bytes, realm: bytes, deadline: float, check: Callable[[], None]
) -> Talk:
    """VRB-1."""
    client = secrets.token_bytes(NONCE)
    stream.sendall(MAGIC + client + realm)
    welcome = exactly(stream, WELCOME, deadline, check)
    talk = Talk(door, realm, client, welcome[:NONCE])
    if not talk.proves(Side.SERVER, welcome[-PROOF:]):
        raise BufferGone("the process that owned the buffer has ended: another one is in its place")
    stream.sendall(talk.prove(Side.CLIENT))
    return talk
