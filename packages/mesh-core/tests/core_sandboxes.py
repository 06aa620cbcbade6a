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
import threading
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
kept_bytes: list[bytes] = []


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
    if kind == "descriptors":
        # A file in each process would be too few; all of these share one table, which costs them nothing.
        fill_descriptors(megabytes)
    elif kind == "table":
        filling = threading.Thread(target=fill_own_table, args=(megabytes,))
        filling.start()
        filling.join()
    elif kind == "threads":
        # Each of them is within the limit.
        kept.extend(live_without_first_thread(megabytes) for _ in range(3))
    elif kind == "secret":
        for _ in range(megabytes):
            keep_secret(1)[1].close()
    elif kind == "anonymous":
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


def keep_secret(megabytes: int) -> tuple[int, mmap.mmap]:
    """Memory in a file that even the kernel has not mapped, and which stays open."""
    file = checked(ctypes.CDLL(None, use_errno=True).syscall(447, 0))
    os.ftruncate(file, megabytes << 20)
    mapped = mmap.mmap(file, megabytes << 20)
    for page in range(0, megabytes << 20, mmap.PAGESIZE):
        mapped[page] = 1
    return file, mapped


def fill_own_table(megabytes: int) -> None:
    """Fill memory files that only this thread has open, and wait for the end."""
    checked(ctypes.CDLL(None, use_errno=True).unshare(0x400))
    for _ in range(megabytes):
        os.write(os.memfd_create("filled"), bytes(1 << 20))
    time.sleep(1000)


def live_without_first_thread(megabytes: int = 0) -> int:
    """Start a process whose first thread ends, while another one has that much memory."""
    pid = os.fork()
    if pid == 0:
        threading.Thread(
            target=lambda: (kept_bytes.append(b"1" * (megabytes << 20)), time.sleep(1000))
        ).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
    return pid


def fork_without_first_threads(count: int) -> None:
    for _ in range(count):
        live_without_first_thread()
    time.sleep(1000)


def fill_descriptors(each: int) -> None:
    """Start processes that share a table of that many descriptors."""
    call, clone = ctypes.CDLL(None), {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    for _ in range(each):
        os.dup(0)
    files_and_end = 0x400 | signal.SIGCHLD
    while call.syscall(clone, files_and_end, 0, 0, 0, 0) > 0 and len(kept) < 6:
        kept.append(0)


def fill_kernel(kind: str, megabytes: int) -> None:
    """Fill memory that no process needs to have mapped, and wait for the end."""
    call: Any = ctypes.CDLL(None, use_errno=True)
    call.shmat.restype = call.mmap.restype = ctypes.c_void_p
    if kind == "segments":
        for _ in range(megabytes // 10):
            size = ctypes.c_size_t(10 << 20)
            at = call.shmat(checked(call.shmget(0, size, 0o1600)), None, 0)
            ctypes.memset(at, 1, 10 << 20)
            call.shmdt(ctypes.c_void_p(at))
    elif kind == "messages":
        # As much as a queue takes, and as a message may have.
        for _ in range(megabytes * 64):
            queue = checked(call.msgget(0, 0o1600))
            for _ in range(2):
                checked(
                    call.msgsnd(
                        queue, (1).to_bytes(8, sys.byteorder) + bytes(8192), ctypes.c_size_t(8192), 0o4000
                    )
                )
    elif kind == "semaphores":
        for _ in range(megabytes):
            checked(call.semget(0, 16384, 0o1600))
    else:
        # Nothing is in these pages, and the kernel has a table for each part of two mebibytes.
        length, step = megabytes << 29, 2 << 20
        at = call.mmap(None, ctypes.c_size_t(length), 1, 0x4022, -1, 0)
        call.madvise(ctypes.c_void_p(at), ctypes.c_size_t(length), 15)
        for each in range(at, at + length, step):
            ctypes.string_at(each, 1)
    signal.pause()


def checked(result: int) -> int:
    """The result of a call in C."""
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def new_user_namespace(how: str) -> int:
    """Why a process gets no user namespace of its own, in which it would have privileges; 0 if it does."""
    new, call = 0x10000000, ctypes.CDLL(None, use_errno=True)
    pid = os.fork()
    if pid == 0:
        number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
        arguments = (ctypes.c_uint64 * 11)(new, 0, 0, 0, signal.SIGCHLD)
        done = {
            "unshare": lambda: call.unshare(new),
            "clone": lambda: call.syscall(number, new | signal.SIGCHLD, 0, 0, 0, 0),
            "clone3": lambda: call.syscall(435, arguments, 88),
            # Outside, this one says that the process is there already.
            "setns": lambda: call.setns(os.open("/proc/self/ns/user", os.O_RDONLY), new),
        }[how]()
        os._exit(ctypes.get_errno() if done < 0 else 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def knock(path: str) -> bytes:
    """Connect to a Unix socket; return what it says first."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(SOON)
        peer.connect(path)
        return peer.recv(100)


def spin() -> None:
    while True:
        pass


def scream(what: bytes) -> None:
    """End this process after much output."""
    for _ in range(16):
        os.write(2, what * (4096 // len(what)))
    os.abort()


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


def pairs() -> dict[str, int]:
    """Why a pair of sockets of each family is refused, by its name; 0 where it is not."""
    found = {}
    for name in ("AF_UNIX", "AF_INET"):
        try:
            for each in socket.socketpair(getattr(socket, name)):
                each.close()
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


def weakening_all_of_the_user() -> list[int]:
    """Why a change of all processes of the user, with which comes the first one, is refused; 0 where it is not."""
    numbers = {"x86_64": (141, 251), "aarch64": (140, 30)}[os.uname().machine]
    call = ctypes.CDLL(None, use_errno=True).syscall
    wanted = ((numbers[0], os.PRIO_USER, 19), (numbers[1], 3, 3 << 13))
    return [
        0 if call(number, kind, os.getuid(), value) == 0 else ctypes.get_errno()
        for number, kind, value in wanted
    ]


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
