"""Which snapshots count: what the process knows in which snapshots were enabled."""

import threading
from dataclasses import dataclass
from typing import Final

from mesh_core.extensions import Proc
from mesh_snapshots._files import Owner, Snapshot, SnapshotError, found_in

KEPT: Final = 2
"""How many snapshots of an owner stay on disk: the last one, and one more in case the last is damaged."""


@dataclass(frozen=True)
class Find:
    """A message: which snapshots are there of this owner? The answer has the newest first."""

    owner: Owner


@dataclass(frozen=True)
class Begin:
    """A message: the sender takes the owner's snapshots from now on. The answer is that of :class:`Find`."""

    owner: Owner


@dataclass(frozen=True)
class Saved:
    """A message: this one is on disk. The answer is what the sender should remove."""

    snapshot: Snapshot


class Keeper:
    """Knows the snapshots of every owner, and which process takes them."""

    def __init__(self, folder: str) -> None:
        self._lock = threading.Lock()
        self._known: dict[Owner, list[Snapshot]] = {}
        """The newest first."""
        self._takers: dict[Owner, Proc] = {}
        for snapshot in sorted(found_in(folder), key=lambda each: -each.number):
            self._known.setdefault(snapshot.owner, []).append(snapshot)

    def answer(self, message: object, sender: Proc) -> tuple[Snapshot, ...] | tuple[str, ...]:
        """Answer a message of the process ``sender``."""
        with self._lock:
            match message:
                case Find(owner):
                    return tuple(self._known.get(owner, ()))
                case Begin(owner):
                    self._takers[owner] = sender
                    return tuple(self._known.get(owner, ()))
                case Saved(snapshot):
                    return self._saved(snapshot, sender)
        raise TypeError(f"the messages of snapshots are Find, Begin and Saved, got {message!r}")

    def _saved(self, snapshot: Snapshot, sender: Proc) -> tuple[str, ...]:
        owner = snapshot.owner
        if self._takers.get(owner) != sender:
            raise SnapshotError(
                f"another process takes the snapshots of {owner} by now: this one was replaced, or a second mesh has the "
                "same name. Give meshes names of their own"
            )
        known = self._known.setdefault(owner, [])
        known.insert(0, snapshot)
        spare = tuple(each.path for each in known[KEPT:])
        del known[KEPT:]
        return spare

    def latest(self) -> dict[Owner, Snapshot]:
        """The newest of each owner."""
        with self._lock:
            return {owner: known[0] for owner, known in self._known.items()}
