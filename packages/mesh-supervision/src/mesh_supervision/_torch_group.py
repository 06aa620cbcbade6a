"""The process group of torch.distributed that a process is in, and a way to leave it from another thread.

PyTorch offers no way to leave a gloo collective: a rank that waits for another one that lives, but has given up, waits
until the timeout. Here the connections of the group are shut down, so everything that waits on them raises at once. They
are known by which sockets were opened while the group was joined. A collective that begins at the very moment of the
shutdown may miss it, inside gloo; such a process has to be ended. PyTorch is imported by the first member that joins.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import Any

from mesh_core import MeshError

Ask = Callable[[str, str, bytes], bytes]
"""A request to the meeting of a group: an operation, a key and a value. It may wait for a key, and raises when the group is given up."""


class TorchGroup:
    """The default group of this process. :meth:`abort` may be called by any thread, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._generation = -1
        self._connections: dict[int, int] = {}
        """The group's sockets: inodes and descriptors."""
        self._aborted = -1
        """The latest generation of groups that was given up."""
        self._store: Any = None

    def join(self, generation: int, rank: int, size: int, ask: Ask, *, seconds: float, is_local: bool) -> Any:
        """Leave the previous group, and join the next, which is returned; waits for the other members."""
        dist = _distributed()
        self.leave()
        with self._lock:
            self._generation = generation
        before = _connections()
        self._store = _store(dist, ask)
        with _on_loopback(is_local):
            # There can be no timeout for this alone: gloo applies it to collectives too.
            dist.init_process_group(
                "gloo", store=self._store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds)
            )
        with self._lock:
            self._connections = {
                inode: number for inode, number in _connections().items() if inode not in before
            }
            is_over = self._aborted >= generation
        if is_over:
            self.abort(generation)
            raise MeshError("the group was given up while it was joined: one of its processes has died")
        return dist.group.WORLD

    def leave(self) -> None:
        """Leave the group; whatever waits in it raises."""
        dist = _distributed()
        self.abort(self._generation)
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
        elif dist.is_available():
            # PyTorch numbers groups, and also counts those that could not be joined. A member that has just started would wait for
            # the others under another number. No function of PyTorch resets the numbers without a group.
            dist.distributed_c10d._world.group_count = 0  # noqa: SLF001
        with self._lock:
            self._connections = {}
        self._store = None

    def abort(self, generation: int) -> int:
        """Make everything raise that waits in this group or an earlier one; return the number of connections that were shut down."""
        with self._lock:
            self._aborted = max(self._aborted, generation)
            if generation < self._generation:
                return 0
            connections, self._connections = self._connections, {}
        return sum(_shut_down(inode, number) for inode, number in connections.items())


def in_collective() -> bool:
    """Return whether a thread of this process is in a function of torch.distributed."""
    for frame in sys._current_frames().values():  # noqa: SLF001 - the interpreter's documented way
        each: FrameType | None = frame
        while each is not None:
            if each.f_globals.get("__name__") == "torch.distributed.distributed_c10d":
                return True
            each = each.f_back
    return False


def _distributed() -> Any:
    import torch.distributed

    return torch.distributed


def _connections() -> dict[int, int]:
    """Return the TCP connections of this process: inodes and descriptors."""
    found: dict[int, int] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, and no paths
        with contextlib.suppress(OSError, ValueError):
            number = int(name)
            link = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115 - a name, and no path
            if link.startswith("socket:["):
                inode = int(link[8:-1])
                with _looked_at(inode, number) as one:
                    if one is not None and _is_connection(one):
                        found[inode] = number
    return found


def _store(dist: Any, ask: Ask) -> Any:
    """A store with PyTorch's interface, whose keys are kept by the process that forms the group.

    PyTorch's own store needs a server in one of the processes, which may die, and resolves names, which may take seconds.
    """

    class Store(dist.Store):  # type: ignore[misc]
        def set(self, key: str, value: str | bytes) -> None:
            ask("set", key, _bytes(value))

        def get(self, key: str) -> bytes:
            return ask("get", key, b"")

        def add(self, key: str, amount: int) -> int:
            return int(ask("add", key, str(amount).encode()))

        def check(self, keys: list[str]) -> bool:
            return all(ask("check", key, b"") for key in keys)

        def wait(self, keys: list[str], *_timeout: timedelta) -> None:
            for key in keys:
                ask("get", key, b"")

        def compare_set(self, key: str, expected: str | bytes, value: str | bytes) -> bytes:
            return ask("compare", key, _bytes(expected) + b"\0" + _bytes(value))

        def delete_key(self, key: str) -> bool:
            return bool(ask("delete", key, b""))

    return Store()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@contextlib.contextmanager
def _looked_at(inode: int, number: int) -> Iterator[socket.socket | None]:
    """Return a second descriptor of a socket; nothing if the number means another socket by now."""
    mine = os.dup(number)
    if os.fstat(mine).st_ino != inode:
        os.close(mine)
        yield None
        return
    with socket.socket(fileno=mine) as one:
        yield one


def _is_connection(one: socket.socket) -> bool:
    return (
        one.family in (socket.AF_INET, socket.AF_INET6)
        and one.type == socket.SOCK_STREAM
        and not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    )


def _shut_down(inode: int, number: int) -> bool:
    with contextlib.suppress(OSError), _looked_at(inode, number) as one:
        if one is not None:
            one.shutdown(socket.SHUT_RDWR)
            return True
    return False


@contextlib.contextmanager
def _on_loopback(is_local: bool) -> Iterator[None]:
    """Make gloo use the loopback device if all members are on this machine, unless the user has set a device."""
    name = "GLOO_SOCKET_IFNAME"
    if not is_local or name in os.environ:
        yield
        return
    os.environ[name] = "lo"
    try:
        yield
    finally:
        os.environ.pop(name, None)
