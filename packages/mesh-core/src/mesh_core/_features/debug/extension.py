"""The debugger in each process: ``breakpoint()``, and stopping at unhandled exceptions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_core._features.debug.hook import Breakpoints
from mesh_core.extensions import Extension

if TYPE_CHECKING:
    from mesh_core.extensions import Raised


class Debugging(Extension):
    """Makes ``breakpoint()`` wait for ``mesh debug``. Each process has its own instance."""

    name = "mesh.debugger"
    _everywhere = True

    def start(self) -> None:
        """Replace ``breakpoint()`` and, in a worker, ``pdb.set_trace()``."""
        process = self._mesh_process
        self._breakpoints = Breakpoints(process, everywhere=not process.identity.is_script)
        self._breakpoints.install()

    def stop(self) -> None:
        """Restore ``breakpoint()`` in the script. A worker never has a terminal, so it stays replaced there."""
        if self._mesh_process.identity.is_script:
            self._breakpoints.uninstall()

    def endpoint_raised(self, raised: Raised) -> None:
        """Stop where an unhandled exception was raised, if the setting ``post_mortem`` is on."""
        if self._mesh_process.settings.post_mortem:
            self._breakpoints.examine(raised.error)
