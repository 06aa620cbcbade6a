"""How a process lets others see the stacks of its threads.

Its event loop reports them, with the GIL. If the loop is blocked, the runtime's own thread does: it asks ``faulthandler``,
which needs no GIL, in a fork of the process; see ``dump.rs``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh_core._native import Runtime


def arm(runtime: Runtime) -> None:
    """Register a handler that writes the stacks, for a real-time signal that nobody uses and that is never sent."""
    number = next(
        (n for n in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if signal.getsignal(n) == signal.SIG_DFL),
        None,
    )
    if number is None:
        return
    file = os.memfd_create("mesh-stacks", os.MFD_CLOEXEC)
    # faulthandler keeps the descriptor for the life of the process.
    faulthandler.register(number, file=file, all_threads=True, chain=False)
    runtime.catch_dumps(number, file)


Stack = tuple[int, str, list[tuple[str, int, str]]]
"""A thread's number, its name, and file, line and function of its frames, the most recent call first."""


def stacks() -> list[Stack]:
    """Return the stacks of this process's threads; the calling thread's begins at the caller."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    found: list[Stack] = []
    for ident, top in sys._current_frames().items():
        frame: FrameType | None = sys._getframe(1) if ident == threading.get_ident() else top
        frames = []
        while frame is not None:
            code = frame.f_code
            frames.append((code.co_filename, frame.f_lineno or 0, code.co_name))
            frame = frame.f_back
        found.append((ident, names.get(ident, ""), frames))
    return found
