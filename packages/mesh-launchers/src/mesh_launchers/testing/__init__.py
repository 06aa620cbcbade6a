"""Tests for authors of launchers.

>>> from mesh_launchers import LAUNCHERS
>>> from mesh_core.plugins import PluginManager
>>> from mesh_launchers.testing import LauncherConformance
>>> class TestLocal(LauncherConformance):
...     plugin = PluginManager().get(LAUNCHERS, "local")
...     distribution = "mesh-launchers"
"""

from mesh_core.testing import rewrite_asserts

rewrite_asserts("mesh_launchers.testing._suite")

from mesh_launchers.testing._suite import LauncherConformance  # noqa: E402 - rewritten as it is imported

__all__ = ["LauncherConformance"]
