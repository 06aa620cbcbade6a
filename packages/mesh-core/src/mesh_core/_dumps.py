"""How a worker lets others see its threads' stacks, whatever the threads are doing.

The runtime's own thread answers for the process; it asks ``faulthandler``, which needs no GIL, by a signal. See
``dump.rs``.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh_core._native import Runtime


def arm(runtime: Runtime) -> None:
    """Register what writes the stacks, on a real-time signal that nobody uses."""
    number = next(
        (n for n in range(signal.SIGRTMAX, signal.SIGRTMIN, -1) if signal.getsignal(n) == signal.SIG_DFL),
        None,
    )
    if number is None:
        return
    file = os.memfd_create("mesh-stacks", os.MFD_CLOEXEC)
    # It keeps the descriptor, for the life of the process.
    faulthandler.register(number, file=file, all_threads=True, chain=False)
    # The runtime's handler replaces it, calls it, and then knows that the text is written.
    runtime.catch_dumps(number, file)
