"""Logging in each process: where its records go, and from which level on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_core._common.control import LOGGING
from mesh_core._common.errors import MeshError
from mesh_core._features.logs import set_level, set_up, set_up_worker
from mesh_core.extensions import Extension

if TYPE_CHECKING:
    from mesh_core.extensions import Proc


class Logging(Extension):
    """Makes a worker send its records to the controller. Each process has its own instance."""

    name = LOGGING
    _at_once = True
    _everywhere = True

    def start(self) -> None:
        """In a worker, send records; in a script that has not set up logging, show Mesh's own records."""
        process = self._mesh_process
        settings = process.settings
        if process.identity.is_script:
            set_up(settings.log_level, process.identity.proc_id)
        else:
            set_up_worker(settings.log_level, records=settings.log_records)

    def receive(self, message: int, sender: Proc) -> None:
        """Send records from this level on; see :meth:`ProcMesh.logging_option`."""
        if self._mesh_process.identity.is_script:
            raise MeshError(
                "logging_option() does not change the script's own level; use the setting log_level"
            )
        set_level(message)
