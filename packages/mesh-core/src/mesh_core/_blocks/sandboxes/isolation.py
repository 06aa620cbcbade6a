"""Isolation of boxes by the kernel. All of it is optional, because many containers forbid it.

ISO-1: whether a kind of isolation is available is determined by trying it, in processes that exit with the answer.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Flag
from pathlib import Path

from mesh_core._common.private_folders import temporary_folder
from mesh_core._native import (
    beget_in,
    change_mount,
    filter_calls,
    give_up_privileges,
    leave_keyring,
    mount,
    unshare,
)

_MOUNTS, _IPC, _USERS, _PIDS, _NET = 0x20000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_NOSUID, _NODEV, _NOEXEC = 2, 4, 8
_RDONLY = 1
_DEVICES = ("null", "zero", "full", "random", "urandom")
_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}
# Folders that are replaced by empty ones.
_REPLACED = ("/tmp", "/dev")
_LEAST_PIDS = 301  # the kernel takes no lower limit
_PER_FILE, _LEAST_FILES = 4096, 1024


class Isolation(Flag):
    """What boxes are isolated from.

    >>> Isolation.FILES in (Isolation.PROCESSES | Isolation.FILES)
    True
    """

    NONE = 0
    """Only limits and a private folder."""
    PROCESSES = 1
    """A box sees and signals only its own processes, and the kernel ends all of them with it."""
    FILES = 2
    """A box can write only to its folder and to its own ``/tmp`` and ``/dev/shm``, and read everything else."""
    NETWORK = 4
    """A box has no network except its own loopback."""
    IPC = 8
    """A box has its own System V shared memory, semaphores and message queues."""


EVERYTHING = Isolation.PROCESSES | Isolation.FILES | Isolation.NETWORK | Isolation.IPC


class Seclusion:
    """Isolates guard, template and boxes; each step runs in the process that it is named after."""

    def __init__(
        self, kinds: Isolation, keep: list[str], hide: list[str], size: int | None, pids: int | None
    ) -> None:
        self.kinds = kinds
        self._keep = keep
        self._hide = hide
        self._size = size
        self._pids = pids
        self._own = -1

    def settle_guard(self) -> None:
        """Runs in the guard, before it forks the template."""
        if not self.kinds:
            return
        user, group = os.geteuid(), os.getegid()
        try:
            unshare(_USERS)
        except OSError:
            # Root of this machine, or of a privileged container, does not need a user namespace.
            if user != 0:
                raise
        else:
            with suppress(FileNotFoundError):
                Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
            Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        if Isolation.PROCESSES in self.kinds:
            unshare(_PIDS)

    def settle_template(self) -> None:
        """Runs first in the template."""
        if self.kinds:
            # Keys of the kernel belong to no namespace: boxes would have those of the session.
            leave_keyring()
        if self.kinds & (Isolation.PROCESSES | Isolation.FILES):
            unshare(_MOUNTS)
            mount(None, "/", None, _RECURSIVE | _PRIVATE, None)
        if Isolation.PROCESSES in self.kinds:
            _mount_proc()
            self._own = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)

    def fork(self) -> int:
        """Fork a box from the template."""
        if self._own < 0:
            return os.fork()
        unshare(_PIDS)
        try:
            pid = os.fork()
        except BaseException:
            beget_in(self._own)
            raise
        if pid != 0:
            beget_in(self._own)
        return pid

    def settle_box(self, folder: str) -> None:
        """Runs in the first process of a box."""
        if self._own >= 0:
            os.close(self._own)
        kinds = self.kinds
        unshare(
            (_IPC if Isolation.IPC in kinds else 0)
            | (_NET if Isolation.NETWORK in kinds else 0)
            | (_MOUNTS if kinds & (Isolation.PROCESSES | Isolation.FILES) else 0)
        )
        if Isolation.NETWORK in kinds:
            _raise_loopback()
        if Isolation.FILES in kinds:
            self._arrange(folder)
        if Isolation.PROCESSES in kinds:
            _mount_proc()
            if self._pids is not None:
                # Linux 6.14 and newer have one for each namespace; older kernels refuse this.
                with suppress(OSError):
                    Path("/proc/sys/kernel/pid_max").write_text(str(max(_LEAST_PIDS, 4 * self._pids)))
            # Root of the machine can write to some of these files without privileges.
            change_mount("/proc", _RDONLY, 0, False)
        give_up_privileges()
        if kinds:
            filter_calls(Isolation.NETWORK in kinds, Isolation.PROCESSES in kinds)

    def _arrange(self, folder: str) -> None:
        # Empty files need memory as well.
        size = (
            ""
            if self._size is None
            else f",size={self._size},nr_inodes={max(_LEAST_FILES, self._size // _PER_FILE)}"
        )
        held = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in [*self._keep, folder]}
        devices = {
            name: os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC)
            for name in _DEVICES
            if Path(f"/dev/{name}").exists()
        }
        change_mount("/", _RDONLY | _NOSUID | _NODEV, 0, True)
        mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, f"mode=1777{size}")
        mount("tmpfs", "/dev", "tmpfs", _NOSUID | _NOEXEC, "mode=755,size=64k")
        Path("/dev/shm").mkdir()
        mount("tmpfs", "/dev/shm", "tmpfs", _NOSUID | _NODEV, f"mode=1777{size}")
        for name, fd in devices.items():
            Path(f"/dev/{name}").touch()
            _bind(fd, f"/dev/{name}", _RDONLY | _NODEV)
        for name, target in _LINKS.items():
            Path(f"/dev/{name}").symlink_to(target)
        change_mount("/dev", _RDONLY, 0, False)
        hidden = [each for each in self._hide if _is_replaced(each)]
        for path, fd in held.items():
            if path == folder or path.startswith(tuple(f"{each}/" for each in (*_REPLACED, *hidden))):
                Path(path).mkdir(parents=True, exist_ok=True)
                _bind(fd, path, _RDONLY if path == folder else 0)
        # Others may have come back just now, in a folder that is kept.
        hidden += [each for each in self._hide if each not in hidden and _is_replaced(each)]
        for each in hidden:
            with _at(each) as place:
                change_mount(place, _RDONLY, 0, False)
        for fd in [*held.values(), *devices.values()]:
            os.close(fd)


def _is_replaced(folder: str) -> bool:
    """Replace a folder by an empty one; return whether there is such a folder. There is none where one around it has been replaced."""
    if not Path(folder).is_dir():
        return False
    with _at(folder) as place:
        mount("tmpfs", place, "tmpfs", _NOSUID | _NODEV | _NOEXEC, "mode=755,size=64k")
    return True


def _bind(fd: int, target: str, clear: int) -> None:
    """Mount what a descriptor refers to at another place, and clear these attributes there."""
    with _at(target) as place:
        mount(f"/proc/self/fd/{fd}", place, None, _BIND, None)
    if clear:
        with _at(target) as place:
            change_mount(place, 0, clear, False)


@contextmanager
def _at(path: str) -> Iterator[str]:
    """Name what is at a path now, for system calls that take text: a path may be any bytes."""
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def _mount_proc() -> None:
    mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC, None)


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        get_flags, set_flags, up = 0x8913, 0x8914, 1
        told = fcntl.ioctl(any_socket, get_flags, struct.pack("16sh14x", b"lo", 0))
        flags = struct.unpack("16sh14x", told)[1]
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", flags | up))


def available(wanted: Isolation) -> Isolation:
    """Return the part of ``wanted`` that the kernel allows (ISO-1). The process must have a single thread."""
    if not wanted or _works(wanted):
        return wanted
    found = Isolation.NONE
    for kind in wanted:
        if _works(kind):
            found |= kind
    return found if _works(found) else Isolation.NONE


def _works(kinds: Isolation) -> bool:
    """Try all steps, from a guard to a box."""
    with tempfile.TemporaryDirectory(prefix="mesh-probe-", dir=temporary_folder()) as folder:
        seclusion = Seclusion(kinds, [], [], 1 << 20, None)

        def box() -> bool:
            seclusion.settle_box(folder)
            return True

        def template() -> bool:
            seclusion.settle_template()
            return _succeeds(seclusion.fork, box)

        def guard() -> bool:
            seclusion.settle_guard()
            return _succeeds(os.fork, template)

        return _succeeds(os.fork, guard)


def _succeeds(fork: Callable[[], int], steps: Callable[[], bool]) -> bool:
    """Whether a child that runs these steps reports success."""
    pid = fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if steps() else 1
        except OSError as error:
            if sys.flags.dev_mode:
                sys.stderr.write(f"mesh: a sandbox cannot be isolated further: {error!r}\n")
        finally:
            os._exit(status)
    _, how = os.waitpid(pid, 0)
    return bool(how == 0)
