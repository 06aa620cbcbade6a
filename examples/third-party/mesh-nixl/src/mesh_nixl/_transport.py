"""The transport, at both ends."""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress

from mesh_nixl._agent import Agent, span_of
from mesh_nixl._server import Server
from mesh_nixl._wire import ASK, DONE, GONE, HELLO, PLACE, PLACES, REFUSED, SECRET, push, take
from mesh_rdma import BufferGone, Copy, Exported, HandleRefused, Peer, Transport, Watch

_AHEAD = 2
_IDLE = 4
_DYING = 0.2


class Places:
    """Memory of this process that owners write to and read from, place by place (NXL-2)."""

    def __init__(self, agent: Agent) -> None:
        # Zeroed pages that are made when they are first used.
        self.memory = memoryview(mmap.mmap(-1, PLACES * PLACE))
        self.base, _ = span_of(self.memory)
        self._registered = agent.register((self.base, self.memory.nbytes))
        self.metadata = agent.metadata(self._registered)
        self._free = deque(range(PLACES))
        self._given_up: list[tuple[socket.socket, list[int]]] = []
        self._changed = threading.Condition()

    def take(self, most: int, watch: Watch) -> list[int]:
        """Return some, and at least one."""
        with self._changed:
            while not self._free:
                self._look()
                if not self._free:
                    watch.check()
                    self._changed.wait(0.05)
            return [self._free.popleft() for _ in range(min(most, len(self._free)))]

    def give(self, places: list[int]) -> None:
        """Have them used again."""
        with self._changed:
            self._free.extend(places)
            self._changed.notify_all()

    def give_later(self, stream: socket.socket, places: list[int]) -> None:
        """Have them used again once the owner has ended the connection, as it may be at work on them until then."""
        with suppress(OSError):
            stream.shutdown(socket.SHUT_WR)
        with self._changed:
            self._given_up.append((stream, places))
            self._look()

    def _look(self) -> None:
        kept = []
        for stream, places in self._given_up:
            if _has_ended(stream):
                stream.close()
                self._free.extend(places)
                self._changed.notify_all()
            else:
                kept.append((stream, places))
        self._given_up = kept


def _has_ended(stream: socket.socket) -> bool:
    stream.setblocking(False)
    try:
        while stream.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


class NixlTransport(Transport):
    """The transport, in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made: Agent | None = None
        self._places: Places | None = None
        self._server: Server | None = None

    def _agent(self) -> Agent:
        with self._lock:
            self._made = self._made or Agent()
            return self._made

    def offer(self, export: Exported) -> bytes:
        """Name the socket, and a secret for this memory."""
        with self._lock:
            self._server = self._server or Server(self._agent)
            server = self._server
        return server.offer(export) + struct.pack("<Q", export.key) + server.name

    def withdraw(self, export: Exported) -> None:
        """Once nobody is at work on it."""
        assert self._server is not None, "withdrawn is what was offered"
        self._server.withdraw(export.key)

    def reach(self, section: bytes, owner: str, watch: Watch) -> Peer:
        """Meet the owner: connections are made as they are needed."""
        agent = self._agent()
        with self._lock:
            self._places = self._places or Places(agent)
            places = self._places
        peer = NixlPeer(agent, places, section[SECRET + 8 :], owner)
        peer.greet(section, watch)
        return peer


class NixlPeer(Peer):
    """An owner, which is asked to move bytes to and from memory of this process."""

    def __init__(self, agent: Agent, places: Places, name: bytes, owner: str) -> None:
        self._agent, self._places, self._name, self._owner = agent, places, name, owner
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()

    def greet(self, section: bytes, watch: Watch) -> None:
        """Make the first connection."""
        self._put_back(self._connect(section, watch))

    def _connect(self, section: bytes, watch: Watch) -> _Connection:
        try:
            connection = _Connection(self._name, self._agent, watch)
        except ConnectionError as error:
            raise BufferGone(f"{self._owner}, which owned the buffer, has ended ({error})") from None
        try:
            connection.greet(section, self._places)
        except BaseException as error:
            connection.stream.close()
            if isinstance(error, ConnectionError) and not isinstance(error, BufferGone):
                raise BufferGone(f"{self._owner}, which owned the buffer, has ended ({error})") from None
            raise
        return connection

    def _take(self, section: bytes, watch: Watch) -> _Connection:
        with self._lock:
            if self._idle:
                connection = self._idle.pop()
                connection.watch = watch
                return connection
        return self._connect(section, watch)

    def _put_back(self, connection: _Connection) -> None:
        with self._lock:
            if len(self._idle) < _IDLE:
                self._idle.append(connection)
                return
        connection.close()

    def run(self, copies: Sequence[Copy], watch: Watch) -> None:
        """Ask for all of it, some ahead."""
        parts = _parts(copies)
        first = next(parts, None)
        if first is None:
            return
        connection = self._take(first[0].section, watch)
        try:
            places = self._places.take(_AHEAD, watch)
        except BaseException:
            self._put_back(connection)
            raise
        try:
            refused = self._exchange(connection, deque(places), first, parts)
        except BaseException as error:
            self._places.give_later(connection.stream, places)
            connection.forget()
            if isinstance(error, ConnectionError) and not isinstance(error, BufferGone):
                raise BufferGone(f"{self._owner}, which owned the buffer, has ended ({error})") from None
            raise
        self._places.give(places)
        self._put_back(connection)
        if refused:
            raise _error(refused)

    def _exchange(
        self,
        connection: _Connection,
        free: deque[int],
        first: _Part | None,
        parts: Iterator[_Part],
    ) -> bytes | None:
        asked: deque[tuple[_Part, int]] = deque()
        part, refused = first, None
        while True:
            while part is not None and free and refused is None:
                copy, start, length = part
                place = free.popleft()
                if copy.write:
                    _gather(copy, start, self._memory(place, length))
                secret, (key,) = copy.section[:SECRET], struct.unpack_from("<Q", copy.section, SECRET)
                connection.push(ASK.pack(copy.write, secret, key, copy.offset + start, place * PLACE, length))
                asked.append((part, place))
                part = next(parts, None)
            if not asked:
                return refused
            (copy, start, length), place = asked.popleft()
            answer = connection.take(1)
            if answer != DONE:
                refused = refused or answer
            elif not copy.write:
                _scatter(copy, start, self._memory(place, length))
            free.append(place)

    def _memory(self, place: int, length: int) -> memoryview:
        return self._places.memory[place * PLACE : place * PLACE + length]

    def alive(self) -> bool:
        """Whether there is somebody at its socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
            stream.setblocking(False)
            try:
                stream.connect(self._name)
            except BlockingIOError:
                return True
            except OSError:
                return False
            return True


_Part = tuple[Copy, int, int]
"""Of a copy: where it begins, counted from its beginning, and how long it is."""


def _parts(copies: Sequence[Copy]) -> Iterator[_Part]:
    for copy in copies:
        for start in range(0, copy.nbytes, PLACE):
            yield copy, start, min(PLACE, copy.nbytes - start)


def _pieces(copy: Copy, start: int, length: int) -> Iterator[memoryview]:
    for piece in copy.memory:
        with piece[start : start + length] as part:
            start, length = max(start - piece.nbytes, 0), length - part.nbytes
            yield part


def _scatter(copy: Copy, start: int, source: memoryview) -> None:
    at = 0
    for part in _pieces(copy, start, source.nbytes):
        part[:] = source[at : at + part.nbytes]
        at += part.nbytes


def _gather(copy: Copy, start: int, target: memoryview) -> None:
    at = 0
    for part in _pieces(copy, start, target.nbytes):
        target[at : at + part.nbytes] = part
        at += part.nbytes


def _error(answer: bytes) -> Exception:
    if answer == GONE:
        return BufferGone("the buffer was dropped by its owner")
    if answer == REFUSED:
        return HandleRefused("the owner refuses: the handle is not its own, or names more than it offers")
    return RuntimeError("NIXL has failed at the owner")


class _Connection:
    """One connection to an owner, used by one thread at a time."""

    def __init__(self, name: bytes, agent: Agent, watch: Watch) -> None:
        self.watch, self._agent = watch, agent
        self.stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._process: int | None = None
        try:
            self._dial(name)
            # A forked child of the owner may keep its sockets open: the process itself is seen to end.
            credentials = self.stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            pid = struct.unpack("3i", credentials)[0]
            if pid:
                with suppress(ProcessLookupError):
                    self._process = os.pidfd_open(pid)
        except BaseException:
            self.stream.close()
            raise

    def _dial(self, name: bytes) -> None:
        self.stream.settimeout(0.1)
        while True:
            try:
                return self.stream.connect(name)
            except BlockingIOError:  # its queue is full
                self.watch.check()
                select.select([], [], [], 0.01)

    def greet(self, section: bytes, places: Places) -> None:
        """Tell the owner where to write to, and show that we may."""
        if len(section) < SECRET + 8:
            raise HandleRefused("the handle's part for the transport nixl is damaged")
        (key,) = struct.unpack_from("<Q", section, SECRET)
        hello = HELLO.pack(section[:SECRET], key, len(places.metadata), places.base)
        self.push(hello + places.metadata)
        answer = self.take(1)
        if answer != DONE:
            raise _error(answer)

    def push(self, data: bytes) -> None:
        self.stream.settimeout(0.1)
        push(self.stream, data, self._wait)

    def take(self, length: int) -> bytes:
        poller = select.poll()
        poller.register(self.stream, select.POLLIN)
        if self._process is not None:
            poller.register(self._process, select.POLLIN)
        pause = 0
        while True:
            ready = dict(poller.poll(pause))
            if self.stream.fileno() in ready:
                return take(self.stream, length, self._wait)
            if ready:
                raise ConnectionResetError("its process has ended")
            # The owner's agent may be connecting to this one.
            self._agent.progress()
            self._wait()
            pause = min(pause + 1, 20)

    def _wait(self) -> None:
        self.watch.check()

    def forget(self) -> None:
        """Leave the stream to who waits for its end."""
        if self._process is not None:
            os.close(self._process)
            self._process = None

    def close(self) -> None:
        self.forget()
        self.stream.close()

    def __del__(self) -> None:
        self.forget()
