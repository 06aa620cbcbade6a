"""Which actor classes are spawned as others, while tests want it so: what ``mesh_core.testing.patch_actor`` changes.

A process that is spawned meanwhile is told, and tells those that it spawns itself.
"""

from __future__ import annotations

import base64

from mesh_core._errors import MeshError
from mesh_core._serialize import dumps, loads


class Substitutes:
    """Classes, and those that are spawned in their place; the newest layer counts."""

    def __init__(self) -> None:
        self._layers: list[tuple[type, type]] = []
        self._told = ""
        """What the spawner of this process has said, not read yet: that imports the classes."""

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
        return base64.b64encode(data).decode()

    def push(self, real: type, substitute: type) -> None:
        """From now on spawn ``substitute`` where ``real`` is asked for."""
        self._read()
        self._layers.append((real, substitute))

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
            self._layers[:0] = loads(base64.b64decode(self._told))
            self._told = ""
