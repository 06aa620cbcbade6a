"""Python's debugger, controlled through a socket."""

from __future__ import annotations

import code
import dis
import pdb
import sys
import traceback
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_core._features.debug.session import Session

# Stepping skips these modules: users do not debug the code that runs actors.
_PASSED_OVER = ("mesh_core", "mesh_core.*", "asyncio", "asyncio.*", "contextvars", "selectors", "threading")
_LAST = "_last_pdb_instance"
# The instructions at which a waiting coroutine stands; from 3.13 on, the one after the yield.
_SUSPENDS = frozenset({"YIELD_VALUE", "RETURN_GENERATOR", "RESUME"})


class RemotePdb(pdb.Pdb):
    """The debugger of one thread. It is kept between stops, and with it the breakpoints set with ``b``."""

    def __init__(self, session: Session) -> None:
        console: Any = session.console
        super().__init__(stdin=console, stdout=console, nosigint=True, skip=_PASSED_OVER)
        self.session = session
        self.busy = False
        """Whether it is at its prompt; breakpoints in code evaluated there are skipped."""
        self._why = "breakpoint"
        self._after = False
        """Whether it shows code that an exception ended."""
        self._again = False
        session.break_in = self.break_in

    def stop_at(self, frame: FrameType, header: str | None, commands: list[str] | None) -> None:
        """Stop at the next line of ``frame``."""
        self._why, self._after, self._again = "breakpoint", False, False
        if header is not None:
            self._why = f"breakpoint: {header}"
        if commands:
            self.rcLines.extend(commands)
        # From 3.13 on, a later plain `breakpoint()` reuses the last debugger, and would wait at this one's socket.
        last = getattr(pdb.Pdb, _LAST, None)
        self.set_trace(frame)
        if hasattr(pdb.Pdb, _LAST):
            setattr(pdb.Pdb, _LAST, last)

    def examine(self, error: BaseException, trace: TracebackType) -> None:
        """Examine the frames of an exception."""
        text = traceback.format_exception_only(error)[-1].strip()
        self._why, self._after, self._again = text, True, False
        self.reset()
        self.interaction(None, trace)
        self.quitting = False

    def interaction(self, frame: FrameType | None, tb_or_exc: Any) -> None:
        """Wait for commands until one resumes the thread."""
        at, line = (frame, frame.f_lineno) if frame is not None else _end_of(tb_or_exc)
        if not self.session.enter(at, line, self._why, after=self._after, again=self._again):
            self.set_continue()
            return
        self._again = True
        self.busy = True
        try:
            super().interaction(frame, tb_or_exc)
        finally:
            self.busy = False
            self.session.answered()
            self.session.console.drain()
            self.session.resumed(over=frame is None or self._free())

    def break_in(self) -> None:
        """Stop the running thread at its next line; called by another thread."""
        ident = self.session.thread.ident
        frame = None if ident is None else sys._current_frames().get(ident)
        while frame is not None:
            # A function that was stepped over has no trace function.
            if not self._is_passed_over(frame):
                frame.f_trace = self.trace_dispatch
            frame = frame.f_back
        self.set_step()

    def _free(self) -> bool:
        return self.quitting or sys.gettrace() is None

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """Resume the thread when a step leaves the user's code."""
        result = super().dispatch_return(frame, arg)
        stepping = self.stopframe is None or self.stopframe is frame or self.returnframe is frame
        if stepping and self._is_outermost(frame) and not _is_suspended(frame):
            self.set_continue()
            self.session.resumed(over=self._free())
        return result

    def _is_outermost(self, frame: FrameType) -> bool:
        back = frame.f_back
        return back is None or self._is_passed_over(back)

    def _is_passed_over(self, frame: FrameType) -> bool:
        return bool(self.is_skipped_module(frame.f_globals.get("__name__") or ""))

    def get_stack(self, f: FrameType | None, t: TracebackType | None) -> tuple[list[Any], int]:
        """Leave out the frames of the code that runs the actor."""
        stack, index = super().get_stack(f, t)
        first = 0
        if t is None:
            ours = (n for n, (frame, _) in enumerate(stack) if _module(frame).startswith("mesh_core."))
            first = next(ours, 0)
        while first < index and self._is_passed_over(stack[first][0]):
            first += 1
        return stack[first:], index - first

    def set_stepinstr(self) -> None:
        """Stop at the next line; newer versions would stop within the line of the breakpoint itself."""
        self.set_step()

    def set_continue(self) -> None:
        """Stop only at breakpoints."""
        self.session.continuing = True
        super().set_continue()

    # Commands.

    def default(self, line: str) -> Any:
        """Run a statement, and keep its assignments."""
        result = super().default(line)
        if sys.version_info < (3, 13) and self.curframe is not None:
            # Otherwise the next access to the frame's variables, by `w` for example, would restore the old values.
            import ctypes

            ctypes.pythonapi.PyFrame_LocalsToFast(ctypes.py_object(self.curframe), ctypes.c_int(0))
        return result

    def do_interact(self, arg: str) -> None:
        """Interact.

        Start an interactive interpreter with the names of the current scope. Ctrl-D or exit() ends it.
        """
        frame = self.curframe
        assert frame is not None
        names = {**frame.f_globals, **frame.f_locals}
        shell = _Shell(self.session, names)
        self.session.console.takes_end = True
        try:
            shell.interact(banner="*interactive*", exitmsg="*left interactive*")
        except SystemExit:
            pass
        finally:
            self.session.console.takes_end = False

    def do_run(self, arg: str) -> None:
        """Run.

        An actor cannot be started again from here.
        """
        self.error("an actor cannot be restarted from the debugger")

    do_restart = do_run

    def do_EOF(self, arg: str) -> None:  # noqa: N802 - the name is pdb's
        """EOF.

        Ctrl-D detaches and leaves the actor stopped; q ends the call with an error.
        """
        self.message("Ctrl-D detaches; q ends the call with an error; c continues")


class _Shell(code.InteractiveConsole):
    """``interact``."""

    def __init__(self, session: Session, names: dict[str, Any]) -> None:
        super().__init__(names, "<interact>")
        self._session = session

    def raw_input(self, prompt: str = "") -> str:
        self.write(prompt)
        line = self._session.console.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def write(self, data: str) -> None:
        self._session.console.write(data)

    def runcode(self, code: Any) -> None:
        before = sys.stdin, sys.stdout
        console: Any = self._session.console
        # Replace stdin too: exit() closes it.
        sys.stdin = sys.stdout = console
        try:
            super().runcode(code)
        finally:
            sys.stdin, sys.stdout = before


def _module(frame: FrameType) -> str:
    return frame.f_globals.get("__name__") or ""


def _end_of(trace: TracebackType) -> tuple[FrameType, int]:
    while trace.tb_next is not None:
        trace = trace.tb_next
    return trace.tb_frame, trace.tb_lineno


def _is_suspended(frame: FrameType) -> bool:
    """Return whether a frame that returns is a coroutine that is only suspended."""
    if frame.f_lasti < 0:
        return False
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in _SUSPENDS
