"""Gradients that are summed up together, while the process continues with the backward pass.

SUM-1: a sum over the processes may be postponed until its result is read, something is written to, or the message that asked for it ends. All of
these are the same instruction in every process, so the processes agree on which sums travel together (STM-3). Nothing outside the message can see
a tensor whose sum is still to come.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from mesh_tensor._instructions import Failed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.tensor.placement_types import Placement

    from mesh_tensor._parts._layouts import Layout
    from mesh_tensor._parts._worker import Worker

BUCKET_BYTES = 4 << 20
"""A bucket of this size is sent without waiting for more."""
_MOVED = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_DETACH = torch.ops.aten.detach.default


@dataclass(slots=True)
class Summand:
    """A sum that is still to come."""

    local: torch.Tensor
    """This process's summand."""
    layout: Layout
    """Of the sum."""
    where: Any
    """The instruction that asked for it."""
    results: list[DTensor] = field(default_factory=list)
    """The tensors that receive the sum: the first, and its aliases."""
    total: torch.Tensor | None = None
    """The sum, once it is there."""
    failed: Failed | None = None
    """Why it will not be there."""


@dataclass(slots=True)
class _Bucket:
    """Sums over one dimension of the mesh, of numbers of one kind."""

    dim: int
    summands: list[Summand] = field(default_factory=list)
    nbytes: int = 0
    flat: torch.Tensor | None = None
    """Their sums, once they are in progress."""


class Sums:
    """The postponed sums of one mesh."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._open: dict[tuple[int, torch.dtype], _Bucket] = {}
        self._under_way: list[_Bucket] = []
        self._pending: dict[int, Summand] = {}
        """By the identity of their results."""
        self.any = False
        """Whether there are results that may not be read yet."""

    def put_off(self, tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor | None:
        """Return the future tensor with this layout; ``None`` if that is not a sum that can wait."""
        dim = summed_dim(tensor.placements, placements)
        if dim is None or tensor.dtype not in _MOVED:
            return None
        local = tensor._local_tensor.detach()  # noqa: SLF001 - without a copy
        layout = self._worker.layouts.placed(tensor._spec, placements)  # noqa: SLF001 - its layout
        return self.shown(self.postpone(local, layout, dim))

    def postpone(self, local: torch.Tensor, layout: Layout, dim: int) -> Summand:
        """Have this process's summand summed up along a dimension of the mesh, later."""
        worker = self._worker
        summand = Summand(local, layout, worker.bench.instruction())
        bucket = self._open.setdefault((dim, local.dtype), _Bucket(dim))
        bucket.summands.append(summand)
        bucket.nbytes += local.nbytes
        if not self.any:
            self.any = True
            worker.bench.unfinished.append(self)
        if bucket.nbytes >= BUCKET_BYTES:
            del self._open[dim, local.dtype]
            self._send(bucket)
        return summand

    def shown(self, summand: Summand) -> DTensor:
        """Return the tensor that is, or will be, the sum."""
        total = summand.total
        result = summand.layout.join(summand.local if total is None else total)
        if summand.failed is not None:
            result._mesh_failed = summand.failed  # type: ignore[attr-defined]  # noqa: SLF001 - beside PyTorch's own
        elif total is None:
            summand.results.append(result)
            self._pending[id(result)] = summand
        return result

    def arrived(self, summand: Summand) -> torch.Tensor | None:
        """Wait for all sums; return this one, unless it has failed."""
        if summand.total is None and summand.failed is None:
            self.finish()
        return summand.total

    def before(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, writes: bool) -> Any:
        """Complete the tensors that an operator needs; return its result if that has to wait, too."""
        if func is _DETACH and (summand := self._pending.get(id(args[0]))) is not None:
            return self._alias(args[0], summand)
        self.make_way((*args, *kwargs.values()), writes=writes)
        return None

    def make_way(self, values: Iterable[Any], *, writes: bool) -> None:
        """Complete the tensors among the arguments of an operator."""
        if writes:
            # It may write to a summand, or to a view of one.
            self._send_all()
        if self._reads(values):
            self.finish()

    def is_pending(self, tensor: Any) -> bool:
        """Return whether a tensor may not be read yet."""
        return id(tensor) in self._pending

    def finish(self) -> None:
        """Wait for all sums."""
        self._send_all()
        buckets, self._under_way = self._under_way, []
        for bucket in buckets:
            flat = bucket.flat
            assert flat is not None
            try:
                torch.ops._c10d_functional.wait_tensor.default(flat)  # noqa: SLF001 - its public name
            except Exception as error:  # noqa: BLE001 - kept, for whoever asks
                self._fail(bucket, error)
                continue
            at = 0
            for summand in bucket.summands:
                size = summand.local.numel()
                total = summand.total = flat[at : at + size].view(summand.local.shape)
                at += size
                for each in summand.results:
                    each._local_tensor = total  # noqa: SLF001 - nobody has read it
        self._pending.clear()
        if self.any:
            self.any = False
            self._worker.bench.unfinished.remove(self)

    def _alias(self, tensor: DTensor, summand: Summand) -> DTensor:
        result = self.shown(summand)
        if (failed := getattr(tensor, "_mesh_failed", None)) is not None:
            result._mesh_failed = failed  # type: ignore[attr-defined]  # noqa: SLF001 - beside PyTorch's own
        return result

    def _reads(self, values: Iterable[Any]) -> bool:
        pending = self._pending
        for each in values:
            if isinstance(each, (list, tuple)):
                if self._reads(each):
                    return True
            elif id(each) in pending:
                return True
        return False

    def _send_all(self) -> None:
        buckets, self._open = self._open, {}
        for bucket in buckets.values():
            self._send(bucket)

    def _send(self, bucket: _Bucket) -> None:
        worker = self._worker
        flat = bucket.flat = torch.cat([each.local.reshape(-1) for each in bucket.summands])
        name = worker.mesh._dim_group_names[bucket.dim]  # noqa: SLF001 - as it was made
        try:
            torch.ops._c10d_functional.all_reduce_.default(flat, "sum", name)  # noqa: SLF001 - its public name
        except Exception as error:  # noqa: BLE001 - kept, for whoever asks
            self._fail(bucket, error)
        else:
            self._under_way.append(bucket)

    def _fail(self, bucket: _Bucket, error: Exception) -> None:
        self._worker.failures = True
        for summand in bucket.summands:
            failed = summand.failed = Failed(summand.where, "the sum of a gradient", error)
            for each in summand.results:
                each._mesh_failed = failed  # type: ignore[attr-defined]  # noqa: SLF001 - beside PyTorch's own


def summed_dim(before: Sequence[Placement], after: Sequence[Placement]) -> int | None:
    """Return the one dimension of the mesh along which summands become their sum, if nothing else changes."""
    changed = [at for at, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    if len(changed) != 1:
        return None
    one, other = before[changed[0]], after[changed[0]]
    is_sum = type(one) is Partial and one.reduce_op == "sum" and type(other) is Replicate
    return changed[0] if is_sum else None
