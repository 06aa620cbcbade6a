"""A host's copy of a workspace: what it lacks, taking it in, and putting it in place.

WSP-1: nothing is put in place before all of it is here (and, as the controller commits last, on every host); each file is
the old one or the new one.
WSP-2: nothing is deleted but what a sync has put there; notes that cannot be read name nothing.
WSP-3: no link in a copy is followed.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import shutil
import stat
import time
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from mesh_core._errors import MeshError
from mesh_core._workspace._manifest import (
    FOLDER,
    LINK,
    PROGRAM,
    Entry,
    Manifest,
    Print,
    digest_of,
    hasher,
    is_inside,
)
from mesh_core._workspace._rules import OWN

MORE, DONE, ABANDON = 0, 1, 2
"""What follows a piece of a file: more of it, nothing, or nothing as it changed while it was read."""

Piece = tuple[int, bytes, int]
"""A file's number in the manifest, some bytes of it, and what follows."""

_INDEX_VERSION = 1
_FORGOTTEN_S = 86_400.0


class Record(NamedTuple):
    """What is known of one name in the copy."""

    ours: bool
    """Whether a sync has put it there: nothing else is ever deleted."""
    kind: str
    look: Print | None
    digest: bytes


class Committed(NamedTuple):
    """What putting a workspace in place has changed."""

    written: int
    deleted: int
    modules: tuple[str, ...]
    """Files of Python that were there before and are not what they were."""


class Mirror:
    """One workspace's copy below ``root``. A sync is a :meth:`survey`, any number of :meth:`take`, a :meth:`commit`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._own = root / OWN
        self._staging = self._own / f"arriving-{os.uname().nodename}-{os.getpid()}"
        self._records: dict[str, Record] | None = None
        self._manifest: Manifest | None = None
        self._lacking: frozenset[int] = frozenset()
        self._todo: list[int] = []
        """What is to be put in place: most of a tree is there already."""
        self._arriving: tuple[int, int, blake2b] | None = None
        self._serial = 0
        self._arrived: dict[tuple[str, str, bytes], Path] = {}
        """What has come and is not in place yet, by its path, kind and digest: also what came before a second survey."""

    @property
    def digest(self) -> bytes:
        """Of the tree that was last surveyed."""
        return b"" if self._manifest is None else self._manifest.digest

    # What it lacks.

    def survey(self, manifest: Manifest | None) -> bytes:
        """Begin a sync; returns the numbers of the entries whose content is lacking here. ``None``: the tree of before."""
        self._let_go()
        if manifest is not None:
            self._manifest = manifest
        assert self._manifest is not None
        self._prepare()
        records = self._load()
        lacking, todo = [], []
        folders = {""}
        for number, entry in enumerate(self._manifest.entries):
            found = self._look(entry.path) if entry.path.rpartition("/")[0] in folders else None
            if entry.kind == FOLDER:
                right = found is not None and stat.S_ISDIR(found.st_mode)
                if right:
                    folders.add(entry.path)
            elif entry.kind == LINK:
                right = self._points(entry, found)
            else:
                has = self._has(entry, found, records)
                if not has and _key(entry) not in self._arrived:
                    lacking.append(number)
                right = has and found is not None and _executable(found) is (entry.kind == PROGRAM)
            if not right:
                todo.append(number)
        self._lacking, self._todo = frozenset(lacking), todo
        return array.array("I", lacking).tobytes()

    def _prepare(self) -> None:
        try:
            self._own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"no copy of the workspace can be kept here, so choose another place with to=: {error.strerror}"
            raise OSError(error.errno, why, str(self.root)) from None
        if stat.S_ISLNK(self._own.lstat().st_mode):
            raise MeshError(f"{self._own} is a link, and no place for a workspace's notes; remove it")
        for left in self._own.glob("arriving-*"):
            node, _, pid = left.name.removeprefix("arriving-").rpartition("-")
            here = node == os.uname().nodename
            with contextlib.suppress(OSError):
                # Of one that was killed while it wrote.
                if (
                    here and not Path("/proc", pid).exists()
                ) or time.time() - left.stat().st_mtime > _FORGOTTEN_S:
                    shutil.rmtree(left, ignore_errors=True)

    def _look(self, path: str) -> os.stat_result | None:
        try:
            return os.lstat(f"{self.root}/{path}")
        except OSError:
            return None

    def _points(self, entry: Entry, found: os.stat_result | None) -> bool:
        if found is None or not stat.S_ISLNK(found.st_mode):
            return False
        return os.fsencode((self.root / entry.path).readlink()) == entry.digest

    def _has(self, entry: Entry, found: os.stat_result | None, records: dict[str, Record]) -> bool:
        if found is None or not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
            return False
        look, known = Print.of(found), records.get(entry.path)
        if known is None or known.look != look:
            try:
                digest = digest_of(f"{self.root}/{entry.path}")
            except OSError:
                return False
            ours = known is not None and known.ours
            known = records[entry.path] = Record(ours, entry.kind, look, digest)
        return known.digest == entry.digest

    # Taking it in.

    def take(self, pieces: list[Piece]) -> None:
        """Take in pieces of files; those of files that this host has already are nothing to it."""
        assert self._manifest is not None
        for number, data, then in pieces:
            if number not in self._lacking:
                continue
            entry = self._manifest.entries[number]
            if self._arriving is None or self._arriving[0] != number:
                self._arriving = (number, self._open(entry), hasher())
            _, file, whole = self._arriving
            view = memoryview(data)
            whole.update(view)
            while view:
                view = view[os.write(file, view) :]
            if then == MORE:
                continue
            os.close(file)
            self._arriving = None
            if then == DONE:
                if whole.digest() != entry.digest:
                    raise MeshError(f"{entry.path!r} of a workspace arrived damaged; sync it again")
                self._arrived[_key(entry)] = self._staging / str(self._serial)

    def _let_go(self) -> None:
        if self._arriving is not None:
            os.close(self._arriving[1])
        self._arriving = None

    def _open(self, entry: Entry) -> int:
        self._let_go()
        self._serial += 1
        self._staging.mkdir(exist_ok=True)
        mode = 0o777 if entry.kind == PROGRAM else 0o666
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(self._staging / str(self._serial), flags, mode)

    def discard(self) -> None:
        """Forget what has arrived of a sync that does not come to its end."""
        self._let_go()
        self._arrived = {}
        self._lacking, self._todo = frozenset(), []
        if self._staging.exists():
            shutil.rmtree(self._staging)

    # Putting it in place.

    def commit(self) -> Committed:
        """Make the copy what the manifest says: each file is the old one or the new one, never part of both."""
        assert self._manifest is not None
        entries = self._manifest.entries
        missing = [number for number in self._lacking if _key(entries[number]) not in self._arrived]
        if missing:
            path = entries[min(missing)].path
            raise MeshError(
                f"{len(missing)} files of a workspace have not arrived, {path!r} the first; sync it again"
            )
        records = self._load()
        before = dict(records)
        modules: list[str] = []
        written = deleted = 0
        try:
            deleted = self._delete(records, modules)
            for number in self._todo:
                entry = self._manifest.entries[number]
                found = self._look(entry.path)
                self._place(number, entry, found, records)
                written += entry.kind != FOLDER
                if found is not None and entry.path.endswith(".py"):
                    modules.append(entry.path)
        finally:
            # Also of a commit that fails: what was put there stays this copy's to delete.
            if records != before:
                self._save(records)
            self.discard()
        return Committed(written, deleted, tuple(sorted(modules)))

    def _delete(self, records: dict[str, Record], modules: list[str]) -> int:
        assert self._manifest is not None
        wanted = {entry.path for entry in self._manifest.entries}
        gone = [path for path, record in records.items() if path not in wanted]
        deleted = 0
        for path in sorted(gone, reverse=True):
            record = records[path]
            if record.ours and self._safe(path):
                full = self.root / path
                if record.kind == FOLDER:
                    with contextlib.suppress(OSError):
                        (full / "__pycache__").rmdir()
                    with contextlib.suppress(OSError):  # holds what is not ours
                        full.rmdir()
                        deleted += 1
                else:
                    with contextlib.suppress(FileNotFoundError, IsADirectoryError):
                        full.unlink()
                        deleted += 1
                    if path.endswith(".py"):
                        modules.append(path)
                        # Made by Python out of ours, and in the way of the directory's end.
                        for cached in (full.parent / "__pycache__").glob(f"{full.stem}.*.pyc"):
                            cached.unlink(missing_ok=True)
            del records[path]
        return deleted

    def _safe(self, path: str) -> bool:
        """Say whether no directory on the way is a link by now, which could lead anywhere."""
        parts = path.split("/")[:-1]
        return not any((self.root / "/".join(parts[: n + 1])).is_symlink() for n in range(len(parts)))

    def _place(
        self, number: int, entry: Entry, found: os.stat_result | None, records: dict[str, Record]
    ) -> None:
        """Put one entry where it belongs, in place of what is found there."""
        full = self.root / entry.path
        if entry.kind == FOLDER:
            if found is not None and not stat.S_ISDIR(found.st_mode):
                full.unlink()
            full.mkdir(exist_ok=True)
            records[entry.path] = Record(True, FOLDER, None, b"")
        elif entry.kind == LINK:
            self._make_room(full, found)
            self._staging.mkdir(exist_ok=True)
            link = self._staging / f"link-{number}"
            link.symlink_to(os.fsdecode(entry.digest))
            link.replace(full)
            records[entry.path] = Record(True, LINK, None, entry.digest)
        elif (staged := self._arrived.get(_key(entry))) is not None:
            self._make_room(full, found)
            os.utime(staged, ns=(entry.mtime_ns, _later(entry, found)))
            staged.replace(full)
            records[entry.path] = Record(True, entry.kind, Print.of(full.lstat()), entry.digest)
        else:
            mode = stat.S_IMODE(full.lstat().st_mode)
            # For whoever may read it, as the umask would have it.
            full.chmod(mode | (mode & 0o444) >> 2 if entry.kind == PROGRAM else mode & ~0o111)
            ours = records[entry.path].ours
            records[entry.path] = Record(ours, entry.kind, Print.of(full.lstat()), entry.digest)

    def _make_room(self, full: Path, found: os.stat_result | None) -> None:
        if found is None or not stat.S_ISDIR(found.st_mode):
            return
        try:
            full.rmdir()
        except OSError as error:
            raise type(error)(
                error.errno,
                f"{error.strerror}: a file of the workspace belongs where a directory is that holds what no sync has "
                "put there; move that away",
                str(full),
            ) from None

    # What is remembered from one sync to the next, also of another job.

    def _load(self) -> dict[str, Record]:
        if self._records is None:
            self._records = {}
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                told = json.loads((self._own / "index.json").read_text())
                if told["version"] == _INDEX_VERSION:
                    self._records = {
                        path: Record(bool(ours), kind, Print(*look) if look else None, bytes.fromhex(digest))
                        for path, (ours, kind, look, digest) in told["records"].items()
                        if is_inside(path)
                    }
        return self._records

    def _save(self, records: dict[str, Record]) -> None:
        self._records = records
        told = {
            "version": _INDEX_VERSION,
            "records": {p: (r.ours, r.kind, r.look, r.digest.hex()) for p, r in records.items()},
        }
        fresh = self._own / f"index-{os.getpid()}"
        fresh.write_text(json.dumps(told))
        fresh.replace(self._own / "index.json")


def _key(entry: Entry) -> tuple[str, str, bytes]:
    return entry.path, entry.kind, entry.digest


def _executable(found: os.stat_result) -> bool:
    return bool(found.st_mode & stat.S_IXUSR)


def _later(entry: Entry, found: os.stat_result | None) -> int:
    """The time a file is given: its own, but another second than that of the version it replaces.

    Python takes a compiled file for fresh if the source's size and second are those it was compiled from.
    """
    if found is None:
        return entry.mtime_ns
    second = 1_000_000_000
    return max(entry.mtime_ns, (found.st_mtime_ns // second + 1) * second)
