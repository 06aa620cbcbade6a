"""What a directory tree holds, as a table of hashes: made where the files are edited, compared where they are copied."""

from __future__ import annotations

import os
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import PurePosixPath
from typing import NamedTuple

from mesh_core._common.errors import MeshError
from mesh_core._features.workspace.rules import OWN, Rules

_DIGEST = 20
_BLOCK = 1 << 20
_SETTLED_NS = 2_000_000_000
"""A file that was changed so shortly before it was looked at may change again without looking different: file systems
count time in steps."""

FILE, LINK, FOLDER = "f", "l", "d"
"""Kinds of entries: a file, a symbolic link, a directory."""

_MODES = 0o775
"""What is kept of a mode: no copy gets the rights of its owner, and none can be written by everybody."""


class Entry(NamedTuple):
    """One name in a tree."""

    path: str
    kind: str
    mode: int
    """Who may do what with it; of a link nothing."""
    size: int
    mtime_ns: int
    digest: bytes
    """Of a file its content's; of a link where it points."""


class Print(NamedTuple):
    """What a file looks like from outside: as long as this stays, its content is taken to be the same."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, seen: os.stat_result) -> Print:
        """Take it from what ``stat`` says."""
        return cls(seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino)


class Manifest:
    """A tree's entries, parents before what is in them, and a digest of it all."""

    __slots__ = ("digest", "entries", "touched")

    def __init__(self, entries: list[Entry], touched: dict[str, int] | None = None) -> None:
        self.entries = entries
        whole = blake2b(digest_size=_DIGEST)
        for path, kind, mode, size, _, digest in entries:
            whole.update(f"{path}\0{kind}{mode:o}/{size}\0".encode("utf-8", "surrogateescape"))
            whole.update(digest)
        self.digest = whole.digest()
        self.touched = touched or {}
        """When modules of Python were last changed in any way, even if only put in place of older ones."""

    def encode(self) -> bytes:
        """As bytes; the names compress well."""
        rows = [f"{e.kind}{e.mode:o}/{e.size}/{e.mtime_ns}/{e.digest.hex()}/{e.path}\0" for e in self.entries]
        return zlib.compress("".join(rows).encode("utf-8", "surrogateescape"), 1)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Read what :meth:`encode` wrote; refuses names that lead out of the tree."""
        entries = []
        for row in zlib.decompress(data).decode("utf-8", "surrogateescape").split("\0")[:-1]:
            mode, size, mtime, digest, path = row[1:].split("/", 4)
            if not is_inside(path):
                raise MeshError(
                    f"a workspace has an entry {path!r}, which lies outside of it; it was not written"
                )
            kept = int(mode, 8) & _MODES
            entries.append(Entry(path, row[0], kept, int(size), int(mtime), bytes.fromhex(digest)))
        return cls(entries)


def is_inside(path: str) -> bool:
    """Say whether a path leads to a place in the tree that it is read from."""
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts and pure.parts[:1] not in ((), (OWN,))


class Scanner:
    """Looks through one tree, again and again; files that look as before are not read again."""

    def __init__(self, top: str, rules: Rules, check: Callable[[], None]) -> None:
        self._top = top
        self._check = check
        """Raises when the scan is to be given up; called now and then."""
        self._rules = rules
        self._known: dict[str, tuple[Print, bytes]] = {}

    def scan(self) -> Manifest:
        """What the tree holds now."""
        entries: list[Entry] = []
        touched: dict[str, int] = {}
        known: dict[str, tuple[Print, bytes]] = {}
        for path, seen in self._walk("", self._top):
            entry = self._entry(path, seen, known)
            if entry is not None:
                entries.append(entry)
                if path.endswith(".py"):
                    touched[path] = max(seen.st_mtime_ns, seen.st_ctime_ns)
        self._known = known
        entries.sort(key=lambda entry: entry.path.split("/"))
        return Manifest(entries, touched)

    def _walk(self, prefix: str, folder: str) -> Iterator[tuple[str, os.stat_result]]:
        try:
            with os.scandir(folder) as found:
                names = list(found)
        except FileNotFoundError:
            if not prefix:
                raise
            return
        for each in names:
            path = f"{prefix}{each.name}"
            try:
                is_dir = each.is_dir(follow_symlinks=False)
                if each.name == OWN or self._rules.leaves_out(path, is_dir):
                    continue
                yield path, each.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if is_dir:
                yield from self._walk(f"{path}/", each.path)

    def _entry(self, path: str, seen: os.stat_result, known: dict[str, tuple[Print, bytes]]) -> Entry | None:
        full = os.path.join(self._top, path)  # noqa: PTH118 - paths of whole trees: pathlib takes several times as long
        mode = seen.st_mode
        if stat.S_ISDIR(mode):
            # What is in it must be written and read.
            return Entry(path, FOLDER, mode & _MODES | 0o700, 0, 0, b"")
        if stat.S_ISLNK(mode):
            try:
                return Entry(path, LINK, 0, 0, 0, os.fsencode(os.readlink(full)))  # noqa: PTH115 - as above
            except OSError:
                return None
        if not stat.S_ISREG(mode):
            # Sockets, pipes and devices are of this machine.
            return None
        look, before = Print.of(seen), self._known.get(path)
        if before is not None and before[0] == look:
            digest = before[1]
        else:
            try:
                digest = digest_of(full, self._check)
            except FileNotFoundError:
                return None
            except OSError as error:
                raise type(error)(
                    error.errno,
                    f"{error.strerror}: the workspace cannot be sent without it; make it readable or exclude it",
                    full,
                ) from None
        if time.time_ns() - max(seen.st_mtime_ns, seen.st_ctime_ns) > _SETTLED_NS:
            known[path] = look, digest
        return Entry(path, FILE, mode & _MODES, seen.st_size, seen.st_mtime_ns, digest)


def digest_of(path: str | int, check: Callable[[], None] | None = None) -> bytes:
    """The digest of a file's content, or of that of a descriptor, which is closed; ``check`` may raise meanwhile."""
    whole = hasher()
    with open(path, "rb") as file:  # noqa: PTH123 - as above
        while block := file.read(_BLOCK):
            whole.update(block)
            if check is not None:
                check()
    return whole.digest()


def hasher() -> blake2b:
    """What content is hashed with."""
    return blake2b(digest_size=_DIGEST)
