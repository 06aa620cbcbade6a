"""Who is at the other end of a Unix socket, according to the kernel.

PER-1: sockets by which code can be run in a process, or processes be ended, serve only processes of the same user in the same user and process
namespaces. Code in a sandbox or in a container has its user's id as well, but is kept from that user's processes.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from contextlib import suppress

_CREDENTIALS = struct.Struct("3i")
_PEER_PIDFD = 77
"""``SO_PEERPIDFD``, of Linux 6.5 and newer: unlike a pid, it cannot refer to a later process."""
_NAMESPACES = ("user", "pid")


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return the process at the other end, 0 if this process cannot see it, and its user.

    >>> import os, socket
    >>> ours, theirs = socket.socketpair()
    >>> peer_of(ours) == (os.getpid(), os.geteuid())
    True
    >>> ours.close(); theirs.close()
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(found)
    return pid, uid


def require_same_user(connection: socket.socket) -> None:
    """Raise ``PermissionError`` unless the process at the other end belongs to the same user (DBG-2).

    >>> import socket
    >>> ours, theirs = socket.socketpair()
    >>> require_same_user(ours)
    >>> ours.close(); theirs.close()
    """
    pid, uid = peer_of(connection)
    if uid != os.geteuid():
        raise PermissionError(
            f"the process at the other end, pid {pid}, belongs to uid {uid}, not {os.geteuid()}"
        )


def require_same_namespaces(connection: socket.socket) -> None:
    """Raise ``PermissionError`` unless the process at the other end runs where this one does: it is in no sandbox (PER-1).

    Its user must be the same, or root.

    >>> import socket
    >>> ours, theirs = socket.socketpair()
    >>> require_same_namespaces(ours)
    >>> ours.close(); theirs.close()
    """
    pid, uid = peer_of(connection)
    if uid == 0 != os.geteuid():
        return  # its namespaces cannot be read, and nothing protects from it
    require_same_user(connection)
    process = _open_process(connection, pid)
    try:
        here, there = [namespaces(each) for each in ("self", _number(process))]
        # Only now: while it has not ended, its number belongs to no other process.
        if select.select([process], [], [], 0)[0]:
            raise PermissionError(f"the process at the other end, pid {pid}, has ended")
    finally:
        os.close(process)
    if other := [name for name in _NAMESPACES if here[name] != there[name]]:
        raise PermissionError(
            f"the process at the other end, pid {pid}, is in another {' and '.join(other)} namespace, such as a sandbox's or a "
            "container's; connect from where this process runs"
        )


def _open_process(connection: socket.socket, pid: int) -> int:
    with suppress(OSError):
        return connection.getsockopt(socket.SOL_SOCKET, _PEER_PIDFD)
    try:
        return os.pidfd_open(pid)
    except OSError:  # 0 is no pid
        raise PermissionError(
            f"the process at the other end, pid {pid}, has ended, or is in a process namespace that this process cannot see"
        ) from None


def _number(process: int) -> str:
    """Return the number that ``/proc`` has for a process, which is that of another namespace if ``/proc`` is."""
    with open(f"/proc/self/fdinfo/{process}") as file:  # noqa: PTH123 - pathlib takes long to import
        found = next((line.split()[1] for line in file if line.startswith("Pid:")), "0")
    if int(found) <= 0:
        raise PermissionError("the process at the other end has ended, or cannot be seen in /proc")
    return found


def namespaces(process: str) -> dict[str, tuple[int, int]]:
    """Return which namespaces a process is in, by their kinds."""
    try:
        found = {name: os.stat(f"/proc/{process}/ns/{name}") for name in _NAMESPACES}  # noqa: PTH116 - as above
    except OSError as error:
        raise PermissionError(
            f"the namespaces of process {process} cannot be read ({error.strerror}), so it may be in a sandbox"
        ) from None
    return {name: (each.st_dev, each.st_ino) for name, each in found.items()}
