"""Sends large message parts between hosts past the agents, if a package that moves them is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_core._native import set_bypass

if TYPE_CHECKING:
    from mesh_core._process.process import Process


def find_bypass(process: Process) -> None:
    """Let large parts travel by what is installed for them, or through the agents from now on."""
    threshold = process.settings.bypass_threshold
    capsule = process.hooks.find_bypass() if threshold else None
    set_bypass(process.runtime, capsule, threshold)
