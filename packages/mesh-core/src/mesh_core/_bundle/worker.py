"""The features of a worker. The fork server imports this module, so that workers need not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_core._bundle.every import equip as equip_any
from mesh_core._features.debug.extension import Debugging
from mesh_core._features.logs import records  # noqa: F401 - for the workers, as above
from mesh_core._features.logs.extension import Logging

if TYPE_CHECKING:
    from mesh_core._process.process import Process


def equip(process: Process) -> None:
    """Add the features of a worker, and start those that are extensions, before any user code runs."""
    equip_any(process)
    process.extensions.ensure(Logging)
    process.extensions.ensure(Debugging)
