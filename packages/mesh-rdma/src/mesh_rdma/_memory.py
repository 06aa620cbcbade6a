"""The addresses of Python objects' bytes: in memory of the processor, or of a GPU."""

from __future__ import annotations

import re
import sys
from typing import Any

from mesh_rdma._errors import InvalidTransfer
from mesh_rdma._native import Memory

_OBJECTS = "an array of Python objects cannot be transferred; pickle it instead"


def memory_of(data: Any) -> Memory:
    """Return the memory of an object with a buffer, of an array that says where it is, or of a tensor on a CPU or a GPU."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(data, torch.Tensor):
        return _of_tensor(data, torch)
    try:
        view = memoryview(data)
        # Writing to an invalid address would kill the process.
        if "O" in view.format and "O" in re.sub(":[^:]*:", "", view.format):
            raise InvalidTransfer(_OBJECTS)
        return Memory.of_view(view)
    except InvalidTransfer:
        raise
    except (TypeError, ValueError, BufferError) as error:
        # numpy arrays have no buffer for some types, such as dates.
        told = getattr(data, "__array_interface__", None)
        if isinstance(told, dict):
            return _of_array(data, told)
        # Asked last: some libraries compute it, and those whose arrays are on a GPU have no buffer.
        told = getattr(data, "__cuda_array_interface__", None)
        if isinstance(told, dict):
            return _of_cuda_array(data, told)
        raise InvalidTransfer(
            f"memory must be a bytes-like object, an array or a tensor, got {type(data).__name__} ({error})"
        ) from None


def writable_memory_of(data: Any) -> Memory:
    """The same for memory that will be written to."""
    memory = memory_of(data)
    if not memory.writable:
        raise InvalidTransfer(
            f"the destination must be writable, got a read-only {type(data).__name__}. Use a bytearray or a writable array."
        )
    return memory


def _layout(told: dict[str, Any]) -> tuple[int, list[int], list[int], int, bool]:
    """Return address, shape, strides in bytes, size of an element, and whether it may be written to."""
    kind, shape = str(told["typestr"]), [int(size) for size in told["shape"]]
    if kind[1] == "O":
        raise InvalidTransfer(_OBJECTS)
    # The digits after the letter; a date's unit follows them in brackets.
    item = int(kind[2:].partition("[")[0])
    address, readonly = told["data"]
    strides = told.get("strides")
    if strides is None:
        strides, step = [], item
        for size in reversed(shape):
            strides.insert(0, step)
            step *= size
    return int(address or 0), shape, [int(step) for step in strides], item, not readonly


def _of_array(data: Any, told: dict[str, Any]) -> Memory:
    return Memory.of_array(*_layout(told), data)


def _of_cuda_array(data: Any, told: dict[str, Any]) -> Memory:
    if told.get("mask") is not None:
        raise InvalidTransfer(
            "an array with a mask cannot be transferred; transfer its data and its mask instead"
        )
    # 1 and 2 are default streams; none means that no work on the array is queued.
    return Memory.of_cuda(*_layout(told), told.get("stream"), data)


def _of_tensor(tensor: Any, torch: Any) -> Memory:
    on_gpu = tensor.device.type == "cuda" and torch.version.hip is None
    if tensor.device.type != "cpu" and not on_gpu:
        raise InvalidTransfer(
            f"a tensor must be on a CPU or an NVIDIA GPU to be transferred, this one is on {tensor.device}. "
            "Copy it with .cpu() first."
        )
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        raise InvalidTransfer(
            f"a tensor must be dense to be transferred, got {tensor.layout}. Use .to_dense(), .resolve_conj() or .resolve_neg()."
        )
    item = tensor.element_size()
    strides = [stride * item for stride in tensor.stride()]
    layout = (tensor.data_ptr(), list(tensor.shape), strides, item, True)
    # The storage too: `set_` gives the tensor another one.
    keep = (tensor, tensor.untyped_storage())
    if on_gpu:
        return Memory.of_cuda(*layout, torch.cuda.current_stream(tensor.device).cuda_stream, keep)
    return Memory.of_array(*layout, keep)
