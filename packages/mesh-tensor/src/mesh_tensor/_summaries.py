"""What a process says of its part of a tensor that somebody looks at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def looked(local: torch.Tensor, start: Sequence[int] | None = None) -> Any:
    """Return a summary of this process's part of a tensor."""
    shape = tuple(local.shape)
    low = mean = high = None
    odd = 0
    if not local.is_complex():
        total, count = 0.0, 0
        # A little at a time: the memory may be almost full.
        for some in torch.split(local.detach().flatten(), 1 << 20):
            values = some.double()
            finite = values[values.isfinite()]
            odd += values.numel() - finite.numel()
            if finite.numel():
                least, greatest = (float(each) for each in finite.aminmax())
                low, high = (
                    min(least, least if low is None else low),
                    max(greatest, greatest if high is None else high),
                )
                total, count = total + float(finite.sum()), count + finite.numel()
        mean = total / count if count else None
    begins = tuple(start) if start is not None else (0,) * len(shape)
    return "value", (shape, begins, local.numel() * local.element_size(), low, mean, high, odd, None)
