"""The kinds of plugin there are: each with its entry-point group, its hook, its descriptor and its contract's version."""

from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from mesh_core.plugins._descriptors import (
    CommandPlugin,
    DoctorCheck,
    LauncherPlugin,
    Plugin,
    PolicyPlugin,
    TransportPlugin,
)

P_co = TypeVar("P_co", bound=Plugin, covariant=True)


@dataclass(frozen=True, slots=True)
class PluginKind(Generic[P_co]):
    """One kind of plugin.

    >>> COMMANDS.group, COMMANDS.hook
    ('mesh.commands', 'mesh_register_commands')
    """

    word: str
    """What one of them is called in messages."""
    group: str
    """Its entry-point group."""
    hook: str
    """The hook that returns its descriptors."""
    descriptor: type[P_co]
    """What the hook returns."""
    api_version: int
    """The newest version of its contract that this mesh-core speaks."""

    @property
    def plural(self) -> str:
        """The word for many."""
        return self.word.removesuffix("y") + "ies" if self.word.endswith("y") else self.word + "s"


TRANSPORTS: Final = PluginKind("transport", "mesh.transports", "mesh_register_transports", TransportPlugin, 1)
LAUNCHERS: Final = PluginKind("launcher", "mesh.launchers", "mesh_register_launchers", LauncherPlugin, 1)
POLICIES: Final = PluginKind("policy", "mesh.supervision", "mesh_register_policies", PolicyPlugin, 1)
COMMANDS: Final = PluginKind("command", "mesh.commands", "mesh_register_commands", CommandPlugin, 1)
DOCTOR_CHECKS: Final = PluginKind(
    "doctor check", "mesh.doctor", "mesh_register_doctor_checks", DoctorCheck, 1
)

KINDS: Final[tuple[PluginKind[Plugin], ...]] = (TRANSPORTS, LAUNCHERS, POLICIES, COMMANDS, DOCTOR_CHECKS)
"""All of them, in the order in which they are listed."""
