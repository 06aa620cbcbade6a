"""Actor classes that are spawned in place of others in tests: the state behind ``mesh_core.testing.patch_actor``.

An extension passes it on to processes that are spawned meanwhile, which pass it on to theirs.
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
    """Pairs of a class and its substitute; the newest pair wins. Kept when the runtime ends."""

    def __init__(self) -> None:
        self._layers: list[tuple[type, type]] = []
        self._told = ""
        """What the spawner of this process sent. Not read yet, because reading imports the classes."""
        self._joins = False

    def hear(self, told: str) -> None:
        """Take over what :meth:`tell` returned in another process."""
        self._told = told

    def tell(self) -> str:
        """Return all pairs as text, for a process that is spawned; empty if there are none."""
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
                "a class that patch_actor() replaces, or its replacement, holds large data. Pass the data to the "
                "constructor instead of keeping it in the class or its globals"
            )
        return b2a_base64(data, newline=False).decode()

    def push(self, real: type, substitute: type) -> None:
        """Spawn ``substitute`` in place of ``real`` from now on."""
        self._read()
        self._layers.append((real, substitute))
        if not self._joins:
            self._joins = True
            holder().for_each(_join)

    def pop(self, real: type, substitute: type) -> None:
        """Remove the newest such pair."""
        for index in range(len(self._layers) - 1, -1, -1):
            if self._layers[index] == (real, substitute):
                del self._layers[index]
                return

    def of(self, cls: type) -> type:
        """Return the class to spawn in place of ``cls``."""
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
    """Return the layers of this process."""
    return holder().slots.of(Layers)


class Substitutes(Extension):
    """Spawns substitutes; ``payload`` is the text from the spawner of this process."""

    name = "mesh.substitutes"

    def for_spawn(self, spawning: Spawning) -> Any:
        """Send this process's layers to new processes."""
        return layers().tell() or NOT_CARRIED

    def start(self) -> None:
        """Take over the layers of the spawner."""
        if self.payload:
            layers().hear(self.payload)

    def actor_class(self, cls: type) -> type:
        """Return the class to spawn in place of ``cls``."""
        return layers().of(cls)


def _join(process: Process) -> None:
    process.extensions.ensure(Substitutes)
