"""The plugin keeps the promises of its kinds: Mesh's own suites, run against it."""

from mesh_sysinfo import plugin

from mesh_core.testing import CommandPluginConformance, DoctorCheckConformance


class TestSysinfo(CommandPluginConformance):
    plugin = plugin.COMMAND
    distribution = "mesh-sysinfo"


class TestGpus(DoctorCheckConformance):
    plugin = plugin.CHECK
    distribution = "mesh-sysinfo"
