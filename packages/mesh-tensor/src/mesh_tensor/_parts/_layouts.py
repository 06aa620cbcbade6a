"""Layouts of tensors on a mesh, told apart by identity: decisions about operators are looked up by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from mesh_tensor._descriptors import strides_of
from mesh_tensor._torch._dtensor import DTensorSpec, TensorMeta, compute_local_shape_and_global_offset

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

_LAYOUTS = 1 << 14
"""The most layouts of a mesh that are told apart."""


def in_order(meta: Any) -> TensorMeta:
    """Return the form of a tensor of that shape and type whose elements are in order."""
    return TensorMeta(meta.shape, strides_of(meta.shape), meta.dtype)


class Layout:
    """A layout on a mesh, told apart by identity."""

    __slots__ = ("_nothing", "shape", "spec")

    def __init__(self, spec: DTensorSpec, shape: tuple[int, ...]) -> None:
        self.spec = spec
        self.shape = shape
        """Of this process's part."""
        self._nothing: torch.Tensor | None = None

    def join(self, local: torch.Tensor) -> DTensor:
        """Make a DTensor of this process's part."""
        made: DTensor = DTensor(local, self.spec, requires_grad=False)
        return made

    def join_later(self, device: torch.device) -> DTensor:
        """Make a DTensor of a part that is still to come: until then its local tensor has that form, and no memory of its own."""
        if self._nothing is None:
            one = torch.zeros((), dtype=self.spec.tensor_meta.dtype, device=device)  # type: ignore[union-attr]  # it has one
            self._nothing = one.expand(self.shape)
        return self.join(self._nothing)


class Layouts:
    """The layouts on one mesh."""

    def __init__(self) -> None:
        self._known: dict[DTensorSpec, Layout] = {}
        self._by_identity: dict[int, tuple[DTensorSpec, Layout]] = {}
        """Keeps the objects alive, so that no other gets the identity of one."""
        self._placed: dict[tuple[Layout, tuple[Placement, ...]], Layout] = {}

    def of(self, spec: DTensorSpec) -> Layout:
        """Return the one object that stands for a layout."""
        found = self._by_identity.get(id(spec))
        if found is not None:
            return found[1]
        if len(self._by_identity) >= _LAYOUTS:
            # Decisions about the old objects are not found any more, which costs time and nothing else.
            self._known.clear()
            self._by_identity.clear()
        layout = self._known.get(spec)
        if layout is None:
            shape, _ = compute_local_shape_and_global_offset(spec.shape, spec.mesh, spec.placements)
            layout = self._known[spec] = Layout(spec, tuple(shape))
        self._by_identity[id(spec)] = spec, layout
        return layout

    def placed(self, spec: DTensorSpec, placements: tuple[Placement, ...]) -> Layout:
        """Return the layout of a tensor of the same shape that is placed in another way, with its elements in order."""
        key = self.of(spec), placements
        found = self._placed.get(key)
        if found is None:
            if len(self._placed) >= _LAYOUTS:
                self._placed.clear()
            found = self._placed[key] = self.of(
                DTensorSpec(spec.mesh, placements, in_order(spec.tensor_meta))
            )
        return found
