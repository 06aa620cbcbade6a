"""A command in a terminal, as a user at a keyboard has it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

from launched import LIMIT

_TAKE = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"


class InTerminal:
    """A `mesh` command that runs in a terminal of its own."""

    def __init__(
        self, *arguments: str, size: tuple[int, int] = (24, 80), env: dict[str, str] | None = None
    ) -> None:
        self._main, side = pty.openpty()
        self.resize(*size)
        self.before = termios.tcgetattr(side)
        self._side = side
        self.shown = ""
        words = [sys.executable, "-m", "mesh_core.cli", *arguments]
        self.process = subprocess.Popen(
            [sys.executable, "-ISc", _TAKE, *words],
            stdin=side,
            stdout=side,
            stderr=side,
            start_new_session=True,
            env=env,
        )

    def resize(self, rows: int, columns: int) -> None:
        """Give the terminal another size."""
        fcntl.ioctl(self._main, termios.TIOCSWINSZ, struct.pack("4H", rows, columns, 0, 0))

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._main, text.encode())

    def sees(self, pattern: str) -> str:
        """Wait until something new is shown that matches; what comes after it is new next time."""
        until = time.monotonic() + LIMIT
        while not (found := re.search(pattern, self.shown)):
            left = until - time.monotonic()
            assert left > 0, f"{pattern!r} is not shown, but {self.shown[-2000:]!r}"
            if select.select([self._main], [], [], min(left, 0.5))[0]:
                self.shown += os.read(self._main, 1 << 16).decode(errors="replace")
            else:
                assert self.process.poll() is None, f"it has ended, and shown {self.shown!r}"
        self.shown = self.shown[found.end() :]
        return found[0]

    def ends(self) -> int:
        """Wait for its end; returns its exit status."""
        until = time.monotonic() + LIMIT
        while self.process.poll() is None:
            assert time.monotonic() < until, f"it does not end; it has shown {self.shown[-2000:]!r}"
            if select.select([self._main], [], [], 0.05)[0]:
                self.shown += os.read(self._main, 1 << 16).decode(errors="replace")
        while select.select([self._main], [], [], 0)[0]:
            self.shown += os.read(self._main, 1 << 16).decode(errors="replace")
        return self.process.returncode

    def is_as_before(self) -> bool:
        """Whether the terminal is as it was before the command began."""
        return bool(termios.tcgetattr(self._side) == self.before)

    def close(self) -> None:
        """End it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._main)
        os.close(self._side)
