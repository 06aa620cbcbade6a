"""The ``mesh`` command. All subcommands are plugins, including Mesh's own; only the one that runs is imported."""

from mesh_core.cli._app import main

__all__ = ["main"]
