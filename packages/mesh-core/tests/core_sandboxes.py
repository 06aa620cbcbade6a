"""What the tests of sandboxes run in them."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core_processes import Traces
from core_trees import TREES

from mesh_core import Sandboxes

SOON = 30.0
MODES = {"isolated": None, "plain": False}
kept: list[int] = []
kept_maps: list[mmap.mmap] = []


class Odd(Exception):
    """An exception of the tests' own."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def tidily(mode: str, **options: Any) -> Iterator[Sandboxes]:
    """Sandboxes that leave no process, thread or descriptor behind."""
    before = Traces()
    options.setdefault("network", None)
    with Sandboxes(isolate=MODES[mode], **options) as boxes:
        yield boxes
    left = Traces().left_since(before)
    assert not left, f"left behind: {left}"


def keep(value: int) -> list[int]:
    kept.append(value)
    return kept


def raise_odd(number: int) -> None:
    raise Odd(number)


def write(path: str, text: str) -> int:
    return Path(path).write_text(text)


def read(path: str) -> str:
    return Path(path).read_text()


def fill(kind: str, megabytes: int) -> None:
    """Fill memory that can be shared, and wait for the end."""
    if kind == "hidden":
        ctypes.CDLL(None).prctl(4, 0)  # nobody may look at this process
    if kind == "anonymous":
        kept_maps.append(mmap.mmap(-1, megabytes << 20))
        for _ in range(megabytes):
            kept_maps[0].write(bytes(1 << 20))
    else:
        # Each of them is within the limit for files.
        for _ in range(megabytes):
            file = os.memfd_create("filled")
            os.write(file, bytes(1 << 20))
            if kind == "mapped":
                kept_maps.append(mmap.mmap(file, 1 << 20))
    signal.pause()


def knock(path: str) -> bytes:
    """Connect to a Unix socket; return what it says first."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(SOON)
        peer.connect(path)
        return peer.recv(100)


def spin() -> None:
    while True:
        pass


def crash(how: str) -> None:
    """End this process."""
    sys.stderr.write("last words\n")
    sys.stderr.flush()
    if how == "exit":
        os._exit(3)
    if how == "segv":
        ctypes.string_at(0)
    if how == "abort":
        os.abort()
    os.kill(os.getpid(), 9)


def sockets() -> list[int]:
    """The connection to the owner, however a hostile function finds it."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def _alike(count: int) -> bytes:
    """A frame with a set of numbers that all have the same hash: hash tables compare each with each."""
    modulus = sys.hash_info.modulus
    members = b"".join(
        b"i" + (16).to_bytes(8, "big") + (number * modulus).to_bytes(16, "big") for number in range(count)
    )
    data = b"e" + count.to_bytes(8, "big") + members
    return len(data).to_bytes(8, "big") + data


def misuse(how: str) -> None:
    if how == "close":
        os.closerange(3, 1000)
        time.sleep(1000)
    garbage = {
        "noise": os.urandom(1 << 16),
        "huge": b"\xff" * 8 + b"x",
        # A frame that is read, and holds a list of 2**60 members.
        "lies": (10).to_bytes(8, "big") + b"l" + (1 << 60).to_bytes(8, "big") + b"n",
        "two": (1).to_bytes(8, "big") + b"n" + (1).to_bytes(8, "big") + b"n",
        "alike": _alike(100_000),
        "kind": (1).to_bytes(8, "big") + b"n",
        # A pickle that would run something.
        "pickle": b"cos\nsystem\n(S'echo owned'\ntR.",
    }[how]
    for fd in sockets():
        left = garbage
        while left:
            left = left[os.write(fd, left) :]
    time.sleep(1000)


def plant(kind: str, fifo: str) -> int:
    """Start a tree that is not waited for."""
    return subprocess.Popen([sys.executable, "-S", "-c", TREES[kind][1], fifo]).pid


def fork(count: int) -> None:
    """Start some processes, all of which are idle."""
    for _ in range(count):
        if os.fork() == 0:
            time.sleep(1000)
    time.sleep(1000)


def connects(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError:
        return False
    return True


def families() -> dict[str, int]:
    """Why each family of sockets is refused, by its name; 0 where it is not."""
    found = {}
    for name in ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK", "AF_VSOCK"):
        kind = socket.SOCK_RAW if name == "AF_NETLINK" else socket.SOCK_STREAM
        try:
            socket.socket(getattr(socket, name), kind).close()
            found[name] = 0
        except OSError as error:
            found[name] = error.errno or -1
    return found


def weakening_the_first() -> list[int]:
    """Why each change of the process that enforces the limits is refused, 0 where it is not; and of this process, for comparison."""
    idle = os.sched_param(0)
    changes = [
        lambda pid: os.setpriority(os.PRIO_PROCESS, pid, 19),
        lambda pid: os.sched_setaffinity(pid, os.sched_getaffinity(0)),
        lambda pid: os.sched_setscheduler(pid, os.SCHED_IDLE, idle),
        lambda pid: os.sched_setparam(pid, idle),
        lambda pid: resource.prlimit(pid, resource.RLIMIT_NOFILE, (64, 64)),
    ]
    found = []
    for pid in (1, 0):
        for change in changes:
            try:
                change(pid)
                found.append(0)
            except OSError as error:
                found.append(error.errno or -1)
    return found


def own_loopback() -> bool:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return connects(server.getsockname()[1])


def can_signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool], limit: float = SOON) -> None:
    """For what nothing tells of: other processes, looked at from outside."""
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
