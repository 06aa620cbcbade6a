"""Folders in places that other users can write to, such as ``/tmp``.

PRV-1: a path in such a place does not tell whose folder it leads to. A folder is opened without following a link, its
owner and mode are checked through that descriptor, and everything in it is reached through the descriptor from then on.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress

_GROUP_OR_OTHERS_WRITE = 0o022
_LINKS = 40  # as many as the kernel follows
SECRET = "mesh-host-"
"""What the names of folders for keys begin with."""
_HELD = ".held"
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


def open_base(path: str) -> int:
    """Open a folder in which private ones lie; raise ``PermissionError`` if another user could replace or remove these.

    >>> import tempfile
    >>> os.close(open_base(tempfile.mkdtemp()))
    """
    at = open_own(path)
    if not _is_safe(os.fstat(at)):
        os.close(at)
        raise PermissionError(
            f"others can write to {path} and replace what is there: chmod go-w it, or use another folder"
        )
    return at


def open_own_file(path: str) -> int:
    """Open a file of this user or root to read it; raise ``PermissionError`` for any other: its owner says what is in it.

    >>> import tempfile
    >>> with tempfile.NamedTemporaryFile() as file:
    ...     os.close(open_own_file(file.name))
    """
    owners = (0, os.geteuid())
    link = os.stat(path, follow_symlinks=False)  # noqa: PTH116 - pathlib takes long to import
    at = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    found = os.fstat(at)
    other = next((each.st_uid for each in (link, found) if each.st_uid not in owners), None)
    if other is not None or not stat.S_ISREG(found.st_mode):
        os.close(at)
        why = (
            "is not a regular file"
            if other is None
            else f"belongs to uid {other}, not to uid {owners[1]} or root"
        )
        raise PermissionError(f"{path} {why}")
    return at


def make_secret_folder(prefix: str) -> tuple[str, int]:
    """Make a folder of mode 0700 for keys, in memory where that is possible; return its path, and a descriptor of it (PRV-1).

    Files must be made through the descriptor. The caller removes the folder, and then closes the descriptor. Once no process has the
    descriptor any more, somebody else removes the folder.

    >>> import shutil
    >>> path, at = make_secret_folder("mesh-host-")
    >>> shutil.rmtree(path); os.close(at)
    """
    import fcntl
    import tempfile

    places = _places_of_secrets()
    there = next(
        (each for each in places if is_safe_parent(each) and os.access(each, os.W_OK | os.X_OK)), None
    )
    path = tempfile.mkdtemp(prefix=prefix, dir=there or temporary_folder())
    at = open_private(path)
    # Marked only once it is held: a folder that is marked and not held is that of a dead process.
    fcntl.flock(at, fcntl.LOCK_EX)
    os.close(os.open(_HELD, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=at))
    return path, at


def _places_of_secrets() -> list[str]:
    return [*runtime_folders()[:1], "/dev/shm"]


def sweep_secret_folders() -> None:
    """Remove folders for keys of this user that no process has open any more."""
    for parent in dict.fromkeys([*_places_of_secrets(), *temporary_folders()]):
        with suppress(OSError):
            for name in os.listdir(parent) if is_safe_parent(parent) else ():  # noqa: PTH208 - names are wanted
                if name.startswith(SECRET):
                    with suppress(OSError):
                        _sweep_secret(f"{parent}/{name}")


def _sweep_secret(folder: str) -> None:
    import fcntl

    at = open_private(folder)
    try:
        os.stat(_HELD, dir_fd=at, follow_symlinks=False)
        fcntl.flock(at, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_private(folder, inode(at))
    finally:
        os.close(at)


def inode(at: int) -> tuple[int, int]:
    """Return what distinguishes an open file from others that may have its path later."""
    found = os.fstat(at)
    return found.st_dev, found.st_ino


def remove_private(folder: str, known: tuple[int, int]) -> None:
    """Remove a folder that was checked before, if it is still the same one (PRV-1)."""
    parent, _, name = folder.rpartition("/")
    with suppress(OSError):
        at = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            inner = open_private(name, dir_fd=at)
            same = inode(inner) == known
            os.close(inner)
            if same:
                remove_tree(name, dir_fd=at)
        finally:
            os.close(at)


def remove_tree(folder: str, *, dir_fd: int | None = None) -> None:
    """Remove a folder of this user as far as possible, whatever permissions there are in it, and however deep it is; never raises.

    Code that is not trusted may have filled it: no link is followed, and nothing here grows with the depth.

    >>> import tempfile
    >>> path = tempfile.mkdtemp()
    >>> os.makedirs(f"{path}/a/b/c"); os.chmod(f"{path}/a/b", 0)
    >>> remove_tree(path)
    >>> os.access(path, os.F_OK)
    False
    """
    with suppress(OSError):
        top = _open_for_removal(folder, dir_fd)
        try:
            _empty(top)
        finally:
            os.close(top)
        os.rmdir(folder, dir_fd=dir_fd)


def _empty(top: int) -> None:
    # Folders in folders come up here first, with names that nobody could foresee.
    waiting, count, risen_name = [""], 0, f".{os.urandom(16).hex()}-"
    while waiting:
        name = waiting.pop()
        with suppress(OSError):
            at = _open_for_removal(name, top) if name else os.dup(top)
            try:
                with os.scandir(at) as entries:
                    found = list(entries)
                for each in found:
                    with suppress(OSError):
                        if not each.is_dir(follow_symlinks=False):
                            os.unlink(each.name, dir_fd=at)
                        elif not name:
                            waiting.append(each.name)
                        else:
                            os.close(_open_for_removal(each.name, at))
                            count += 1
                            risen = f"{risen_name}{count}"
                            os.rename(each.name, risen, src_dir_fd=at, dst_dir_fd=top)
                            waiting.append(risen)
            finally:
                os.close(at)
            if name:
                os.rmdir(name, dir_fd=top)


def _open_for_removal(name: str, dir_fd: int | None) -> int:
    """Open a folder that may forbid it."""
    at = os.open(name, _FOLDER | os.O_PATH, dir_fd=dir_fd)
    try:
        # By the descriptor: a path might be a link by now.
        place = f"/proc/self/fd/{at}"
        os.chmod(place, 0o700)  # noqa: PTH101 - pathlib takes long to import
        return os.open(place, _FOLDER & ~os.O_NOFOLLOW)
    finally:
        os.close(at)


def runtime_folders() -> list[str]:
    """Return this user's folders for sockets, as the system has made them."""
    user = os.geteuid()
    given = os.environ.get("XDG_RUNTIME_DIR")
    # After `su` it may still be the previous user's.
    if given and not _belongs_to(given, user):
        given = None
    return [each for each in (given, f"/run/user/{user}") if each]


def _belongs_to(folder: str, user: int) -> bool:
    try:
        return os.stat(folder).st_uid == user  # noqa: PTH116 - pathlib takes long to import, and this is read at every exit
    except OSError:
        return False


def jobs_folder() -> str:
    """Return the folder in which the jobs of this user are found by their names, and which may not exist yet."""
    return jobs_folders()[0]


def jobs_folders() -> list[str]:
    """Return it, and those in which other scripts of this user, with other variables, have theirs."""
    given, state = os.environ.get("MESH_JOBS"), os.environ.get("XDG_STATE_HOME")
    usual = os.path.expanduser("~/.local/state")  # noqa: PTH111 - pathlib takes long to import, and this is read at every exit
    # As everywhere in this file.
    first = [os.path.abspath(given)] if given else []  # noqa: PTH100
    return [*first, *(f"{each}/mesh/jobs" for each in (state, usual) if each)]


def temporary_folder() -> str:
    """Return the folder for temporary files, or another if other users could replace our files there.

    After ``su``, for example, ``TMPDIR`` may still name a folder of the previous user.
    """
    import tempfile

    usual = tempfile.gettempdir()
    for folder in (usual, "/tmp", "/var/tmp"):
        if is_safe_parent(folder) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    # For example a container whose /tmp is a volume of mode 0777: either there are no other users, or nothing is safe.
    return usual


def temporary_folders() -> list[str]:
    """Return the folders that :func:`temporary_folder` chooses from; unlike that, it imports nothing."""
    named = [os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP")]
    return list(dict.fromkeys(each for each in (*named, "/tmp", "/var/tmp") if each and is_safe_parent(each)))


def is_safe_parent(path: str) -> bool:
    """Return whether no other user but root can rename or replace what this user puts into a folder, or the folder itself."""
    try:
        found = os.stat(path)  # noqa: PTH116 - pathlib takes long to import, and this is read at every exit
        return _is_safe(found) and _is_reached_safely(path)
    except OSError:
        return False


def _is_safe(found: os.stat_result) -> bool:
    # The owner of a sticky folder can replace what others put there.
    if found.st_uid not in _trusted():
        return False
    return bool(found.st_mode & stat.S_ISVTX) or not found.st_mode & _GROUP_OR_OTHERS_WRITE


def _trusted() -> tuple[int, ...]:
    # In a user namespace, root outside of it has another number. Whoever owns the root directory is root here.
    return 0, os.geteuid(), os.stat("/").st_uid  # noqa: PTH116 - as above


def _is_reached_safely(path: str) -> bool:
    """Return whether all folders and links on the way belong to this user or root, and others cannot replace them."""
    trusted, at, left, links = _trusted(), "/", os.path.join(os.getcwd(), path).split("/"), 0  # noqa: PTH109, PTH118
    while left:
        name = left.pop(0)
        if name == "..":
            at = os.path.dirname(at)  # noqa: PTH120
            continue
        here = at if name in ("", ".") else os.path.join(at, name)  # noqa: PTH118
        found = os.lstat(here)
        if found.st_uid not in trusted:
            return False
        if stat.S_ISLNK(found.st_mode):
            links += 1
            leads = os.readlink(here)  # noqa: PTH115
            if links > _LINKS:
                return False
            left[:0] = leads.split("/")
            at = "/" if leads.startswith("/") else at
            continue
        at = here
        if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
            return False
    return True
