"""A host's private directory for one job, gone with the job."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

_PREFIX = "mesh-scratch-"
_LOCK = ".alive"


class Scratch:
    """A directory of mode 0700, removed by :meth:`close`; by the next one that is made, if this process is killed."""

    def __init__(self) -> None:
        sweep()
        self.path = tempfile.mkdtemp(prefix=_PREFIX)
        self._pid = os.getpid()
        # Held as long as this process lives, and not inherited by the programs it starts. In its place only when it is
        # held: whoever sweeps takes a lock that nobody holds for one of the dead.
        fresh = Path(self.path) / f"{_LOCK}-fresh"
        self._lock = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        fresh.rename(Path(self.path) / _LOCK)

    def close(self) -> None:
        """Remove it with all that is in it; nothing in a forked copy of the process, whose it is not."""
        if self._lock >= 0 and os.getpid() == self._pid:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def sweep() -> None:
    """Remove what processes of this user have left that were killed."""
    for found in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            about = found.lstat()
            if stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and _abandoned(found):
                shutil.rmtree(found, ignore_errors=True)


def _abandoned(folder: Path) -> bool:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True
