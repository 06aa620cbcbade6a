"""Values that are passed on as they came, without being unpickled on the way."""

from __future__ import annotations

from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

from mesh_core._serialize import dumps, loads

if TYPE_CHECKING:
    from mesh_core._native import Message

_ITSELF = 256
"""What an item counts besides its bytes, as a message does."""


class Packed:
    """A pickled value; where it is sent as an argument the value itself arrives."""

    __slots__ = ("_buffers", "_data", "size")

    def __init__(self, data: bytes, buffers: list[Any]) -> None:
        self._data = data
        self._buffers = buffers
        self.size = _ITSELF + len(data) + sum(memoryview(each).nbytes for each in buffers)
        """What it counts for."""

    @classmethod
    def of(cls, value: object) -> Packed:
        """Pickle a value; its large buffers are not copied before it is sent."""
        return cls(*dumps(value, root="an item of the pipeline"))

    @classmethod
    def come(cls, message: Message) -> Packed:
        """What a stage has answered."""
        return cls(*message.raw())

    def load(self) -> Any:
        """The value."""
        return loads(self._data, self._buffers)

    def __reduce_ex__(self, _: Any) -> Any:
        return loads, (self._data, [PickleBuffer(each) for each in self._buffers])
