"""Processes without their start: copies of one that has imported all they need.

To start an interpreter takes seconds in the virtual machine, and its copy a few hundredths of one.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from select import POLLIN, poll

_LONGEST = 1000


def start(path: Path, programs: Mapping[str, Callable[[], object]], prepare: Callable[[], object]) -> int:
    """Start a server that listens at the path, as a copy of this process; return its number.

    This process must have one thread. The server lives until it is killed.

    Args:
        path: of the socket that is made.
        programs: what its copies can do, by name: each ends as a program does when the function returns.
        prepare: called once in the server.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()
        if pid := os.fork():
            return pid
        prepare()
        program = _Server(listener).serve()
    programs[program]()
    sys.exit()


class _Server:
    """Has a connection for each process that it has started, over which it tells of that one's end."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._alive: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> str:
        """Serve until killed. In a process that was asked for: return which program it is."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._listener:
                    self._tell_of_the_end(key.fd)
                elif program := self._start():
                    return program

    def _start(self) -> str | None:
        connection, _ = self._listener.accept()
        told, descriptors, _, _ = socket.recv_fds(connection, _LONGEST, 2)
        pid = os.fork()
        if pid == 0:
            connection.close()
            self._let_go()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            return told.decode()
        for descriptor in descriptors:
            os.close(descriptor)
        handle = os.pidfd_open(pid)
        self._alive[handle] = (pid, connection)
        self._selector.register(handle, selectors.EVENT_READ)
        with suppress(OSError):
            socket.send_fds(connection, [str(pid).encode()], [handle])
        return None

    def _let_go(self) -> None:
        """Keep nothing of the server's in its copy."""
        self._selector.close()
        self._listener.close()
        for handle, (_, connection) in self._alive.items():
            os.close(handle)
            connection.close()
        self._alive.clear()

    def _tell_of_the_end(self, handle: int) -> None:
        self._selector.unregister(handle)
        os.close(handle)
        pid, connection = self._alive.pop(handle)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with connection, suppress(OSError):
            connection.send(str(status).encode())


class Copy:
    """A copy of a server's process, used as a `subprocess.Popen` whose stdin and stdout are pipes."""

    def __init__(self, path: Path, program: str) -> None:
        self.returncode: int | None = None
        reads, its_stdout = os.pipe()
        its_stdin, writes = os.pipe()
        self.stdin, self.stdout = os.fdopen(writes, "wb"), os.fdopen(reads, "rb")
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._connection.connect(str(path))
            socket.send_fds(self._connection, [program.encode()], [its_stdin, its_stdout])
        finally:
            os.close(its_stdin)
            os.close(its_stdout)
        said, (self._handle,), _, _ = socket.recv_fds(self._connection, _LONGEST, 1)
        os.set_inheritable(self._handle, False)
        self.pid = int(said)

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        """End it now."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status once it has ended and nothing is left of it."""
        if self.returncode is None:
            told = poll()
            told.register(self._connection, POLLIN)
            if not told.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            said = self._connection.recv(_LONGEST)
            # Without a server nobody knows; it has ended, as it reads from the process that waits here.
            self.returncode = int(said or -signal.SIGKILL)
            self._connection.close()
            os.close(self._handle)
        return self.returncode


def end(*servers: int) -> None:
    """End servers. What they have started goes on."""
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
