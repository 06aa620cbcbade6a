"""The structure of nested lists, tuples and dictionaries, as it travels between processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class Structure:
    """PyTorch's description of a structure. PyTorch 2.11 warns wherever its own description of a leaf is unpickled."""

    spec: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (_plain(self.spec),)

    def filled(self, leaves: Any) -> Any:
        """Return the structure with these leaves."""
        return pytree.tree_unflatten(leaves, self.spec)


def taken_apart(value: Any) -> tuple[list[Any], Structure]:
    """Return the leaves of a structure, and what it is without them."""
    leaves, spec = pytree.tree_flatten(value)
    return leaves, Structure(spec)


def _plain(spec: Any) -> Any:
    if spec.type is None:
        return None
    # The method is of PyTorch 2.10 and later.
    children = spec.children() if hasattr(spec, "children") else spec.children_specs
    return spec.type, spec.context, [_plain(each) for each in children]


def _rebuilt(plain: Any) -> Structure:
    return Structure(_spec(plain))


def _spec(plain: Any) -> Any:
    if plain is None:
        return pytree.tree_structure(0)
    kind, context, children = plain
    return pytree.TreeSpec(kind, context, [_spec(each) for each in children])
