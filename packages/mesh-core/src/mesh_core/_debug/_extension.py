"""The debugger in each process: ``breakpoint()``, and stops where an exception has gone unhandled."""

from __future__ import annotations

from typing import Any

from mesh_core import _process
from mesh_core._debug._hook import Breakpoints
from mesh_core.extensions import NOT_CARRIED, Extension, Raised, Spawning


class Debugging(Extension):
    """Has ``breakpoint()`` wait for ``mesh debug``. Each process makes its own."""

    name = "mesh.debugger"

    def for_spawn(self, spawning: Spawning) -> Any:
        """It is in every process already."""
        return NOT_CARRIED

    def start(self) -> None:
        """Take ``breakpoint()`` over; in a worker ``pdb.set_trace()`` too."""
        self._process = _process.current()
        self._breakpoints = Breakpoints(self._process, everywhere=self._process.identity.mesh_id != 0)
        self._breakpoints.install()

    def stop(self) -> None:
        """Give ``breakpoint()`` back to the script. A worker has no terminal until its last line."""
        if self._process.identity.mesh_id == 0:
            self._breakpoints.uninstall()

    def endpoint_raised(self, raised: Raised) -> None:
        """Stop where an exception has gone unhandled, if that is wanted."""
        if self._process.settings.post_mortem:
            self._breakpoints.examine(raised.error)
