"""Trees of processes under an actor. Every process of a tree has opened a pipe of the test's, which ends with the last one."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from mesh_core import Actor, detach, endpoint

# Each starts what it says, has every process say so in the fifo, and lasts.
_PYTHON = """
import os, signal, subprocess, sys, time
fifo = os.open(sys.argv[1], os.O_WRONLY)
def here():
    os.write(fifo, b".")
def stay():
    here()
    while True:
        signal.pause()
"""

TREES = {
    "child": (1, _PYTHON + "stay()"),
    "session": (2, _PYTHON + "if os.fork() == 0: os.setsid()\nstay()"),
    "daemon": (
        1,
        _PYTHON
        + """
ended, alive = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.environ.clear()
        os.close(alive)
        # It is alone from here on: nobody takes one that ends for the daemon.
        os.read(ended, 1)
        stay()
    os._exit(0)
""",
    ),
    # Its first thread has ended, and another one goes on.
    "headless": (
        1,
        _PYTHON
        + """
import ctypes, threading
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        threading.Thread(target=stay).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)
    os._exit(0)
""",
    ),
    "deaf": (
        2,
        _PYTHON
        + """
for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
os.fork()
stay()
""",
    ),
    "stopped": (2, _PYTHON + "os.fork()\nhere()\nos.kill(os.getpid(), signal.SIGSTOP)\nstay()"),
    "crowd": (
        32,
        _PYTHON
        + """
first = os.getpid()
for _ in range(5):
    os.fork()
here()
while True:
    # Each but the first goes on in a child, over and over.
    if os.getpid() != first and os.fork():
        os._exit(0)
    time.sleep(0.1)
""",
    ),
    "workers": (
        3,
        _PYTHON
        + """
import multiprocessing
for _ in range(2):
    multiprocessing.get_context("fork").Process(target=stay).start()
stay()
""",
    ),
}

SHELL = 'exec 9> "$0"; sleep 1000 & (sleep 1000 &); echo . >&9; sleep 1000'


class Trees(Actor):
    """Starts trees."""

    @endpoint
    def plant(self, kind: str, fifo: str) -> int:
        """Start a tree; its first process."""
        code = TREES[kind][1]
        return subprocess.Popen(
            [sys.executable, "-S", "-c", code, fifo], start_new_session=kind == "crowd"
        ).pid

    @endpoint
    def shell(self, fifo: str) -> int:
        return subprocess.Popen(["sh", "-c", SHELL, fifo]).pid

    @endpoint
    def detach(self, pid: int) -> None:
        detach(pid)

    @endpoint
    def crash(self, how: str) -> None:
        if how == "exit":
            os._exit(3)
        os.kill(os.getpid(), 11)


class Pipe:
    """The test's end of a fifo that the processes of one tree have open for writing."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = str(path)
        self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)

    def wait_for(self, n: int, limit: float = 30.0) -> None:
        """Wait until so many processes have said that they are there."""
        until = time.monotonic() + limit
        while n > 0:
            assert self._poll.poll(max(0.0, until - time.monotonic()) * 1000), f"{n} are missing"
            n -= len(os.read(self._fd, n))

    def said(self) -> int:
        """How many processes have said since the last look that they are there."""
        try:
            return len(os.read(self._fd, 4096))
        except BlockingIOError:
            return 0

    def ended(self, limit: float = 20.0) -> bool:
        """Wait until no process has it open any more; whether that came true."""
        until = time.monotonic() + limit
        while (left := until - time.monotonic()) > 0 and self._poll.poll(left * 1000):
            if not os.read(self._fd, 4096):
                return True
        return False

    @property
    def is_open(self) -> bool:
        """Whether a process has it open."""
        return not self.ended(0.001)

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def pipe(path: Path) -> Iterator[Pipe]:
    made = Pipe(path)
    try:
        yield made
    finally:
        made.close()


def plant(trees: Any, kind: str, made: Pipe) -> int:
    """Have an actor start a tree, and wait until that stands."""
    if kind == "shell":
        first = trees.shell.call_one(made.path).get()
        made.wait_for(1)
        return int(first)
    first = trees.plant.call_one(kind, made.path).get()
    made.wait_for(TREES[kind][0])
    return int(first)


def end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, 9)
