"""The plugin manager of the command line, which shows broken plugins itself instead of logging warnings."""

from mesh_core._common.errors import PluginLoadError
from mesh_core.plugins import PluginManager


def quiet_manager() -> PluginManager:
    """Return a manager that does not log: selecting a broken plugin raises, and `mesh plugins` lists it."""
    return PluginManager(warn=_ignore)


def _ignore(error: PluginLoadError) -> None:
    del error
