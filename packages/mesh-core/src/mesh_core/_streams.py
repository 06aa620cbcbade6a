"""stdout and stderr of a worker: every line says which actor has written it.

Both are pipes to the host's agent. The streams here write each line at once, whole, with a mark before it that the
agent takes off again (``mesh-proto/src/logs``); what C code and child processes write has no mark, and counts as the
process's own. Nothing stays in a buffer: what was printed arrives, however the process ends.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from os import write
from threading import get_ident
from typing import TYPE_CHECKING, Any

from mesh_core._context import _current, current_instance
from mesh_core._native import flush_stdio, line_buffer_stdio

if TYPE_CHECKING:
    from mesh_core._context import Instance

_LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
# The beginning of a line that is longer is sent as it is.
_LONGEST = 64 * 1024
_current_context = _current.get
_CONTROLS = dict.fromkeys(range(32), "?")


class LineStream(io.TextIOBase):
    """A text stream to a descriptor, in whole and marked lines."""

    encoding = "utf-8"
    errors = "backslashreplace"
    line_buffering = True
    mode = "w"

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self.buffer = io.FileIO(fd, "wb", closefd=False)
        """For bytes; they are written as they are."""
        self._fd = fd
        # A signal's handler may print while its thread does.
        self._lock = threading.RLock()
        self._pending: dict[int, tuple[str, Instance | None]] = {}
        """The beginning of a line, by thread, and the actor that has written it."""
        self._pop = self._pending.pop
        self._begun: set[tuple[int, Instance | None]] = set()
        """Those whose line has been sent in part."""
        self._marks: dict[Instance | None, bytes] = {}

    def write(self, text: str, /) -> int:
        """Write the lines that are complete; the rest waits for its end, or for :meth:`flush`."""
        # `print` comes here twice a line, once for its end: this is kept short.
        context = _current_context()
        instance = None if context is None else context.actor_instance
        thread = get_ident()
        begun = self._pop(thread, None)
        if begun is None:
            whole = text
        elif begun[1] is instance:
            whole = begun[0] + text
        else:
            # Two actors take turns on the event loop's thread.
            self._send_part(thread, begun)
            whole = text
        if "\n" not in text and len(whole) <= _LONGEST:
            self._pending[thread] = (whole, instance)
            return len(text)
        end = whole.rfind("\n") + 1
        if end != len(whole):
            self._pending[thread] = (whole[end:], instance)
            if len(whole) - end > _LONGEST:
                self._send_part(thread, self._pending.pop(thread))
            whole = whole[:end]
        if end:
            mark = self._marks.get(instance) or self._mark(instance)
            if self._begun and (thread, instance) in self._begun:
                self._begun.discard((thread, instance))
                self._send(b"\x1eC%d" % thread + mark[3:], mark, whole)
            else:
                self._send(mark, mark, whole)
        return len(text)

    def record(self, lines: str, level: int) -> None:
        """Write a log record."""
        mark = b"\x1eL%d" % level + self._mark(current_instance())[3:]
        self._send(mark, mark, lines)

    def _mark(self, instance: Instance | None) -> bytes:
        mark = self._marks.get(instance)
        if mark is None:
            if instance is None:
                who = "\x1f\x1f"
            else:
                point = ",".join(f"{label}={place}" for label, place in instance.rank.items())
                who = f"{instance.name.translate(_CONTROLS)}\x1f{instance.rank.rank}\x1f{point}"
            if len(self._marks) > 1000:
                self._marks.clear()  # most of them have ended
            mark = self._marks[instance] = f"\x1eL0\x1f{who}\x1f".encode("utf-8", "backslashreplace")
        return mark

    def _send(self, first: bytes, mark: bytes, lines: str) -> None:
        data = lines.encode("utf-8", "backslashreplace")
        if data.find(b"\n") != len(data) - 1:
            data = data[:-1].replace(b"\n", b"\n" + mark) + b"\n"
        data = first + data
        with self._lock:
            try:
                while (done := write(self._fd, data)) != len(data):
                    data = data[done:]
            except BrokenPipeError:
                pass  # the controller has gone, and this process is about to

    def _send_part(self, thread: int, begun: tuple[str, Instance | None]) -> None:
        text, instance = begun
        self._begun.add((thread, instance))
        mark = b"\x1eF%d" % thread + self._mark(instance)[3:]
        self._send(mark, mark, text + "\n")

    def flush(self) -> None:
        """Send the beginning of a line, if this thread has written one; the rest may follow."""
        begun = self._pending.pop(get_ident(), None)
        if begun is not None:
            self._send_part(get_ident(), begun)

    def finish(self) -> None:
        """The process ends: send what all threads have begun."""
        for thread in list(self._pending):
            begun, instance = self._pending.pop(thread, ("", None))
            mark = self._mark(instance)
            first = b"\x1eC%d" % thread + mark[3:] if (thread, instance) in self._begun else mark
            self._send(first, mark, begun + "\n")

    def forked(self) -> None:
        """In a forked child: other threads' locks and lines stay in the parent."""
        self._lock = threading.RLock()
        self._pending.clear()
        self._begun.clear()

    def close(self) -> None:
        """Flush. The descriptor stays open, for whoever prints later."""
        self.flush()

    def reconfigure(self, **_options: Any) -> None:
        """Accept what programs ask of their stdout; it has one encoding, and is always line-buffered."""
        self.flush()

    def writable(self) -> bool:
        """It is."""
        return True

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """It is a pipe."""
        return False


def introduce(told: dict[str, Any], rank: int) -> None:
    """Say on both streams who writes there; before anything else does, a failing interpreter included."""
    place, coordinates = rank, []
    for label, size in zip(reversed(told["labels"]), reversed(told["sizes"]), strict=True):
        coordinates.append(f"{label}={place % size}")
        place //= size
    procs = 1
    for size in told["sizes"]:
        procs *= size
    settings = told["settings"]
    name, host = (told[key].translate(_CONTROLS) for key in ("mesh_name", "host"))
    window, level = round(settings["log_window"] * 1000), _LEVELS[settings["log_level"]]
    fields = (name, rank, ",".join(reversed(coordinates)), host, procs, window, level)
    record = "\x1eI" + "".join(f"{field}\x1f" for field in fields) + "\n"
    for fd in (1, 2):
        os.write(fd, record.encode("utf-8", "backslashreplace"))


def set_options(mesh: int, shown: bool, window_ms: int, level: int) -> None:
    """From a process that owns a mesh: what the agent is to do with the lines of that mesh."""
    os.write(2, f"\x1eO{mesh}\x1f{int(shown)}\x1f{window_ms}\x1f{level}\x1f\n".encode())


def install() -> None:
    """Put the streams into the place of stdout and stderr."""
    import faulthandler

    out, err = LineStream(1, "<stdout>"), LineStream(2, "<stderr>")
    sys.stdout = sys.__stdout__ = out  # type: ignore[assignment, misc]
    sys.stderr = sys.__stderr__ = err  # type: ignore[assignment, misc]
    line_buffer_stdio()
    # A crash leaves its stack among the last lines of stderr.
    faulthandler.enable(err, all_threads=False)

    def forked() -> None:
        out.forked()
        err.forked()

    os.register_at_fork(after_in_child=forked)


def finish() -> None:
    """The process is about to end: let nothing stay behind in a buffer."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, LineStream):
            stream.finish()
    flush_stdio()
