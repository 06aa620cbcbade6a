"""The line on a terminal that says how far something is: :func:`progress`.

A line appears once something has taken a second, at the end of the terminal, on stderr. It is rewritten in place and erased at
the end, so it never becomes a part of what the program prints. Where stderr is not a terminal, nothing is written, unless the
setting ``progress`` asks for it: then lines, one every ten seconds.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from mesh_core._common.current import current, holder
from mesh_core._common.settings import current_settings

if TYPE_CHECKING:
    from mesh_core._process.process import Process

_AFTER_S = 1.0
_EVERY_S = 0.2
_EVERY_LINE_S = 10.0
_IDLE_S = 1.0
"""How long the thread stays when there is nothing to show."""
_BLOCKED_S = 1.0
"""A terminal that accepts nothing for this long delays nobody any longer."""


class ProgressLine:
    """Of this process. A thread that only runs while something is under way writes the line."""

    def __init__(self, process: Process) -> None:
        self._changed = threading.Condition()
        self._under_way: dict[int, tuple[Callable[[], str], float, bool]] = {}
        self._number = 0
        # What stands on the terminal belongs to who holds this; it is held while the terminal is written to.
        self._terminal = threading.Lock()
        self._standing = False
        self._not_before = 0.0
        self._is_closed = False
        self._thread: threading.Thread | None = None
        process.hooks.closing.append(self._close)

    @contextmanager
    def show(self, text: Callable[[], str], on_terminal: bool) -> Iterator[None]:
        """Show a line while the block runs."""
        with self._changed:
            self._number += 1
            number = self._number
            self._under_way[number] = text, time.monotonic(), on_terminal
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mesh-progress", daemon=True)
                self._thread.start()
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                del self._under_way[number]
            self.erase()

    def erase(self) -> None:
        """Make room for what somebody else is about to print; the line comes again a moment later."""
        self._not_before = time.monotonic() + _EVERY_S
        if self._standing and self._terminal.acquire(timeout=_BLOCKED_S):
            try:
                if self._standing:
                    _write("\r\x1b[K")
                    self._standing = False
            finally:
                self._terminal.release()

    def _close(self) -> None:
        """This process's part in the mesh ends."""
        with self._changed:
            self._is_closed = True
            thread = None if self._under_way else self._thread
            self._changed.notify()
        if thread is not None:
            thread.join(_BLOCKED_S)

    def _run(self) -> None:
        line_at = 0.0
        while True:
            with self._changed:
                if not self._under_way:
                    self._changed.wait_for(lambda: self._under_way or self._is_closed, _IDLE_S)
                if not self._under_way:
                    self._thread = None
                    return
                number, (text, since, on_terminal) = max(self._under_way.items())
                now = time.monotonic()
                due = max(since + _AFTER_S, self._not_before if on_terminal else line_at)
                if now < due:
                    self._changed.wait(due - now)
                    continue
            with contextlib.suppress(Exception):  # what others have written must not end this thread
                self._draw(number, text(), f", {now - since:.0f} s", on_terminal)
            self._not_before = max(self._not_before, now + _EVERY_S)
            line_at = now + _EVERY_LINE_S

    def _draw(self, number: int, text: str, seconds: str, on_terminal: bool) -> None:
        text = " ".join(text.split())
        with self._terminal:
            if number not in self._under_way:
                return
            if on_terminal:
                self._standing = True
                _write(f"\r{text[: max(0, _width() - 1 - len(seconds))]}{seconds}\x1b[K")
            else:
                _write(f"{text}{seconds}\n")


def progress(text: Callable[[], str]) -> AbstractContextManager[None]:
    """Show on the terminal how far the block is, if it takes more than a second; see the setting ``progress``.

    Args:
        text: returns the line, without its end. It is called from another thread, several times a second, and must be quick.

    >>> from mesh_core.extensions import progress
    >>> done = 0
    >>> with progress(lambda: f"indexing: {done} of 3 files"):
    ...     for done in range(3):
    ...         pass
    """
    when = current_settings().progress
    on_terminal = when != "OFF" and _is_terminal()
    if when == "OFF" or not (on_terminal or when == "ON"):
        return contextlib.nullcontext()
    process = current()
    return process.slots.of(ProgressLine, lambda: ProgressLine(process)).show(text, on_terminal)


def clear_progress() -> None:
    """Make room on the terminal for what is about to be printed. The line comes again a moment later."""
    process = holder().process
    line = None if process is None else process.slots.find(ProgressLine)
    if line is not None:
        line.erase()


def _is_terminal() -> bool:
    stream: Any = sys.stderr
    try:
        # Others take the control characters for text.
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except Exception:  # noqa: BLE001 - closed, or an object of somebody else
        return False


def _width() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except (OSError, ValueError, AttributeError):
        return 80


def _write(text: str) -> None:
    with contextlib.suppress(Exception):
        sys.stderr.write(text)
        sys.stderr.flush()
