"""The plugin manager of the command line, which shows broken plugins itself instead of warning of them."""

from mesh_core._common.errors import PluginLoadError
from mesh_core.plugins import PluginManager


def quiet_manager() -> PluginManager:
    """A manager that does not log: whoever selects a broken plugin is told, and `mesh plugins` lists it."""
    return PluginManager(warn=_say_nothing)


def _say_nothing(error: PluginLoadError) -> None:
    del error
