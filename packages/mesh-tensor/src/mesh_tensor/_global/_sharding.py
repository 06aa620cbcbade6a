"""The layout of a tensor on a mesh, as users write it and as PyTorch does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

Sharding = Sequence[str | tuple[str, ...] | None] | Sequence[Placement] | Mapping[str, Placement] | None
"""For each dimension of the tensor the dimension of the mesh that splits it, or several, or ``None``; or PyTorch's placement for each
dimension of the mesh, in order or by name; or nothing: everything is on every process."""


def placements_of(sharding: Sharding, names: tuple[str, ...], shape: Sequence[int]) -> tuple[Placement, ...]:
    """Return PyTorch's placements, one for each dimension of a mesh."""
    if sharding is None:
        return (Replicate(),) * len(names)
    if isinstance(sharding, Mapping):
        _known(sharding, names)
        return tuple(_checked(sharding.get(name, Replicate()), shape) for name in names)
    if isinstance(sharding, (str, Placement)):
        raise TypeError(f"a sharding is a list with an entry for each dimension, got {sharding!r} alone")
    if sharding and any(isinstance(each, Placement) for each in sharding):
        if len(sharding) != len(names):
            raise ValueError(
                f"{len(sharding)} placements, and the mesh has {len(names)} dimensions, {_listed(names)}: give one for each"
            )
        return tuple(_checked(each, shape) for each in sharding)
    if len(sharding) != len(shape):
        raise ValueError(
            f"the sharding has {len(sharding)} entries and the tensor {len(shape)} dimensions, {tuple(shape)}: give one for each, "
            "the name of a dimension of the mesh or None"
        )
    placed: dict[str, Placement] = {}
    for dim, entry in enumerate(sharding):
        splitters = (entry,) if isinstance(entry, str) else tuple(entry or ())  # type: ignore[arg-type]
        _known(splitters, names)
        if sorted(splitters, key=names.index) != list(splitters):
            raise ValueError(
                f"{splitters} split one dimension in another order than the mesh has them, {_listed(names)}: give them in the mesh's order"
            )
        for name in splitters:
            if name in placed:
                raise ValueError(f"{name!r} splits two dimensions of the tensor: it can split one")
            placed[name] = Shard(dim)
    return tuple(placed.get(name, Replicate()) for name in names)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names))


def _known(wanted: Any, names: tuple[str, ...]) -> None:
    for each in wanted:
        if each not in names:
            raise ValueError(f"the mesh has no dimension {each!r}; it has {_listed(names)}")


def _checked(placement: Any, shape: Sequence[int]) -> Placement:
    if not isinstance(placement, (Shard, Replicate, Partial)):
        raise TypeError(f"a placement must be Shard, Replicate or Partial, got {placement!r}")
    if isinstance(placement, Shard):
        if not -len(shape) <= placement.dim < len(shape):
            raise ValueError(f"{placement} of a tensor with {len(shape)} dimensions, {tuple(shape)}")
        return Shard(placement.dim % len(shape))
    return placement
