"""Plugins: write them, and find installed ones.

Authors import a descriptor and ``hookimpl``. Mesh's packages find plugins with :class:`PluginManager`. A package that accepts
plugins of its own declares their :class:`PluginKind`.

>>> from mesh_core.plugins import CommandPlugin, hookimpl
>>> @hookimpl
... def mesh_register_commands():
...     yield CommandPlugin(name="greet", api_version=1, create=lambda: Greet(), summary="say hello")
"""

from mesh_core.plugins._descriptors import (
    BypassPlugin,
    Capability,
    Check,
    Command,
    CommandPlugin,
    DoctorCheck,
    Finding,
    Plugin,
    PolicyPlugin,
    ProbeResult,
    always_available,
    name_problem,
)
from mesh_core.plugins._kinds import BYPASSES, COMMANDS, DOCTOR_CHECKS, POLICIES, PluginKind
from mesh_core.plugins._manager import PluginManager, PluginReport, PluginStatus
from mesh_core.plugins._scan import PluginEntry
from mesh_core.plugins._specs import hookimpl

__all__ = [
    "BYPASSES",
    "COMMANDS",
    "DOCTOR_CHECKS",
    "POLICIES",
    "BypassPlugin",
    "Capability",
    "Check",
    "Command",
    "CommandPlugin",
    "DoctorCheck",
    "Finding",
    "Plugin",
    "PluginEntry",
    "PluginKind",
    "PluginManager",
    "PluginReport",
    "PluginStatus",
    "PolicyPlugin",
    "ProbeResult",
    "always_available",
    "hookimpl",
    "name_problem",
]
