"""When Ctrl-C may be raised, where something must end as a whole.

EXIT-2: Ctrl-C hurries the end of a process's part in the mesh, and never breaks it off.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType


class Interrupts:
    """A ``with`` block that Ctrl-C leaves alone, but for its parts under :meth:`raised`.

    Ctrl-C elsewhere in it is kept, and raised by the next such part or else at the block's end. Only the main thread
    hears of Ctrl-C, and a program that has a handler of its own for it keeps that: there this is a block like any other.
    """

    def __init__(self) -> None:
        self._kept = False
        self._raises = False
        self._handles = False

    def __enter__(self) -> Self:
        ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if ours and threading.current_thread() is threading.main_thread():
            self._handles = True
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handles:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._kept and error is None:
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
        """Raise nothing at the block's end: what Ctrl-C wants is under way."""
        self._kept = False
