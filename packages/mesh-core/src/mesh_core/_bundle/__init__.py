"""Which features a process has, and how they use the kernel's hooks.

The only place that knows both. ``script`` and ``_process.worker`` equip the two kinds of processes; rarely used features
are imported when they are needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_core._common.current import holder

if TYPE_CHECKING:
    from mesh_core._process.process import Process


def put_together() -> None:
    """Set how processes are created and equipped; called when mesh_core is imported."""
    at = holder()
    at.make = _make_controller
    at.equip_script = _equip_script
    at.equip_worker = _equip_worker


def _make_controller() -> Process:
    from mesh_core._process.process import make_controller

    return make_controller()


def _equip_script(process: Process) -> None:
    from mesh_core._bundle.script import equip

    equip(process)


def _equip_worker(process: Process) -> None:
    from mesh_core._bundle.worker import equip

    equip(process)
