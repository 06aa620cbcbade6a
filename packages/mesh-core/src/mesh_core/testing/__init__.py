"""Test plugins, and programs that use Mesh.

>>> from mesh_core.plugins import COMMANDS, PluginManager
>>> from mesh_core.testing import CommandPluginConformance
>>> class TestDoctor(CommandPluginConformance):
...     plugin = PluginManager().get(COMMANDS, "doctor")
...     distribution = "mesh-core"
"""

from mesh_core.testing._asserts import expect_bytes, rewrite_asserts
from mesh_core.testing._bypasses import BypassPluginConformance
from mesh_core.testing._clock import FakeClock, Timer
from mesh_core.testing._cluster import LocalCluster
from mesh_core.testing._installed import installed_plugins
from mesh_core.testing._local import local_procs
from mesh_core.testing._patch import mock_actor, patch_actor
from mesh_core.testing._plugins import (
    CommandPluginConformance,
    DoctorCheckConformance,
    KindConformance,
    PluginConformance,
    PolicyPluginConformance,
)

__all__ = [
    "BypassPluginConformance",
    "CommandPluginConformance",
    "DoctorCheckConformance",
    "FakeClock",
    "KindConformance",
    "LocalCluster",
    "PluginConformance",
    "PolicyPluginConformance",
    "Timer",
    "expect_bytes",
    "installed_plugins",
    "local_procs",
    "mock_actor",
    "patch_actor",
    "rewrite_asserts",
]
