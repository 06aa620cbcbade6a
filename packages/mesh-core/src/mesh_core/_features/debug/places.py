"""Find and make the sockets of stopped processes, which are in one folder per job in a private folder of the user (PRV-1)."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from mesh_core._common.peers import require_same_user
from mesh_core._common.private_folders import open_private, runtime_folders

_ANSWER_S = 2.0
_TRIES = 5

INSPECTION = "inspect"
"""The name of a job's inspection socket."""
_REMEDY = "remove it, or set XDG_RUNTIME_DIR to a folder of your own"


def folders() -> list[str]:
    """Return the folders that may contain jobs; first those that a new terminal would find too."""
    parents = (*runtime_folders(), "/tmp", os.environ.get("TMPDIR"))
    return list(dict.fromkeys(f"{parent.rstrip('/')}/mesh-{os.geteuid()}" for parent in parents if parent))


def listen(job: int, name: str = "") -> tuple[socket.socket, str]:
    """Open a socket in the job's folder, called ``name`` or, without one, as this process's debugger; return it and its path."""
    reasons = []
    for folder in folders():
        try:
            return _listen_in(folder, job, name or f"{os.getpid()}.sock")
        except OSError as error:
            reasons.append(str(error))
    raise OSError("found no folder for a socket: " + "; ".join(reasons))


def _listen_in(folder: str, job: int, name: str) -> tuple[socket.socket, str]:
    place = f"{folder}/{job}"
    for tried in range(_TRIES):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _opened(place, make=True) as at:
                # Listen before the socket gets its name: a name without an answer is then always stale.
                early = f".{os.getpid()}-{os.urandom(4).hex()}"
                listener.bind(f"/proc/self/fd/{at}/{early}")
                listener.listen(64)
                os.rename(early, name, src_dir_fd=at, dst_dir_fd=at)
            return listener, f"{place}/{name}"
        except OSError as error:
            listener.close()
            # Another process may have removed the folder meanwhile, because it was empty.
            if not isinstance(error, FileNotFoundError) or tried == _TRIES - 1:
                raise
    raise AssertionError("unreachable")


def connect(path: str) -> socket.socket:
    """Connect to a stopped process; ``OSError`` if there is none, or if it belongs to another user."""
    place, _, name = path.rpartition("/")
    with _opened(place) as at:
        return _connect_at(at, name)


def _connect_at(at: int, name: str) -> socket.socket:
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        peer.settimeout(_ANSWER_S)
        # Through the folder's descriptor, also because a socket's path is limited to 107 bytes.
        peer.connect(f"/proc/self/fd/{at}/{name}")
        require_same_user(peer)
    except BaseException:
        peer.close()
        raise
    return peer


@contextlib.contextmanager
def _opened(place: str, *, make: bool = False) -> Iterator[int]:
    """Open a job's folder; raise unless it and its parent are private to this user."""
    folder, _, job = place.rpartition("/")
    if make:
        _make(folder)
    outer = open_private(folder, remedy=_REMEDY)
    try:
        if make:
            _make(job, outer)
        at = open_private(job, dir_fd=outer, remedy=_REMEDY)
    finally:
        os.close(outer)
    try:
        yield at
    finally:
        os.close(at)


def _make(folder: str, dir_fd: int | None = None) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700, dir_fd=dir_fd)


def find(job: int | None = None) -> Iterator[tuple[str, socket.socket | None]]:
    """Connect to every process of this user that has stopped threads.

    Yields the path with the connection, or with ``None`` for a process that does not answer. Sockets of dead processes are
    removed.
    """
    for folder in folders():
        for name in _jobs(folder):
            if job is None or int(name) == job:
                place = f"{folder}/{name}"
                with contextlib.suppress(OSError), _opened(place) as at:
                    yield from _find_in(place, at)
                remove_empty(place)


def find_inspected(job: int | None = None) -> Iterator[tuple[int, str, socket.socket | None]]:
    """Connect to every job of this user that can be looked into; yield its pid, and its path as :func:`find` does."""
    seen: set[int] = set()
    for folder in folders():
        for name in _jobs(folder):
            number = int(name)
            if number in seen or (job is not None and number != job):
                continue
            place = f"{folder}/{name}"
            with contextlib.suppress(OSError), _opened(place) as at:
                try:
                    peer = _connect_at(at, INSPECTION)
                except (ConnectionRefusedError, FileNotFoundError):
                    _unlink_at(at, INSPECTION)
                except PermissionError:
                    pass
                except OSError:
                    # It does not accept connections; perhaps a signal has stopped it.
                    seen.add(number)
                    yield number, f"{place}/{INSPECTION}", None
                else:
                    seen.add(number)
                    yield number, f"{place}/{INSPECTION}", peer
            remove_empty(place)


def _jobs(folder: str) -> list[str]:
    try:
        at = open_private(folder)
    except OSError:
        return []
    try:
        return sorted(filter(_is_number, os.listdir(at)), key=int)  # noqa: PTH208 - names are wanted
    finally:
        os.close(at)


def _find_in(place: str, at: int) -> Iterator[tuple[str, socket.socket | None]]:
    for name in sorted(os.listdir(at)):
        if _is_name(name):
            try:
                peer = _connect_at(at, name)
            except (ConnectionRefusedError, FileNotFoundError):
                _unlink_at(at, name)
            except PermissionError:
                continue
            except OSError:
                yield f"{place}/{name}", None
            else:
                yield f"{place}/{name}", peer
        elif _is_early(name) and not os.path.exists(f"/proc/{name[1:].partition('-')[0]}"):  # noqa: PTH110
            _unlink_at(at, name)
        elif name == INSPECTION and not os.path.exists(f"/proc/{place.rpartition('/')[2]}"):  # noqa: PTH110
            # Its job has ended, or runs in another pid namespace.
            try:
                _connect_at(at, name).close()
            except ConnectionRefusedError:
                _unlink_at(at, name)
            except OSError:
                continue


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _is_name(name: str) -> bool:
    """Return whether this is the name of a process's debugger socket."""
    return name.endswith(".sock") and _is_number(name[:-5])


def _is_early(name: str) -> bool:
    """Return whether this is the temporary name of a socket that is not reachable yet."""
    return name.startswith(".") and _is_number(name[1:].partition("-")[0])


def _unlink_at(at: int, name: str) -> None:
    """Remove one of our sockets; anything else with that name stays."""
    with contextlib.suppress(OSError):
        if _is_name(name) or _is_early(name) or name == INSPECTION:
            found = os.stat(name, dir_fd=at, follow_symlinks=False)
            if stat.S_ISSOCK(found.st_mode):
                os.unlink(name, dir_fd=at)


def unlink(path: str) -> None:
    """Remove a socket, and its folders if they are empty then."""
    place, _, name = path.rpartition("/")
    with contextlib.suppress(OSError), _opened(place) as at:
        _unlink_at(at, name)
    remove_empty(place)


def remove_empty(place: str) -> None:
    """Remove a job's folder and its parent if they are empty."""
    folder, _, job = place.rpartition("/")
    try:
        outer = open_private(folder)
    except OSError:
        return
    try:
        with contextlib.suppress(OSError):
            os.rmdir(job, dir_fd=outer)
            os.rmdir(folder)  # noqa: PTH106 - as above
    finally:
        os.close(outer)


def sweep() -> None:
    """Remove the sockets of jobs whose scripts are not on this machine any more, as far as nobody listens there."""
    for folder in folders():
        for name in _jobs(folder):
            if os.path.exists(f"/proc/{name}"):  # noqa: PTH110 - as above
                continue
            place = f"{folder}/{name}"
            with contextlib.suppress(OSError), _opened(place) as at:
                for _, peer in _find_in(place, at):
                    if peer is not None:
                        peer.close()
            remove_empty(place)


def forget_job(job: int) -> None:
    """Remove the sockets that killed processes of an ended job have left, and nothing else (PRV-1)."""
    for folder in folders():
        place = f"{folder}/{job}"
        try:
            with _opened(place) as at:
                for name in os.listdir(at):  # noqa: PTH208 - names are wanted
                    _unlink_at(at, name)
        except OSError:
            continue
        remove_empty(place)
