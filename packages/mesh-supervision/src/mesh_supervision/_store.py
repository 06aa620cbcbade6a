"""Which snapshots of actors are kept, and which one counts. No clock, no I/O.

SNP-1: the version of an actor's snapshot never goes back.
SNP-2: a life that was followed by another one keeps no more snapshots.
SNP-3: a snapshot is stored as a whole or not at all; until a newer one is, the older one stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from mesh_core.extensions import Proc


class Owner(NamedTuple):
    """The owner of a state: a rank of a mesh of actors, in any of its lives."""

    actor: int
    """The number of the mesh of actors."""
    rank: int


class Version(NamedTuple):
    """Identifies a snapshot of an actor: later ones compare greater.

    >>> Version(1, 9) < Version(2, 1)
    True
    """

    life: int
    """The life of the actor in which it was taken, counted from 1."""
    number: int
    """The number of the snapshot in that life."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One state of an actor, pickled."""

    version: Version
    data: bytes
    buffers: tuple[bytes, ...] = ()

    @property
    def nbytes(self) -> int:
        """The memory that it takes."""
        return len(self.data) + sum(map(len, self.buffers))


@dataclass(frozen=True, slots=True)
class Placed:
    """A snapshot that other processes keep, each with a whole copy."""

    owner: Owner
    version: Version
    nbytes: int
    places: tuple[Proc, ...]
    """The processes that have it, those of the owner's host first."""


Entry: TypeAlias = Kept | Placed
Dropped: TypeAlias = "Callable[[Owner, Version, tuple[Proc, ...]], None]"
"""Called with copies that nobody will ask for again: whose they are, up to which version, and where."""


class Store:
    """The newest snapshot of each actor, or where it is, in the memory of one process. Thread-safe.

    At most ``ended_bytes`` are kept for actors that were stopped, since they may be restarted. The oldest are dropped first.

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
        """In the order in which they were kept."""
        self._dropped = dropped
        self._ended: dict[Owner, None] = {}
        """Actors that were stopped, the oldest first."""
        self._ended_bytes = ended_bytes

    def begin(self, owner: Owner) -> tuple[int, Entry | None]:
        """Begin a new life of an actor: return its number, and the newest snapshot (SNP-2)."""
        with self._lock:
            life = self._lives[owner] = self._lives.get(owner, 0) + 1
            self._ended.pop(owner, None)
            return life, self._kept.get(owner)

    def save(self, owner: Owner, kept: Entry) -> bool:
        """Keep a snapshot; false if it is older than the present one, or its life is over (SNP-1, SNP-2)."""
        with self._lock:
            known = self._kept.get(owner)
            if kept.version.life != self._lives.get(owner) or (known and known.version >= kept.version):
                return False
            self._kept.pop(owner, None)
            self._kept[owner] = kept
        self._drop(owner, known, kept)
        return True

    def plant(self, owner: Owner, kept: Kept) -> Version:
        """Let the next life of an actor begin with this state, perhaps another actor's. Snapshots of its present life are refused."""
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
        """Drop all snapshots of a mesh of actors."""
        with self._lock:
            owners = [each for each in self._lives if each.actor == actor]
            gone = [(owner, self._forget(owner)) for owner in owners]
        for owner, known in gone:
            self._drop(owner, known)

    def _forget(self, owner: Owner) -> Entry | None:
        self._ended.pop(owner, None)
        return self._kept.pop(owner, None)

    def _drop(self, owner: Owner, known: Entry | None, now: Entry | None = None) -> None:
        """Report copies that were known before and are no longer."""
        if self._dropped is None or not isinstance(known, Placed):
            return
        still = now.places if isinstance(now, Placed) else ()
        places = tuple(place for place in known.places if place not in still)
        if places:
            self._dropped(owner, known.version, places)

    def last(self, actor: int) -> Entry | None:
        """Return the snapshot that was kept last of any rank of a mesh of actors."""
        with self._lock:
            return next((kept for owner, kept in reversed(self._kept.items()) if owner.actor == actor), None)

    def newest(self, owner: Owner) -> Entry | None:
        """The snapshot of an actor."""
        with self._lock:
            return self._kept.get(owner)
