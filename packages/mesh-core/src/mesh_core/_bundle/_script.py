"""What a script's process comes with."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from mesh_core._bundle import equip as equip_any

# The end needs it, and Ctrl-C in the middle of an import leaves half a module behind.
from mesh_core._logging._console import Console

if TYPE_CHECKING:
    from mesh_core._process import Process


def equip(process: Process) -> None:
    """Hang the features on."""
    equip_any(process)
    hooks = process.hooks
    hooks.spawning.append(partial(_open_console, process))
    hooks.staging.append(partial(_begin, process))
    hooks.flush.append(partial(_flush, process))
    hooks.closed.append(partial(_end, process))


def _open_console(process: Process) -> None:
    process.slots.of(Console, lambda: Console(process.runtime.logs()))


def _flush(process: Process) -> None:
    if (console := process.slots.find(Console)) is not None:
        console.flush()


def _begin(process: Process) -> None:
    """Its first actor is about to come."""
    from mesh_core._debug._extension import Debugging
    from mesh_core._logging._extension import Logging

    process.extensions.ensure(Logging)
    process.extensions.ensure(Debugging)


def _end(process: Process) -> None:
    if (console := process.slots.find(Console)) is not None:
        console.end()
    from mesh_core._debug._places import forget_job

    forget_job(process.pid)
