"""What the workers print, shown by the controller.

The runtime gathers the lines of all processes of the host and makes of similar ones one (``mesh-proto/src/logs``). The
thread here writes what comes of that to whatever ``sys.stdout`` and ``sys.stderr`` are at the time: a terminal, a file,
the cell of a notebook that runs.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from mesh_core._native import Logs

# Where stdout takes nothing for so long, the end of a script does not wait for it.
_STUCK_S = 10.0


class Console:
    """Shows the lines of a controller's workers, in a thread of its own."""

    def __init__(self, logs: Logs) -> None:
        self.logs = logs
        self._ended = threading.Event()
        self._shown = 0
        logs.watch()
        # Not a `threading.Thread`: notebooks tie the output of one to the cell that started it.
        _thread.start_new_thread(self._show, ())
        self._shell = _ipython()
        if self._shell is not None:
            self._shell.events.register("post_run_cell", self._after_cell)

    def _show(self) -> None:
        try:
            while (chunks := self.logs.next()) is not None:
                for is_error, text, _ in chunks:
                    stream = sys.stderr if is_error else sys.stdout
                    # It may be None, closed, left by its reader, or anybody's own: there is nobody to tell, and the
                    # workers go on.
                    with contextlib.suppress(Exception):
                        _write(stream, text)
                    self._shown += 1
        finally:
            self._ended.set()

    def _after_cell(self, _result: object) -> None:
        self.flush()

    def flush(self, limit: float = 5.0) -> bool:
        """Show everything that was printed so far; returns whether that was done within ``limit`` seconds."""
        return self.logs.flush(limit)

    def end(self) -> None:
        """The runtime is closed: wait until the last line is shown."""
        if self._shell is not None:
            with contextlib.suppress(ValueError):
                self._shell.events.unregister("post_run_cell", self._after_cell)
        before = -1
        while not self._ended.wait(_STUCK_S) and self._shown != before:
            before = self._shown


def _write(stream: TextIO | None, text: str) -> None:
    if stream is None:
        return
    try:
        stream.write(text)
    except UnicodeEncodeError as error:
        # A stream that can do ASCII only, say.
        stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
    stream.flush()


def _ipython() -> Any:
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()
