"""The credentials of a script's jobs: all its hosts have the same authority, whichever launcher has started them.

AUT-1: a folder of credentials exists as long as a script's runtime or a keeper uses it. Each of these holds a shared lock in it, which processes that
they fork do not have. The last one removes the folder; what killed processes have left is removed by the next launch or listing of jobs.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

from mesh_core import Credentials
from mesh_core.extensions import NOT_CARRIED, Extension, Spawning, find, install, make_private, open_private
from mesh_launchers._deaths import follow_deaths
from mesh_launchers._errors import LaunchError
from mesh_launchers._folder import base, base_opened

LIFETIME = timedelta(days=7)
"""That of certificates that a job makes for itself, and renews (CRT-1)."""
_KEYS = ".keys"
_LOCK = "lock"
_NAME = re.compile(r"[0-9a-f]{16}")


@contextmanager
def _keys(*, make: bool = False) -> Iterator[int]:
    """Open the folder of all credentials (FLD-2)."""
    with base_opened(make=make) as outer:
        at = make_private(_KEYS, outer) if make else open_private(_KEYS, dir_fd=outer)
    try:
        yield at
    finally:
        os.close(at)


class Use:
    """Marks a folder of credentials as used here, until :meth:`end`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = -1
        if self.is_ours:
            with _keys() as keys:
                self._lock = _open_lock(path.parent.name, keys)
            fcntl.lockf(self._lock, fcntl.LOCK_SH)

    @property
    def is_ours(self) -> bool:
        """Whether a launch has made them, and not the user."""
        return self.path.parent.parent == base() / _KEYS

    @classmethod
    def of_new(cls) -> Use:
        """Make credentials."""
        sweep()
        while True:
            path = base() / _KEYS / secrets.token_hex(8)
            with _keys(make=True) as keys:
                os.mkdir(path.name, 0o700, dir_fd=keys)
            try:
                use = cls(path / "credentials")
            except FileNotFoundError:
                continue  # another process took it for an abandoned one
            if path.exists():
                Credentials.new(use.path, lifetime=LIFETIME)
                return use
            use.end()

    def end(self) -> None:
        """Stop using it."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
            _remove_unused(self.path.parent)


class Authority(Extension):
    """Keeps the credentials of this script's hosts while its runtime runs."""

    name = "mesh_launchers"
    here: ClassVar[Authority | None] = None
    """The instance of this script, if there is one: looking for it must not start Mesh."""

    def start(self) -> None:
        """Begin without credentials."""
        self._use: Use | None = None
        self._told_of_deaths: list[Callable[[str, str], object]] = []
        Authority.here = self

    def for_spawn(self, spawning: Spawning) -> Any:
        """Stay here."""
        return NOT_CARRIED

    def closed(self) -> None:
        """Stop using them. Until then the runtime checks them repeatedly."""
        Authority.here = None
        if self._use is not None:
            self._use.end()
            self._use = None

    def follow_deaths(self, tell: Callable[[str, str], object]) -> None:
        """Tell also this one of hosts that have died, by their names."""
        self._told_of_deaths.append(tell)
        if len(self._told_of_deaths) == 1:
            follow_deaths(self._has_died)

    def _has_died(self, host: str, why: str) -> None:
        for tell in list(self._told_of_deaths):
            tell(host, why)

    def uses(self, folder: Path) -> bool:
        """Return whether that is the script's own folder."""
        return self._use is not None and self._use.path.parent == folder

    def credentials(self) -> Path:
        """Return the script's folder, which is made when it is first needed."""
        if self._use is None:
            self._use = Use.of_new()
        return self._use.path

    def take(self, path: Path, job: str) -> None:
        """Use those of a job that another script has launched, or that the user gives."""
        if self._use is None:
            self._use = Use(path)
        elif self._use.path != path:
            raise LaunchError(
                f"job {job!r} has other credentials than the hosts that this script has already: all hosts of a script use the same ones, "
                "and mesh_core.shutdown() lets them go. Have that job in another script, or launch both in one."
            )


def authority() -> Authority:
    """Return the instance of this script."""
    return find(Authority) or install(Authority)


def sweep() -> None:
    """Remove what killed processes have left."""
    folder, ours = base() / _KEYS, Authority.here
    try:
        with _keys() as keys:
            names = os.listdir(keys)  # noqa: PTH208 - of a descriptor
    except FileNotFoundError:
        return
    for name in filter(_NAME.fullmatch, names):  # FLD-3: the others are somebody's own
        # A process's own lock does not keep it out, and closing the file would end it.
        if ours is None or not ours.uses(folder / name):
            _remove_unused(folder / name)


def _open_lock(name: str, keys: int) -> int:
    folder = open_private(name, dir_fd=keys)
    try:
        return os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    finally:
        os.close(folder)


def _remove_unused(path: Path) -> None:
    """Remove a folder that nobody uses."""
    try:
        with _keys() as keys:
            lock = _open_lock(path.name, keys)
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.name, ignore_errors=True, dir_fd=keys)
            finally:
                os.close(lock)
    except (FileNotFoundError, BlockingIOError, PermissionError):
        pass  # it is gone, in use, or not ours
