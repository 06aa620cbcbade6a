"""What moves large parts of messages between hosts past their agents, if a package is installed that does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_core import _native

if TYPE_CHECKING:
    from mesh_core._process import Process


def find_bypass(process: Process) -> None:
    """Have large parts travel by the first plugin that works here, or through the agents for good."""
    threshold = process.settings.bypass_threshold
    capsule = _capsule() if threshold else None
    _native.set_bypass(process.runtime, capsule, threshold)


def _capsule() -> object | None:
    import logging

    from mesh_core.plugins import BYPASSES, PluginManager

    log = logging.getLogger("mesh")
    manager = PluginManager()
    for plugin in manager.all(BYPASSES):
        able = manager.probe(plugin)
        if not able:
            log.debug("large parts do not travel by %s: %s", plugin.name, able.reason)
            continue
        try:
            return plugin.create()
        except Exception:
            # They travel as they would without it.
            log.exception("large parts do not travel by %s, which failed", plugin.name)
    return None
