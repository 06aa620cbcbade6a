"""Values that are passed on without being unpickled."""

from __future__ import annotations

from functools import partial
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

from mesh_core._meshes.outcomes import load
from mesh_core._meshes.refs import Ref, capture
from mesh_core._serialize import dumps, loads

if TYPE_CHECKING:
    from mesh_core._native import Message

_ITSELF = 256
"""The overhead that each item counts beyond its bytes; the same as for a message."""


class Packed:
    """A pickled value. Sent as an argument, it arrives as the value itself."""

    __slots__ = ("_buffers", "_data", "_refs", "size")

    def __init__(self, data: bytes, buffers: list[Any], refs: list[Ref[Any]]) -> None:
        self._data = data
        self._buffers = buffers
        self._refs = refs
        self.size = _ITSELF + len(data) + sum(memoryview(each).nbytes for each in buffers)
        """How many bytes it counts for."""

    @classmethod
    def of(cls, value: object) -> Packed:
        """Pickle a value; its large buffers are not copied before it is sent."""
        (data, buffers), refs = capture(partial(dumps, value, root="an item of the pipeline"))
        # A Ref that carries its own value is not in refs, and must not arrive as a reference either.
        return cls(data, buffers, [value] if isinstance(value, Ref) else refs)

    @classmethod
    def come(cls, message: Message) -> Packed:
        """Wrap a stage's reply. Raises if it contains references and cannot be unpickled here."""
        if message.has_refs:
            return cls.of(load(message))  # this takes the references out of the message
        return cls(*message.raw(), [])

    def load(self) -> Any:
        """Return the value."""
        return loads(self._data, self._buffers)

    def __reduce_ex__(self, _: Any) -> Any:
        buffers = [PickleBuffer(each) for each in self._buffers]
        if self._refs:
            return _loads, (self._refs, self._data, buffers)
        return loads, (self._data, buffers)


def _loads(_: list[Ref[Any]], data: bytes, buffers: list[Any]) -> Any:
    """Like ``loads``, for a pickle that contains these references, which have to be kept alive meanwhile."""
    return loads(data, buffers)
