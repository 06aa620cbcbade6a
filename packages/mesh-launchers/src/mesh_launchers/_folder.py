"""Where jobs are found by their names: a private folder for each, which is removed with the job.

FLD-1: a job holds a lock in its folder from before its keeper starts until the folder is removed: a folder without a lock was left by a killed
keeper. The lock is on a file, because network file systems have no locks on folders.
FLD-2: no other user can make, replace or change the folder of a job. It is opened anew for each use, checked, and accessed through the descriptor; and
the process that listens there must be the user's.
FLD-3: nothing is removed from a folder that no job has made: one without the file of the lock, unless it is empty.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from mesh_core.extensions import jobs_folder, naming, open_base, open_private, require_same_user
from mesh_launchers._errors import JobExists, JobNotFound, LaunchError

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
DOOR = "door"
LINK = "link"
"""The socket by which scripts join a kept job."""
LOG = "keeper.log"
AUDIT = ".audit.log"
"""Beside the folders of jobs, as it outlives them."""
_LOCK = ".mesh-job"
_LOOK_S = 0.2
_PAUSE_S = 0.01


def open_audit(outer: int) -> int:
    """Open the file of audit lines in the folder of all jobs; raise ``PermissionError`` for one that others have put there (FLD-2)."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    refused = f"{base() / AUDIT} is not a file of mode 0600 that belongs to uid {os.geteuid()}; remove it"
    try:
        at = os.open(AUDIT, flags, 0o600, dir_fd=outer)
    except OSError as error:
        # A link, a pipe that nobody reads, or a folder.
        if error.errno in (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES):
            raise PermissionError(refused) from None
        raise
    found = os.fstat(at)
    private = found.st_uid == os.geteuid() and not found.st_mode & 0o077 and found.st_nlink == 1
    if not (private and stat.S_ISREG(found.st_mode)):
        os.close(at)
        raise PermissionError(refused)
    return at


def base() -> Path:
    """Return the folder with those of all jobs of this user."""
    return Path(jobs_folder())


@contextlib.contextmanager
def base_opened(*, make: bool = False) -> Iterator[int]:
    """Open it; raise :class:`LaunchError` if another user could replace what is in it (FLD-2)."""
    path = base()
    if make:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
    at = _checked(lambda: open_base(str(path)), path)
    try:
        yield at
    finally:
        os.close(at)


def _checked(check: Callable[[], T], path: Path) -> T:
    try:
        return check()
    except PermissionError as error:
        raise LaunchError(
            f"{path} is not used, because another user could have made it or could change it: {error}. Jobs are in MESH_JOBS, else "
            "in XDG_STATE_HOME, else in ~/.local/state: set MESH_JOBS to a folder of your own"
        ) from None


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
        return self.path / LOG

    @classmethod
    def of(cls, name: str) -> JobFolder:
        """Return the folder of a job of this name, whether it exists or not."""
        if _NAME.fullmatch(name) is None:
            raise ValueError(
                f"a job's name has up to 64 letters, digits, '.', '_' or '-', and begins with a letter or digit, got {name!r}"
            )
        return cls(base() / name)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Open it; raise :class:`LaunchError` unless it is private to this user (FLD-2)."""
        with base_opened() as outer:
            at = _checked(lambda: open_private(self.name, dir_fd=outer), self.path)
        try:
            yield at
        finally:
            os.close(at)

    @classmethod
    def make(cls, name: str) -> tuple[JobFolder, int]:
        """Make a folder for a new job; return it, and the descriptor that holds its lock."""
        folder = cls.of(name)
        until = time.monotonic() + _LOOK_S
        while True:
            with base_opened(make=True) as outer, contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=outer)
            try:
                folder.require_own()
                lock = folder.lock(make=True)
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
        """Yield the folders of all running jobs; those of killed ones are removed. What others have put there is passed over."""
        try:
            with base_opened() as outer:
                names = sorted(filter(_NAME.fullmatch, os.listdir(outer)))  # noqa: PTH208 - of a descriptor
        except FileNotFoundError:
            return
        for name in names:
            folder = cls(base() / name)
            with contextlib.suppress(LaunchError):
                if folder.runs():
                    yield folder

    def require_own(self) -> None:
        """Raise :class:`LaunchError` if this is somebody's folder for something else (FLD-3)."""
        with self.opened() as at:
            names = os.listdir(at)  # noqa: PTH208 - of a descriptor
        if names and _LOCK not in names:
            raise LaunchError(
                f"{self.path} is there already, and is no job's folder ({len(names)} entries, such as {min(names)!r}): choose another name, or set "
                "MESH_JOBS to a folder for jobs alone"
            )

    def runs(self) -> bool:
        """Return whether the job runs."""
        try:
            lock = self.lock()
        except FileNotFoundError:  # it has just ended, or is no job's
            return False
        if lock is None:
            return True
        if self.is_at(lock):
            self.remove()
        os.close(lock)
        return False

    def make_inner(self, name: str) -> Path:
        """Make a folder in it."""
        with self.opened() as at:
            os.mkdir(name, 0o700, dir_fd=at)
        return self.path / name

    def open(self, name: str, mode: str) -> IO[Any]:
        """Open a file in it, as ``open`` does."""
        with self.opened() as at:
            return open(
                name, mode, opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600, dir_fd=at)
            )

    def write(self, what: dict[str, Any]) -> None:
        """Store the plan of the job."""
        with naming(self.path / "job.json"), self.open("job.json", "w") as file:
            json.dump(what, file)

    def read(self) -> dict[str, Any]:
        """Return it."""
        with self.open("job.json", "r") as file:
            told: dict[str, Any] = json.load(file)
        return told

    def listen(self, name: str = DOOR) -> socket.socket:
        """Make a socket for requests, or for scripts that join the job."""
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with self.opened() as at:
            door.bind(_short(at, name))
        door.listen()
        return door

    def connect(self, timeout: float, name: str = DOOR) -> socket.socket:
        """Connect to it."""
        door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        door.settimeout(timeout)
        try:
            with self.opened() as at:
                door.connect(_short(at, name))
            _checked(lambda: require_same_user(door), self.path)
        except OSError as error:
            door.close()
            raise JobNotFound(
                f"no job {self.name!r} runs here ({error.strerror}); `mesh jobs` lists those that do"
            ) from None
        except BaseException:
            door.close()
            raise
        door.settimeout(None)
        return door

    def remove(self) -> None:
        """Remove it with everything in it."""
        # The lock last: what is left of a folder without it belongs to nobody (FLD-3).
        with contextlib.suppress(OSError, LaunchError):
            self.empty()
        with contextlib.suppress(OSError, LaunchError), self.opened(), base_opened() as outer:
            shutil.rmtree(self.name, ignore_errors=True, dir_fd=outer)

    def lock(self, *, make: bool = False) -> int | None:
        """Take the lock; return its descriptor, or ``None`` if another process has it (FLD-1). Without ``make`` it must exist."""
        flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if make else 0)
        with self.opened() as folder:
            at = os.open(_LOCK, flags, 0o600, dir_fd=folder)
        try:
            fcntl.flock(at, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(at)
            return None
        return at

    def is_at(self, lock: int) -> bool:
        """Return whether the lock is on the folder that is there now."""
        try:
            with self.opened() as at:
                return os.path.samestat(os.fstat(lock), os.stat(_LOCK, dir_fd=at, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def empty(self) -> None:
        """Remove what a killed keeper has left in it."""
        with self.opened() as at, os.scandir(at) as entries:
            for each in list(entries):
                if each.is_dir(follow_symlinks=False):
                    shutil.rmtree(each.name, dir_fd=at)
                elif each.name != _LOCK:
                    os.unlink(each.name, dir_fd=at)


def _short(at: int, name: str) -> str:
    """Return a path that is short enough for a socket, however long the folder's own is."""
    return f"/proc/self/fd/{at}/{name}"
