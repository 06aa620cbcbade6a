"""Where a checkpoint is: a directory that is complete, or as it was before.

CKP-1: there is a complete checkpoint at a path at all times. A new one is written beside it, and replaces it at the very end.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mesh_core import MeshError
from mesh_core.extensions import naming

_EXCHANGE = 2
_HERE = -100
_UNABLE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)


class CheckpointError(MeshError):
    """A checkpoint is missing or incomplete, or does not contain what was requested."""


@contextmanager
def writing(path: str | Path) -> Iterator[None]:
    """Have errors name the checkpoint; those of PyTorch about a full disk name neither the file nor the disk."""
    try:
        with naming(path):
            yield
    except RuntimeError as error:
        if isinstance(error, MeshError):
            raise
        about = os.statvfs(Path(path).parent)
        raise CheckpointError(
            f"the checkpoint {path} could not be written, and is as it was before: {error}. Its file system has "
            f"{about.f_bavail * about.f_frsize:,} bytes free"
        ) from error


class Place:
    """A directory in which a checkpoint is written, until it is complete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not (path / ".metadata").exists() and (not path.is_dir() or any(path.iterdir())):
            raise CheckpointError(
                f"{path} is there and is no checkpoint: it is not replaced. Save to another path"
            )
        _sweep(path)
        self.partial = path.parent / f".{path.name}.{uuid.uuid4().hex}.partial"
        new = self.partial.with_suffix(".new")
        new.mkdir()
        self._lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
        # The next process that saves there sees by the lock whether this one is still writing; it is locked before anybody looks.
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.partial)

    def finish(self) -> None:
        """Put it at the path (CKP-1)."""
        os.fsync(self._lock)
        old: Path | None = None
        if not self.path.exists():
            self.partial.rename(self.path)
        elif _exchange(self.partial, self.path):
            old = self.partial
        else:
            # Not every file system can exchange two directories. Between these two lines `found()` finds the old one.
            old = self.path.parent / f".{self.path.name}.{uuid.uuid4().hex}.previous"
            self.path.rename(old)
            self.partial.rename(self.path)
        _sync(self.path.parent)
        os.close(self._lock)
        if old is not None:
            shutil.rmtree(old, ignore_errors=True)

    def give_up(self) -> None:
        """Remove it."""
        os.close(self._lock)
        shutil.rmtree(self.partial, ignore_errors=True)


def found(path: Path) -> Path:
    """Return the directory that has the checkpoint."""
    if not path.exists():
        previous = sorted(path.parent.glob(f".{path.name}.*.previous"))
        if previous:
            return previous[0]
        raise CheckpointError(f"there is no checkpoint at {path}: no such directory")
    if not (path / ".metadata").is_file():
        raise CheckpointError(f"{path} is no checkpoint, or a part of one: it has no file .metadata")
    return path


def _sweep(path: Path) -> None:
    """Remove what processes have left that died while they saved there."""
    for left in path.parent.glob(f".{path.name}.*.partial"):
        try:
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)
    if path.exists():
        for left in path.parent.glob(f".{path.name}.*.previous"):
            shutil.rmtree(left, ignore_errors=True)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange two directories atomically; return whether the file system can do that."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    if renameat2(_HERE, os.fsencode(a), _HERE, os.fsencode(b), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _UNABLE:
        return False
    raise OSError(number, os.strerror(number), str(b))


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
