"""Where the bytes of Python objects are."""

from __future__ import annotations

import re
import sys
from typing import Any

from mesh_rdma._errors import InvalidTransfer
from mesh_rdma._native import Memory

_OBJECTS = "an array of Python objects cannot be transferred; pickle it instead"


def memory_of(data: Any) -> Memory:
    """Return the memory of an object with a buffer, an array that says where it is, or a tensor on a CPU."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return _of_tensor(data, torch)
    try:
        view = memoryview(data)
        # To write what is no object there would end the process.
        if "O" in view.format and "O" in re.sub(":[^:]*:", "", view.format):
            raise InvalidTransfer(_OBJECTS)
        return Memory.of_view(view)
    except InvalidTransfer:
        raise
    except (TypeError, ValueError, BufferError) as error:
        # Arrays of numpy have no buffer for some types, such as dates.
        told = getattr(data, "__array_interface__", None)
        if isinstance(told, dict):
            return _of_array(data, told)
        raise InvalidTransfer(
            f"memory must be a bytes-like object, an array or a tensor on a CPU, got {type(data).__name__} ({error})"
        ) from None


def writable_memory_of(data: Any) -> Memory:
    """The same for memory that is written to."""
    memory = memory_of(data)
    if not memory.writable:
        raise InvalidTransfer(
            f"the destination must be writable, got a read-only {type(data).__name__}. Use a bytearray or a writable array."
        )
    return memory


def _of_array(data: Any, told: dict[str, Any]) -> Memory:
    kind, shape = str(told["typestr"]), tuple(told["shape"])
    if kind[1] == "O":
        raise InvalidTransfer(_OBJECTS)
    # The digits after the letter; a date's unit follows them in brackets.
    item = int(kind[2:].partition("[")[0])
    address, readonly = told["data"]
    strides = told.get("strides")
    if strides is None:
        steps, step = [], item
        for size in reversed(shape):
            steps.append(step)
            step *= size
        strides = tuple(reversed(steps))
    return Memory.of_array(address, list(shape), list(strides), item, not readonly, data)


def _of_tensor(tensor: Any, torch: Any) -> Memory:
    if tensor.device.type != "cpu":
        raise InvalidTransfer(
            f"a tensor must be on a CPU to be transferred, this one is on {tensor.device}. Copy it with .cpu() first."
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise InvalidTransfer(
            f"a tensor must be dense to be transferred, got {tensor.layout}. Use .to_dense(), .resolve_conj() or .resolve_neg()."
        )
    item = tensor.element_size()
    return Memory.of_array(
        tensor.data_ptr(),
        list(tensor.shape),
        [stride * item for stride in tensor.stride()],
        item,
        True,
        # The storage too: `set_` gives the tensor another one.
        (tensor, tensor.untyped_storage()),
    )
