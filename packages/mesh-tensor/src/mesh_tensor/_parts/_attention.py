"""Attention on CPUs, which DTensor cannot shard: batches and heads are computed separately."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor.placement_types import Placement

    from mesh_tensor._parts._worker import Worker

FORWARD = "aten::_scaled_dot_product_flash_attention_for_cpu"
BACKWARD = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"


def splits(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Placement, ...] | None:
    """Return how the work can be split, judged by what all processes know; ``None`` if it cannot."""
    if name not in (FORWARD, BACKWARD):
        return None
    query, key = args[:2] if name == FORWARD else args[1:3]
    mask = kwargs.get("attn_mask")
    if mask is not None and (
        not isinstance(mask, DTensor)
        or any(type(each) is not Replicate for each in mask.placements)
        or any(size != 1 for size in mask.shape[:-2])
    ):
        return None
    # Groups of heads may be cut where those of the keys are not.
    dims = (0, 1) if query.shape[1] == key.shape[1] else (0,)
    return tuple(
        each if type(each) is Shard and each.dim in dims else Replicate() for each in query.placements
    )


def attend(
    worker: Worker, func: Any, args: Any, kwargs: Any, placements: tuple[Placement, ...]
) -> tuple[Any, ...]:
    """Have each process compute its batches and heads."""
    wholes = _shapes(func, args)

    def local(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        if value is kwargs.get("attn_mask") or value.placements == placements:
            return value._local_tensor  # noqa: SLF001 - without a copy
        return value.redistribute(worker.mesh, placements).to_local()

    parts = [local(each) for each in args]
    masks = {name: local(each) for name, each in kwargs.items()}
    if any(isinstance(each, torch.Tensor) and not each.numel() for each in parts):
        # The kernel wants some batch and some head, and this process has none.
        return missing(worker, func, args, placements)
    results = func(*parts, **masks)
    return tuple(
        worker.wrap(part, _whole_of(shape), placements) for part, shape in zip(results, wholes, strict=True)
    )


def missing(worker: Worker, func: Any, args: Any, placements: tuple[Placement, ...]) -> tuple[Any, ...]:
    """Return zeros in place of what this process was to compute."""
    dtype = next(each.dtype for each in args if isinstance(each, DTensor))
    made = []
    for shape in _shapes(func, args):
        whole = _whole_of(shape)
        part = worker.part(whole, placements)
        made.append(
            worker.wrap(torch.zeros(part.shape, dtype=dtype, device=worker.device), whole, placements)
        )
    return tuple(made)


def _shapes(func: Any, args: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the results, as if there was one process."""
    tensors = [each for each in args if isinstance(each, DTensor)]
    if func._schema.name == FORWARD:  # noqa: SLF001 - as the whole of PyTorch reads it
        query, _, value = tensors
        return [(*query.shape[:-1], value.shape[-1]), tuple(query.shape[:-1])]
    return [tuple(each.shape) for each in tensors[1:4]]


def _whole_of(shape: tuple[int, ...]) -> torch.Tensor:
    """Return the form of a result: heads lie in memory behind the places in the sequence."""
    batch, heads, places, *features = shape
    return torch.empty(batch, places, heads, *features, device="meta").transpose(1, 2)
