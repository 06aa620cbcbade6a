"""``mesh shell``: a terminal on a host of a job, over the job's own connections."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import threading
import tty
from argparse import REMAINDER, ArgumentParser, Namespace
from contextlib import suppress

from mesh_core import HostMesh, MeshError
from mesh_launchers._errors import LaunchError
from mesh_launchers._exec import LOST, add_dial, command_of, running
from mesh_launchers._remote import Terminal
from mesh_launchers._visit import chosen, visited

_CHUNK = 4096
_START_S = 60.0
_STOP_S = 5.0
_CARRIED = ("TERM", "COLORTERM", "LANG", "LC_ALL")
_LEAVE = b"~."
_END = b"\xff"
"""No signal has this number."""


class ShellCommand:
    """Opens a shell on a host of a job, in a terminal; a script may have the job. At the start of a line, ~. leaves one that hangs."""

    def configure(self, parser: ArgumentParser) -> None:
        """Declare the options."""
        self._options(parser)
        parser.add_argument("job", help="its name; `mesh jobs` lists them")
        parser.add_argument(
            "host", nargs="?", help="which host: host=2, or its name; needed where there are several"
        )
        parser.add_argument("command", nargs=REMAINDER, help="after --: a command in place of the shell")

    def _options(self, parser: ArgumentParser) -> None:
        parser.add_argument("--mesh", help="a host of this mesh, where the job has several")
        parser.add_argument("--python", action="store_true", help="an interactive Python in place of a shell")
        add_dial(parser)

    def run(self, args: Namespace) -> int:
        """Be the terminal until the shell ends, and return its exit status."""
        host, words = args.host, args.command
        if host == "--":
            host, words = None, ["--", *words]
        argv = command_of(args, "mesh shell", words, self._options)
        if not (os.isatty(0) and os.isatty(1)):
            raise LaunchError("mesh shell needs a terminal; `mesh exec` runs commands without one")
        with visited(args.job) as visit:
            found = chosen(visit.state(), args.mesh, host)
            if len(found) != 1:
                names = ", ".join(each.name for each in found)
                raise LaunchError(
                    f"name one host, such as `mesh shell {args.job} host=0`; there are {len(found)}: {names}"
                )
            (one,) = running(found, is_named=True)
            return Session(visit.attach([one], args.dial)).run(argv, is_python=args.python)


class Session:
    """The terminal here, joined to one on a host."""

    def __init__(self, hosts: HostMesh) -> None:
        self._procs = hosts.spawn_procs(name="shell")
        self._terminal = self._procs.spawn("shell", Terminal)
        self._status: int | None = None
        self._error: BaseException | None = None
        self._wakes, self._wake_end = os.pipe()
        os.set_blocking(self._wake_end, False)
        self._at_line_start = True
        self._held = b""

    def run(self, argv: list[str], *, is_python: bool) -> int:
        """Pass everything on until the command has ended; returns its exit status."""
        env = {name: os.environ[name] for name in _CARRIED if name in os.environ}
        self._terminal.start.call_one(argv, env, _size(), is_python=is_python).get(timeout=_START_S)
        before = termios.tcgetattr(0)
        # The kernel may give the signal to a thread of the runtime, and then `select` would go on.
        heeded = signal.signal(signal.SIGWINCH, lambda *_: None)
        woken = signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)
        shows = threading.Thread(target=self._show, name="mesh-shell", daemon=True)
        try:
            tty.setraw(0)
            # It may have been resized before anybody listened for that.
            self._terminal.resize.broadcast(_size())
            shows.start()
            has_ended = self._type()
        finally:
            termios.tcsetattr(0, termios.TCSADRAIN, before)
            signal.set_wakeup_fd(woken)
            signal.signal(signal.SIGWINCH, heeded)
            with suppress(MeshError, TimeoutError):
                self._terminal.hang_up.call_one().get(timeout=_STOP_S)
                self._procs.stop().get(timeout=_STOP_S)
        if has_ended and self._error is not None:
            raise self._error
        return self._status if has_ended and self._status is not None else LOST

    def _type(self) -> bool:
        """Send what is typed here, until the command ends there or the user leaves; whether it has ended."""
        while True:
            ready, _, _ = select.select([self._wakes, 0], [], [])
            if self._wakes in ready:
                woken = os.read(self._wakes, _CHUNK)
                if _END in woken:
                    return True
                if signal.SIGWINCH in woken:
                    self._terminal.resize.broadcast(_size())
            if 0 in ready:
                typed = os.read(0, _CHUNK)
                if not typed:
                    # The terminal here has gone.
                    return False
                passed = self._passed(typed)
                if passed is None:
                    sys.stderr.write("\r\nleft\r\n")
                    return False
                if passed:
                    self._terminal.write.broadcast(passed)

    def _passed(self, typed: bytes) -> bytes | None:
        """Return what of it is for the other side; none if it says to leave."""
        passed = bytearray()
        for each in typed:
            byte = bytes([each])
            if self._held:
                if byte == _LEAVE[1:]:
                    return None
                passed += self._held
                self._held = b""
            elif self._at_line_start and byte == _LEAVE[:1]:
                self._held = byte
                continue
            passed += byte
            self._at_line_start = byte in b"\r\n"
        return bytes(passed)

    def _show(self) -> None:
        """Show what is written there, on a thread of its own."""
        try:
            while piece := self._terminal.read.call_one().get():
                while piece:
                    piece = piece[os.write(1, piece) :]
            self._status = self._terminal.status.call_one().get()
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            self._error = error
        with suppress(OSError):
            os.write(self._wake_end, _END)


def _size() -> tuple[int, int]:
    columns, rows = os.get_terminal_size(0)
    return rows, columns
