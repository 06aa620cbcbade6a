"""What ``breakpoint()`` calls in an actor. Every worker imports it, so it imports nothing heavy."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType, ModuleType

    from mesh_core._features.debug.pdb import RemotePdb
    from mesh_core._features.debug.server import Debugger
    from mesh_core._process.process import Process


class Breakpoints:
    """The breakpoint hook of one process, which replaces the interpreter's own while it is installed."""

    def __init__(self, process: Process, *, everywhere: bool) -> None:
        self._process = process
        self._everywhere = everywhere
        """Whether no thread has a terminal, as in a worker. In a script, only actors' threads have none."""
        self._before: Callable[..., Any] = sys.__breakpointhook__
        self._debugger: Debugger | None = None
        self._local = threading.local()
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def install(self) -> None:
        """Have ``breakpoint()`` and, in a worker, ``pdb.set_trace()`` call this hook."""
        self._before = sys.breakpointhook
        sys.breakpointhook = self.hook
        if self._everywhere:
            pdb = sys.modules.get("pdb")
            if pdb is not None:
                self.take_over(pdb)
            else:
                sys.meta_path.insert(0, _PdbFinder(self))

    def uninstall(self) -> None:
        """Restore the previous hook, unless it was replaced again since."""
        if sys.breakpointhook == self.hook:
            sys.breakpointhook = self._before

    def hook(self, *args: Any, **kwargs: Any) -> None:
        """Stop the thread that calls ``breakpoint()``."""
        if os.environ.get("PYTHONBREAKPOINT"):
            sys.__breakpointhook__(*args, **kwargs)
        elif self._is_ours():
            self._stop_at(sys._getframe(1), *args, **kwargs)
        else:
            self._before(*args, **kwargs)

    def take_over(self, pdb: ModuleType) -> None:
        """Have ``pdb.set_trace()`` do the same as ``breakpoint()``: a worker's stdin is empty."""

        def set_trace(*args: Any, **kwargs: Any) -> None:
            self._stop_at(sys._getframe(1), *args, **kwargs)

        pdb.set_trace = set_trace  # type: ignore[attr-defined]

    def _is_ours(self) -> bool:
        if self._everywhere:
            return True
        from mesh_core._common.context import current_instance

        return threading.current_thread() is not threading.main_thread() and current_instance() is not None

    def _stop_at(
        self, frame: FrameType, *, header: str | None = None, commands: list[str] | None = None
    ) -> None:
        pdb = self._pdb()
        if pdb.busy:
            pdb.message("(skipped a breakpoint in the code evaluated here)")
        else:
            pdb.stop_at(frame, header, commands)

    def examine(self, error: BaseException) -> None:
        """Stop the thread where an exception was raised in the user's code."""
        import bdb

        from mesh_core._serialize.exceptions import in_user_code

        trace = in_user_code(error.__traceback__)
        if trace is None or not isinstance(error, Exception) or isinstance(error, bdb.BdbQuit):
            return
        pdb = self._pdb()
        if not pdb.busy:
            pdb.examine(error, trace)

    def _pdb(self) -> RemotePdb:
        """This thread's debugger."""
        from mesh_core._features.debug.pdb import RemotePdb
        from mesh_core._features.debug.server import Debugger
        from mesh_core._features.debug.session import Session

        if self._pid != os.getpid():
            # A forked copy has a single thread, and neither stopped threads nor a server.
            self._pid, self._debugger = os.getpid(), None
            self._lock, self._local = threading.Lock(), threading.local()
        with self._lock:
            debugger = self._debugger = self._debugger or Debugger(self._process)
        found: RemotePdb | None = getattr(self._local, "pdb", None)
        if found is None:
            found = self._local.pdb = RemotePdb(Session(debugger))
        return found


class _PdbFinder:
    """Waits for the import of ``pdb``, which happens in few workers."""

    def __init__(self, breakpoints: Breakpoints) -> None:
        self._breakpoints = breakpoints

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Have the other finders find ``pdb``, and patch it once it is loaded."""
        if name != "pdb":
            return None
        import importlib.util

        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        loader = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def execute_and_patch(module: ModuleType) -> None:
                execute(module)
                self._breakpoints.take_over(module)

            loader.exec_module = execute_and_patch  # type: ignore[method-assign]
        return spec
