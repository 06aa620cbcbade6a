"""stdout and stderr of a worker, where every line says which actor wrote it.

Both are pipes to the host's agent. These streams write each line at once and whole, prefixed with a mark that the
agent removes (``mesh-proto/src/logs``). Output of C code and child processes has no mark, and counts as the
process's own. Nothing stays in a buffer: printed text arrives however the process ends.
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
# The beginning of a longer line is sent by itself; lines that are longer together are sent one by one.
_LONGEST = 64 * 1024
# Replaces a line end inside text that belongs together.
_BREAK = b"\x1d"
# Flags for a mesh's lines: show them; treat lines that differ only in numbers as equal.
SHOWN, ALIKE = 1, 2
_CONTROLS = dict.fromkeys(range(32), "?")
# Replaces the separators of a mark.
_ESCAPED = bytes.maketrans(b"\x1d\x1e\x1f", b"???")


class LineStream(io.TextIOBase):
    """A text stream that writes whole, marked lines to a descriptor."""

    encoding = "utf-8"
    errors = "backslashreplace"
    line_buffering = True
    mode = "w"

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self.buffer = io.FileIO(fd, "wb", closefd=False)
        """For bytes, which are written unchanged."""
        self._fd = fd
        self._begun: set[tuple[int, Instance | None]] = set()
        """Threads and actors that sent part of a line."""
        self._marks: dict[Instance | None, bytes] = {}
        self._writer = LineWriter(fd, _current.get, self._mark, self._write)
        # `print` calls it directly, twice a line.
        self.write = self._writer.write  # type: ignore[method-assign]

    def _write(self, text: str, instance: Instance | None, begun: str | None, by: Instance | None) -> None:
        """Write what is not a single line; ``begun`` is the unfinished line that ``by`` wrote before."""
        thread = get_ident()
        if not text.isascii():
            # Lone surrogates, as in file names that are not UTF-8.
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
        """Write a log record to this standard stream as text and, unless the text is long, with ``payload``: JSON in ASCII."""
        mark = self._mark(current_instance())[3:]
        data = lines.encode("utf-8", "backslashreplace")[:-1]
        if payload and len(data) <= _LONGEST:
            text = data.translate(_ESCAPED).replace(b"\n", _BREAK)
            self._writer.send(b"\x1eR%d%b%b\x1f%b\n" % (level, mark, text, payload))
        else:
            mark = b"\x1eL%d" % level + mark
            self._send(mark, mark, lines)

    def notice(self, line: str) -> None:
        """Write one of Mesh's own lines, which is shown by itself."""
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
            # The rest of a line that was sent in part does not repeat the part.
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
        """Send this thread's unfinished line, if there is one; the rest may follow."""
        begun = self._writer.take()
        if begun is not None:
            self._send_part(get_ident(), *begun)

    def finish(self) -> None:
        """Send the unfinished lines of all threads; the process ends."""
        for text, instance in self._writer.take_all():
            mark = self._mark(instance)
            self._send(mark, mark, text + "\n")

    def forked(self) -> None:
        """In a forked child: other threads' locks and lines stay in the parent."""
        self._writer.forked()
        self._begun.clear()

    def close(self) -> None:
        """Flush. The descriptor stays open for later output."""
        self.flush()

    def reconfigure(self, **_options: Any) -> None:
        """Accept a program's options for stdout, without effect: the encoding and line buffering are fixed."""
        self.flush()

    def writable(self) -> bool:
        """Return true."""
        return True

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def isatty(self) -> bool:
        """Return false: it is a pipe."""
        return False


def introduce(told: dict[str, Any], rank: int) -> None:
    """Announce on both streams which process writes there, before anything else does, even a failing interpreter."""
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
    """Tell the agent what to do with a mesh's lines; for a process that owns the mesh."""
    os.write(2, f"\x1eO{mesh}\x1f{flags}\x1f{window_ms}\x1f{level}\x1f\n".encode())


def notice(line: str) -> None:
    """Tell the user something about this process alone, on stderr."""
    stream = sys.stderr
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if isinstance(stream, LineStream):
            stream.notice(line)
        else:
            stream.write(line + "\n")
            stream.flush()


def install() -> None:
    """Replace stdout and stderr with these streams."""
    import faulthandler

    out, err = LineStream(1, "<stdout>"), LineStream(2, "<stderr>")
    sys.stdout = sys.__stdout__ = out  # type: ignore[assignment, misc]
    sys.stderr = sys.__stderr__ = err  # type: ignore[assignment, misc]
    line_buffer_stdio()
    # Leaves the stack of a crash among the last lines of stderr.
    faulthandler.enable(err, all_threads=False)

    def forked() -> None:
        out.forked()
        err.forked()

    os.register_at_fork(after_in_child=forked)


def finish() -> None:
    """Write what is buffered; the process is about to end."""
    for stream in (sys.__stdout__, sys.__stderr__):
        if isinstance(stream, LineStream):
            stream.finish()
    flush_stdio()
