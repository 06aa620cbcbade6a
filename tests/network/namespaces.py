"""The few calls into the kernel that make a machine out of namespaces; `os` has them from Python 3.12 on."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

NEWNS = 0x00020000
NEWUTS = 0x04000000
NEWIPC = 0x08000000
NEWPID = 0x20000000
NEWNET = 0x40000000
MACHINE = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
"""What a machine has for itself: mounts, a name, System V objects, process numbers, a network."""

_MS_REC_PRIVATE = 0x4000 | 0x40000
_MS_BIND = 0x1000
_PR_SET_PDEATHSIG = 1


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")


def unshare(flags: int) -> None:
    """Give the calling thread namespaces of its own; with NEWPID, its next children."""
    _check(_libc().unshare(flags), "unshare")


def join(fd: int, flags: int) -> None:
    """Take the calling thread into namespaces of a process (a pidfd) or into one (its file in /proc)."""
    _check(_libc().setns(fd, flags), "setns")


def mount(source: str, target: str, kind: str, options: str = "") -> None:
    """Mount a file system that is made up by the kernel."""
    done = _libc().mount(source.encode(), target.encode(), kind.encode(), 0, options.encode())
    _check(done, f"mount {kind} on {target}")


def bind(source: str, target: str) -> None:
    """Let a file be found in the place of another."""
    _check(_libc().mount(source.encode(), target.encode(), None, _MS_BIND, None), f"bind {target}")


def keep_mounts_to_ourselves() -> None:
    """No mount of this namespace is seen in others."""
    _check(_libc().mount(b"none", b"/", None, _MS_REC_PRIVATE, None), "mount --make-rprivate /")


def die_with_parent() -> None:
    """SIGKILL this process when the thread that forked it ends."""
    _check(_libc().prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0), "prctl")


@contextmanager
def inside_network(pid: int) -> Iterator[None]:
    """For the calling thread, and what it starts meanwhile: sockets are those of the network a process is in.

    The thread is back where it was at the end, also after an exception.
    """
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
        try:
            join(there, NEWNET)
        finally:
            os.close(there)
        try:
            yield
        finally:
            join(home, NEWNET)
    finally:
        os.close(home)
