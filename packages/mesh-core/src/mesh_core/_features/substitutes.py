"""Which actor classes are spawned as others, while tests want it so: what ``mesh_core.testing.patch_actor`` changes.

An extension. A process that is spawned meanwhile is told, and tells those that it spawns itself.
"""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from typing import TYPE_CHECKING, Any

from mesh_core._common.current import holder
from mesh_core._common.errors import MeshError
from mesh_core._serialize import dumps, loads
from mesh_core.extensions import NOT_CARRIED, Extension, Spawning

if TYPE_CHECKING:
    from mesh_core._process.process import Process


class Layers:
    """Classes, and those that are spawned in their place; the newest layer counts. Kept when the runtime ends."""

    def __init__(self) -> None:
        self._layers: list[tuple[type, type]] = []
        self._told = ""
        """What the spawner of this process has said, not read yet: that imports the classes."""
        self._joins = False

    def hear(self, told: str) -> None:
        """Take what :meth:`tell` has made in another process."""
        self._told = told

    def tell(self) -> str:
        """All of it as text, for a process that is spawned; empty if there is nothing."""
        if self._told and not self._layers:
            return self._told
        self._read()
        if not self._layers:
            return ""
        data, buffers = dumps(
            self._layers, root="the classes that patch_actor() replaces, and their replacements"
        )
        if buffers:
            raise MeshError(
                "a class that patch_actor() replaces, or its replacement, holds large data; pass that to the "
                "constructor instead of keeping it in the class or its globals"
            )
        return b2a_base64(data, newline=False).decode()

    def push(self, real: type, substitute: type) -> None:
        """From now on spawn ``substitute`` where ``real`` is asked for."""
        self._read()
        self._layers.append((real, substitute))
        if not self._joins:
            self._joins = True
            holder().for_each(_join)

    def pop(self, real: type, substitute: type) -> None:
        """Take the newest such layer back."""
        for index in range(len(self._layers) - 1, -1, -1):
            if self._layers[index] == (real, substitute):
                del self._layers[index]
                return

    def of(self, cls: type) -> type:
        """What to spawn where ``cls`` is asked for."""
        if self._told:
            self._read()
        for real, substitute in reversed(self._layers):
            if real is cls:
                return substitute
        return cls

    def _read(self) -> None:
        if self._told:
            self._layers[:0] = loads(a2b_base64(self._told))
            self._told = ""


def layers() -> Layers:
    """Those of this process."""
    return holder().slots.of(Layers)


class Substitutes(Extension):
    """Has substitutes spawned; ``payload`` is what the spawner of this process has said, as text."""

    name = "mesh.substitutes"

    def for_spawn(self, spawning: Spawning) -> Any:
        """Tell new processes what counts here."""
        return layers().tell() or NOT_CARRIED

    def start(self) -> None:
        """Take over what counts where this process was spawned."""
        if self.payload:
            layers().hear(self.payload)

    def actor_class(self, cls: type) -> type:
        """What to spawn where ``cls`` is asked for."""
        return layers().of(cls)


def _join(process: Process) -> None:
    process.extensions.ensure(Substitutes)
