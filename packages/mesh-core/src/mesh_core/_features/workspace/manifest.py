"""The contents of a directory tree as a table of hashes, made by the controller and compared by the hosts."""

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
"""A file modified this recently may change again without a visible difference, because file systems count time in steps.
Its digest is not cached."""

FILE, LINK, FOLDER = "f", "l", "d"
"""Kinds of entries: a file, a symbolic link, a directory."""

_MODES = 0o775
"""The bits of a mode that are copied: no setuid or setgid, and nothing is writable by everybody."""


class Entry(NamedTuple):
    """One name in a tree."""

    path: str
    kind: str
    mode: int
    """Its permissions; 0 for a link."""
    size: int
    mtime_ns: int
    digest: bytes
    """The digest of a file's content, or the target of a link."""


class Print(NamedTuple):
    """A file's status; as long as it stays the same, the content is assumed to be unchanged."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, seen: os.stat_result) -> Print:
        """Make it from the result of ``stat``."""
        return cls(seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino)


class Manifest:
    """A tree's entries, parents before their contents, and a digest of all of them."""

    __slots__ = ("digest", "entries", "touched")

    def __init__(self, entries: list[Entry], touched: dict[str, int] | None = None) -> None:
        self.entries = entries
        whole = blake2b(digest_size=_DIGEST)
        for path, kind, mode, size, _, digest in entries:
            whole.update(f"{path}\0{kind}{mode:o}/{size}\0".encode("utf-8", "surrogateescape"))
            whole.update(digest)
        self.digest = whole.digest()
        self.touched = touched or {}
        """When Python files were last changed in any way, including being moved into place."""

    def encode(self) -> bytes:
        """Encode as bytes, compressed."""
        rows = [f"{e.kind}{e.mode:o}/{e.size}/{e.mtime_ns}/{e.digest.hex()}/{e.path}\0" for e in self.entries]
        return zlib.compress("".join(rows).encode("utf-8", "surrogateescape"), 1)

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Read the result of :meth:`encode`; raise for names outside the tree."""
        entries = []
        for row in zlib.decompress(data).decode("utf-8", "surrogateescape").split("\0")[:-1]:
            mode, size, mtime, digest, path = row[1:].split("/", 4)
            if not is_inside(path):
                raise MeshError(
                    f"a workspace has an entry {path!r}, which is outside of it; it was not written"
                )
            kept = int(mode, 8) & _MODES
            entries.append(Entry(path, row[0], kept, int(size), int(mtime), bytes.fromhex(digest)))
        return cls(entries)


def is_inside(path: str) -> bool:
    """Return whether a path stays inside its tree."""
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts and pure.parts[:1] not in ((), (OWN,))


class Scanner:
    """Scans a tree repeatedly; files whose status has not changed are not read again."""

    def __init__(self, top: str, rules: Rules, check: Callable[[], None]) -> None:
        self._top = top
        self._check = check
        """Called now and then; raises to abort the scan."""
        self._rules = rules
        self._known: dict[str, tuple[Print, bytes]] = {}

    def scan(self) -> Manifest:
        """Return the manifest of the tree as it is now."""
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
            # The owner must be able to write and read its contents.
            return Entry(path, FOLDER, mode & _MODES | 0o700, 0, 0, b"")
        if stat.S_ISLNK(mode):
            try:
                return Entry(path, LINK, 0, 0, 0, os.fsencode(os.readlink(full)))  # noqa: PTH115 - as above
            except OSError:
                return None
        if not stat.S_ISREG(mode):
            # Sockets, pipes and devices belong to this machine.
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
    """Return the digest of a file's content; a descriptor is closed. ``check`` may raise to abort."""
    whole = hasher()
    with open(path, "rb") as file:  # noqa: PTH123 - as above
        while block := file.read(_BLOCK):
            whole.update(block)
            if check is not None:
                check()
    return whole.digest()


def hasher() -> blake2b:
    """Return a new hash for file contents."""
    return blake2b(digest_size=_DIGEST)
