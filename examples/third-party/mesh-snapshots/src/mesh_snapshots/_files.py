"""Files of snapshots: their names, and what is in them."""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from mesh_core import MeshError

SUFFIX: Final = ".snapshot"
_MAGIC: Final = b"mesh-snapshot 1\n"
_HEADER: Final = struct.Struct("<16sQI")
"""The magic bytes, how many bytes of state follow, and their checksum."""


class SnapshotError(MeshError):
    """A snapshot cannot be taken or read."""


@dataclass(frozen=True)
class Owner:
    """Whose state it is: an actor at a rank of a mesh of processes, in whichever process that rank is."""

    mesh: str
    rank: int
    name: str

    def __str__(self) -> str:
        return f"{self.name!r} on rank {self.rank} of {self.mesh!r}"

    @property
    def prefix(self) -> str:
        """What the names of its files begin with. ``+`` is in no part of it."""
        return f"{quote(self.mesh, safe='')}+{self.rank}+{quote(self.name, safe='')}+"


@dataclass(frozen=True)
class Snapshot:
    """One state of an actor, on disk."""

    owner: Owner
    number: int
    """The owner's snapshots are counted from 1, across its lives."""
    path: str


def name_of(owner: Owner, number: int, address: tuple[int, int, int]) -> str:
    """A file's name. No two processes write the same, also where one only seems to be dead."""
    return f"{owner.prefix}{number}+{'-'.join(map(str, address))}{SUFFIX}"


def parts_of(folder: str, address: tuple[int, int, int]) -> list[Path]:
    """What a process has begun to write: all that a writer may call it begins with the file's own name."""
    begun = f"+{'-'.join(map(str, address))}{SUFFIX}"
    return [path for path in Path(folder).iterdir() if begun in path.name and path.suffix != SUFFIX]


def pack(state: bytes) -> bytes:
    """What is in the file.

    >>> unpack(pack(b"state"), "a")
    b'state'
    """
    return _HEADER.pack(_MAGIC, len(state), zlib.crc32(state)) + state


def unpack(data: bytes, path: str) -> bytes:
    """What was packed; a :class:`SnapshotError` if it is not whole."""
    if len(data) >= _HEADER.size:
        magic, size, checksum = _HEADER.unpack_from(data)
        state = data[_HEADER.size :]
        if magic == _MAGIC and len(state) == size and zlib.crc32(state) == checksum:
            return state
    raise SnapshotError(f"{path} is damaged: its {len(data):,} bytes are not those of a snapshot")


def found_in(folder: str) -> Iterator[Snapshot]:
    """The snapshots that a folder has by their names."""
    with os.scandir(folder) as entries:
        for entry in entries:
            stem, dot, suffix = entry.name.rpartition(".")
            parts = stem.split("+")
            if dot + suffix == SUFFIX and len(parts) == 5 and parts[1].isdecimal() and parts[3].isdecimal():
                owner = Owner(unquote(parts[0]), int(parts[1]), unquote(parts[2]))
                yield Snapshot(owner, int(parts[3]), entry.path)


def remove_strays(folder: str, owner: Owner, kept: set[str]) -> None:
    """Remove what the owner's earlier lives have begun to write, and nobody has heard of."""
    for path in Path(folder).iterdir():
        if path.name.startswith(owner.prefix) and str(path) not in kept:
            path.unlink(missing_ok=True)
