"""stdout and stderr of a worker: every line says which actor has written it.

Both are pipes to the host's agent. The streams here write each line at once, whole, with a mark before it that the
agent takes off again (``mesh-proto/src/logs``); what C code and child processes write has no mark, and counts as the
process's own. Nothing stays in a buffer: what was printed arrives, however the process ends.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from threading import get_ident
from typing import TYPE_CHECKING, Any

from mesh_core._common.context import _current, current_instance
from mesh_core._native import LineWriter, flush_stdio, line_buffer_stdio

if TYPE_CHECKING:
    from mesh_core._common.context import Instance

LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
# The beginning of a line that is longer is sent as it is, and lines that are longer together are sent one by one.
_LONGEST = 64 * 1024
# Stands for a line's end inside of what belongs together.
_BREAK = b"\x1d"
# What is done with the lines of a mesh: they are shown; those that differ in their numbers alone count as equal.
SHOWN, ALIKE = 1, 2
_CONTROLS = dict.fromkeys(range(32), "?")
# What stands between the parts of a mark.
_ESCAPED = bytes.maketrans(b"\x1d\x1e\x1f", b"???")


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
        self._begun: set[tuple[int, Instance | None]] = set()
        """Threads and actors whose line has been sent in part."""
        self._marks: dict[Instance | None, bytes] = {}
        self._writer = LineWriter(fd, _current.get, self._mark, self._write)
        # `print` goes straight there, twice a line.
        self.write = self._writer.write  # type: ignore[method-assign]

    def _write(self, text: str, instance: Instance | None, begun: str | None, by: Instance | None) -> None:
        """Write what is not a single line; ``begun`` is what ``by`` has written before."""
        thread = get_ident()
        if not text.isascii():
            # Lone surrogates, as in names of files that are not UTF-8.
            text = text.encode("utf-8", "backslashreplace").decode()
        whole = text
        if begun is not None:
            if by is instance:
                whole = begun + text
            else:
                # Two actors take turns on the event loop's thread.
                self._send_part(thread, begun, by)
        end = whole.rfind("\n") + 1
        if len(whole) - end > _LONGEST:
            self._send_lines(thread, instance, whole[:end])
            self._send_part(thread, whole[end:], instance)
        else:
            if end != len(whole):
                self._writer.wait(whole[end:], instance)
            self._send_lines(thread, instance, whole[:end])

    def _send_lines(self, thread: int, instance: Instance | None, lines: str) -> None:
        if not lines:
            return
        mark = first = self._mark(instance)
        if self._begun and (thread, instance) in self._begun:
            self._begun.discard((thread, instance))
            self._writer.begun(bool(self._begun))
            first = b"\x1eC%d" % thread + mark[3:]
        self._send(first, mark, lines)

    def record(self, lines: str, level: int, payload: bytes = b"") -> None:
        """Write a log record as text and, unless that is long, as ``payload`` has it: JSON in ASCII."""
        mark = self._mark(current_instance())[3:]
        data = lines.encode("utf-8", "backslashreplace")[:-1]
        if payload and len(data) <= _LONGEST:
            text = data.translate(_ESCAPED).replace(b"\n", _BREAK)
            self._writer.send(b"\x1eR%d%b%b\x1f%b\n" % (level, mark, text, payload))
        else:
            mark = b"\x1eL%d" % level + mark
            self._send(mark, mark, lines)

    def notice(self, line: str) -> None:
        """Write a line of Mesh's own, which is shown by itself."""
        mark = b"\x1eN0" + self._mark(current_instance())[3:]
        self._send(mark, mark, line + "\n")

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
        end = data.find(b"\n")
        if end == len(data) - 1:
            self._writer.send(first + data)
            return
        if first is not mark:
            # The rest of a line that was sent in part is not sent anew.
            first, data = first + data[: end + 1], data[end + 1 :]
        else:
            first = b""
        if len(data) > _LONGEST or _BREAK in data:
            self._writer.send(first + mark + data[:-1].replace(b"\n", b"\n" + mark) + b"\n")
        else:
            self._writer.send(first + b"\x1eU" + mark[2:] + data[:-1].replace(b"\n", _BREAK) + b"\n")

    def _send_part(self, thread: int, text: str, instance: Instance | None) -> None:
        self._begun.add((thread, instance))
        self._writer.begun(True)
        mark = b"\x1eF%d" % thread + self._mark(instance)[3:]
        self._send(mark, mark, text + "\n")

    def flush(self) -> None:
        """Send the beginning of a line, if this thread has written one; the rest may follow."""
        begun = self._writer.take()
        if begun is not None:
            self._send_part(get_ident(), *begun)

    def finish(self) -> None:
        """The process ends: send what all threads have begun."""
        for text, instance in self._writer.take_all():
            mark = self._mark(instance)
            self._send(mark, mark, text + "\n")

    def forked(self) -> None:
        """In a forked child: other threads' locks and lines stay in the parent."""
        self._writer.forked()
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
    window, level = round(settings["log_window"] * 1000), LEVELS[settings["log_level"]]
    flags = SHOWN | (ALIKE if settings["log_ignore_numbers"] else 0)
    fields = (name, rank, ",".join(reversed(coordinates)), host, procs, flags, window, level)
    record = "\x1eI" + "".join(f"{field}\x1f" for field in fields) + "\n"
    for fd in (1, 2):
        os.write(fd, record.encode("utf-8", "backslashreplace"))


def set_options(mesh: int, flags: int, window_ms: int, level: int) -> None:
    """From a process that owns a mesh: what the agent is to do with the lines of that mesh."""
    os.write(2, f"\x1eO{mesh}\x1f{flags}\x1f{window_ms}\x1f{level}\x1f\n".encode())


def notice(line: str) -> None:
    """Tell the user something about this process alone, where its errors go."""
    stream = sys.stderr
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if isinstance(stream, LineStream):
            stream.notice(line)
        else:
            stream.write(line + "\n")
            stream.flush()


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
