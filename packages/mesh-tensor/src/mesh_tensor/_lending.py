"""Tensors of a mesh as arguments of actors.

TAR-1: an actor that gets a tensor of a mesh receives a copy of its process's part, as computed by the operators that were issued before the call,
whatever is issued after it.
"""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import _disable_current_modes

from mesh_core import SerializationError
from mesh_core.extensions import register_reducer
from mesh_tensor._errors import described
from mesh_tensor._exchange import arrive
from mesh_tensor._stream import caller


def carry(cls: type) -> None:
    """Send tensors of a class to actors as the local parts of their processes."""
    register_reducer(cls, _lent)


def _lent(tensor: Any) -> Any:
    """Let the processes keep a copy for the receivers of the message, and return what fetches it there."""
    stream = tensor.descriptor.stream
    tensors = stream.tensors
    if getattr(tensors.refuses, "here", False):
        raise SerializationError(
            f"cannot send {described(tensor)}, within something else that goes to the mesh: pass it as an argument"
        )
    if tensors.guard.on:
        tensors.guard.check("giving a tensor to an actor", [tensor])
    tensors.recorded(lambda recorder: recorder.exchanges("give a tensor to an actor"))
    with _disable_current_modes():
        stream.exchange.join()
        number = next(tensors.numbers)
        stream.alone(caller(), "lend", number, tensor.ref.number)
    where = tensors.proc.address, stream.exchange.number, len(stream.procs)
    return arrive, (*where, number, described(tensor))
