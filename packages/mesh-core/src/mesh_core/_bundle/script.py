"""The features of a script's process."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

from mesh_core._bundle.every import equip as equip_any

# Needed at the end of the script, where Ctrl-C could interrupt the import and leave half a module behind.
from mesh_core._features.logs.console import Console

if TYPE_CHECKING:
    from mesh_core._process.process import Process
    from mesh_core.inspect._socket import Inspection


def equip(process: Process) -> None:
    """Add the features of a script."""
    equip_any(process)
    hooks = process.hooks
    if process.identity.is_guest:
        # The controller shows the output of processes and handles inspection.
        hooks.staging.append(partial(_begin, process))
        return
    hooks.spawning.append(partial(_open_console, process))
    hooks.staging.append(partial(_begin, process))
    hooks.flush.append(partial(_flush, process))
    hooks.noticing.append(partial(_open_inspection, process))
    hooks.knocked = partial(_inspected, process)
    hooks.closing.append(partial(_close_inspection, process))
    hooks.closed.append(partial(_end, process))


def _open_console(process: Process) -> None:
    process.slots.of(Console, lambda: Console(process))
    process.shows_output = True


def _flush(process: Process) -> None:
    if (console := process.slots.find(Console)) is not None:
        console.flush()


def _begin(process: Process) -> None:
    """Called before the first actor is created."""
    from mesh_core._features.debug.extension import Debugging
    from mesh_core._features.logs.extension import Logging

    process.extensions.ensure(Logging)
    process.extensions.ensure(Debugging)


def _inspection(process: Process) -> Inspection | None:
    """Return the object that lets others inspect the job, if it was opened."""
    # While another thread imports the module, it is there but empty.
    kind = getattr(sys.modules.get("mesh_core.inspect._socket"), "Inspection", None)
    return None if kind is None else process.slots.find(kind)


def _open_inspection(process: Process) -> None:
    from mesh_core.inspect._socket import Inspection

    if process.in_charge:
        process.slots.of(Inspection, lambda: Inspection(process)).open()


def _inspected(process: Process) -> None:
    if (inspection := _inspection(process)) is not None:
        inspection.knocked()


def _close_inspection(process: Process) -> None:
    if (inspection := _inspection(process)) is not None:
        inspection.close()


def _end(process: Process) -> None:
    if (console := process.slots.find(Console)) is not None:
        console.end()
    if (inspection := _inspection(process)) is not None:
        # Once more: the thread that opens it has ended by now, but may have opened it late.
        inspection.close()
        inspection.join()
    from mesh_core._features.debug.places import forget_job

    forget_job(process.pid)
