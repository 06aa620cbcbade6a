"""What a controller knows about a tensor's form, kept once for all tensors of that form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mesh_tensor._stream import Stream

HERE = frozenset({"cpu", "meta"})
"""Kinds of devices that each process has, and of which it has one."""
Form = tuple[tuple[int, ...], tuple[int, ...], int, torch.dtype, torch.device]
"""Shape, strides, offset in the storage, type and device."""


class Descriptor:
    """The form of tensors, and which mesh they are on. Equal ones are one object, so that it hashes by identity."""

    __slots__ = ("form", "make", "stream")

    def __init__(self, stream: Stream, form: Form, cls: type) -> None:
        self.stream = stream
        self.form = form
        shape, strides, offset, dtype, device = form
        make: Callable[..., Any] = torch.Tensor._make_wrapper_subclass  # noqa: SLF001 - how classes of tensors are made
        more: dict[str, Any] = {}
        if device.type not in HERE:
            # To PyTorch in this process it is one of the CPU's, as there may be no such device here, and so that gradients are computed in the
            # thread that asks for them; but autocast treats it as what it is.
            more = _autocast(device.type)
            device = torch.device("cpu")
        self.make = partial(
            make, cls, shape, strides=strides, storage_offset=offset, dtype=dtype, device=device, **more
        )

    def __repr__(self) -> str:
        shape, _, _, dtype, device = self.form
        where = "" if device.type == "cpu" else f" on {device}"
        return f"{tuple(shape)} of {str(dtype).removeprefix('torch.')}{where}"


def _autocast(kind: str) -> dict[str, Any]:
    key = getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}", None)  # noqa: SLF001 - there is no other name for it
    return {} if key is None else {"_extra_dispatch_keys": torch._C.DispatchKeySet(key)}  # noqa: SLF001 - likewise


def form_of(tensor: torch.Tensor) -> Form:
    """Return the form of a tensor."""
    return (
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        own_device(tensor.device),
    )


def own_device(device: torch.device) -> torch.device:
    """Return it without its number: each process has one device of a kind."""
    return device if device.type in HERE or device.index is None else torch.device(device.type)


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor of that shape that has its elements in order."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
