"""Registered memory that other processes read and write without the owner's Python: RDMABuffer and its transports.

Planned: this release holds its version and nothing else.
"""

from importlib.metadata import version as _version

__all__ = ["__version__"]

__version__ = _version("mesh-rdma")
