"""What ``mesh exec`` and ``mesh shell`` run on hosts. It is sent there as code, so that hosts need only mesh-core."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from contextlib import suppress

from mesh_core import Actor, endpoint, python_command

_NOT_FOUND = 127
_SIGNAL = 128
_CHUNK = 1 << 16
# The child must make the terminal its own before it becomes the command. Not by `preexec_fn`: this process has threads.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
try:
    os.execvp(sys.argv[1], sys.argv[1:])
except OSError as error:
    sys.stderr.write(f"{sys.argv[1]}: {error.strerror}\\n")
    os._exit(127)
"""


class Runner(Actor):
    """Runs one command on its host. Its output is this process's own, and is shown as such."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._sent: int | None = None

    @endpoint(concurrent=True)
    async def run(self, argv: list[str]) -> int:
        """Run it, and return its exit status as a shell would."""
        try:
            # A group of its own, so that a signal reaches what it has started too.
            self._process = await asyncio.create_subprocess_exec(
                *argv, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
            return _NOT_FOUND
        if self._sent is not None:
            self._send(self._sent)
        return _as_shells_say(await self._process.wait())

    @endpoint(concurrent=True)
    async def send(self, number: int) -> None:
        """Send a signal to the command and to what it has started."""
        self._sent = number
        self._send(number)

    def _send(self, number: int) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)


class Terminal(Actor):
    """Runs one command in a terminal of its host.

    Output is pulled, a piece at a time, so that Ctrl-C is not behind megabytes that nobody has read yet.
    """

    def __init__(self) -> None:
        self._main = -1
        self._process: asyncio.subprocess.Process | None = None
        self._writing = asyncio.Lock()

    @endpoint(concurrent=True)
    async def start(
        self, argv: list[str], env: dict[str, str], size: tuple[int, int], *, is_python: bool
    ) -> None:
        """Start the command, or a login shell; with `is_python` the interpreter that runs this process, with such arguments."""
        self._main, side = pty.openpty()
        try:
            os.set_blocking(self._main, False)
            self._set_size(size)
            shell = [os.environ.get("SHELL") or "/bin/sh", "-l"]
            words = [sys.executable, *argv] if is_python else argv or shell
            self._process = await asyncio.create_subprocess_exec(
                *python_command(_TAKE_TERMINAL, *words, isolated=True),
                stdin=side,
                stdout=side,
                stderr=side,
                env={**os.environ, **env},
                start_new_session=True,
            )
        finally:
            os.close(side)

    @endpoint(concurrent=True)
    async def read(self) -> bytes:
        """Return what was written to the terminal since the last time; nothing at the end."""
        while True:
            try:
                return os.read(self._main, _CHUNK)
            except BlockingIOError:
                await self._until_readable()
            except OSError:
                # EIO: nobody has the terminal open any longer.
                return b""

    @endpoint(concurrent=True)
    async def write(self, typed: bytes) -> None:
        """Type something."""
        async with self._writing:
            while typed:
                try:
                    typed = typed[os.write(self._main, typed) :]
                except BlockingIOError:
                    await self._until_writable()
                except OSError:
                    return

    @endpoint(concurrent=True)
    async def resize(self, size: tuple[int, int]) -> None:
        """Give the terminal another size; its foreground processes get SIGWINCH."""
        self._set_size(size)

    @endpoint(concurrent=True)
    async def status(self) -> int:
        """Wait for the command's end, and return its exit status as a shell would."""
        assert self._process is not None
        return _as_shells_say(await self._process.wait())

    @endpoint(concurrent=True)
    async def hang_up(self) -> None:
        """Close the terminal: what runs in it gets SIGHUP."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGHUP)

    def _set_size(self, size: tuple[int, int]) -> None:
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("4H", *size, 0, 0))

    async def _until_readable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_reader(self._main, _finish, ready)
        try:
            await ready
        finally:
            loop.remove_reader(self._main)

    async def _until_writable(self) -> None:
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        loop.add_writer(self._main, _finish, ready)
        try:
            await ready
        finally:
            loop.remove_writer(self._main)


def _finish(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _as_shells_say(status: int) -> int:
    return _SIGNAL - status if status < 0 else status
