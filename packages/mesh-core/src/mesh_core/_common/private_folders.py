"""Folders in places that other users can write to, such as ``/tmp``.

PRV-1: a path in such a place does not tell whose folder it leads to. A folder is opened without following a link, its
owner and mode are checked through that descriptor, and everything in it is reached through the descriptor from then on.
"""

from __future__ import annotations

import errno
import os
import stat

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_private(path: str, *, dir_fd: int | None = None, remedy: str = "remove it") -> int:
    """Open a folder that belongs to this user and that nobody else can enter; raise ``PermissionError`` for any other.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> at = open_private(folder.name)
    >>> os.listdir(at)
    []
    >>> os.close(at); folder.cleanup()
    """
    user = os.geteuid()
    refused = f"{path} is not a folder of mode 0700 that belongs to uid {user}; {remedy}"
    at = _open(path, dir_fd, refused)
    found = os.fstat(at)
    if found.st_uid != user or found.st_mode & 0o077:
        os.close(at)
        raise PermissionError(refused)
    return at


def make_private(name: str, dir_fd: int) -> int:
    """Create a folder that nobody else can enter, or close an existing one of this user to others, and open it."""
    try:
        os.mkdir(name, 0o700, dir_fd=dir_fd)
    except FileExistsError:
        pass
    refused = f"{name} is not a folder that belongs to uid {os.geteuid()}; remove it"
    at = _open(name, dir_fd, refused)
    found = os.fstat(at)
    if found.st_uid != os.geteuid():
        os.close(at)
        raise PermissionError(refused)
    if found.st_mode & 0o077:
        os.fchmod(at, 0o700)
    return at


def open_own(path: str, *, dir_fd: int | None = None) -> int:
    """Open a folder of this user or root, even if others can enter it; raise ``PermissionError`` for any other.

    A link at the end of the path is followed only if it belongs to one of the two as well: other users' links in a
    shared folder lead wherever they want.
    """
    owners = (0, os.geteuid())
    found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
    follow = stat.S_ISLNK(found.st_mode) and found.st_uid in owners
    refused = f"{path} is not a folder that belongs to uid {os.geteuid()}; use a folder of your own"
    at = os.open(path, _FOLDER & ~os.O_NOFOLLOW, dir_fd=dir_fd) if follow else _open(path, dir_fd, refused)
    owner = os.fstat(at).st_uid
    if owner not in owners:
        os.close(at)
        raise PermissionError(
            f"{path} belongs to uid {owner}, who could replace what is put there; use a folder of your own",
        )
    return at


def _open(path: str, dir_fd: int | None, refused: str) -> int:
    try:
        return os.open(path, _FOLDER, dir_fd=dir_fd)
    except OSError as error:
        # A link, or not a folder.
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise PermissionError(refused) from None
        raise


def is_safe_parent(path: str) -> bool:
    """Return whether no other user but root can rename or replace what this user puts into a folder."""
    try:
        found = os.stat(path)  # noqa: PTH116 - pathlib takes long to import, and this is read at every exit
    except OSError:
        return False
    if found.st_mode & stat.S_ISVTX:
        return True
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022
