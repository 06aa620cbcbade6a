"""The logging of each process: where its records go, and from which level on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_core._common.control import LOGGING
from mesh_core._common.errors import MeshError
from mesh_core._features.logs import set_level, set_up, set_up_worker
from mesh_core.extensions import Extension

if TYPE_CHECKING:
    from mesh_core.extensions import Proc


class Logging(Extension):
    """Has a worker send its records to the controller. Each process makes its own."""

    name = LOGGING
    _at_once = True
    _everywhere = True

    def start(self) -> None:
        """Send the records of a worker; in a script, show Mesh's own where the script has set up nothing."""
        process = self._mesh_process
        settings = process.settings
        if process.identity.is_script:
            set_up(settings.log_level, process.identity.proc_id)
        else:
            set_up_worker(settings.log_level, records=settings.log_records)

    def receive(self, message: int, sender: Proc) -> None:
        """Send records from this level on; see :meth:`ProcMesh.logging_option`."""
        if self._mesh_process.identity.is_script:
            raise MeshError("the script's own level is the script's affair: see the setting log_level")
        set_level(message)
