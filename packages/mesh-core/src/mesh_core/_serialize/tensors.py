"""torch tensors, which are sent as their elements in memory order.

Preserved: dtype, shape, the order of dimensions in memory (so channels-last stays so), the type
`Parameter`, `requires_grad` of a leaf, attributes set from Python.

Not preserved: the autograd graph, so a tensor computed from others arrives as a plain value that requires
no gradient; `.grad`; hooks; and the device. Messages are in host memory: an accelerator's tensor is copied to the
host and arrives on the CPU; the receiver may move it. Two tensors that share memory arrive with separate memory;
a tensor that occurs twice arrives as one tensor.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from mesh_core._serialize.memory import carry

if TYPE_CHECKING:
    from typing_extensions import Buffer


def reduce_tensor(tensor: Any) -> Any:
    """Send a strided tensor's elements; sparse, quantized and meta tensors are pickled by torch."""
    torch: Any = sys.modules["torch"]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return tensor.__reduce_ex__(5)
    requires_grad = tensor.requires_grad and tensor.is_leaf
    return _reduced(rebuild_tensor, tensor, (*_elements(tensor), requires_grad))


def reduce_parameter(parameter: Any) -> Any:
    """Send a parameter like a tensor; it arrives as a parameter."""
    torch: Any = sys.modules["torch"]
    if parameter.layout is not torch.strided or parameter.is_quantized or parameter.device.type == "meta":
        return parameter.__reduce_ex__(5)
    return _reduced(rebuild_parameter, parameter, (*_elements(parameter), parameter.requires_grad))


def rebuild_tensor(
    data: Buffer, dtype: str, shape: tuple[int, ...], axes: tuple[int, ...] | None, requires_grad: bool
) -> Any:
    """Create the tensor on ``data``, which it keeps alive."""
    torch: Any = importlib.import_module("torch")
    kind = getattr(torch, dtype)
    # torch rejects an empty buffer.
    flat = torch.frombuffer(data, dtype=kind) if 0 not in shape else torch.empty(0, dtype=kind)
    tensor = flat.view(shape)
    if axes is not None:
        tensor = tensor.permute(axes)
    return tensor.requires_grad_() if requires_grad else tensor


def rebuild_parameter(
    data: Buffer, dtype: str, shape: tuple[int, ...], axes: tuple[int, ...] | None, requires_grad: bool
) -> Any:
    """Create a parameter on ``data``."""
    torch: Any = importlib.import_module("torch")
    return torch.nn.Parameter(rebuild_tensor(data, dtype, shape, axes, False), requires_grad)


def set_attributes(tensor: Any, attributes: dict[str, Any]) -> None:
    """Restore attributes that were set on a tensor from Python; its own ``__setstate__`` does something else."""
    tensor.__dict__.update(attributes)


def _elements(tensor: Any) -> tuple[Any, str, tuple[int, ...], tuple[int, ...] | None]:
    """Return a tensor's memory, dtype, shape in memory order, and the permutation from that to its own shape."""
    value = tensor.detach()
    if value.device.type != "cpu":
        value = value.cpu()
    value = value.resolve_conj().resolve_neg()
    axes: tuple[int, ...] | None = None
    if not value.is_contiguous():
        strides = value.stride()
        outer_first = sorted(range(value.dim()), key=strides.__getitem__, reverse=True)
        permuted = value.permute(outer_first)
        if permuted.is_contiguous():
            # A transposed or channels-last tensor: its elements are contiguous, in another order.
            value = permuted
            axes = tuple(sorted(range(len(outer_first)), key=outer_first.__getitem__))
        else:
            value = value.contiguous()
    data = carry(value.data_ptr(), value.numel() * value.element_size(), value)
    return data, str(value.dtype).removeprefix("torch."), tuple(value.shape), axes


def _reduced(rebuild: Any, tensor: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    if attributes := tensor.__dict__:
        return rebuild, arguments, dict(attributes), None, None, set_attributes
    return rebuild, arguments
