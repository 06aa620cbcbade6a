"""Memory of large results that is no longer used, kept for the next ones.

The kernel clears each page of new memory when it is first touched, which takes longer than a collective's arithmetic; freed memory returns
to it at once. CUDA's allocator keeps memory by itself.

SPR-1: memory is given out again only when no tensor and no view of it is left in this process.
"""

from __future__ import annotations

import math
import threading

import torch

LEAST = 1 << 20
"""Bytes: the allocator itself keeps smaller pieces."""
MOST = 256 << 20
"""Bytes that are kept at most."""


def _uses(tensor: torch.Tensor) -> int:
    count: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)  # noqa: SLF001 - nothing else tells
    return count


_UNUSED = _uses(torch.empty(1))
"""The number of references to memory that one tensor has."""


class Spares(threading.local):
    """The memory that one thread keeps: each stream of a process has a thread that computes."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        """Those that were unused for longest come first."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a tensor with undefined values."""
        numbers = math.prod(shape)
        size = numbers * dtype.itemsize
        if device.type != "cpu" or not LEAST <= size <= MOST:
            return torch.empty(shape, dtype=dtype, device=device)
        for at, each in enumerate(self._kept):
            if each.numel() == numbers and each.dtype is dtype and self._is_free(each):
                self._kept.append(self._kept.pop(at))
                return each.view(shape)
        made = torch.empty(numbers, dtype=dtype)
        self._kept.append(made)
        while sum(each.nbytes for each in self._kept) > MOST:
            self._kept.pop(0)
        return made.view(shape)

    @staticmethod
    def _is_free(tensor: torch.Tensor) -> bool:
        # It may have been resized.
        return _uses(tensor) == _UNUSED and tensor.untyped_storage().nbytes() == tensor.nbytes


SPARES = Spares()
"""The calling thread's spares."""
