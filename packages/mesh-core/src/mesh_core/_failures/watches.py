"""Which code in this process is notified of the ends of other processes; see ``extensions.watch``."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh_core._extensions.watching import Watch
    from mesh_core._native import Message
    from mesh_core._process.process import Process


class Watches:
    """The watches of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._watches: list[Watch] = []

    def add(self, watch: Watch) -> None:
        """Notify it of the ends of its processes from now on."""
        with self._lock:
            self._watches.append(watch)
        self._process.notices.start()
        self._process.runtime.watch_procs(watch._target)

    def discard(self, watch: Watch) -> None:
        """Stop notifying it."""
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def on_down(self, message: Message) -> None:
        """Notify the watches of a process that ended."""
        if not self._watches or (down := message.down()) is None:
            return
        procs_id, rank, lost, _ = down
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            try:
                watch._ended(procs_id, rank, lost)
            except BaseException:
                logging.getLogger("mesh").exception("a callback of watch() raised")
            if not watch.living:
                self.discard(watch)
