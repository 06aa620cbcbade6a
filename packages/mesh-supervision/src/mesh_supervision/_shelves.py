"""Snapshots in the memory of hosts: one copy on the actor's host, and one on a neighbour.

The process that has called ``keep_snapshots`` decides which snapshot is the newest, and knows where its copies are. A
host's own process has the copies. It takes a snapshot from an actor of its host, hands a copy to the neighbour, and has
the keeper decide. Only then is the actor told that the snapshot is kept.

SNP-4: a snapshot is acknowledged once it has a copy on a second host, or at the keeper if there is no other host. Until
then the copies of the previous one stay.
SNP-5: a life begins with the newest acknowledged snapshot or not at all; a copy of any other version is never used.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mesh_core import MeshError
from mesh_supervision._store import Kept, Owner, Placed, Version

if TYPE_CHECKING:
    from mesh_core.extensions import Proc

COPY_S = 60.0
"""The time limit for handing over a copy."""


@dataclass(frozen=True)
class Here:
    """To the keeper: this host's process has started, and can take copies."""


@dataclass(frozen=True)
class Keep:
    """To the process of the actor's host: keep a snapshot; the answer is whether it counts."""

    owner: Owner
    kept: Kept


@dataclass(frozen=True)
class Copy:
    """To a neighbour: store a copy."""

    owner: Owner
    kept: Kept


@dataclass(frozen=True)
class Get:
    """Answer with the copy of a version, or with nothing if it is not here."""

    owner: Owner
    version: Version


@dataclass(frozen=True)
class Drop:
    """Drop the copies of versions up to this one."""

    owner: Owner
    version: Version


@dataclass(frozen=True)
class Remove:
    """Drop the copy of one version, which does not count."""

    owner: Owner
    version: Version


@dataclass(frozen=True)
class Neighbour:
    """To the keeper: which host is to get the second copy? These could not be reached."""

    lost: tuple[Proc, ...] = ()


@dataclass(frozen=True)
class Commit:
    """To the keeper: these hosts have a snapshot; the answer is whether it counts, and which host is the neighbour from now on."""

    placed: Placed


class Shelf:
    """The copies that a process has. Thread-safe.

    >>> shelf, owner = Shelf(), Owner(7, 0)
    >>> for number in (1, 2, 3):
    ...     shelf.put(owner, Kept(Version(1, number), b"state"))
    >>> shelf.drop(owner, Version(1, 2))
    >>> shelf.get(owner, Version(1, 2)), shelf.get(owner, Version(1, 3)).data
    (None, b'state')
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._copies: dict[Owner, dict[Version, Kept]] = {}

    def put(self, owner: Owner, kept: Kept) -> None:
        """Store a copy, beside those of other versions."""
        with self._lock:
            self._copies.setdefault(owner, {})[kept.version] = kept

    def get(self, owner: Owner, version: Version) -> Kept | None:
        """Return the copy of exactly this version (SNP-5)."""
        with self._lock:
            return self._copies.get(owner, {}).get(version)

    def drop(self, owner: Owner, version: Version) -> None:
        """Drop the copies of versions up to this one."""
        self._keep_only(owner, lambda each: each > version)

    def remove(self, owner: Owner, version: Version) -> None:
        """Drop the copy of one version."""
        self._keep_only(owner, lambda each: each != version)

    def _keep_only(self, owner: Owner, stays: Callable[[Version], bool]) -> None:
        with self._lock:
            left = {each: kept for each, kept in self._copies.pop(owner, {}).items() if stays(each)}
            if left:
                self._copies[owner] = left

    @property
    def nbytes(self) -> int:
        """The memory that they take."""
        with self._lock:
            return sum(kept.nbytes for copies in self._copies.values() for kept in copies.values())

    def handle(self, message: Copy | Get | Drop | Remove) -> Kept | None:
        """Carry out a request of another process."""
        match message:
            case Copy(owner, kept):
                self.put(owner, kept)
            case Get(owner, version):
                return self.get(owner, version)
            case Drop(owner, version):
                self.drop(owner, version)
            case Remove(owner, version):
                self.remove(owner, version)
        return None


class Ring:
    """The hosts that can take copies, as the keeper knows them. A host's neighbour is the one with the next higher number, in a ring."""

    def __init__(self, keeper: Proc) -> None:
        self._keeper = keeper
        self._hosts: dict[int, Proc] = {}

    def add(self, proc: Proc) -> None:
        """A host's process has started."""
        self._hosts[proc.address[2]] = proc

    def lose(self, proc: Proc) -> None:
        """A host could not be reached. It is a neighbour again once its process has started anew."""
        if self._hosts.get(proc.address[2]) == proc:
            del self._hosts[proc.address[2]]

    def neighbour(self, proc: Proc) -> Proc:
        """Return the host with the second copy of a host's snapshots; the keeper itself if there is no other host."""
        own = proc.address[2]
        others = sorted(number for number in self._hosts if number != own)
        if not others:
            return self._keeper
        return self._hosts[next((number for number in others if number > own), others[0])]


class Holder:
    """The process of a host, which keeps the snapshots that the actors of that host send."""

    def __init__(self, proc: Proc, keeper: Proc, ask: Callable[[Proc, Any], Awaitable[Any]]) -> None:
        self._proc = proc
        self._keeper = keeper
        self._ask = ask
        """Sends a message to a process, and waits for the answer."""
        self._neighbour: Proc | None = None
        self.shelf = Shelf()

    async def keep(self, owner: Owner, kept: Kept) -> bool:
        """Keep a snapshot here and at the neighbour, and have the keeper decide whether it counts (SNP-4)."""
        self.shelf.put(owner, kept)
        try:
            neighbour = await self._hand_over(owner, kept)
        except BaseException:
            # The keeper has not been asked: it does not count.
            self.shelf.remove(owner, kept.version)
            raise
        placed = Placed(owner, kept.version, kept.nbytes, (self._proc, neighbour))
        counts, self._neighbour = await self._ask(self._keeper, Commit(placed))
        if not counts:
            self.shelf.remove(owner, kept.version)
            await self._ask(neighbour, Remove(owner, kept.version))
            return False
        before = Version(kept.version.life, kept.version.number - 1)
        self.shelf.drop(owner, before)
        # A neighbour that has died in the meantime has nothing to drop.
        try:
            await self._ask(neighbour, Drop(owner, before))
        except MeshError:
            self._neighbour = None
        return True

    async def _hand_over(self, owner: Owner, kept: Kept) -> Proc:
        lost: tuple[Proc, ...] = ()
        while True:
            if self._neighbour is None:
                self._neighbour = await self._ask(self._keeper, Neighbour(lost))
            neighbour: Proc = self._neighbour
            try:
                await self._ask(neighbour, Copy(owner, kept))
            except MeshError:
                if neighbour == self._keeper:
                    raise
                lost, self._neighbour = (*lost, neighbour), None
            else:
                return neighbour
