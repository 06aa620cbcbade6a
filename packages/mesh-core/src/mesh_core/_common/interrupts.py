"""When Ctrl-C and SIGTERM may be raised, where something must end as a whole.

EXIT-2: Ctrl-C hurries the end of a process's part in the mesh, and never breaks it off.
EXIT-3: SIGTERM ends the script in order, once: it is raised as SystemExit, and neither hurries an end that is under way
nor breaks it off. A second one, or the end of the grace, kills (``sigterm.rs``).
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
    """A ``with`` block that Ctrl-C leaves alone, but for its parts under :meth:`raised`.

    Ctrl-C elsewhere in it is kept, and raised by the next such part or else at the block's end. Only the main thread
    hears of Ctrl-C, and a program that has a handler of its own for it keeps that: there this is a block like any other.
    SIGTERM is kept until the block's end in all of it.
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
        """In this part Ctrl-C is raised as anywhere else."""
        self._raises = True
        try:
            if self._kept:
                self._raise()
            yield
        finally:
            self._raises = False

    def forget(self) -> None:
        """Raise nothing at the block's end: what Ctrl-C and SIGTERM want is under way."""
        self._kept = False
        if self._sigterm is not None:
            self._sigterm.forget()


class Termination:
    """What SIGTERM does to a script that uses Mesh: it ends as by ``sys.exit(143)``, and so in order.

    It is there from the first use of Mesh in the main thread until :func:`mesh_core.shutdown`, unless the script has a
    handler of its own, or runs in a notebook, where nothing that is raised ends the process.
    """

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._pid = os.getpid()
        self._held = 0
        self._kept = False
        self.begun = False
        """SIGTERM has arrived, and the script is ending."""

    @classmethod
    def install(cls, grace: float) -> Termination | None:
        """Hear of SIGTERM from now on, if nobody does."""
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
        """Let SIGTERM do what it did before."""
        if threading.current_thread() is not threading.main_thread() or self._pid != os.getpid():
            return
        # Compared by value: each look at a method makes a new object.
        if not self.begun and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            release_sigterm()

    def hold(self) -> None:
        """Raise nothing until :meth:`let_go`."""
        self._held += 1

    def let_go(self) -> None:
        """Raise the signal that has arrived meanwhile."""
        self._held -= 1
        if self._kept and not self._held:
            self._kept = False
            self._raise()

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """In this part, in a block that holds it, it is raised unless somebody else holds it."""
        held = self._held
        try:
            self.let_go()
            yield
        finally:
            self._held = held

    def forget(self) -> None:
        """Drop the signals that have arrived meanwhile: the script is ending."""
        self._kept = False

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self._pid != os.getpid():
            # A copy that the script has forked.
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
        # The interpreter waits for threads before it comes to what stops the job, which they may be waiting for.
        with contextlib.suppress(AttributeError, RuntimeError):
            threading._register_atexit(_wake_threads)  # type: ignore[attr-defined]
        raise _Ending(self)

    def raise_again(self) -> None:
        """Have the handler run once more: what it raised has been lost."""
        if self.begun and self._pid == os.getpid():
            self.begun = False
            repeat_sigterm()


_STATUS = 128 + signal.SIGTERM


class _Ending(SystemExit):
    """What SIGTERM raises; it notices when nobody gets to see it.

    Signals are handled wherever the interpreter looks for them, for example while it compiles a module or closes a file
    that nobody refers to any more, and some of these places drop whatever is raised.
    """

    def __init__(self, cause: Termination) -> None:
        super().__init__(_STATUS)
        self._cause = cause

    def __del__(self) -> None:
        # Without frames below there is nothing it could have been dropped by: it is at the end of the script.
        way = self.__traceback__
        if (way is None or way.tb_frame.f_code is _HANDLER) and sys._getframe().f_back is not None:
            self._cause.raise_again()


# What has seen it is outside of this.
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
    """Whether Ctrl-C, which nobody has caught, is why the interpreter ends."""
    kind = getattr(sys, "last_type", None)
    return isinstance(kind, type) and issubclass(kind, KeyboardInterrupt)


def end_by_interrupt() -> None:
    """Have the interpreter end itself by SIGINT, if Ctrl-C is why it ends (EXIT-2).

    It does so when the last code compiled from text, such as the script itself, has raised KeyboardInterrupt. By now that
    may be another: a dataclass made by an import on any thread runs ``exec``, and the exit status would be 1.
    """
    if was_interrupted():
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")


def say_stopping(count: int, *, by_sigterm: bool = False) -> None:
    """Tell the user what the end of the script waits for."""
    what = f"{count} process" if count == 1 else f"{count} processes"
    which = "it" if count == 1 else "them"
    how = f"another SIGTERM kills {which}" if by_sigterm else f"Ctrl-C again to kill {which}"
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"mesh: stopping {what}; {how}\n")
        sys.stderr.flush()
