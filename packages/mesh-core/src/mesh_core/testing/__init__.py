"""What authors of plugins, and of programs that use Mesh, test with.

>>> from mesh_core.plugins import COMMANDS, PluginManager
>>> from mesh_core.testing import CommandPluginConformance
>>> class TestDoctor(CommandPluginConformance):
...     plugin = PluginManager().get(COMMANDS, "doctor")
...     distribution = "mesh-core"
"""

from mesh_core.testing._plugins import CommandPluginConformance, DoctorCheckConformance, PluginConformance

__all__ = ["CommandPluginConformance", "DoctorCheckConformance", "PluginConformance"]
