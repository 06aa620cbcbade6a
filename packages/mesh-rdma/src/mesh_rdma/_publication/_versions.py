"""Which versions exist, in which slots of memory, and who has a lease on which. A state machine without I/O, clock or memory.

VER-1: a slot that is being filled, or that is empty, is never leased.
VER-2: a slot that is leased is never filled.
VER-3: numbers only go up: a new version is greater than all that were ever begun, or that a reader says it has seen. In a copy, a version that
could not be filled may be begun again, from elsewhere: its content is decided by the original.
VER-4: the newest version stays until a newer one is there.
VER-5: a reader that asks for a version that will never exist again is told so at once; one that waits is notified when the version exists,
or when the publication ends.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Lease:
    """A version that somebody has, and the slot that it is in."""

    slot: int
    version: int


@dataclass(frozen=True)
class Refusal:
    """Why a version is not available."""

    reason: str


@dataclass(frozen=True)
class Ask:
    """A reader's request."""

    version: int | None = None
    """Exactly this one; otherwise the newest."""
    floor: int | None = None
    """No version below."""
    wait: bool = False
    """Whether to wait for one that may still come."""


@dataclass
class _Slot:
    version: int | None = None
    """None while it is empty, or filled."""
    holders: set[Hashable] = field(default_factory=set)


class Versions:
    """The versions of one publication."""

    def __init__(self, slots: int, last: int, *, is_copy: bool = False) -> None:
        self._is_copy = is_copy
        self._slots = [_Slot() for _ in range(slots)]
        self._filling: tuple[int, int] | None = None
        self._newest: int | None = None
        self._last = last
        """The greatest number that was ever begun, or seen by a reader."""
        self._waiting: dict[Hashable, Ask] = {}
        self._leases: dict[Hashable, int] = {}
        self._closed = False

    @property
    def newest(self) -> int | None:
        """The newest version."""
        return self._newest

    @property
    def last(self) -> int:
        """The greatest number so far; the next version is greater."""
        return self._last

    def held(self) -> list[int]:
        """Return the existing versions, in order."""
        return sorted(slot.version for slot in self._slots if slot.version is not None)

    def holders(self) -> dict[Hashable, int]:
        """Return who has a lease, and on which version."""
        return {
            reader: version
            for reader, at in self._leases.items()
            if (version := self._slots[at].version) is not None
        }

    @property
    def readers(self) -> int:
        """Return how many have a lease, or wait for one."""
        return len(self._leases) + len(self._waiting)

    # The owner's side.

    @property
    def has_room(self) -> bool:
        """Whether another version can be begun."""
        return self._filling is None and any(self._may_be_filled(slot) for slot in self._slots)

    def _may_be_filled(self, slot: _Slot) -> bool:
        # VER-2, VER-4
        return not slot.holders and (slot.version is None or slot.version != self._newest)

    def begin(self, version: int) -> int | None:
        """Return the slot to fill with this version; none while all that may be filled are leased (VER-2)."""
        if self._filling is not None:
            raise RuntimeError("a version is being filled already")
        if version <= self._last:
            raise ValueError(f"version must be greater than {self._last}, got {version}")
        free = [
            (-1 if slot.version is None else slot.version, at)
            for at, slot in enumerate(self._slots)
            if self._may_be_filled(slot)
        ]
        if not free:
            return None
        _, at = min(free)
        # VER-1: from here on nobody gets it.
        self._slots[at].version = None
        self._filling = (at, version)
        self._last = version
        return at

    def finish(self) -> list[tuple[Hashable, Lease | Refusal]]:
        """The slot is filled. Return the answers to those that have waited."""
        if self._filling is None:
            raise RuntimeError("no version is being filled")
        at, version = self._filling
        self._filling = None
        self._slots[at].version = self._newest = version
        return self._tell()

    def abort(self) -> list[tuple[Hashable, Lease | Refusal]]:
        """The slot could not be filled: there is no such version, and its number is used again in copies only. Returns as `finish`."""
        if self._is_copy and self._filling is not None and self._filling[1] == self._last:
            self._last -= 1
        self._filling = None
        return self._tell()

    def _tell(self) -> list[tuple[Hashable, Lease | Refusal]]:
        told: list[tuple[Hashable, Lease | Refusal]] = []
        for reader, ask in list(self._waiting.items()):
            found = self._find(ask)
            if found is not None:
                del self._waiting[reader]
                told.append((reader, self._give(reader, found) if isinstance(found, int) else found))
        return told

    def close(self) -> list[Hashable]:
        """Serve no version to anyone who asks from now on. Return the answers to those that have waited. Leases stay."""
        self._closed = True
        waited = list(self._waiting)
        self._waiting.clear()
        return waited

    # The readers' side.

    def noticed(self, version: int) -> list[tuple[Hashable, Lease | Refusal]]:
        """A reader has seen this version, in an earlier life of the publication (VER-3). Returns as `finish`."""
        self._last = max(self._last, version)
        return self._tell()

    def ask(self, reader: Hashable, ask: Ask) -> Lease | Refusal | None:
        """Return what the reader gets; ``None`` if it waits, and is notified later."""
        if reader in self._leases or reader in self._waiting:
            return Refusal("it has asked already")
        if self._closed:
            return Refusal("the publication was closed by its owner")
        found = self._find(ask)
        if isinstance(found, int):
            return self._give(reader, found)
        if found is None and ask.wait:
            self._waiting[reader] = ask
            return None
        return found or Refusal(self._lacks(ask))

    def gone(self, reader: Hashable) -> None:
        """The reader returns its lease, no longer waits, or has ended."""
        self._waiting.pop(reader, None)
        at = self._leases.pop(reader, None)
        if at is not None:
            self._slots[at].holders.discard(reader)

    def _give(self, reader: Hashable, at: int) -> Lease:
        slot = self._slots[at]
        assert slot.version is not None
        slot.holders.add(reader)
        self._leases[reader] = at
        return Lease(at, slot.version)

    def _find(self, ask: Ask) -> int | Refusal | None:
        """Return the slot; ``None`` if it may still come (VER-5)."""
        wanted = self._newest if ask.version is None else ask.version
        if ask.version is not None and ask.floor is not None and ask.version < ask.floor:
            return Refusal(f"version {ask.version} is below {ask.floor}, the least that this reader may get")
        if wanted is not None and (ask.floor is None or wanted >= ask.floor):
            for at, slot in enumerate(self._slots):
                if slot.version == wanted:
                    return at
        filling = None if self._filling is None else self._filling[1]
        if ask.version is not None and ask.version <= self._last and ask.version != filling:
            # It never comes (VER-3).
            return Refusal(self._lacks(ask))
        return None

    def _lacks(self, ask: Ask) -> str:
        wanted = "no version" if ask.version is None else f"no version {ask.version}"
        if ask.version is None and ask.floor is not None:
            wanted = f"no version from {ask.floor} on"
        there = ", ".join(map(str, self.held()))
        return f"{wanted} is there; " + (f"there are {there}" if there else "nothing has been published yet")
