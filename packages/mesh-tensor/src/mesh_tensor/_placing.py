"""Moves from one kind of device to another, within each process of a mesh."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from mesh_tensor._descriptors import own_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mesh_tensor._tensor import MeshTensor


def device_named(device: Any) -> torch.device:
    """Return a kind of device; which device of a kind a process has is not the script's decision."""
    found = device if isinstance(device, torch.device) else torch.device(device)
    if own_device(found) is not found and found.index != 0:
        raise ValueError(
            f"each process of a mesh has one device of a kind, and chooses it itself: say {found.type!r}, not {str(found)!r}"
        )
    return own_device(found)


def moved(tensor: MeshTensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do what `Tensor.to` does."""
    kwargs = dict(kwargs)
    copies = kwargs.pop("copy", False)
    if args and isinstance(args[0], torch.Tensor):
        (other, *rest) = args
        args = (other.device, other.dtype, *rest)
    # `to(dtype, non_blocking, copy)` and `to(device, dtype, non_blocking, copy)`.
    before_copy = 2 if args and isinstance(args[0], torch.dtype) else 3
    if len(args) > before_copy:
        args, copies = args[:before_copy], args[before_copy]
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)  # noqa: SLF001 - as modules do
    if device is not None:
        device = device_named(device)
        if getattr(type(tensor), "is_global", False):
            # PyTorch's own functions take it for one of the CPU's, and say so here.
            if device.type not in {tensor.device.type, "cpu"}:
                raise ValueError(
                    f"a tensor of the global view is where its mesh has its tensors, on {str(tensor.device)!r}, got {str(device)!r}: make "
                    f"a mesh with device={device.type!r}"
                )
        elif device.type != tensor.device.type:
            return _Move.apply(tensor, device, dtype or tensor.dtype, layout)
    more: dict[str, Any] = {} if layout is None else {"memory_format": layout}
    return torch.Tensor.to(tensor, dtype=dtype or tensor.dtype, copy=copies, **more)


@contextmanager
def unseen() -> Iterator[None]:
    """Let PyTorch accept the names of CUDA devices in this thread if it would find none: they are those of other processes."""
    # PyTorch initializes CUDA before it asks any mode, unless it is doing so already.
    here = getattr(torch.cuda, "_tls", None)
    if here is None or hasattr(here, "is_initializing") or _has_cuda():
        yield
        return
    here.is_initializing = True
    try:
        yield
    finally:
        del here.is_initializing


@cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()


class _Move(torch.autograd.Function):
    # PyTorch's own function would not know where the gradient goes: to it both devices are this process's.

    @staticmethod
    def forward(ctx: Any, tensor: Any, device: torch.device, dtype: torch.dtype, layout: Any) -> Any:
        ctx.back = tensor.device, tensor.dtype
        more = {} if layout is None else {"memory_format": layout}
        return torch.ops.aten._to_copy.default(  # noqa: SLF001 - what `to` is made of
            tensor, dtype=dtype, device=device, **more
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        device, dtype = ctx.back
        return grad.to(device, dtype), None, None, None
