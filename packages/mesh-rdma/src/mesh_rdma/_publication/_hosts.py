"""Copies of a publication on other hosts: one each, fetched once, under the name of the original.

CPS-1: a host has one copy of a version, however many of its processes read it.
CPS-2: a version that is being fetched is leased where it is fetched from, so that it stays whole.
CPS-3: a host that joins fetches its first version from another copy, if there is one. The owner sends to two hosts at once;
the others wait until one of these has the version, and fetch it there: a tree in which each host gives to two.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from mesh_core import Actor, Future, HostMesh, ProcMesh, endpoint
from mesh_rdma._buffer import RDMABuffer
from mesh_rdma._errors import RDMATimeout
from mesh_rdma._publication._delta import apply, encode
from mesh_rdma._publication._layout import Layout
from mesh_rdma._publication._reader import place
from mesh_rdma._publication._server import Lent, ReaderFailure, Server, Slot

_LIMIT_S = 60.0
_AT_ONCE = 2
"""The number of hosts that fetch from one at once. A single one would leave a link idle while its other end makes room."""


class Place(NamedTuple):
    """Where a copy is."""

    key: tuple[str, int]
    """As :func:`place` returns it: publications of one name would be in each other's way there."""
    pid: int
    host: str

    @classmethod
    def here(cls) -> Place:
        """Return the place of this process."""
        return cls(place(), os.getpid(), socket.gethostname())


class Mirror(Actor):
    """Keeps a host's copy of a publication.

    Nothing here waits for readers while it has a lease elsewhere, or keeps others from returning theirs.
    """

    def __init__(self, name: str, layout: bytes, incarnation: str, versions: int) -> None:
        self._made = partial(Server, name, Layout.decode(layout), versions, -1, incarnation, is_copy=True)
        self._server: Server | None = None
        self._lent: dict[int, Lent] = {}

    @endpoint
    async def where(self) -> Place:
        """Return where this is."""
        return Place.here()

    @endpoint
    async def begin(self) -> None:
        """Give leases from now on."""
        self._server = self._made()

    @endpoint
    async def room(self) -> None:
        """Wait until there is room for another version."""
        assert self._server is not None
        loop, there = asyncio.get_running_loop(), asyncio.Event()
        self._server.when_room(lambda: loop.call_soon_threadsafe(there.set))
        await there.wait()

    @endpoint
    async def take(self, version: int, source: RDMABuffer) -> bool:
        """Fetch a version; false if there is no room for it."""
        slot = self._place_for(version)
        if slot is None:
            return False
        assert self._server is not None
        try:
            await source.read_into(slot.memory, timeout=None)
        except BaseException:
            self._server.abort()
            raise
        self._server.finish()
        return True

    def _place_for(self, version: int) -> Slot | None:
        assert self._server is not None
        try:
            return self._server.begin(version, 0)[2]
        except RDMATimeout:
            return None

    @endpoint
    async def change(self, version: int, base: int, delta: RDMABuffer) -> bool:
        """Make a version from an older one; false if that is not here, or there is no room for another one."""
        assert self._server is not None
        lent = self._server.lend(os.getpid(), base)
        if lent is None:
            return False
        try:
            said = bytearray(delta.size())
            await delta.read_into(said, timeout=None)
            slot = self._place_for(version)
            if slot is None:
                return False
            try:
                await slot.own.write_from(lent.slot.memory, timeout=None)
                apply(self._server.layout, memoryview(said), slot.memory)
            except BaseException:
                self._server.abort()
                raise
            self._server.finish()
        finally:
            self._server.give_back(lent)
        return True

    @endpoint
    async def lend(self) -> tuple[int, int, RDMABuffer] | None:
        """Keep the newest version for another host; return a function that releases it, its number, and its memory."""
        assert self._server is not None
        lent = self._server.lend(os.getpid())
        if lent is None:
            return None
        self._lent[id(lent.token)] = lent
        return id(lent.token), lent.version, lent.slot.buffer

    @endpoint
    async def give_back(self, number: int) -> None:
        """The other host has it."""
        assert self._server is not None
        self._server.give_back(self._lent.pop(number))


@dataclass
class _Copy:
    """One host's copy, as its owner knows it."""

    mirror: Any
    place: Place
    version: int | None = None
    fetching: bool = False
    sending: int = 0
    """The number of hosts that fetch from it."""
    direct: bool = False
    """Whether it could not fetch from another copy, and fetches from the owner."""


class Copies:
    """All copies of a publication."""

    def __init__(self, server: Server, versions: int) -> None:
        self._server = server
        self._versions = versions
        self._lock = threading.Lock()
        self._copies: list[_Copy] = []
        self._procs: list[ProcMesh] = []
        self._closed = False
        self._sending = 0
        """The number of hosts that fetch from the owner."""
        self._queue: list[_Copy] = []
        """Hosts that have room, and nobody to fetch from yet."""
        self.delta_bytes: int | None = None
        """The length of the latest delta."""

    def versions(self) -> dict[str, int | None]:
        """Return the newest version of each host's copy."""
        with self._lock:
            return {f"{copy.place.host}, pid {copy.place.pid}": copy.version for copy in self._copies}

    def add(self, hosts: HostMesh) -> None:
        """Add copies on these hosts, if there are none yet."""
        procs = hosts.spawn_procs(name="publication", supervise=lambda failure: True)
        told = self._server.layout.encode(), self._server.incarnation
        mirrors: Any = procs.spawn("mirrors", Mirror, self._server.name, *told, self._versions)
        there: list[tuple[Any, Place]] = list(mirrors.where.call().get(timeout=_LIMIT_S).items())
        with self._lock:
            known = {Place.here().key, *(copy.place.key for copy in self._copies)}
            added = []
            for point, at in there:
                if at.key not in known:
                    known.add(at.key)
                    added.append(_Copy(mirrors.slice(**point), at))
        if not added:
            procs.stop()
            return
        for copy in added:
            copy.mirror.begin.call_one().get(timeout=_LIMIT_S)
        with self._lock:
            self._copies += added
            self._procs.append(procs)
        for copy in added:
            self._fetch(copy)

    def publish(self) -> None:
        """There is a new version."""
        with self._lock:
            copies = list(self._copies)
        for copy in copies:
            self._fetch(copy)

    def publish_changes(self, base: Lent) -> None:
        """There is a new version, made from this one; the lease on it is ended here."""
        new = self._server.lend(os.getpid())
        delta = None
        try:
            if new is not None and new.version > base.version:
                delta = encode(self._server.layout, base.slot.memory, new.slot.memory)
        finally:
            self._server.give_back(base)
            if new is not None:
                self._server.give_back(new)
        if delta is None or new is None:
            self.publish()
            return
        said = RDMABuffer(delta)
        with self._lock:
            self.delta_bytes = len(delta)
            copies = list(self._copies)
        for copy in copies:
            if copy.version == base.version and self._begin(copy):
                self._change(copy, new.version, base.version, said)
            else:
                self._fetch(copy)

    def _change(self, copy: _Copy, version: int, base: int, delta: RDMABuffer) -> None:
        def over(_kept: RDMABuffer, future: Future[Any]) -> None:
            error = future.exception()
            if (error is None and future.get()) or (error is not None and _is_lost(error)):
                self._fetched(copy, version, error)
                return
            if error is not None:
                self._note(copy, version, error)
            with self._lock:
                copy.fetching = False
            self._fetch(copy)

        def change() -> None:
            # The reader of a delta has only a handle: the delta is kept here until then.
            copy.mirror.change.call_one(version, base, delta).add_done_callback(partial(over, delta))

        self._when_room(copy, change)

    def _when_room(self, copy: _Copy, then: Callable[[], None]) -> None:
        """Continue when a host has room for another version."""

        def asked(future: Future[None]) -> None:
            error = future.exception()
            if error is None:
                then()
            else:
                self._fetched(copy, self._server.newest or 0, error)

        copy.mirror.room.call_one().add_done_callback(asked)

    def close(self) -> None:
        """Stop them; versions in use there stay until they are released."""
        with self._lock:
            self._closed = True
            procs, self._procs, self._copies = self._procs, [], []
        for each in procs:
            each.stop()

    def _begin(self, copy: _Copy) -> bool:
        """Return whether it should fetch now: it exists, and fetches nothing else."""
        with self._lock:
            if self._closed or copy.fetching or copy not in self._copies:
                return False
            copy.fetching = True
            return True

    def _fetch(self, copy: _Copy) -> None:
        """Let a host fetch the newest version."""
        if self._begin(copy):
            self._when_room(copy, partial(self._find_source, copy))

    def _find_source(self, copy: _Copy) -> None:
        """Let it fetch from where the fewest others do (CPS-3), or wait for its turn."""
        newest = self._server.newest
        with self._lock:
            having = [each for each in self._copies if each.version is not None and each is not copy]
            if copy.version is not None:
                having = [each for each in having if each.version == newest]
            peer = None if copy.direct else min(having, key=lambda each: each.sending, default=None)
            if peer is not None and peer.sending < _AT_ONCE:
                peer.sending += 1
            elif self._sending < _AT_ONCE and not (copy.version is None and peer is not None):
                peer = None
                self._sending += 1
            else:
                self._queue.append(copy)
                return
        if peer is None:
            self._fetch_here(copy)
        else:
            self._fetch_from(peer, copy)

    def _sent(self, peer: _Copy | None) -> None:
        """A host has finished fetching: it is the next one's turn."""
        with self._lock:
            if peer is None:
                self._sending -= 1
            else:
                peer.sending -= 1
            waiting, self._queue = self._queue, []
        for copy in waiting:
            self._find_source(copy)

    def _again(self, copy: _Copy, peer: _Copy | None) -> None:
        """Let a host fetch once more, but not from another copy."""
        with self._lock:
            copy.fetching = False
            copy.direct = peer is not None
        self._sent(peer)
        self._fetch(copy)

    def _fetch_here(self, copy: _Copy) -> None:
        lent = self._server.lend(copy.place.pid)  # CPS-2
        if lent is None or lent.version == copy.version:
            if lent is not None:
                self._server.give_back(lent)
            with self._lock:
                copy.fetching = False
            self._sent(None)
            return
        self._take(copy, lent.version, lent.slot.buffer, partial(self._server.give_back, lent), None)

    def _fetch_from(self, peer: _Copy, copy: _Copy) -> None:
        """Let a host fetch from another one, or from here if that has ended."""

        def lent(future: Future[Any]) -> None:
            found = None if future.exception() is not None else future.get()
            if found is not None and (copy.version is None or found[1] > copy.version):
                number, version, buffer = found
                give_back = partial(peer.mirror.give_back.broadcast, number)
                self._take(copy, version, buffer, give_back, peer)
                return
            if found is not None:
                peer.mirror.give_back.broadcast(found[0])
            self._again(copy, peer)

        peer.mirror.lend.call_one().add_done_callback(lent)

    def _take(
        self,
        copy: _Copy,
        version: int,
        source: RDMABuffer,
        give_back: Callable[[], object],
        peer: _Copy | None,
    ) -> None:
        def over(future: Future[Any]) -> None:
            give_back()
            error = future.exception()
            # The problem may be the other copy, which may have ended; there is none if there is just no room for the version yet.
            if (error is not None and peer is not None and not _is_lost(error)) or (
                error is None and not future.get()
            ):
                self._again(copy, peer)
            else:
                self._fetched(copy, version, error)
                self._sent(peer)

        copy.mirror.take.call_one(version, source).add_done_callback(over)

    def _note(self, copy: _Copy, version: int, error: BaseException) -> None:
        self._server.note(ReaderFailure(copy.place.pid, version, f"host {copy.place.host}: {error}"))

    def _fetched(self, copy: _Copy, version: int, error: BaseException | None) -> None:
        """A host now has a version, or failed to get it."""
        with self._lock:
            copy.fetching = copy.direct = False
            if error is None:
                copy.version = version
            elif _is_lost(error) and copy in self._copies:
                self._copies.remove(copy)
            if self._closed:
                return
        if error is not None:
            self._note(copy, version, error)
        newest = self._server.newest
        if newest is not None and newest > version:
            self._fetch(copy)


def _is_lost(error: BaseException) -> bool:
    """Whether the process of a copy has ended."""
    from mesh_core import SupervisionError, Undeliverable

    return isinstance(error, (SupervisionError, Undeliverable))
