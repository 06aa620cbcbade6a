"""Gradients that are summed up together, while the process continues with the backward pass.

SUM-1: a sum over the processes may be postponed until its result is read, something is written to, or the message that asked for it ends. All of
these are the same instruction in every process, so the processes agree on which sums travel together (STM-3). Nothing outside the message can see
a tensor whose sum is still to come.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from mesh_tensor._instructions import Failed

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.distributed.tensor.placement_types import Placement

    from mesh_tensor._parts._layouts import Layout
    from mesh_tensor._parts._worker import Worker

BUCKET_BYTES = 4 << 20
"""A bucket of this size is sent without waiting for more."""
UNDER_WAY_BYTES = 64 << 20
"""The most bytes of summands that are under way, if each process gets only its part of the sum: no more than that is in memory besides the parts."""
_MOVED = frozenset((torch.float32, torch.float64, torch.float16, torch.bfloat16))
_DETACH = torch.ops.aten.detach.default


@dataclass(slots=True, eq=False)
class Summand:
    """A sum that is still to come."""

    local: torch.Tensor | None
    """This process's summand, until it is sent."""
    shape: torch.Size
    """Of that."""
    layout: Layout
    """Of the sum."""
    split: int | None
    """The dimension of which each process gets its part, if it gets only that."""
    where: Any
    """The instruction that asked for it."""
    results: list[DTensor] = field(default_factory=list)
    """The tensors that receive the sum: the first, and its aliases."""
    total: torch.Tensor | None = None
    """The sum, once it is there."""
    failed: Failed | None = None
    """Why it will not be there."""


@dataclass(slots=True, eq=False)
class _Bucket:
    """Sums over one dimension of the mesh, of numbers of one kind; all of them, or parts."""

    dim: int
    splits: bool
    summands: list[Summand] = field(default_factory=list)
    nbytes: int = 0
    flat: torch.Tensor | None = None
    """Their sums, once they are in progress."""


class Sums:
    """The postponed sums of one mesh."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._open: dict[tuple[int, bool, torch.dtype], _Bucket] = {}
        self._under_way: deque[_Bucket] = deque()
        self._pending: dict[int, Summand] = {}
        """By the identity of their results."""
        self.any = False
        """Whether there are results that may not be read yet."""

    def put_off(self, tensor: DTensor, placements: tuple[Placement, ...]) -> DTensor | None:
        """Return the future tensor with this layout; ``None`` if that is not a sum that can wait."""
        along = summed_along(tensor.placements, placements)
        if along is None or tensor.dtype not in _MOVED:
            return None
        local = tensor._local_tensor.detach()  # noqa: SLF001 - without a copy
        layout = self._worker.layouts.placed(tensor._spec, placements)  # noqa: SLF001 - its layout
        return self.shown(self.postpone(local, layout, *along))

    def postpone(self, local: torch.Tensor, layout: Layout, dim: int, split: int | None) -> Summand:
        """Have this process's summand summed up along a dimension of the mesh, later."""
        worker = self._worker
        summand = Summand(local, local.shape, layout, split, worker.bench.instruction())
        key = dim, split is not None, local.dtype
        bucket = self._open.setdefault(key, _Bucket(dim, split is not None))
        bucket.summands.append(summand)
        bucket.nbytes += local.nbytes
        if not self.any:
            self.any = True
            worker.bench.unfinished.append(self)
        if bucket.nbytes >= BUCKET_BYTES:
            del self._open[key]
            self._send(bucket)
        return summand

    def shown(self, summand: Summand) -> DTensor:
        """Return the tensor that is, or will be, the sum."""
        if summand.total is not None:
            return summand.layout.join(summand.total)
        if summand.failed is not None:
            result: DTensor = self._worker.zeros(summand.layout.spec)
            result._mesh_failed = summand.failed  # type: ignore[attr-defined]  # noqa: SLF001 - beside PyTorch's own
            return result
        result = summand.layout.join_later(self._worker.device)
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
        while self._under_way:
            self._complete(self._under_way.popleft())
        self._pending.clear()
        if self.any:
            self.any = False
            self._worker.bench.unfinished.remove(self)

    def _complete(self, bucket: _Bucket) -> None:
        """Wait for the sums of a bucket."""
        flat = bucket.flat
        assert flat is not None
        try:
            torch.ops._c10d_functional.wait_tensor.default(flat)  # noqa: SLF001 - its public name
        except Exception as error:  # noqa: BLE001 - kept, for whoever asks
            self._fail(bucket, error)
            return
        at = 0
        for summand in bucket.summands:
            total, at = self._taken(bucket, flat, at, summand)
            summand.total = total
            for each in self._those_of(summand):
                each._local_tensor = total  # noqa: SLF001 - nobody has read it

    def _those_of(self, summand: Summand) -> list[DTensor]:
        """Return the tensors that have waited for a sum. They do no longer."""
        results, summand.results = summand.results, []
        for each in results:
            self._pending.pop(id(each), None)
        return results

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

    def _taken(
        self, bucket: _Bucket, flat: torch.Tensor, at: int, summand: Summand
    ) -> tuple[torch.Tensor, int]:
        """Return a sum, or this process's part of it, and where the next one begins."""
        if summand.split is None:
            end = at + summand.shape.numel()
            return flat[at:end].view(summand.shape), end
        shape, dim = list(summand.shape), summand.split
        shape[dim] = -(-shape[dim] // self._worker.mesh.shape[bucket.dim])
        end = at + math.prod(shape)
        part = flat[at:end].view(shape)
        size = summand.layout.shape[dim]
        return part if size == shape[dim] else part.narrow(dim, 0, size).contiguous(), end

    def _send(self, bucket: _Bucket) -> None:
        worker = self._worker
        if bucket.splits:
            self._make_room(bucket.nbytes)
        name = worker.mesh._dim_group_names[bucket.dim]  # noqa: SLF001 - as it was made
        try:
            whole = self._taken_together(bucket)
            if bucket.splits:
                scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default  # noqa: SLF001 - its public name
                bucket.flat = scatter(whole, "sum", worker.mesh.shape[bucket.dim], name)
            else:
                bucket.flat = whole
                torch.ops._c10d_functional.all_reduce_.default(whole, "sum", name)  # noqa: SLF001 - its public name
        except Exception as error:  # noqa: BLE001 - kept, for whoever asks
            self._fail(bucket, error)
        else:
            self._under_way.append(bucket)

    def _make_room(self, nbytes: int) -> None:
        """Wait for the earliest sums under way until so many bytes may be sent."""
        splitting = [each for each in self._under_way if each.splits]
        nbytes += sum(each.nbytes for each in splitting)
        for each in splitting:
            if nbytes <= UNDER_WAY_BYTES:
                break
            self._under_way.remove(each)
            self._complete(each)
            nbytes -= each.nbytes

    def _taken_together(self, bucket: _Bucket) -> torch.Tensor:
        """Return the summands of a bucket as one tensor, and keep no other."""
        locals_: list[torch.Tensor] = []
        for each in bucket.summands:
            assert each.local is not None, "it was not sent yet"
            locals_.append(each.local)
            each.local = None
        if not bucket.splits:
            return torch.cat([each.reshape(-1) for each in locals_])
        count = self._worker.mesh.shape[bucket.dim]
        parts = [
            pieces(local, each.split or 0, count)
            for local, each in zip(locals_, bucket.summands, strict=True)
        ]
        return torch.cat([each[place].reshape(-1) for place in range(count) for each in parts])

    def _fail(self, bucket: _Bucket, error: Exception) -> None:
        self._worker.failures = True
        for summand in bucket.summands:
            summand.local = None
            failed = summand.failed = Failed(summand.where, "the sum of a gradient", error)
            for each in self._those_of(summand):
                each._local_tensor = self._worker.zeros(each._spec)._local_tensor  # noqa: SLF001 - nobody has read it
                each._mesh_failed = failed  # type: ignore[attr-defined]  # noqa: SLF001 - beside PyTorch's own


def summed_along(before: Sequence[Placement], after: Sequence[Placement]) -> tuple[int, int | None] | None:
    """Return the one dimension of the mesh along which summands become their sum, if nothing else changes, and which of the tensor's is split then."""
    changed = [at for at, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    if len(changed) != 1:
        return None
    (at,) = changed
    one, other = before[at], after[at]
    if type(one) is not Partial or one.reduce_op != "sum":
        return None
    if type(other) is Replicate:
        return at, None
    if type(other) is not Shard or any(
        isinstance(each, Shard) and each.dim == other.dim for place, each in enumerate(after) if place != at
    ):
        return None
    return at, other.dim


def gathered_along(before: Sequence[Placement], after: Sequence[Placement]) -> tuple[int, int] | None:
    """Return the one dimension of the mesh along which a tensor is gathered, if nothing else changes, and which of the tensor's was split."""
    changed = [at for at, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
    if len(changed) != 1:
        return None
    (at,) = changed
    one = before[at]
    if type(one) is not Shard or type(after[at]) is not Replicate:
        return None
    if any(isinstance(each, Shard) and each.dim == one.dim for each in after):
        return None
    return at, one.dim


def filled_up(part: torch.Tensor, dim: int, size: int, count: int) -> torch.Tensor:
    """Return a part that is as large as the first one of so many."""
    missing = -(-size // count) - part.shape[dim]
    if not missing:
        return part
    shape = list(part.shape)
    shape[dim] = missing
    return torch.cat([part, part.new_zeros(shape)], dim)


def pieces(tensor: torch.Tensor, dim: int, count: int) -> list[torch.Tensor]:
    """Split a tensor into parts of one size, the last ones filled up."""
    size = tensor.shape[dim]
    step = -(-size // count)
    return (
        [
            filled_up(tensor.narrow(dim, min(at, size), max(0, min(step, size - at))), dim, size, count)
            for at in range(0, step * count, step or 1)
        ]
        if step
        else [tensor] * count
    )
