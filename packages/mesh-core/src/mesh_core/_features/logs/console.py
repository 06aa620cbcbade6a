"""Show in the controller what the workers print.

The runtime collects the lines of all processes and merges equal ones (``mesh-proto/src/logs``). The thread here writes them to
whatever ``sys.stdout`` and ``sys.stderr`` are at the time: a terminal, a file, the running cell of a notebook. Records of
``logging`` go to the script's handlers, if it has set up any.
"""

from __future__ import annotations

import _thread
import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any, TextIO

from mesh_core._common.progress import clear_progress
from mesh_core._features.logs.records import Records

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh_core._features.logs.records import Told
    from mesh_core._process.process import Process

# If stdout accepts nothing for this many seconds, the script ends without waiting for it.
_STUCK_S = 10.0


class Console:
    """Shows the workers' output, in a thread of its own."""

    def __init__(self, process: Process) -> None:
        self.logs = logs = process.runtime.logs()
        self._ended = threading.Event()
        self._shown = 0
        self.taps: set[Callable[[bool, str], None]] = set()
        """Functions that also receive everything shown: whether it is for stderr, and the text, which is empty at the end."""
        self._records = Records()
        self._hands_on = self._records.wanted
        logs.hand_on_records(self._hands_on)
        logs.watch()
        # Not a `threading.Thread`: notebooks tie the output of one to the cell that started it.
        _thread.start_new_thread(self._show, ())
        self._shell = _ipython()
        if self._shell is not None:
            self._shell.events.register("post_run_cell", self._after_cell)

    def _show(self) -> None:
        try:
            while (chunks := self.logs.next()) is not None:
                texts: list[str] = []
                error, handlers = False, self._records.possible
                for is_error, text, records in chunks:
                    for tap in tuple(self.taps):
                        tap(is_error, text)
                    if texts and (error != is_error or (records and handlers)):
                        self._write(error, texts)
                    if not (records and handlers and self._hand_on(records)):
                        texts.append(text)
                        error = is_error
                    self._shown += 1
                self._write(error, texts)
                if self._hands_on != self._records.wanted:
                    self._hands_on = not self._hands_on
                    self.logs.hand_on_records(self._hands_on)
        finally:
            self._ended.set()
            # Tell waiting readers that nothing follows.
            for tap in tuple(self.taps):
                tap(False, "")

    @property
    def over(self) -> bool:
        """Whether everything was shown and nothing will follow."""
        return self._ended.is_set()

    def _write(self, error: bool, texts: list[str]) -> None:
        stream = sys.stderr if error else sys.stdout
        # It may be None, closed, without a reader, or a custom object. Errors have nowhere to go, and the workers continue.
        with contextlib.suppress(Exception):
            if texts:
                clear_progress()
                _write(stream, "".join(texts))
        texts.clear()

    def _hand_on(self, records: list[Told]) -> bool:
        try:
            return self._records.hand_on(records)
        except Exception:  # noqa: BLE001 - handlers are user code; one that raises has received the record
            return True

    def _after_cell(self, _result: object) -> None:
        self.flush()

    def flush(self, limit: float = 5.0) -> bool:
        """Show everything printed so far; return whether that finished within ``limit`` seconds."""
        return self.logs.flush(limit)

    def end(self) -> None:
        """Wait until the last line is shown, after the runtime was closed."""
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
        # The stream may support ASCII only.
        stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
    stream.flush()


def _ipython() -> Any:
    module = sys.modules.get("IPython")
    return None if module is None else module.get_ipython()
