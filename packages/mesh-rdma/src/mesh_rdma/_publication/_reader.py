"""The readers' side: leases on versions, and copies of them."""

from __future__ import annotations

import base64
import errno
import os
import socket
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mesh_core.extensions import require_same_namespaces
from mesh_rdma._buffer import RDMABuffer, _of_bytes
from mesh_rdma._errors import (
    BufferGone,
    InvalidTransfer,
    PublicationGone,
    RDMAError,
    RDMATimeout,
    VersionUnavailable,
    advice,
)
from mesh_rdma._here import close_in_forks
from mesh_rdma._publication._layout import Layout, Parts, Piece
from mesh_rdma._publication._load import Load
from mesh_rdma._publication._weights import Weights
from mesh_rdma._publication._wire import MOST_DESCRIPTORS, address_of, open_socket, receive, send

_TIMEVAL = struct.Struct("ll")
_MOMENT_S = 0.001


def place() -> tuple[str, int]:
    """The scope in which publications are found by their names: this host, and its network."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, Path("/proc/self/ns/net").stat().st_ino


@dataclass(frozen=True)
class Source:
    """Where a publication is found."""

    name: str
    pid: int
    host: str
    boot: str
    network: int

    @classmethod
    def here(cls, name: str) -> Source:
        """Return where one of this process is."""
        return cls(name, os.getpid(), socket.gethostname(), *place())

    def __str__(self) -> str:
        return f"publication {self.name} of pid {self.pid} on host {self.host}"


@dataclass
class Lease:
    """A version of one source that this process has. It ends when this is garbage, at the latest."""

    connection: socket.socket
    source: Source
    layout: Layout
    version: int
    incarnation: str
    slot: int
    """A descriptor of the file that it is in."""
    offset: int
    buffer: RDMABuffer
    handle: bytes
    held: list[int]
    """All versions that existed when it was given."""

    def failed(self, reason: str) -> None:
        """Tell the owner that the version could not be read."""
        try:
            send(self.connection, {"failed": reason})
        except OSError:
            # The owner knows by itself, or has ended.
            pass

    def end(self) -> None:
        """Give it back."""
        _release(self.connection)
        if self.slot >= 0:
            os.close(self.slot)
            self.slot = -1

    def __del__(self) -> None:
        self.end()


@dataclass
class _Known:
    """What this process knows about a source."""

    incarnation: str | None = None
    seen: int | None = None
    layout: Layout | None = None


@dataclass
class _Asked:
    """What a caller wants from all sources."""

    version: int | None
    floor: int | None
    wait: bool
    timeout: float | None
    deadline: float | None = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = None if self.timeout is None else time.monotonic() + self.timeout

    def left(self) -> float | None:
        """Return the remaining seconds: a moment at least, so that existing versions are returned in any case."""
        return None if self.deadline is None else max(self.deadline - time.monotonic(), _MOMENT_S)


class PublicationReader:
    """Reads the versions of a publication, in any process on its owner's host or on a host with a copy.

    ``Publication.reader()`` makes one. It may be sent to other processes and used by several threads at once.
    """

    def __init__(
        self, sources: Iterable[Source], known: Iterable[tuple[str | None, int | None]] = ()
    ) -> None:
        self._sources = tuple(sources)
        self._known = tuple(_Known(*each) for each in known) or tuple(_Known() for _ in self._sources)
        self._parts = Parts()
        self._load: Load | None = None

    @staticmethod
    def joined(readers: Sequence[PublicationReader]) -> PublicationReader:
        """Return a reader of tensors that several processes publish in pieces, such as the ranks of a trainer.

        All must publish under the same numbers: pass ``version`` to ``publish``. A version is available when all have published it.
        """
        if not readers:
            raise InvalidTransfer("readers must not be empty")
        sources = [source for reader in readers for source in reader._sources]  # noqa: SLF001 - of this class
        known = [each for reader in readers for each in reader._known]  # noqa: SLF001 - as above
        return PublicationReader(sources, [(each.incarnation, each.seen) for each in known])

    def use(
        self,
        version: int | None = None,
        *,
        min_version: int | None = None,
        wait: bool = True,
        timeout: float | None = 60,
    ) -> Weights:
        """Return a version under a lease: a mapping of names to arrays in the shared memory of the version, without a copy.

        Use it in a ``with`` block. It does not change during the block, or while any of its arrays is referenced.

        Args:
            version: exactly this version; by default the newest.
            min_version: this version or a newer one.
            wait: whether to wait for a version that is not published yet; otherwise :class:`VersionUnavailable` is raised at once. It is
                always raised for a version that no longer exists.
            timeout: how long to wait before :class:`RDMATimeout` is raised.
        """
        leases = self._lease(_Asked(version, min_version, wait, timeout))
        return Weights(leases)

    def load_into(
        self,
        state: Mapping[str, Any],
        *,
        pieces: Mapping[str, Piece] | None = None,
        cast: bool = False,
        version: int | None = None,
        min_version: int | None = None,
        wait: bool = True,
        timeout: float | None = 60,
    ) -> int:
        """Copy a version into tensors of this process, and return its number.

        The copy plan is made once, and reused as long as the same tensors are passed. If the copy fails halfway, they hold a
        mixture.

        Args:
            state: names, and the arrays or tensors to fill. Other published tensors are ignored.
            pieces: for tensors that are parts, which part of the whole tensor each is. DTensors know this themselves.
            cast: whether to convert values if a tensor has another dtype than the published one.
            version: as for :meth:`use`.
            min_version: as for :meth:`use`.
            wait: as for :meth:`use`.
            timeout: as for :meth:`use`, with the copy.
        """
        asked = _Asked(version, min_version, wait, timeout)
        parts = self._parts.of(state, pieces)
        try:
            leases = self._lease(asked)
        except PublicationGone:
            # What is mapped for it would keep the memory of an owner that has ended.
            self._load = None
            raise
        try:
            load, layouts = self._load, [lease.layout for lease in leases]
            if load is None or not load.fits(layouts, parts, cast):
                load = self._load = Load(layouts, [str(source) for source in self._sources], parts, cast)
            try:
                load.run(leases, asked.left())
            except BufferGone as error:
                raise PublicationGone(
                    f"an owner has ended while version {leases[0].version} was read: {error}"
                ) from None
        except RDMAError as error:
            for lease in leases:
                lease.failed(str(error))
            raise
        finally:
            _end(leases)
        return leases[0].version

    def _lease(self, asked: _Asked) -> list[Lease]:
        """Lease one version of all sources."""
        version, floor, older = asked.version, asked.floor, list[int]()
        while True:
            leases: list[Lease] = []
            try:
                for at in range(len(self._sources)):
                    leases.append(self._ask(at, leases[0].version if leases else version, floor, asked))
                return leases
            except VersionUnavailable:
                _end(leases)
                if asked.version is not None or not leases:
                    raise
                # One may be ahead of another, and may even have given up a version that the other publishes last.
                if asked.wait:
                    floor = leases[0].version + 1
                    continue
                if version is None:
                    older = [each for each in leases[0].held if each < leases[0].version]
                if not older:
                    raise
                version = older.pop()
            except BaseException:
                _end(leases)
                raise

    def _ask(self, at: int, version: int | None, floor: int | None, asked: _Asked) -> Lease:
        """Ask one source."""
        source, known = self._sources[at], self._known[at]
        connection = self._connect(source, asked.left())
        try:
            ask = {"version": version, "floor": floor, "wait": asked.wait}
            send(connection, {**ask, "seen": known.seen, "incarnation": known.incarnation})
            reply, descriptors = self._hear(connection, source, asked)
        except BaseException:
            # It may have been given a lease at the last moment.
            _release(connection)
            raise
        slot, layout = descriptors
        try:
            return self._granted(at, connection, reply, slot, layout)
        finally:
            os.close(layout)

    def _granted(
        self, at: int, connection: socket.socket, reply: dict[str, Any], slot: int, layout: int
    ) -> Lease:
        source, known = self._sources[at], self._known[at]
        if known.layout is None or known.incarnation != reply["incarnation"]:
            known.layout = Layout.decode(os.pread(layout, os.fstat(layout).st_size, 0))
        known.incarnation = reply["incarnation"]
        known.seen = max(known.seen or reply["version"], reply["version"])
        handle = base64.b64decode(reply["buffer"])
        return Lease(
            connection,
            source,
            known.layout,
            reply["version"],
            reply["incarnation"],
            slot,
            reply["offset"],
            _of_bytes(handle),
            handle,
            reply["held"],
        )

    def _connect(self, source: Source, left: float | None) -> socket.socket:
        connection = open_socket()
        try:
            # The limit of a connect that waits for room, too.
            limit = left or 0.0
            limits = _TIMEVAL.pack(int(limit), int(limit % 1 * 1e6))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limits)
            close_in_forks(connection)
            try:
                connection.connect(address_of(source.name))
            except BlockingIOError:
                raise RDMATimeout(f"{source} did not accept a connection in time") from None
            except OSError as error:
                why = "it was closed, or its process has ended"
                if (source.boot, source.network) != place():
                    why = f"this host, {socket.gethostname()}, has no copy of it (give hosts= to the Publication), or {why}"
                raise PublicationGone(f"{source} is not there: {why} ({error.strerror})") from None
            try:
                require_same_namespaces(connection)
            except OSError as error:
                raise PublicationGone(
                    f"{source} is not there: another process has its name: {error}"
                ) from None
        except BaseException:
            connection.close()
            raise
        return connection

    def _hear(
        self, connection: socket.socket, source: Source, asked: _Asked
    ) -> tuple[dict[str, Any], list[int]]:
        waiting: str | None = None
        while True:
            left = asked.left()
            connection.settimeout(left)
            try:
                reply, descriptors = receive(connection)
            except TimeoutError:
                what = f"no such version came within {asked.timeout} s; {waiting}"
                raise RDMATimeout(
                    f"{source}: {what if waiting else f'it did not answer within {asked.timeout} s'}"
                ) from None
            except OSError as error:
                raise PublicationGone(f"{source} has ended: {error.strerror}") from None
            match reply:
                case None:
                    raise PublicationGone(f"{source} has ended")
                case {"waiting": str(waiting)}:
                    continue
                case {"refused": str(reason)}:
                    raise VersionUnavailable(f"{source}: {reason}")
            connection.settimeout(None)
            if len(descriptors) != MOST_DESCRIPTORS:
                for each in descriptors:
                    os.close(each)
                raise RDMAError(
                    f"{source}: its memory cannot be opened here{advice(OSError(errno.EMFILE, ''))}"
                )
            return reply, descriptors

    def __reduce__(self) -> Any:
        return PublicationReader, (self._sources, [(known.incarnation, known.seen) for known in self._known])

    def __repr__(self) -> str:
        return f"<PublicationReader of {' and '.join(map(str, self._sources))}>"


def _end(leases: list[Lease]) -> None:
    for lease in leases:
        lease.end()


def _release(connection: socket.socket) -> None:
    """End a connection in good order: otherwise the owner takes this process for dead."""
    try:
        send(connection, {"released": True})
    except OSError:
        # It was ended by a fork, or the owner has ended.
        pass
    connection.close()
