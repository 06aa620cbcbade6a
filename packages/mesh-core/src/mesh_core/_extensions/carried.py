"""How a process's extensions travel to the processes that it spawns."""

from __future__ import annotations

from binascii import a2b_base64, b2a_base64
from typing import TYPE_CHECKING, Any, NamedTuple

from mesh_core._common.errors import MeshError
from mesh_core._extensions.base import NOT_CARRIED
from mesh_core._serialize import dumps, loads

if TYPE_CHECKING:
    from mesh_core._extensions.base import Extension
    from mesh_core._extensions.events import Spawning


class Carried(NamedTuple):
    """An extension on its way to another process."""

    name: str
    after: list[str]
    blob: str
    """Its class and payload. Loaded only in its turn, because others may have to start before it can be imported."""

    def load(self) -> tuple[type[Extension], Any]:
        """Return the class and the payload."""
        cls, payload = loads(a2b_base64(self.blob))
        return cls, payload


def pack(extension: Extension, spawning: Spawning) -> Carried | None:
    """Pack an extension for spawned processes; return ``None`` if they are not to have it."""
    payload = extension.for_spawn(spawning)
    if payload is NOT_CARRIED:
        return None
    data, buffers = dumps((type(extension), payload), root=f"extension {extension.name!r}, or its payload")
    if buffers:
        raise MeshError(
            f"the payload of extension {extension.name!r} holds {sum(b.nbytes for b in buffers):,} bytes of data, which a "
            "spawn does not carry; send it in a message once the processes are up"
        )
    return Carried(extension.name, list(extension.after), b2a_base64(data, newline=False).decode())


def in_order(carried: list[Carried]) -> list[Carried]:
    """Sort extensions: Mesh's own first, each after those in its ``after``, otherwise in order of installation."""
    left = {each.name: each for each in sorted(carried, key=lambda each: not each.name.startswith("mesh."))}
    ordered = []
    while left:
        ready = next((name for name, each in left.items() if not left.keys() & set(each.after)), None)
        if ready is None:
            raise MeshError(f"extensions name each other in 'after' in a circle: {', '.join(sorted(left))}")
        ordered.append(left.pop(ready))
    return ordered
