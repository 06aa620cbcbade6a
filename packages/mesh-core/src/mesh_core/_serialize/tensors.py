"""torch tensors, which are sent as their elements in memory order.

Preserved: dtype, shape, the order of dimensions in memory (so channels-last stays so), the type
`Parameter`, `requires_grad` of a leaf, attributes set from Python.

Not preserved: the autograd graph, so a tensor computed from others arrives as a plain value that requires
no gradient; `.grad`; hooks; and the device. Messages are in host memory: an accelerator's tensor is copied to the
host and arrives on the CPU; the receiver may move it. Two tensors that share memory arrive with separate memory;
a tensor that occurs twice arrives as one tensor.

A message may have tens of thousands of tensors, so each costs few steps in Python, and none goes through torch's
dispatcher unless its elements have to be brought together.
"""

from __future__ import annotations

import importlib
import math
import sys
from _pickle import PickleBuffer
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from mesh_core._native import COPIED_BYTES, dlpack
from mesh_core._serialize.stream import Stream

if TYPE_CHECKING:
    from typing_extensions import Buffer

Dims = tuple[tuple[int, ...], tuple[int, ...] | None]
"""A tensor's shape, and its strides unless it is contiguous."""

# DLPack's codes of the dtypes that every release of torch takes from it, each with its bits in the lower byte.
_SIGNED, _UNSIGNED, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = (code << 8 for code in (0, 1, 2, 4, 5, 6))
_CODES = {
    "bool": _BOOL | 8,
    "uint8": _UNSIGNED | 8,
    "int8": _SIGNED | 8,
    "int16": _SIGNED | 16,
    "int32": _SIGNED | 32,
    "int64": _SIGNED | 64,
    "float16": _FLOAT | 16,
    "float32": _FLOAT | 32,
    "float64": _FLOAT | 64,
    "bfloat16": _BFLOAT | 16,
    "complex64": _COMPLEX | 64,
    "complex128": _COMPLEX | 128,
}


@cache
def _known() -> tuple[dict[Any, int], Any]:
    """Return the codes of dtypes whose tensors are never conjugates, and the layout of tensors with memory of their own."""
    torch: Any = sys.modules["torch"]
    real = {getattr(torch, name): code for name, code in _CODES.items() if code < _COMPLEX or code >= _BOOL}
    return real, torch.strided


def reduce_tensor(stream: Stream, tensor: Any) -> Any:
    """Send a strided tensor's elements; sparse, quantized and meta tensors are pickled by torch."""
    kinds, strided = _known()
    kind = kinds.get(tensor.dtype)
    if (
        kind is None
        or tensor.layout is not strided
        or not tensor.is_cpu
        or not tensor.is_contiguous()
        or tensor.is_neg()
    ):
        return _reduce_other(stream, tensor, rebuild_tensor, tensor.requires_grad and tensor.is_leaf)
    size = tensor.nbytes
    # Not the tensor: another thread may give it other memory.
    owner = tensor if size < COPIED_BYTES else tensor.untyped_storage()
    data: Any
    data, at = (stream.blocks or stream.begin_blocks()).put_memory(tensor.data_ptr(), size, owner)
    if size >= stream.alone:
        data = PickleBuffer(data)
    attributes = tensor.__dict__
    if not attributes and not tensor.requires_grad:
        return rebuild_plain, (data, at, kind, *tensor.shape)
    arguments = data, at, kind, (tuple(tensor.shape), None), tensor.requires_grad and tensor.is_leaf
    if attributes:
        return rebuild_tensor, arguments, dict(attributes), None, None, set_attributes
    return rebuild_tensor, arguments


def reduce_parameter(stream: Stream, parameter: Any) -> Any:
    """Send a parameter like a tensor; it arrives as a parameter."""
    return _reduce_other(stream, parameter, rebuild_parameter, parameter.requires_grad)


def rebuild_plain(data: Buffer, at: int, kind: int, *shape: int) -> Any:
    """Create a contiguous tensor without a gradient, by far the most frequent kind, with few steps."""
    return _of_dlpack()(dlpack(data, at, kind, shape))


def rebuild_tensor(data: Buffer, at: int, kind: int | str, dims: Dims, requires_grad: bool) -> Any:
    """Create the tensor on its memory in ``data``, which it keeps alive, or on a copy if it is small."""
    shape, strides = dims
    if type(kind) is int:
        tensor = _of_dlpack()(dlpack(data, at, kind, shape, strides))
    else:
        tensor = _of_buffer(data, at, str(kind), shape, strides)
    return tensor.requires_grad_() if requires_grad else tensor


def rebuild_parameter(data: Buffer, at: int, kind: int | str, dims: Dims, requires_grad: bool) -> Any:
    """Create a parameter on its memory in ``data``."""
    return _parameter()(rebuild_tensor(data, at, kind, dims, False), requires_grad)


def set_attributes(tensor: Any, attributes: dict[str, Any]) -> None:
    """Restore attributes that were set on a tensor from Python; its own ``__setstate__`` does something else."""
    tensor.__dict__.update(attributes)


@cache
def _of_dlpack() -> Callable[[object], Any]:
    public: Callable[[object], Any] = importlib.import_module("torch.utils.dlpack").from_dlpack
    # That first looks for a method that capsules do not have, which takes nearly as long as making the tensor. What it calls then
    # has no public name.
    return getattr(importlib.import_module("torch._C"), "_from_dlpack", public)


@cache
def _parameter() -> Callable[[Any, bool], Any]:
    parameter: Callable[[Any, bool], Any] = importlib.import_module("torch.nn").Parameter
    return parameter


def _of_buffer(
    data: Buffer, at: int, kind: str, shape: tuple[int, ...], strides: tuple[int, ...] | None
) -> Any:
    """Create a tensor of a dtype that not every release of torch takes from DLPack."""
    torch: Any = importlib.import_module("torch")
    dtype = getattr(torch, kind)
    count = math.prod(shape)
    if not count:
        # torch rejects an empty buffer.
        return torch.empty(shape, dtype=dtype)
    size = count * dtype.itemsize
    if type(data) is bytes or size < COPIED_BYTES:
        data, at = bytearray(memoryview(data)[at : at + size]), 0
    flat = torch.frombuffer(data, dtype=dtype, count=count, offset=at)
    return flat.view(shape) if strides is None else flat.as_strided(shape, strides)


def _reduce_other(stream: Stream, tensor: Any, rebuild: Any, requires_grad: bool) -> Any:
    """Send any tensor, or a parameter."""
    if tensor.layout is not _known()[1] or tensor.is_quantized or tensor.is_meta:
        return tensor.__reduce_ex__(5)
    value, strides = _together(tensor)
    name = str(value.dtype).removeprefix("torch.")
    kind = _CODES.get(name, name)
    data: Any
    data, at = (stream.blocks or stream.begin_blocks()).put_memory(value.data_ptr(), value.nbytes, value)
    if value.nbytes >= stream.alone:
        data = PickleBuffer(data)
    arguments = data, at, kind, (tuple(value.shape), strides), requires_grad
    if attributes := tensor.__dict__:
        return rebuild, arguments, dict(attributes), None, None, set_attributes
    return rebuild, arguments


def _together(tensor: Any) -> tuple[Any, tuple[int, ...] | None]:
    """Return a tensor whose elements lie together in host memory, and its strides unless it is contiguous."""
    value = tensor.detach()
    if not value.is_cpu:
        value = value.cpu()
    value = value.resolve_conj().resolve_neg()
    if value.is_contiguous():
        return value, None
    strides = value.stride()
    outer_first = sorted(range(value.dim()), key=strides.__getitem__, reverse=True)
    if value.permute(outer_first).is_contiguous():
        # A transposed or channels-last tensor: its elements are contiguous, in another order.
        return value, strides
    return value.contiguous(), None
