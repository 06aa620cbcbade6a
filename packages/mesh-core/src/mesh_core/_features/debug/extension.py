"""The debugger in each process: ``breakpoint()``, and stops where an exception has gone unhandled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_core._features.debug.hook import Breakpoints
from mesh_core.extensions import Extension

if TYPE_CHECKING:
    from mesh_core.extensions import Raised


class Debugging(Extension):
    """Has ``breakpoint()`` wait for ``mesh debug``. Each process makes its own."""

    name = "mesh.debugger"
    _everywhere = True

    def start(self) -> None:
        """Take ``breakpoint()`` over; in a worker ``pdb.set_trace()`` too."""
        process = self._mesh_process
        self._breakpoints = Breakpoints(process, everywhere=not process.identity.is_script)
        self._breakpoints.install()

    def stop(self) -> None:
        """Give ``breakpoint()`` back to the script. A worker has no terminal until its last line."""
        if self._mesh_process.identity.is_script:
            self._breakpoints.uninstall()

    def endpoint_raised(self, raised: Raised) -> None:
        """Stop where an exception has gone unhandled, if that is wanted."""
        if self._mesh_process.settings.post_mortem:
            self._breakpoints.examine(raised.error)
