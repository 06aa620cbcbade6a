"""Views whose values DTensor has copied, such as a row of a tensor that is split by rows.

VWS-1: such a view and its source look like one memory. Writes to the view are written through, and
before the view is read it is refreshed if its source was written to since. All processes do so at the same instructions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


@dataclass(slots=True)
class Copied:
    """The source of a view."""

    base: DTensor
    take: Callable[[torch.Tensor], torch.Tensor] | None
    """Takes the view from a whole tensor; ``None`` if it shares its source's memory."""
    seen: int
    """How often the source had been written to when the values were taken."""


class Copies:
    """The views of one mesh whose values are copies."""

    def __init__(
        self,
        full: Callable[[DTensor], torch.Tensor],
        part: Callable[[torch.Tensor, Any], torch.Tensor],
    ) -> None:
        self._full = full
        self._part = part
        self._writes: dict[int, int] = {}
        """By memory, which all true views share."""
        self.any = False

    def add(self, results: Any, base: DTensor, take: Callable[[torch.Tensor], Any]) -> None:
        """Remember that these show a part of another tensor."""
        self.any = True
        leaves = tree_leaves(results)
        for at, each in enumerate(leaves):
            chosen = take if len(leaves) == 1 and isinstance(results, torch.Tensor) else _nth(take, at)
            _keep(each, Copied(base, chosen, self._count(base)))

    def follow(self, results: Any, base: DTensor) -> None:
        """Remember true views of such a view."""
        if getattr(base, "_mesh_copied", None) is not None:
            for each in tree_leaves(results):
                _keep(each, Copied(base, None, 0))

    def refresh(self, tensor: DTensor) -> None:
        """Refresh a tensor that shows another one."""
        copied: Copied | None = getattr(tensor, "_mesh_copied", None)
        if copied is None:
            return
        self.refresh(copied.base)
        if copied.take is not None and copied.seen != (now := self._count(copied.base)):
            fresh = copied.take(self._full(copied.base))
            tensor._local_tensor.copy_(self._part(fresh, tensor.placements))  # noqa: SLF001 - to write to
            copied.seen = now
            # Views of this one must be refreshed too.
            self._writes[_memory(tensor)] = self._count(tensor) + 1

    def written(self, tensor: DTensor) -> None:
        """Write the new values of a tensor to its source."""
        self._writes[_memory(tensor)] = self._count(tensor) + 1
        copied: Copied | None = getattr(tensor, "_mesh_copied", None)
        if copied is None:
            return
        base = copied.base
        if copied.take is not None:
            # In order in memory: of others, not every view is one.
            whole = self._full(base).contiguous()
            copied.take(whole).copy_(self._full(tensor))
            if whole is not base._local_tensor:  # noqa: SLF001 - to write to
                base._local_tensor.copy_(self._part(whole, base.placements))  # noqa: SLF001 - likewise
        self.written(base)
        copied.seen = self._count(base)

    def _count(self, tensor: DTensor) -> int:
        return self._writes.get(_memory(tensor), 0)


def _keep(tensor: Any, copied: Copied) -> None:
    tensor._mesh_copied = copied  # noqa: SLF001 - beside PyTorch's own


def _memory(tensor: DTensor) -> int:
    which: int = tensor._local_tensor.untyped_storage()._cdata  # noqa: SLF001 - which memory, if it has no bytes too
    return which


def _nth(take: Callable[[torch.Tensor], Any], at: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def one(whole: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = take(whole)[at]
        return found

    return one
