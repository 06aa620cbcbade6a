"""A program at a terminal of its own, typed into and read as a person would."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

LIMIT = 20.0

# With the terminal as its own, Ctrl-C reaches the program.
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


class Terminal:
    """A pseudo-terminal with a program in it."""

    def __init__(self, *arguments: str, env: Mapping[str, str]) -> None:
        self._fd, there = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _TAKE_TERMINAL, *arguments],
            stdin=there,
            stdout=there,
            stderr=there,
            # dumb: no colours, no bracketed paste.
            env={**os.environ, "TERM": "dumb", "COLUMNS": "200", **env},
            start_new_session=True,
        )
        os.close(there)
        self.seen = ""
        """All that was printed since the last :meth:`expect`."""

    def expect(self, pattern: str, limit: float = LIMIT) -> str:
        """Read until the pattern has come; returns what was printed up to its end."""
        until = time.monotonic() + limit
        while (found := re.search(pattern, self.seen)) is None:
            left = until - time.monotonic()
            ready = select.select([self._fd], [], [], max(0.0, left))[0] if left > 0 else []
            more = b""
            with contextlib.suppress(OSError):  # the program has ended
                more = os.read(self._fd, 65536) if ready else b""
            if not more:
                raise AssertionError(f"{pattern!r} did not come; printed since the last match:\n{self.seen}")
            self.seen += more.decode().replace("\r\n", "\n")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def type(self, line: str) -> None:
        """Type a line."""
        os.write(self._fd, line.encode() + b"\n")

    def press(self, letter: str) -> None:
        """Press Ctrl and a letter."""
        os.write(self._fd, bytes([ord(letter.upper()) - 64]))

    def interrupt(self, pattern: str) -> str:
        """Press Ctrl-C at a prompt until the pattern comes: readline loses one between its prompt and its wait."""
        for _ in range(int(LIMIT)):
            self.press("c")
            with contextlib.suppress(AssertionError):
                return self.expect(pattern, 1.0)
        return self.expect(pattern)

    def ask(self, line: str, pattern: str) -> str:
        """Type a line and read until the pattern comes after its echo."""
        self.type(line)
        self.expect(re.escape(line) + r"\n")
        return self.expect(pattern)

    def finish(self) -> int:
        """Wait for its end; its exit status."""
        with contextlib.suppress(OSError):
            while select.select([self._fd], [], [], LIMIT)[0] and (more := os.read(self._fd, 65536)):
                self.seen += more.decode().replace("\r\n", "\n")
        return self.process.wait(LIMIT)

    def close(self) -> None:
        """End it, if it has not ended, and hang up."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
