"""Large parts of messages between hosts, which travel past the agents where a package is installed that moves them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_core._native import set_bypass

if TYPE_CHECKING:
    from mesh_core._process.process import Process


def find_bypass(process: Process) -> None:
    """Have large parts travel by what is installed for that, or through the agents for good."""
    threshold = process.settings.bypass_threshold
    capsule = process.hooks.find_bypass() if threshold else None
    set_bypass(process.runtime, capsule, threshold)
