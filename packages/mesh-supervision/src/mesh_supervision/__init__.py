"""Supervision policies for Mesh: restart strategies, healing, elastic meshes, watching tools.

Planned: this release holds its version and nothing else.
"""

from importlib.metadata import version as _version

__all__ = ["__version__"]

__version__ = _version("mesh-supervision")
