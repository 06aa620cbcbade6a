"""The engine of this process: made when the first buffer is made or used."""

from __future__ import annotations

import atexit
import os
import threading

from mesh_rdma._native import Engine
from mesh_rdma._outside import installed
from mesh_rdma._ucx import places


class _Here:
    """The one engine of a process, which is what handles name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._pid = 0

    def engine(self) -> Engine:
        engine = self._engine
        if engine is not None:
            # In a forked copy it refuses everything by itself, and says why.
            return engine
        with self._lock:
            if self._engine is None:
                self._engine = Engine(installed(), places())
                self._pid = os.getpid()
                # What is offered is memory of Python objects, which the interpreter's end may free.
                atexit.register(self._close)
            return self._engine

    def _close(self) -> None:
        if self._engine is not None and self._pid == os.getpid():
            self._engine.close_all()


_HERE = _Here()
engine = _HERE.engine
