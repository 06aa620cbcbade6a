"""Which snapshots of actors are kept, and which count. No clock, no I/O.

SNP-1: the version of an actor's snapshot never goes back.
SNP-2: a life that another one has followed keeps nothing any more.
SNP-3: a snapshot is there as a whole or not at all; until a newer one is, the older one stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from mesh_core.extensions import Proc


class Owner(NamedTuple):
    """Whose state it is: a rank of a mesh of actors, in whichever life."""

    actor: int
    """The number of the mesh of actors."""
    rank: int


class Version(NamedTuple):
    """Identifies a snapshot of an actor: later ones compare greater.

    >>> Version(1, 9) < Version(2, 1)
    True
    """

    life: int
    """In which life of the actor it was taken, from 1."""
    number: int
    """Which one of that life."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One state of an actor, pickled."""

    version: Version
    data: bytes
    buffers: tuple[bytes, ...] = ()

    @property
    def nbytes(self) -> int:
        """How much memory it takes."""
        return len(self.data) + sum(map(len, self.buffers))


@dataclass(frozen=True, slots=True)
class Placed:
    """A snapshot that other processes keep, each of them a whole copy."""

    owner: Owner
    version: Version
    nbytes: int
    places: tuple[Proc, ...]
    """The processes that have it: those of the owner's host first."""


Entry: TypeAlias = Kept | Placed
Dropped: TypeAlias = "Callable[[Owner, Version, tuple[Proc, ...]], None]"
"""Told of copies that nobody will ask for any more: whose, up to which version, and where they are."""


class Store:
    """The newest snapshot of each actor, or where it is, in the memory of one process. Thread-safe.

    Of actors that were stopped, which may be made again, at most ``ended_bytes`` are kept: the oldest go first.

    >>> store, owner = Store(), Owner(7, 0)
    >>> life, found = store.begin(owner)
    >>> store.save(owner, Kept(Version(life, 1), b"state"))
    True
    >>> life, found = store.begin(owner)
    >>> life, found.data
    (2, b'state')
    >>> store.save(owner, Kept(Version(1, 2), b"from the dead"))
    False
    """

    def __init__(self, ended_bytes: int = 256 << 20, dropped: Dropped | None = None) -> None:
        self._lock = threading.Lock()
        self._lives: dict[Owner, int] = {}
        self._kept: dict[Owner, Entry] = {}
        """What was kept last is the last."""
        self._dropped = dropped
        self._ended: dict[Owner, None] = {}
        """Those that were stopped, the oldest first."""
        self._ended_bytes = ended_bytes

    def begin(self, owner: Owner) -> tuple[int, Entry | None]:
        """A new life of an actor begins: its number, and the newest snapshot (SNP-2)."""
        with self._lock:
            life = self._lives[owner] = self._lives.get(owner, 0) + 1
            self._ended.pop(owner, None)
            return life, self._kept.get(owner)

    def save(self, owner: Owner, kept: Entry) -> bool:
        """Keep a snapshot; false if it is older than what is there, or its life is over (SNP-1, SNP-2)."""
        with self._lock:
            known = self._kept.get(owner)
            if kept.version.life != self._lives.get(owner) or (known and known.version >= kept.version):
                return False
            self._kept.pop(owner, None)
            self._kept[owner] = kept
        self._drop(owner, known, kept)
        return True

    def plant(self, owner: Owner, kept: Kept) -> Version:
        """Have the next life of an actor begin with this state, another's perhaps; what its present one sends is refused."""
        with self._lock:
            life = self._lives[owner] = self._lives.get(owner, 0) + 1
            planted = Version(life, 0)
            known = self._kept.get(owner)
            self._kept[owner] = Kept(planted, kept.data, kept.buffers)
        self._drop(owner, known)
        return planted

    def end(self, owner: Owner, life: int) -> None:
        """An actor was stopped."""
        gone = []
        with self._lock:
            if self._lives.get(owner) != life:
                return
            self._ended[owner] = None
            size = sum(self._kept[each].nbytes for each in self._ended if each in self._kept)
            while size > self._ended_bytes:
                oldest = next(iter(self._ended))
                size -= self._kept[oldest].nbytes if oldest in self._kept else 0
                gone.append((oldest, self._forget(oldest)))
        for each, known in gone:
            self._drop(each, known)

    def forget(self, actor: int) -> None:
        """Drop all that is kept of a mesh of actors."""
        with self._lock:
            owners = [each for each in self._lives if each.actor == actor]
            gone = [(owner, self._forget(owner)) for owner in owners]
        for owner, known in gone:
            self._drop(owner, known)

    def _forget(self, owner: Owner) -> Entry | None:
        self._ended.pop(owner, None)
        return self._kept.pop(owner, None)

    def _drop(self, owner: Owner, known: Entry | None, now: Entry | None = None) -> None:
        """Tell of the copies of what was known that what is known now does not have."""
        if self._dropped is None or not isinstance(known, Placed):
            return
        still = now.places if isinstance(now, Placed) else ()
        places = tuple(place for place in known.places if place not in still)
        if places:
            self._dropped(owner, known.version, places)

    def last(self, actor: int) -> Entry | None:
        """The snapshot of any rank of a mesh of actors that was kept last."""
        with self._lock:
            return next((kept for owner, kept in reversed(self._kept.items()) if owner.actor == actor), None)

    def newest(self, owner: Owner) -> Entry | None:
        """What is kept of an actor."""
        with self._lock:
            return self._kept.get(owner)
