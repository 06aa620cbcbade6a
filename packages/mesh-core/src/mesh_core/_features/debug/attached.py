"""A terminal attached to one stopped thread."""

from __future__ import annotations

import queue
import signal
import sys
import threading
from types import FrameType
from typing import Any

from mesh_core._features.debug.client import Stop, attach
from mesh_core._features.debug.wire import Garbled, Told, Wire


class _GoneError(Exception):
    """The process ended while the user was typing."""


class Attached:
    """A debugging session: shows the debugger's output, and sends the user's input."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self._wire: Wire = attach(stop)
        self._told: queue.SimpleQueue[Told] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="mesh-debug-reader", daemon=True)
        self._typing = False
        self._gone = False
        self._question: Told | None = None
        """The prompt that has not been answered yet."""
        self._main = threading.get_ident()

    def run(self) -> None:
        """Run until the thread is continued, detached or gone."""
        before = signal.signal(signal.SIGUSR1, self._on_gone)
        self._reader.start()
        try:
            while self._step_or_interrupt():
                pass
        finally:
            self._wire.peer.shutdown(2)
            self._reader.join()
            self._wire.close()
            signal.signal(signal.SIGUSR1, before)

    def _read(self) -> None:
        while True:
            try:
                told = self._wire.hear()
            except Garbled as error:
                told = [{"error": str(error)}]
            if told is None:
                break
            for each in told:
                self._told.put(each)
        self._told.put({"gone": True})
        self._gone = True
        if self._typing:
            # The main thread is reading the terminal; only a signal interrupts that.
            signal.pthread_kill(self._main, signal.SIGUSR1)

    def _on_gone(self, number: int, frame: FrameType | None) -> None:
        if self._typing:
            raise _GoneError

    def _step_or_interrupt(self) -> bool:
        try:
            return self._step()
        except KeyboardInterrupt:
            # Ctrl-C arrived just before a line was read, or between a command and the wait for its end.
            if self._question is None:
                self._wire.tell(do="interrupt")
            return True

    def _step(self) -> bool:
        told = self._question or self._next()
        if told is None:
            return _end(f"(detached; {self._stop.name} continues to its next stop)")
        if "out" in told:
            _print(str(told["out"]))
        elif "prompt" in told:
            self._question = told
            return self._ask(str(told["prompt"]), takes_end=bool(told.get("end")))
        elif "over" in told:
            return _end(f"({self._stop.name} continues)")
        elif "running" in told:
            if told.get("continued"):
                _end("(it continues to its next breakpoint; Ctrl-C stops it at its next line)")
        elif "error" in told:
            return _end(f"({self._stop.name}: {told['error']})")
        elif "gone" in told:
            return _end(f"({self._stop.name} has ended: process {self._stop.pid} is gone)")
        return True

    def _next(self) -> dict[str, Any] | None:
        """Return the next message; ``None`` if Ctrl-C was pressed twice."""
        interrupted = False
        while True:
            try:
                return self._told.get()
            except KeyboardInterrupt:
                if interrupted:
                    return None
                interrupted = True
                self._wire.tell(do="interrupt")
                _end("(interrupted; press Ctrl-C again to detach)")

    def _ask(self, prompt: str, *, takes_end: bool) -> bool:
        while True:
            try:
                self._typing = True
                if self._gone:
                    raise _GoneError
                line = input(f"[{self._stop.name}] {prompt}")
                self._typing = False
                self._question = None
            except KeyboardInterrupt:
                _end("")
                continue
            except EOFError:
                self._typing = False
                self._question = None
                _end("")
                if takes_end:
                    self._wire.tell(do="answer", line=None)
                    return True
                return _end(f"(detached; {self._stop.name} stays stopped)")
            except _GoneError:
                self._typing = False
                self._question = None
                _end("")
                return True
            if line.strip() == "detach":
                return _end(f"(detached; {self._stop.name} stays stopped)")
            self._wire.tell(do="answer", line=line)
            return True


def _print(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _end(line: str) -> bool:
    _print(line + "\n")
    return False
