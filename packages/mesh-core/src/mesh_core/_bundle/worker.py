"""What a worker comes with. The fork server imports this, so that the workers need not."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_core._bundle.every import equip as equip_any
from mesh_core._features.debug.extension import Debugging
from mesh_core._features.logs import records  # noqa: F401 - for the workers, as above
from mesh_core._features.logs.extension import Logging

if TYPE_CHECKING:
    from mesh_core._process.process import Process


def equip(process: Process) -> None:
    """Hang the features on, and start those that are extensions, before any of the user's code runs."""
    equip_any(process)
    process.extensions.ensure(Logging)
    process.extensions.ensure(Debugging)
