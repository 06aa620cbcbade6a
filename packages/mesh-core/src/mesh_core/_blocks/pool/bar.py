"""A progress bar on stderr."""

from __future__ import annotations

import sys
import time

_EVERY_S = 0.1
_WIDTH = 30


class Bar:
    """One line that is rewritten in place. If stderr is not a terminal: a line every ten seconds and at the end."""

    def __init__(self, total: int | None) -> None:
        self._total = total
        self._done = 0
        self._begin = time.monotonic()
        self._is_live = sys.stderr.isatty()
        self._next = self._begin + (0.0 if self._is_live else 10.0)

    def step(self) -> None:
        """One more task is done."""
        self._done += 1
        now = time.monotonic()
        if now >= self._next:
            self._next = now + (_EVERY_S if self._is_live else 10.0)
            self._write("\r" if self._is_live else "", "" if self._is_live else "\n")

    def end(self) -> None:
        """All tasks are done, or the rest was given up."""
        self._write("\r" if self._is_live else "", "\n")

    def _write(self, before: str, after: str) -> None:
        sys.stderr.write(f"{before}{self.text()}{after}")
        sys.stderr.flush()

    def text(self) -> str:
        """The line."""
        seconds = max(time.monotonic() - self._begin, 1e-3)
        rate = f"{self._done / seconds:,.1f}/s"
        if not self._total:
            return f"{self._done} done, {rate}"
        full = _WIDTH * self._done // self._total
        left = (self._total - self._done) * seconds / self._done if self._done else 0.0
        return f"[{'#' * full}{' ' * (_WIDTH - full)}] {self._done}/{self._total}, {rate}, {left:,.0f} s left"
