"""What is true of an operator whatever its arguments, read from its schema once."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch._ops import OpOverload

# Their numbers are counts of elements, or indices.
_SHAPED_BY_NUMBERS = frozenset({"aten::arange", "aten::range", "aten::repeat_interleave"})
_NUMBERS = frozenset({"number", "float", "Scalar", "Optional[number]", "Optional[float]"})


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator, with the information of its schema."""

    name: tuple[str, str, str]
    """Namespace, name and overload, by which workers find it."""
    numbers: frozenset[int | str]
    """Places and names of arguments that are numbers on which no shape depends: sent with each call, not part of a template."""
    written: tuple[int | str | None, ...]
    """For each result: the argument that it is, changed in place; ``None`` if it is new."""
    changes_shape_in_place: bool
    """The argument has another shape afterwards, as with `t_`."""
    lists: bool
    """The one result is a list of tensors."""
    changed: frozenset[int | str] = frozenset()
    """Places and names of arguments that are changed in place."""
    changed_lists: tuple[int | str, ...] = ()
    """Those of them that are lists of tensors: PyTorch does not count these changes for tensors of ours (VRS-1)."""
    module: str | None = None
    """The module that defines it, if it is written in Python: to be imported where it is called."""


COLLECTIVE_SPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")
"""Where PyTorch has the operators that processes carry out together."""

OURS = Operator(("mesh_tensor", "", ""), frozenset(), (), False, False)
"""What is not one of PyTorch's."""


def describe(func: OpOverload) -> Operator:
    """Read the schema."""
    schema = func._schema  # noqa: SLF001 - as the whole of PyTorch reads it
    numbers: set[int | str] = set()
    changed: set[int | str] = set()
    changed_lists: list[int | str] = []
    aliases: dict[str, int | str] = {}
    for place, argument in enumerate(schema.arguments):
        where: int | str = argument.name if argument.kwarg_only else place
        if str(argument.type) in _NUMBERS and schema.name not in _SHAPED_BY_NUMBERS:
            numbers.add(where)
            numbers.add(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            changed |= {where, argument.name}
            if str(argument.type) == "List[Tensor]":
                changed_lists.append(where)
            for name in argument.alias_info.before_set:
                aliases[name] = where
    written = tuple(
        next((aliases[name] for name in result.alias_info.before_set if name in aliases), None)
        if result.alias_info is not None and result.alias_info.is_write
        else None
        for result in schema.returns
    )
    if not schema.returns and aliases:
        # Operators on lists, in place, return nothing.
        written = ()
    namespace, _, name = schema.name.partition("::")
    return Operator(
        name=(namespace, name, func._overloadname),  # noqa: SLF001 - likewise
        numbers=frozenset(numbers),
        written=written,
        changes_shape_in_place=torch.Tag.inplace_view in func.tags,
        changed=frozenset(changed),
        changed_lists=tuple(changed_lists),
        module=_module(schema.name),
        lists=len(schema.returns) == 1 and str(schema.returns[0].type) == "List[Tensor]",
    )


_AT_ONCE = {
    ("aten", "_conj", "default"): ("aten", "conj_physical", "default"),
    ("aten", "_neg_view", "default"): ("aten", "neg", "default"),
    # Zeros without memory, for which DTensor and messages would allocate memory.
    ("aten", "_efficientzerotensor", "default"): ("aten", "zeros", "default"),
}
"""Operators that only leave a mark for PyTorch where they are called: they are called elsewhere, and it does not see the mark."""


NEEDS_GRADIENTS = frozenset({"aten::mkldnn_rnn_layer"})
"""Operators that return what their own backward needs only where PyTorch records gradients: workers do not, and must for these."""


def _module(name: str) -> str | None:
    from torch._library.custom_ops import OPDEFS

    found = OPDEFS.get(name)
    module: str | None = None if found is None else found._init_fn.__module__  # noqa: SLF001 - nothing else tells
    return None if module == "__main__" else module


def find(name: tuple[str, str, str], module: str | None) -> Any:
    """Return the operator of that name, as a worker calls it."""
    if module is not None:
        import_module(module)
    namespace, word, overload = _AT_ONCE.get(name, name)
    return getattr(getattr(getattr(torch.ops, namespace), word), overload)
