"""Packages that own names known to mesh-core, so that errors can say what to install."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

GROUP_OWNERS: Final[Mapping[str, str]] = MappingProxyType(
    {"mesh.launchers": "mesh-launchers", "mesh.transports": "mesh-rdma"}
)
"""The package that declares a kind, by the kind's entry-point group."""

NAME_OWNERS: Final[Mapping[tuple[str, str], str]] = MappingProxyType(
    {("mesh.policies", name): "mesh-supervision" for name in ("one_for_one", "one_for_all", "rest_for_one")}
)
"""The package that offers a plugin, by the plugin's entry-point group and name."""
