"""The ``mesh`` command. Its subcommands are plugins, its own included; only the one that is run is imported."""

from mesh_core.cli._app import main

__all__ = ["main"]
