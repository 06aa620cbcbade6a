"""When Ctrl-C and SIGTERM may be raised while something must end as a whole.

EXIT-2: Ctrl-C speeds up the end of a process's part in the mesh, and never cuts it short.
EXIT-3: SIGTERM ends the script in order, once: it is raised as SystemExit, and neither speeds up an end that is under
way nor cuts it short. A second SIGTERM, or the end of the grace period, kills (``sigterm.rs``).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` looks for an enum's member at each step, which takes twenty times as long
import contextlib
import os
import signal
import sys
import threading
from _thread import get_ident
from typing import TYPE_CHECKING, Self

from mesh_core._native import begin_sigterm, guard_sigterm, release_sigterm, repeat_sigterm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_SIGINT = int(signal.SIGINT)


class Interrupts:
    """A ``with`` block that Ctrl-C does not interrupt, except for its parts under :meth:`raised`.

    Elsewhere in it Ctrl-C is held back, and raised by the next such part or at the end of the block. Only the main thread
    receives Ctrl-C, and a program's own handler for it stays in place; in both cases this is an ordinary block.
    SIGTERM is held back until the end of the block.
    """

    def __init__(self, sigterm: Termination | None = None) -> None:
        self._kept = False
        self._raises = False
        self._handles = False
        self._sigterm = sigterm

    def __enter__(self) -> Self:
        if self._sigterm is not None:
            self._sigterm.hold()
        ours = _signal.getsignal(_SIGINT) is _signal.default_int_handler
        if ours and get_ident() == threading.main_thread().ident:
            self._handles = True
            _signal.signal(_SIGINT, self._on_signal)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if self._handles:
            self._handles = False
            _signal.signal(_SIGINT, _signal.default_int_handler)
        if self._sigterm is not None:
            self._sigterm.let_go()
        if self._kept:
            self._kept = False
            if error is None:
                raise KeyboardInterrupt

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._kept = True
        if self._raises:
            self._raise()

    def _raise(self) -> None:
        self._kept = self._raises = False
        raise KeyboardInterrupt

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Raise Ctrl-C as usual in this part."""
        self._raises = True
        try:
            if self._kept:
                self._raise()
            yield
        finally:
            self._raises = False

    def forget(self) -> None:
        """Raise nothing at the end of the block: what Ctrl-C and SIGTERM ask for is under way."""
        self._kept = False
        if self._sigterm is not None:
            self._sigterm.forget()


class Termination:
    """Handles SIGTERM in a script that uses Mesh: the script ends as by ``sys.exit(143)``, and so in order.

    Installed from the first use of Mesh in the main thread until :func:`mesh_core.shutdown`, unless the script has its
    own handler or runs in a notebook, where no exception ends the process.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._pid = os.getpid()
        self._held = 0
        self._kept = False
        self.begun = False
        """SIGTERM arrived, and the script is ending."""

    @classmethod
    def install(cls, grace: float) -> Termination | None:
        """Handle SIGTERM from now on, unless something else does."""
        if (
            grace <= 0.0
            or threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
            or _in_notebook()
        ):
            return None
        made = cls(grace)
        signal.signal(signal.SIGTERM, made._on_signal)
        guard_sigterm(grace)
        return made

    def remove(self) -> None:
        """Restore the default action of SIGTERM."""
        if threading.current_thread() is not threading.main_thread() or self._pid != os.getpid():
            return
        # Compared by value: each access to a method makes a new object.
        if not self.begun and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            release_sigterm()

    def hold(self) -> None:
        """Hold SIGTERM back until :meth:`let_go`."""
        self._held += 1

    def let_go(self) -> None:
        """Raise SIGTERM if it arrived meanwhile."""
        self._held -= 1
        if self._kept and not self._held:
            self._kept = False
            self._raise()

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Raise SIGTERM in this part of a block that holds it back, unless another block does too."""
        held = self._held
        try:
            self.let_go()
            yield
        finally:
            self._held = held

    def forget(self) -> None:
        """Drop a SIGTERM that arrived meanwhile: the script is ending."""
        self._kept = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._pid != os.getpid():
            # In a child that the script forked.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        begin_sigterm(self._grace)
        if self.begun:
            return
        self.begun = True
        if self._held:
            self._kept = True
        else:
            self._raise()

    def _raise(self) -> None:
        # The interpreter joins threads before it runs the code that stops the job, and they may be waiting for the job.
        with contextlib.suppress(AttributeError, RuntimeError):
            threading._register_atexit(_wake_threads)  # type: ignore[attr-defined]
        raise _Ending(self)

    def raise_again(self) -> None:
        """Run the handler again: the exception it raised was lost."""
        if self.begun and self._pid == os.getpid():
            self.begun = False
            repeat_sigterm()


_STATUS = 128 + signal.SIGTERM


class _Ending(SystemExit):
    """Raised by SIGTERM; notices when it is dropped.

    Signals are handled wherever the interpreter checks for them, for example while it compiles a module or closes an
    unreferenced file, and some of these places drop any exception.
    """

    def __init__(self, cause: Termination) -> None:
        super().__init__(_STATUS)
        self._cause = cause

    def __del__(self) -> None:
        # Without a calling frame nothing can have dropped it: the script has ended.
        way = self.__traceback__
        if (way is None or way.tb_frame.f_code is _HANDLER) and sys._getframe().f_back is not None:
            self._cause.raise_again()


# A traceback that begins elsewhere shows that some code received it.
_HANDLER = Termination._on_signal.__code__


def _in_notebook() -> bool:
    module = sys.modules.get("IPython")
    return module is not None and module.get_ipython() is not None


def _wake_threads() -> None:
    me = threading.current_thread()
    if any(thread is not me and not thread.daemon for thread in threading.enumerate()):
        from mesh_core._common.current import holder

        holder().shutdown()


def was_interrupted() -> bool:
    """Return whether the interpreter ends because of an uncaught Ctrl-C."""
    kind = getattr(sys, "last_type", None)
    return isinstance(kind, type) and issubclass(kind, KeyboardInterrupt)


def end_by_interrupt() -> None:
    """Have the interpreter end itself by SIGINT, if it ends because of Ctrl-C (EXIT-2).

    It does so if the code last compiled from text, such as the script itself, raised KeyboardInterrupt. By now that may be
    other code: a dataclass created by an import on any thread runs ``exec``, and the exit status would be 1.
    """
    if was_interrupted():
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def say_stopping(count: int, *, by_sigterm: bool = False) -> None:
    """Tell the user what the end of the script is waiting for."""
    what = f"{count} process" if count == 1 else f"{count} processes"
    which = "it" if count == 1 else "them"
    how = f"another SIGTERM kills {which}" if by_sigterm else f"Ctrl-C again to kill {which}"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"mesh: stopping {what}; {how}\n")
        sys.stderr.flush()
