"""One stopped thread: what it waits for, who is attached to it, and its output."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mesh_core._features.debug.server import Debugger
    from mesh_core._features.debug.wire import Wire

_PIECE = 1 << 15

State = Literal["stopped", "running", "over"]


class Session:
    """A thread under the debugger, from its breakpoint until it runs freely again."""

    def __init__(self, debugger: Debugger) -> None:
        self.debugger = debugger
        self.thread = threading.current_thread()
        self.console = Console(self)
        self.number = 0
        """The number of this stop; commands for an earlier stop do not reach it."""
        self.state: State = "over"
        self.about: dict[str, Any] = {}
        """What listings show."""
        self.client: Wire | None = None
        self.prompt: str | None = None
        """The current prompt, while the thread waits for a line."""
        self.takes_end = False
        """Whether Ctrl-D answers the prompt."""
        self.continuing = False
        self.break_in: Callable[[], object] | None = None
        """Makes the running thread stop at its next line."""
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._evaluating = False
        self._interrupted = False
        """Whether an exception was sent to the thread."""
        self._cut = False
        """Whether an interrupt arrived for the last command, which may not have begun or may be over."""

    # Called by the thread itself.

    def enter(self, frame: FrameType, line: int, why: str, *, after: bool, again: bool) -> bool:
        """Note that the thread has stopped; return false if nobody could ever resume it."""
        about = self.debugger.describe(frame, line, why, after=after)
        with self.debugger.lock:
            if not again:
                self.number = self.debugger.next_number()
            self.about = {**about, "id": self.number, "since": time.time()}
            self.state = "stopped"
            self.continuing = False
            if not self.debugger.open(self):
                self.state = "over"
                return False
            alone = self.client is None
        if alone:
            self.debugger.announce(self.about)
        return True

    def resumed(self, *, over: bool) -> None:
        """Note that the thread resumes, freely if ``over``, else still under the debugger."""
        with self.debugger.lock:
            if self.state == "over":
                return
            self.state = "over" if over else "running"
            client = self.client
            if client is not None:
                if over:
                    self.client = None
                    client.tell(over="continues")
                else:
                    client.tell(running=True, continued=self.continuing)
            if self._cut and not over and self.break_in is not None:
                self.break_in()
        self.debugger.tidy_up()

    def ask(self, prompt: str, *, takes_end: bool = False) -> str:
        """Wait until an attached user enters a line; empty for Ctrl-D if ``takes_end``."""
        with self.debugger.lock:
            self._evaluating = self._cut = False
            self._forget_interrupt()
            self.prompt, self.takes_end = prompt, takes_end
            if self.client is not None:
                self.client.tell(prompt=prompt, end=takes_end)
        line = self._lines.get()
        with self.debugger.lock:
            self._evaluating = True
            if self._cut:
                raise KeyboardInterrupt
        return line

    def answered(self) -> None:
        """Note that a command was carried out; later interrupts are not meant for it."""
        with self.debugger.lock:
            self._evaluating = False
            self._forget_interrupt()

    def show(self, text: str) -> None:
        """Print to the attached user, in pieces that are short enough for the other end."""
        client = self.client
        if client is not None:
            for at in range(0, len(text), _PIECE):
                client.tell(out=text[at : at + _PIECE])

    # Called by the thread that answers, with the lock held.

    def attach(self, client: Wire, *, quiet: bool) -> None:
        """Attach a client."""
        self.client = client
        if not quiet:
            client.tell(out=self.about["banner"])
        if self.prompt is not None:
            client.tell(prompt=self.prompt, end=self.takes_end)

    def answer(self, line: str | None) -> None:
        """Pass on the user's input if there is a prompt; ``None`` means Ctrl-D."""
        if self.prompt is not None and (line is not None or self.takes_end):
            self.prompt = None
            self._lines.put("" if line is None else line + "\n")

    def interrupt(self) -> None:
        """Interrupt the thread: its current command or, at its next line, the program."""
        if self.state == "running":
            if self.break_in is not None:
                self.break_in()
        elif self.prompt is None:
            self._cut = True
            if not self._evaluating:
                return
            import ctypes

            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.thread.ident or 0), ctypes.py_object(KeyboardInterrupt)
            )
            self._interrupted = True

    def _forget_interrupt(self) -> None:
        if self._interrupted:
            import ctypes

            self._interrupted = False
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread.ident or 0), None)


class Console:
    """The debugger's ``stdin`` and ``stdout``."""

    encoding = "utf-8"
    errors = "backslashreplace"
    takes_end = False

    def __init__(self, session: Session) -> None:
        self._session = session
        self._written = ""

    def write(self, text: str) -> int:
        """Print complete lines; an incomplete one is kept, because it may be a prompt."""
        if threading.current_thread() is not self._session.thread:
            # pdb replaces sys.stdout with this while it runs a statement; other threads print as usual.
            return len(text) if sys.__stdout__ is None else sys.__stdout__.write(text)
        whole, end, rest = (self._written + text).rpartition("\n")
        self._written = rest
        if end:
            self._session.show(whole + end)
        return len(text)

    def flush(self) -> None:
        """Do nothing: complete lines were sent already."""

    def isatty(self) -> bool:
        """Return false: there may be a terminal at the other end, but its modes cannot be set from here."""
        return False

    def readline(self) -> str:
        """Use the incomplete line as the prompt, and return once somebody answers."""
        prompt, self._written = self._written, ""
        return self._session.ask(prompt, takes_end=self.takes_end)

    def drain(self) -> None:
        """Send an incomplete line before the thread resumes."""
        if self._written:
            self._session.show(self._written)
            self._written = ""
