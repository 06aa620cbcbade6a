"""Distributed tensors: a tensor that looks local and runs on a mesh of processes.

Planned: this release holds its version and nothing else.
"""

from importlib.metadata import version as _version

__all__ = ["__version__"]

__version__ = _version("mesh-tensor")
