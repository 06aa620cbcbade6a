"""A host's copy of a workspace: find what it lacks, receive it, and put it in place.

WSP-1: nothing is put in place before everything has arrived (on every host, because the controller commits last). Each file
is either the old one or the new one.
WSP-2: only what a sync put there is deleted; an unreadable index lists nothing.
WSP-4: a failed sync leaves nothing behind that takes space, neither files nor descriptors.
"""

from __future__ import annotations

import array
import contextlib
import errno
import json
import os
import shutil
import stat
import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from mesh_core._common.errors import MeshError
from mesh_core._common.private_folders import make_private, open_own
from mesh_core._features.workspace.below import Below, group_bit
from mesh_core._features.workspace.manifest import (
    FILE,
    FOLDER,
    LINK,
    Entry,
    Manifest,
    Print,
    digest_of,
    hasher,
    is_inside,
)
from mesh_core._features.workspace.rules import OWN

MORE, DONE, ABANDON = 0, 1, 2
"""What follows a piece of a file: more of it, nothing, or nothing because it changed while it was read."""

Piece = tuple[int, bytes, int]
"""A file's number in the manifest, some bytes of it, and what follows."""

_INDEX_VERSION = 1
_FORGOTTEN_S = 86_400.0


class Record(NamedTuple):
    """What is known about one name in the copy."""

    ours: bool
    """Whether a sync put it there; nothing else is ever deleted."""
    kind: str
    look: Print | None
    digest: bytes


class Committed(NamedTuple):
    """What a commit changed."""

    written: int
    deleted: int
    modules: tuple[str, ...]
    """Python files that existed before and have changed or are gone."""


class Mirror:
    """A workspace's copy below ``root``. A sync is a :meth:`survey`, any number of :meth:`take`, and a :meth:`commit`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._staging_name = f"arriving-{os.uname().nodename}-{os.getpid()}"
        self._below: Below | None = None
        """The copy; open from the survey to the end of the sync."""
        self._own = -1
        """The descriptor of its folder for the index and arriving files, during a sync."""
        self._staging = -1
        """The descriptor of the folder in that for arriving files, once something has arrived."""
        self._records: dict[str, Record] | None = None
        self._manifest: Manifest | None = None
        self._lacking: frozenset[int] = frozenset()
        self._todo: list[int] = []
        """The numbers of the entries to put in place; most of a tree is usually there already."""
        self._arriving: tuple[int, int, blake2b] | None = None
        self._serial = 0
        self._arrived: dict[tuple[str, str, bytes], str] = {}
        """Files that have arrived but are not in place yet, by path, kind and digest; a second survey keeps them."""

    @property
    def digest(self) -> bytes:
        """The digest of the tree last surveyed."""
        return b"" if self._manifest is None else self._manifest.digest

    @contextlib.contextmanager
    def _leaving_nothing(self) -> Iterator[None]:
        """Clean up after an error (WSP-4), and say which disk is full if one is."""
        try:
            yield
        except BaseException as error:
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            needed = self._needed() if full else 0
            self.discard()
            if isinstance(error, OSError) and full:
                raise self._full_disk(error, needed) from None
            raise

    def _needed(self) -> int:
        assert self._manifest is not None
        return sum(self._manifest.entries[number].size for number in self._lacking)

    def _full_disk(self, error: OSError, needed: int) -> OSError:
        mounted = self.root
        while not mounted.is_mount() and mounted != mounted.parent:
            mounted = mounted.parent
        about = os.statvfs(self.root)
        free = about.f_bavail * about.f_frsize
        why = (
            f"{error.strerror}: the sync needs {needed:,} bytes here, and the file system at {mounted} has {free:,} free. "
            "Make room there, or choose another place with to=. The copy has not changed"
        )
        return type(error)(error.errno, why, str(self.root))

    # Surveying.

    def survey(self, manifest: Manifest | None) -> bytes:
        """Begin a sync and return the numbers of the entries whose content is missing here; ``None`` is the last manifest."""
        self._close_arriving()
        if manifest is not None:
            self._manifest = manifest
        assert self._manifest is not None
        with self._leaving_nothing():
            below = self._prepare()
            records = self._load()
            lacking, todo = [], []
            folders = {""}
            for number, entry in enumerate(self._manifest.entries):
                found = self._look(below, entry.path) if entry.path.rpartition("/")[0] in folders else None
                if entry.kind == FOLDER:
                    is_folder = found is not None and stat.S_ISDIR(found.st_mode)
                    right = is_folder and _has_mode(found, entry)
                    if is_folder:
                        folders.add(entry.path)
                elif entry.kind == LINK:
                    right = found is not None and stat.S_ISLNK(found.st_mode)
                    right = right and below.points(entry.path) == entry.digest
                else:
                    has = self._has(below, entry, found, records)
                    if not has and _key(entry) not in self._arrived:
                        lacking.append(number)
                    right = has and _has_mode(found, entry)
                if not right:
                    todo.append(number)
        self._lacking, self._todo = frozenset(lacking), todo
        return array.array("I", lacking).tobytes()

    def _prepare(self) -> Below:
        """Open the copy and the folder for the index in it; both must belong to this user (PRV-1)."""
        if self._below is not None:
            # This is a second survey in the same sync.
            return self._below
        why = "cannot keep a copy of the workspace here; choose another place with to="
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            below = Below(open_own(str(self.root)))
        except PermissionError as error:
            raise PermissionError(f"{why}: {error}") from None
        except OSError as error:
            raise OSError(error.errno, f"{why}: {error.strerror}", str(self.root)) from None
        self._below = below
        self._own = make_private(OWN, below.root)
        for left in os.listdir(self._own):  # noqa: PTH208 - names are wanted
            if left.startswith("arriving-"):
                self._sweep(left)
        return below

    def _sweep(self, left: str) -> None:
        """Remove the files of a sync that was killed."""
        node, _, pid = left.removeprefix("arriving-").rpartition("-")
        dead = node == os.uname().nodename and not Path("/proc", pid).exists()
        with contextlib.suppress(OSError):
            about = os.stat(left, dir_fd=self._own, follow_symlinks=False)
            if dead or time.time() - about.st_mtime > _FORGOTTEN_S:
                shutil.rmtree(left, ignore_errors=True, dir_fd=self._own)

    def _look(self, below: Below, path: str) -> os.stat_result | None:
        """Return the status of a name in the copy; raise if it is a folder of another user."""
        found = below.look(path)
        if found is not None and stat.S_ISDIR(found.st_mode) and found.st_uid not in (0, os.geteuid()):
            raise PermissionError(
                f"{self.root / path} belongs to uid {found.st_uid}, who could replace files in it. Remove it, or "
                "choose a folder with to= that others cannot write to"
            )
        return found

    def _has(
        self, below: Below, entry: Entry, found: os.stat_result | None, records: dict[str, Record]
    ) -> bool:
        if found is None or not stat.S_ISREG(found.st_mode) or found.st_size != entry.size:
            return False
        if found.st_uid not in (0, os.geteuid()):
            # Its owner could change it later.
            return False
        look, known = Print.of(found), records.get(entry.path)
        if known is None or known.look != look:
            try:
                digest = digest_of(below.open_file(entry.path))
            except OSError:
                return False
            ours = known is not None and known.ours
            known = records[entry.path] = Record(ours, entry.kind, look, digest)
        return known.digest == entry.digest

    # Receiving.

    def take(self, pieces: list[Piece]) -> None:
        """Receive pieces of files; pieces of files that this host already has are ignored."""
        assert self._manifest is not None
        with self._leaving_nothing():
            for number, data, then in pieces:
                if number not in self._lacking:
                    continue
                entry = self._manifest.entries[number]
                if self._arriving is None or self._arriving[0] != number:
                    self._close_arriving()
                    self._serial += 1
                    self._arriving = (number, self._open(str(self._serial)), hasher())
                _, file, whole = self._arriving
                view = memoryview(data)
                whole.update(view)
                while view:
                    view = view[os.write(file, view) :]
                if then == MORE:
                    continue
                self._close_arriving()
                if then == DONE:
                    if whole.digest() != entry.digest:
                        raise MeshError(f"{entry.path!r} of a workspace arrived damaged. Sync again")
                    self._arrived[_key(entry)] = str(self._serial)

    def _close_arriving(self) -> None:
        """Close the arriving file."""
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            os.close(arriving[1])

    def _open(self, name: str) -> int:
        """Make a file for arriving data that nobody else can read yet."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(name, flags, 0o600, dir_fd=self._stage())

    def _stage(self) -> int:
        if self._staging < 0:
            self._staging = make_private(self._staging_name, self._own)
        return self._staging

    def discard(self) -> None:
        """Delete what has arrived of an unfinished sync, and close everything."""
        self._arrived = {}
        self._lacking, self._todo = frozenset(), []
        below, own, staging = self._below, self._own, self._staging
        self._below, self._own, self._staging = None, -1, -1
        try:
            with contextlib.suppress(OSError):  # a delayed write error may show up now
                self._close_arriving()
            if staging >= 0:
                shutil.rmtree(self._staging_name, ignore_errors=True, dir_fd=own)
        finally:
            for at in (staging, own):
                if at >= 0:
                    os.close(at)
            if below is not None:
                below.close()

    # Committing.

    def commit(self) -> Committed:
        """Make the copy match the manifest; each file is the old one or the new one, never a mixture."""
        assert self._manifest is not None
        with self._leaving_nothing():
            if self._below is None:
                raise MeshError("a sync of a workspace was abandoned. Sync again")
            entries = self._manifest.entries
            missing = [number for number in self._lacking if _key(entries[number]) not in self._arrived]
            if missing:
                path = entries[min(missing)].path
                raise MeshError(
                    f"{len(missing)} files of a workspace have not arrived, the first is {path!r}. Sync again"
                )
            committed = self._commit(self._below, self._manifest)
        self.discard()
        return committed

    def _commit(self, below: Below, manifest: Manifest) -> Committed:
        records = self._load()
        before = dict(records)
        modules: list[str] = []
        written = deleted = 0
        try:
            deleted = self._delete(below, manifest, records, modules)
            for number in self._todo:
                entry = manifest.entries[number]
                found = self._look(below, entry.path)
                self._place(below, number, entry, found, records)
                written += entry.kind != FOLDER
                if found is not None and entry.path.endswith(".py"):
                    modules.append(entry.path)
        finally:
            # Even if the commit fails: the next sync may delete what this one put there.
            if records != before:
                self._save(records)
        return Committed(written, deleted, tuple(sorted(modules)))

    def _delete(
        self, below: Below, manifest: Manifest, records: dict[str, Record], modules: list[str]
    ) -> int:
        wanted = {entry.path for entry in manifest.entries}
        gone = [path for path, record in records.items() if path not in wanted]
        deleted = 0
        for path in sorted(gone, reverse=True):
            record = records[path]
            if record.ours and record.kind == FOLDER:
                with contextlib.suppress(OSError):
                    below.remove_folder(f"{path}/__pycache__")
                with contextlib.suppress(OSError):  # holds what is not ours
                    below.remove_folder(path)
                    deleted += 1
            elif record.ours and self._unlink(below, path):
                deleted += 1
                if path.endswith(".py"):
                    modules.append(path)
                    self._unlink_compiled(below, path)
            del records[path]
        return deleted

    @staticmethod
    def _unlink(below: Below, path: str) -> bool:
        try:
            below.unlink(path)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return False
        except OSError as error:
            # There is a link on the way now, which could lead anywhere.
            if error.errno == errno.ELOOP:
                return False
            raise
        return True

    @staticmethod
    def _unlink_compiled(below: Below, path: str) -> None:
        """Remove Python's compiled versions of our file, which would prevent removing the folder."""
        folder, _, name = path.rpartition("/")
        cache = f"{folder}/__pycache__".lstrip("/")
        for each in below.names(cache):
            if each.startswith(f"{name.removesuffix('.py')}.") and each.endswith(".pyc"):
                with contextlib.suppress(FileNotFoundError):
                    below.unlink(f"{cache}/{each}")

    def _place(
        self,
        below: Below,
        number: int,
        entry: Entry,
        found: os.stat_result | None,
        records: dict[str, Record],
    ) -> None:
        """Put one entry in place, replacing what is there."""
        path = entry.path
        if entry.kind == FOLDER:
            if found is not None and not stat.S_ISDIR(found.st_mode):
                below.unlink(path)
            below.make_folder(path)
            below.set_mode(path, entry.mode)
            records[path] = Record(True, FOLDER, None, b"")
        elif entry.kind == LINK:
            self._make_room(below, path, found)
            name = f"link-{number}"
            os.symlink(os.fsdecode(entry.digest), name, dir_fd=self._stage())
            below.put(path, self._staging, name)
            records[path] = Record(True, LINK, None, entry.digest)
        elif (name := self._arrived.get(_key(entry), "")) != "":
            self._make_room(below, path, found)
            os.utime(name, ns=(entry.mtime_ns, _later(entry, found)), dir_fd=self._staging)
            with contextlib.suppress(PermissionError):  # a file system without modes
                os.chmod(name, entry.mode, dir_fd=self._staging)
            below.put(path, self._staging, name)
            records[path] = Record(True, FILE, self._print(below, path), entry.digest)
        else:
            below.set_mode(path, entry.mode)
            records[path] = Record(records[path].ours, FILE, self._print(below, path), entry.digest)

    @staticmethod
    def _print(below: Below, path: str) -> Print | None:
        found = below.look(path)
        return None if found is None else Print.of(found)

    def _make_room(self, below: Below, path: str, found: os.stat_result | None) -> None:
        if found is None or not stat.S_ISDIR(found.st_mode):
            return
        try:
            below.remove_folder(path)
        except OSError as error:
            raise type(error)(
                error.errno,
                f"{error.strerror}: a file of the workspace would replace a directory that holds files "
                "which no sync put there. Move them away",
                str(self.root / path),
            ) from None

    # The index, kept for the next sync, which may be another job's.

    def _load(self) -> dict[str, Record]:
        if self._records is None:
            self._records = {}
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                file = os.open("index.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._own)
                with os.fdopen(file) as notes:
                    told = json.load(notes)
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
        # In the staging folder: if it cannot be written, it is removed together with that.
        with os.fdopen(self._open("index.json"), "w") as notes:
            notes.write(json.dumps(told))
        os.rename("index.json", "index.json", src_dir_fd=self._staging, dst_dir_fd=self._own)


def _key(entry: Entry) -> tuple[str, str, bytes]:
    return entry.path, entry.kind, entry.digest


def _has_mode(found: os.stat_result | None, entry: Entry) -> bool:
    # Folders may inherit the setgid bit from their parent; that is up to the host.
    return found is not None and stat.S_IMODE(found.st_mode) & ~group_bit(found) == entry.mode


def _later(entry: Entry, found: os.stat_result | None) -> int:
    """Return a modification time for a file: its own, but in a later second than the version it replaces.

    Python considers a compiled file fresh if the source's size and modification second are unchanged.
    """
    if found is None:
        return entry.mtime_ns
    second = 1_000_000_000
    return max(entry.mtime_ns, (found.st_mtime_ns // second + 1) * second)
