"""The owner's side: a thread that gives leases to readers, and takes them back when their connections end.

PBL-1: a reader runs where the owner does, in the same user and process namespaces: nothing prevents it from writing to the memory that it is lent. Code in
a sandbox has the same user, and finds publications by their names if it has the network. Neither can it be the owner of one that others read.
"""

from __future__ import annotations

import base64
import errno
import fcntl
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mesh_core.extensions import require_same_namespaces
from mesh_rdma._buffer import RDMABuffer, handle_of
from mesh_rdma._errors import InvalidTransfer, RDMAError, RDMATimeout
from mesh_rdma._here import close_in_forks, engine
from mesh_rdma._memory import memory_of
from mesh_rdma._pool import empty
from mesh_rdma._publication._layout import Layout
from mesh_rdma._publication._versions import Ask, Lease, Refusal, Versions
from mesh_rdma._publication._wire import address_of, open_socket, peer_of, receive, send

_BACKLOG = 4096
_DIED = "it has ended, or was killed, before it gave the version back"
_AGAIN = 0.1
"""Seconds after which a process without descriptors looks again for readers."""


class Slot:
    """Memory for one version."""

    def __init__(self, nbytes: int) -> None:
        self.memory = empty(max(nbytes, 1))
        self.own = RDMABuffer(self.memory)
        """Its owner's access, by which it is filled."""
        self.buffer = RDMABuffer(self.memory.toreadonly())
        found = engine().pooled(memory_of(self.memory))
        if found is None:
            raise InvalidTransfer("the memory of a version must be of empty()")
        descriptor, self.offset = found
        # For reading only, so that no reader changes what others read.
        self.descriptor = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        descriptor = getattr(self, "descriptor", None)
        if descriptor is not None:
            os.close(descriptor)

    def describe(self) -> dict[str, Any]:
        """Return what a reader has to know."""
        handle = base64.b64encode(handle_of(self.buffer).encode()).decode()
        return {"offset": self.offset, "buffer": handle}


class Lent(NamedTuple):
    """A version, and what gives it back."""

    token: object
    version: int
    slot: Slot


@dataclass(frozen=True)
class ReaderFailure:
    """A reader that failed to get or release a version."""

    pid: int
    """Its process."""
    version: int
    """The version that it had a lease on."""
    reason: str
    """What it said."""


class Server:
    """Gives leases on versions."""

    def __init__(
        self,
        name: str,
        layout: Layout,
        slots: int,
        last: int,
        incarnation: str | None = None,
        *,
        is_copy: bool = False,
    ) -> None:
        self.name = name
        self.incarnation = incarnation or secrets.token_hex(8)
        self.layout = layout
        self.failures: list[ReaderFailure] = []
        self._versions = Versions(slots, last, is_copy=is_copy)
        self._slots: list[Slot | None] = [None] * slots
        # Taken again by the same thread where garbage is collected, and with it the publication.
        self._lock = threading.RLock()
        self._owner = os.getpid()
        self._freed = threading.Condition(self._lock)
        self._pids: dict[Hashable, int] = {}
        self._listeners: list[Callable[[], object]] = []
        """Callers that wait for room for another version."""
        self._closed = False
        self._has_refused = False
        self._descriptor = _sealed(layout.encode())
        self._listener = self._listen()
        self._selector = selectors.DefaultSelector()
        self._wake, self._woken = socket.socketpair()
        for each in (self._listener, self._wake, self._woken):
            close_in_forks(each)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="mesh-publication", daemon=True)
        self._thread.start()

    def _listen(self) -> socket.socket:
        listener = open_socket()
        try:
            listener.bind(address_of(self.name))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            os.close(self._descriptor)
            raise InvalidTransfer(
                f"cannot publish as '{self.name}': {error.strerror}. Another process of this user may publish under "
                "this name; close that publication first, or choose another name."
            ) from None
        return listener

    # The owner's threads.

    @property
    def last(self) -> int:
        """The greatest number so far."""
        with self._lock:
            return self._versions.last

    @property
    def newest(self) -> int | None:
        """The newest version."""
        with self._lock:
            return self._versions.newest

    @property
    def leases(self) -> list[tuple[int, int]]:
        """The lease holders: process numbers and versions."""
        with self._lock:
            return sorted(
                (self._pid(reader), version) for reader, version in self._versions.holders().items()
            )

    def begin(self, version: int | None, timeout: float | None) -> tuple[int, int, Slot]:
        """Return the version's number, its slot's place, and the slot to fill. Waits until there is one."""
        if os.getpid() != self._owner:
            raise RDMAError(
                f"publication {self.name} belongs to pid {self._owner}, of which this process is a forked copy. "
                "Publish there, or make another publication here."
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while True:
                if self._closed:
                    raise InvalidTransfer("the publication is closed")
                number = self._versions.last + 1 if version is None else version
                if number <= self._versions.last:
                    raise InvalidTransfer(
                        f"version must be greater than {self._versions.last}, the last one that was published or seen "
                        f"by a reader, got {number}"
                    )
                at = self._versions.begin(number)
                if at is not None:
                    break
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    held = ", ".join(
                        f"version {v} by pid {self._pid(r)}" for r, v in self._versions.holders().items()
                    )
                    raise RDMATimeout(
                        f"version {number} was not published within {timeout} s: there are {len(self._slots)} places "
                        f"for versions, and readers hold {held}. Have them release these, or allow for more by versions=."
                    )
                self._freed.wait(left)
            try:
                slot = self._slots[at] = self._slots[at] or Slot(self.layout.nbytes)
            except BaseException:
                self._tell(self._versions.abort())
                raise
        return number, at, slot

    def finish(self) -> None:
        """The slot is filled."""
        with self._lock:
            self._tell(self._versions.finish())

    def abort(self) -> None:
        """The slot could not be filled."""
        with self._lock:
            self._tell(self._versions.abort())

    def lend(self, pid: int, version: int | None = None) -> Lent | None:
        """Give a lease to a process that asks in another way, by default on the newest version. ``None`` if there is no such version."""
        token = object()
        with self._lock:
            outcome = self._versions.ask(token, Ask(version))
            if not isinstance(outcome, Lease):
                return None
            slot = self._slots[outcome.slot]
            assert slot is not None
            self._pids[token] = pid
            return Lent(token, outcome.version, slot)

    def give_back(self, lent: Lent) -> None:
        """End a lease that was given by `lend`."""
        token = lent.token
        with self._lock:
            self._pids.pop(token, None)
            self._versions.gone(token)
            self._tell_of_room()
            closed = self._closed
        if closed:
            self._rouse()

    def when_room(self, listener: Callable[[], object]) -> None:
        """Call this once, when another version can be begun, or the publication is closed; now, if that is so."""
        with self._lock:
            self._listeners.append(listener)
            self._tell_of_room()

    def close(self) -> None:
        """Give no more leases. Existing ones stay, and the memory with them."""
        if os.getpid() != self._owner:
            # A forked copy: the lock may be locked there forever, and the parent continues.
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            refusal = Refusal("the publication was closed by its owner")
            self._tell([(reader, refusal) for reader in self._versions.close()])
            self._tell_of_room()
        self._rouse()

    def _rouse(self) -> None:
        """Wake the thread."""
        try:
            self._wake.send(b"x")
        except OSError:
            # The thread has seen it, and ended.
            pass

    def join(self, timeout: float | None) -> bool:
        """Wait until the last lease has ended; return whether it has."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # Messages to others; with the lock.

    def _tell_of_room(self) -> None:
        self._freed.notify_all()
        if self._closed or self._versions.has_room:
            listeners, self._listeners = self._listeners, []
            for listener in listeners:
                listener()

    def _tell(self, told: list[tuple[Hashable, Lease | Refusal]]) -> None:
        for reader, outcome in told:
            assert isinstance(reader, socket.socket)
            self._answer(reader, outcome)

    def _answer(self, reader: socket.socket, outcome: Lease | Refusal | None, reason: str = "") -> None:
        descriptors: list[int] = []
        message: dict[str, Any]
        if outcome is None:
            message = {"waiting": reason}
        elif isinstance(outcome, Refusal):
            message = {"refused": outcome.reason}
        else:
            slot = self._slots[outcome.slot]
            assert slot is not None
            message = {
                "version": outcome.version,
                "incarnation": self.incarnation,
                "held": self._versions.held(),
                **slot.describe(),
            }
            descriptors = [slot.descriptor, self._descriptor]
        try:
            send(reader, message, descriptors)
        except OSError:
            # It has ended, or does not read: the thread notices, and takes its lease back.
            _shut(reader)

    def _pid(self, reader: Hashable) -> int:
        return self._pids.get(reader, 0)

    # The thread.

    def _serve(self) -> None:
        paused = False
        while not self._ended():
            events = self._selector.select(_AGAIN if paused else None)
            if paused and not self._closed:
                self._selector.register(self._listener, selectors.EVENT_READ)
                paused = False
            for key, _ in events:
                if key.fileobj is self._woken:
                    self._woken.recv(16)
                elif key.fileobj is self._listener:
                    paused = not self._accept()
                    if paused:
                        self._selector.unregister(self._listener)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._hear(key.fileobj)
        self._end()

    def _ended(self) -> bool:
        """Whether it is closed, and nobody has a lease."""
        if not self._closed:
            return False
        self._listener.close()
        with self._lock:
            return self._versions.readers == 0

    def _accept(self) -> bool:
        """Accept a reader; return whether more can be accepted."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return True
        except OSError as error:
            # No descriptors left: those of readers come back.
            return error.errno == errno.ECONNABORTED
        try:
            require_same_namespaces(connection)
        except OSError as error:
            # Said before the other end can see it.
            if not self._has_refused:
                self._has_refused = True
                logging.getLogger("mesh_rdma").warning(
                    "refused a reader of publication %s, and will say no more of others: %s", self.name, error
                )
            connection.close()
            return True
        pid, _ = peer_of(connection)
        close_in_forks(connection)
        connection.setblocking(False)
        with self._lock:
            self._pids[connection] = pid
        self._selector.register(connection, selectors.EVENT_READ)
        return True

    def _hear(self, connection: socket.socket) -> None:
        try:
            message, descriptors = receive(connection)
            for each in descriptors:
                os.close(each)
        except BlockingIOError:
            return
        except (OSError, ValueError):
            message = None
        if message is not None and message.get("released") is True:
            self._drop(connection)
        elif message is None or not self._obey(connection, message):
            if connection in self._holders():
                self._note(connection, _DIED)
            self._drop(connection)

    def _obey(self, connection: socket.socket, message: dict[str, Any]) -> bool:
        """Carry out a reader's request; return whether it is a valid one."""
        failed = message.get("failed")
        if isinstance(failed, str):
            self._note(connection, failed[:1000])
            return True
        ask, seen = _asked(message), message.get("seen")
        if ask is None:
            return False
        with self._lock:
            if isinstance(seen, int) and message.get("incarnation") != self.incarnation:
                # It has seen an earlier life of the publication: numbers continue from there, and it gets nothing below.
                self._tell(self._versions.noticed(seen))
                ask = replace(ask, floor=max(seen + 1, seen + 1 if ask.floor is None else ask.floor))
            outcome = self._versions.ask(connection, ask)
            there = ", ".join(map(str, self._versions.held())) or "none yet"
            self._answer(connection, outcome, f"there are versions: {there}")
        return True

    def _holders(self) -> dict[Hashable, int]:
        with self._lock:
            return self._versions.holders()

    def _note(self, connection: socket.socket, reason: str) -> None:
        with self._lock:
            version = self._versions.holders().get(connection, 0)
            failure = ReaderFailure(self._pid(connection), version, reason)
        self.note(failure)

    def note(self, failure: ReaderFailure) -> None:
        """Keep and log a failure of a reader."""
        with self._lock:
            self.failures.append(failure)
            del self.failures[:-1000]
        words = "reader pid %d could not get version %d of publication %s: %s"
        logging.getLogger("mesh_rdma").warning(words, failure.pid, failure.version, self.name, failure.reason)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        with self._lock:
            self._pids.pop(connection, None)
            self._versions.gone(connection)
            self._tell_of_room()
        connection.close()

    def _end(self) -> None:
        with self._lock:
            left = [each for each in self._pids if isinstance(each, socket.socket)]
            self._pids.clear()
            self._slots = []
        self._selector.close()
        for each in (*left, self._woken, self._wake):
            each.close()
        os.close(self._descriptor)


def _sealed(data: bytes) -> int:
    """Return a file in memory that nobody can change."""
    descriptor = os.memfd_create("mesh-layout", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


def _asked(message: dict[str, Any]) -> Ask | None:
    """Return the request in a packet; ``None`` if it is not a valid one."""
    version, floor, wait = message.get("version"), message.get("floor"), message.get("wait")
    if not isinstance(wait, bool) or any(
        each is not None and type(each) is not int for each in (version, floor)
    ):
        return None
    return Ask(version, floor, wait)
