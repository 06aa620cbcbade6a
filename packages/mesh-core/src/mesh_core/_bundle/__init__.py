"""Which features a process of Mesh comes with, and how they hang on the kernel's hooks.

The only place that knows both. ``_script`` and ``_worker`` equip the two kinds of processes; what is used now and then is
imported when it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from mesh_core import _current
from mesh_core._process import make_controller

if TYPE_CHECKING:
    from mesh_core._failure import MeshFailure
    from mesh_core._future import Future
    from mesh_core._hooks import Addr
    from mesh_core._process import Process
    from mesh_core._tracing import Tracer
    from mesh_core.policies import Policy


def put_together() -> None:
    """Say how processes are made, and what they are equipped with; done when mesh_core is imported."""
    holder = _current.holder()
    holder.make = make_controller
    holder.equip_script = _equip_script
    holder.equip_worker = _equip_worker


def _equip_script(process: Process) -> None:
    from mesh_core._bundle._script import equip

    equip(process)


def _equip_worker(process: Process) -> None:
    from mesh_core._bundle._worker import equip

    equip(process)
