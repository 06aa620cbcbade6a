"""Where sockets of stopped processes lie: one folder a job, in a folder that is the user's alone."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
from collections.abc import Iterator

_ANSWER_S = 2.0
_TRIES = 5


def folders() -> list[str]:
    """The folders that may hold jobs, those first that a fresh terminal finds too."""
    uid = os.getuid()
    parents = (os.environ.get("XDG_RUNTIME_DIR"), f"/run/user/{uid}", "/tmp", os.environ.get("TMPDIR"))
    return list(dict.fromkeys(f"{parent.rstrip('/')}/mesh-{uid}" for parent in parents if parent))


def require_private(folder: str) -> None:
    """Raise ``PermissionError`` unless a folder is this user's alone (DBG-2)."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(
            f"{folder} is not a folder of mode 0700 that belongs to uid {os.getuid()}; remove it, or set "
            "XDG_RUNTIME_DIR to a folder of your own"
        )


def require_same_user(peer: socket.socket) -> None:
    """Raise ``PermissionError`` unless the process at the other end is of the same user (DBG-2)."""
    uid = peer_uid(peer)
    if uid != os.getuid():
        raise PermissionError(f"the process at the other end belongs to uid {uid}, not {os.getuid()}")


def peer_uid(peer: socket.socket) -> int:
    """Whose process is at the other end, as the kernel has it."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _pid, uid, _gid = struct.unpack("3i", credentials)
    return int(uid)


def listen(job: int) -> tuple[socket.socket, str]:
    """Open this process's socket in the folder of its job; returns it and its path."""
    reasons = []
    for folder in folders():
        try:
            return _listen_in(folder, job)
        except OSError as error:
            reasons.append(str(error))
    raise OSError("no folder for a debugger's socket: " + "; ".join(reasons))


def _listen_in(folder: str, job: int) -> tuple[socket.socket, str]:
    place = f"{folder}/{job}"
    for tried in range(_TRIES):
        for each in (folder, place):
            with contextlib.suppress(FileExistsError):
                os.mkdir(each, 0o700)  # noqa: PTH102 - pathlib takes long to import, and this is read at every exit
            require_private(each)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _opened(place) as at:
                # Listening before it has its name: whoever finds the name gets an answer, or it is stale.
                early = f".{os.getpid()}-{os.urandom(4).hex()}"
                listener.bind(f"/proc/self/fd/{at}/{early}")
                listener.listen(16)
                name = f"{os.getpid()}.sock"
                os.rename(early, name, src_dir_fd=at, dst_dir_fd=at)
            return listener, f"{place}/{name}"
        except OSError as error:
            listener.close()
            # Somebody else has removed the folder in between, as it was empty.
            if not isinstance(error, FileNotFoundError) or tried == _TRIES - 1:
                raise
    raise AssertionError("unreachable")


def connect(path: str) -> socket.socket:
    """Connect to a stopped process; ``OSError`` if none is there, or it is another user's."""
    folder, _, name = path.rpartition("/")
    require_private(folder)
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(_ANSWER_S)
        # Through the folder's descriptor, as the path of a socket may have no more than 107 bytes.
        with _opened(folder) as at:
            peer.connect(f"/proc/self/fd/{at}/{name}")
        require_same_user(peer)
    except BaseException:
        peer.close()
        raise
    return peer


@contextlib.contextmanager
def _opened(folder: str) -> Iterator[int]:
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield at
    finally:
        os.close(at)


def find(job: int | None = None) -> Iterator[tuple[str, socket.socket | None]]:
    """Connect to every process of this user that has something stopped.

    Yields the path with the connection, or with ``None`` for a process that does not answer. What dead processes have
    left is removed.
    """
    for folder in folders():
        try:
            require_private(folder)
            jobs = sorted((name for name in os.listdir(folder) if name.isdigit()), key=int)  # noqa: PTH208 - names are wanted
        except OSError:
            continue
        for name in jobs:
            if job is None or int(name) == job:
                yield from _find_in(f"{folder}/{name}")
                remove_empty(f"{folder}/{name}")


def _find_in(place: str) -> Iterator[tuple[str, socket.socket | None]]:
    try:
        names = sorted(os.listdir(place))  # noqa: PTH208 - names are wanted
    except OSError:
        return
    for name in names:
        path = f"{place}/{name}"
        if name.endswith(".sock"):
            try:
                peer = connect(path)
            except (ConnectionRefusedError, FileNotFoundError):
                unlink(path)
            except PermissionError:
                continue
            except OSError:
                yield path, None
            else:
                yield path, peer
        elif name.startswith(".") and not os.path.exists(f"/proc/{name[1:].partition('-')[0]}"):  # noqa: PTH110
            unlink(path)


def unlink(path: str) -> None:
    """Remove a socket, and folders that are empty then."""
    with contextlib.suppress(OSError):
        os.unlink(path)  # noqa: PTH108 - as the rest of this module
    remove_empty(path.rpartition("/")[0])


def remove_empty(place: str) -> None:
    """Remove a job's folder, and the one it is in, if nothing is in them."""
    with contextlib.suppress(OSError):
        os.rmdir(place)  # noqa: PTH106 - as the rest of this module
        os.rmdir(place.rpartition("/")[0])  # noqa: PTH106


def forget_job(job: int) -> None:
    """The job is over: remove what its killed processes have left."""
    for folder in folders():
        place = f"{folder}/{job}"
        try:
            names = os.listdir(place)  # noqa: PTH208 - names are wanted
        except OSError:
            continue
        for name in names:
            unlink(f"{place}/{name}")
        remove_empty(place)
