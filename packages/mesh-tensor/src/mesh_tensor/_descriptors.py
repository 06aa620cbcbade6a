"""What a controller knows of a tensor's form, kept once for all tensors of that form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from mesh_tensor._stream import Stream

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
        self.make = partial(
            make, cls, shape, strides=strides, storage_offset=offset, dtype=dtype, device=device
        )

    def __repr__(self) -> str:
        shape, _, _, dtype, _ = self.form
        return f"{tuple(shape)} of {str(dtype).removeprefix('torch.')}"


def form_of(tensor: torch.Tensor) -> Form:
    """Return the form of a tensor that says itself."""
    return (
        tuple(tensor.shape),
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.device,
    )


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor of that shape that has its elements in order."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
