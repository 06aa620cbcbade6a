"""A host's private directory for one job, removed with the job."""

from __future__ import annotations

import contextlib
import fcntl
import os

from mesh_core._common.private_folders import (
    inode,
    open_private,
    remove_private,
    temporary_folder,
    temporary_folders,
)

_PREFIX = "mesh-scratch-"
_LOCK = ".alive"


class Scratch:
    """A directory of mode 0700. Removed by :meth:`close`, or by the next process to create one if this process is killed."""

    def __init__(self) -> None:
        import tempfile

        parent = temporary_folder()
        sweep(parent)
        self.path = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        self._pid = os.getpid()
        at = open_private(self.path)
        try:
            self._inode = inode(at)
            # Held while this process lives, and not inherited by programs it starts. Renamed into place only once it
            # is held: a sweep takes a lock that nobody holds for that of a dead process.
            fresh = f"{_LOCK}-fresh"
            self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=at)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            os.rename(fresh, _LOCK, src_dir_fd=at, dst_dir_fd=at)
        finally:
            os.close(at)

    def disown(self) -> None:
        """In a fork of the process: let the directory live as long as the parent, not longer."""
        os.close(self._lock)
        self._lock = -1

    def close(self) -> None:
        """Remove the directory and its contents; does nothing in a fork of the process."""
        if self._lock >= 0 and os.getpid() == self._pid:
            remove_private(self.path, self._inode)
            os.close(self._lock)
            self._lock = -1


def sweep_all() -> None:
    """Remove directories that killed processes of this user left behind, wherever they may be."""
    for parent in temporary_folders():
        sweep(parent)


def sweep(parent: str) -> None:
    """Remove directories that killed processes of this user left behind."""
    with contextlib.suppress(OSError):
        for name in os.listdir(parent):  # noqa: PTH208 - names are wanted
            if name.startswith(_PREFIX):
                with contextlib.suppress(OSError):
                    _sweep_one(f"{parent}/{name}")


def _sweep_one(folder: str) -> None:
    at = open_private(folder)
    try:
        found = inode(at)
        abandoned = _abandoned(at)
    finally:
        os.close(at)
    if abandoned:
        remove_private(folder, found)


def _abandoned(at: int) -> bool:
    lock = os.open(_LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=at)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
