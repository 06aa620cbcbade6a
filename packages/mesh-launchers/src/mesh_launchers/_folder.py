"""Where jobs are found by their names: a private folder for each, which is removed with the job.

FLD-1: a job holds a lock in its folder from before its keeper starts until the folder is removed: a folder without a lock was left by a killed
keeper. The lock is on a file, because network file systems have no locks on folders.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mesh_launchers._errors import JobExists, JobNotFound

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DOOR = "door"
LINK = "link"
"""The socket by which scripts join a kept job."""
_LOCK = "lock"
_LOOK_S = 0.2
_PAUSE_S = 0.01


def base() -> Path:
    """Return the folder with those of all jobs of this user."""
    given = os.environ.get("MESH_JOBS")
    if given:
        return Path(given)
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "mesh" / "jobs"


class JobFolder:
    """The folder of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """The job's name."""
        return self.path.name

    @property
    def log(self) -> Path:
        """The keeper's log."""
        return self.path / "keeper.log"

    @classmethod
    def of(cls, name: str) -> JobFolder:
        """Return the folder of a job of this name, whether it exists or not."""
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"a job's name has up to 64 letters, digits, '.', '_' or '-', and begins with a letter or digit, got {name!r}"
            )
        return cls(base() / name)

    @classmethod
    def make(cls, name: str) -> tuple[JobFolder, int]:
        """Make a folder for a new job; return it, and the descriptor that holds its lock."""
        folder = cls.of(name)
        folder.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        until = time.monotonic() + _LOOK_S
        while True:
            with contextlib.suppress(FileExistsError):
                folder.path.mkdir(mode=0o700)
            try:
                lock = folder.lock()
            except FileNotFoundError:
                continue  # another process took it for an abandoned one
            if lock is not None:
                if folder.is_at(lock):
                    folder.empty()
                    return folder, lock
                # Its last owner has just removed it.
                os.close(lock)
            elif time.monotonic() > until:
                # And not a process that only checks whether it runs.
                raise JobExists(
                    f"job {name!r} runs already: attach_job({name!r}) has it, `mesh stop {name}` ends it; or choose another name"
                )
            else:
                time.sleep(_PAUSE_S)

    @classmethod
    def all(cls) -> Iterator[JobFolder]:
        """Yield the folders of all running jobs; those of killed ones are removed."""
        if not base().is_dir():
            return
        for path in sorted(base().iterdir()):
            folder = cls(path)
            if _NAME.fullmatch(path.name) and path.is_dir() and folder.runs():
                yield folder

    def runs(self) -> bool:
        """Return whether the job runs."""
        try:
            lock = self.lock()
        except FileNotFoundError:
            return False
        if lock is None:
            return True
        if self.is_at(lock):
            self.remove()
        os.close(lock)
        return False

    def write(self, what: dict[str, Any]) -> None:
        """Store the plan of the job."""
        (self.path / "job.json").write_text(json.dumps(what))

    def read(self) -> dict[str, Any]:
        """Return it."""
        told: dict[str, Any] = json.loads((self.path / "job.json").read_text())
        return told

    def listen(self, name: str = DOOR) -> socket.socket:
        """Make a socket for requests, or for scripts that join the job."""
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self._short() as path:
            door.bind(f"{path}/{name}")
        door.listen()
        return door

    def connect(self, timeout: float, name: str = DOOR) -> socket.socket:
        """Connect to it."""
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        door.settimeout(timeout)
        try:
            with self._short() as path:
                door.connect(f"{path}/{name}")
        except OSError as error:
            door.close()
            raise JobNotFound(
                f"no job {self.name!r} runs here ({error.strerror}); `mesh jobs` lists those that do"
            ) from None
        door.settimeout(None)
        return door

    def remove(self) -> None:
        """Remove it with everything in it."""
        shutil.rmtree(self.path, ignore_errors=True)

    @contextlib.contextmanager
    def _short(self) -> Iterator[str]:
        """Yield a path that is short enough for a socket, however long the folder's own is."""
        at = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            yield f"/proc/self/fd/{at}"
        finally:
            os.close(at)

    def lock(self) -> int | None:
        """Take the lock; return its descriptor, or ``None`` if another process has it (FLD-1)."""
        at = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(at, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(at)
            return None
        return at

    def is_at(self, lock: int) -> bool:
        """Return whether the lock is on the folder that is there now."""
        try:
            return os.fstat(lock).st_ino == (self.path / _LOCK).stat().st_ino
        except FileNotFoundError:
            return False

    def empty(self) -> None:
        """Remove what a killed keeper has left in it."""
        for each in self.path.iterdir():
            if each.is_dir():
                shutil.rmtree(each)
            elif each.name != _LOCK:
                each.unlink()
