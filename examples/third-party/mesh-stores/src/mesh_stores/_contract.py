"""The contract: what a store does, what its descriptor says, and the kind that makes both known to Mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

from mesh_core.plugins import Plugin, PluginKind


class Store(Protocol):
    """Keeps bytes under names."""

    def save(self, name: str, data: bytes) -> None:
        """Keep ``data``; what was there before under that name is replaced, whole or not at all."""

    def load(self, name: str) -> bytes:
        """Return what was saved under ``name``, or raise :class:`KeyError`."""
        ...


@dataclass(frozen=True)
class StoreCapabilities:
    """What a store can do on this machine."""

    durable: bool
    """Whether what is saved outlives the process."""


@dataclass(frozen=True, kw_only=True)
class StorePlugin(Plugin[StoreCapabilities]):
    """A kind of store; ``create(location)`` opens one."""

    create: Callable[[str], Store]


STORES: Final = PluginKind(
    word="store",
    group="mesh.stores",
    hook="mesh_register_stores",
    descriptor=StorePlugin,
    api_version=1,
    capabilities=StoreCapabilities,
    owner="mesh-stores",
)
