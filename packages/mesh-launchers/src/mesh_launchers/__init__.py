"""Launchers for Mesh: start host agents through ssh, Slurm, Kubernetes or Ray.

Planned: this release holds its version and nothing else.
"""

from importlib.metadata import version as _version

__all__ = ["__version__"]

__version__ = _version("mesh-launchers")
