"""Which features a process of Mesh comes with, and how they hang on the kernel's hooks.

The only place that knows both. ``script`` and ``_process.worker`` equip the two kinds of processes; what is used now and then is
imported when it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_core._bundle.callables import hand_over
from mesh_core._common.current import holder
from mesh_core._process.process import make_controller

if TYPE_CHECKING:
    from mesh_core._process.process import Process


def put_together() -> None:
    """Say how processes are made, and what they are equipped with; done when mesh_core is imported."""
    hand_over()
    at = holder()
    at.make = make_controller
    at.equip_script = _equip_script
    at.equip_worker = _equip_worker


def _equip_script(process: Process) -> None:
    from mesh_core._bundle.script import equip

    equip(process)


def _equip_worker(process: Process) -> None:
    from mesh_core._bundle.worker import equip

    equip(process)
