"""Moving tensors between meshes.

The processes send them to each other: nothing passes through the controller. It tells those of one mesh to send, and those of the other to wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from mesh_core import ProcMesh
from mesh_tensor._descriptors import Descriptor, strides_of
from mesh_tensor._errors import described, part_of
from mesh_tensor._extension import issuer_for
from mesh_tensor._instructions import HOLE, LIST, NUMBER, RECEIVED, SENT, SPECIAL
from mesh_tensor._propagate import Hit
from mesh_tensor._values import of_mesh

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mesh_tensor._descriptors import Form
    from mesh_tensor._stream import Stream
    from mesh_tensor._tensor import MeshTensor

T = TypeVar("T")
Rule = dict[str, str]
"""By dimensions of the destination: the corresponding dimensions of the source."""


def to_mesh(tensors: T, procs: ProcMesh) -> T:
    """Move a tensor to the processes of another mesh; also lists, dicts and tuples of tensors.

    Between meshes of the same shape each rank sends to its counterpart. Otherwise every dimension of the tensor's mesh must exist in the other mesh with the
    same size, and along new dimensions each process gets a copy. Dimensions of size 1 fit anything, so one process can send to many.

    The processes send the values to each other; the script does not wait and does not see them. Gradients flow back. The gradient of a
    tensor that was copied is the sum over its copies.

    >>> import torch
    >>> from mesh_core import this_host
    >>> from mesh_tensor import activate, fetch, rank_tensor, slice_mesh, to_mesh
    >>> with this_host().spawn_procs({"stage": 2, "gpus": 2}) as procs:
    ...     first, second = procs.slice(stage=0), procs.slice(stage=1)
    ...     moved = to_mesh(rank_tensor(first, "gpus") + 10, second)
    ...     print(fetch(moved).values())
    ...     copied = to_mesh(slice_mesh(moved, gpus=1), first)
    ...     print(fetch(copied).values())
    [tensor(10), tensor(11)]
    [tensor(11), tensor(11)]
    """
    if not isinstance(procs, ProcMesh):
        raise TypeError(f"to_mesh() moves tensors to a mesh of processes, got {procs!r}")
    leaves, shape = pytree.tree_flatten(tensors)
    places: dict[tuple[Stream, bool], list[int]] = {}
    for place, each in enumerate(leaves):
        if isinstance(each, torch.Tensor):
            source = _checked(each).descriptor.stream
            if source.procs != procs:
                recorded = each.requires_grad and torch.is_grad_enabled()
                places.setdefault((source, recorded), []).append(place)
    for (source, recorded), chosen in places.items():
        given = [leaves[place] for place in chosen]
        rule = _rule(given[0], source.procs, procs)
        moved = _Move.apply(procs, rule, *given) if recorded else _moved(given, procs, rule)
        for place, each in zip(chosen, moved, strict=True):
            leaves[place] = each
    result: T = pytree.tree_unflatten(leaves, shape)
    return result


def slice_mesh(tensor: torch.Tensor, **coords: int | slice) -> MeshTensor:
    """Return the tensor on a part of its mesh, ``procs.slice(**coords)``, with the same values.

    Operators and collectives on it involve only these processes. Nothing is copied, and no gradient flows through.

    >>> import torch
    >>> from mesh_core import this_host
    >>> from mesh_tensor import fetch, rank_tensor, reduce, slice_mesh
    >>> with this_host().spawn_procs({"gpus": 3}) as procs:
    ...     last = slice_mesh(rank_tensor(procs, "gpus"), gpus=slice(1, 3))
    ...     print(fetch(reduce(last)).values())
    [tensor(3), tensor(3)]
    """
    tensor = of_mesh(tensor)
    part = part_of(tensor, tensor.procs, coords)
    with _disable_current_modes():
        result: MeshTensor = issuer_for(part, type(tensor)).alias(tensor)
        return result


def _checked(tensor: torch.Tensor) -> MeshTensor:
    if getattr(type(tensor), "is_global", False):
        raise TypeError(
            f"to_mesh() moves tensors of the per-rank view, got {described(tensor)}: fetch() it, and distribute() it over the other mesh"
        )
    if not isinstance(getattr(tensor, "descriptor", None), Descriptor):
        raise TypeError(
            f"to_mesh() moves tensors of a mesh, got one of this process, {tuple(tensor.shape)} of {tensor.dtype}: share() it with the "
            "mesh that is to have it"
        )
    return cast("MeshTensor", tensor)


def _rule(tensor: torch.Tensor, source: ProcMesh, to: ProcMesh) -> Rule:
    """Return which dimension corresponds to which."""
    here, there = dict(source.sizes), dict(to.sizes)
    if set(here) != set(there) and list(here.values()) == list(there.values()):
        return dict(zip(there, here, strict=True))
    for dim, size in here.items():
        if size != 1 and there.get(dim) != size:
            found = f"has {there[dim]} in {to}" if dim in there else f"is not a dimension of {to}"
            raise ValueError(
                f"{described(tensor)}, cannot be moved: {dim!r}, with {size} processes, {found}. Both meshes must have the same shape, or the "
                "other one all dimensions of the tensor's with the same sizes: take a part first, with slice_mesh() of the tensor or "
                "slice() of the processes"
            )
    return {dim: dim for dim, size in here.items() if there.get(dim) == size}


def _moved(tensors: Sequence[torch.Tensor], to: ProcMesh, rule: Rule) -> tuple[MeshTensor, ...]:
    """Let one mesh send tensors, and another one wait for them."""
    given = cast("list[MeshTensor]", list(tensors))
    source = given[0].descriptor.stream
    if source.tensors.guard.on:
        source.tensors.guard.check("to_mesh", given)
    if source.tensors.recorders:
        source.tensors.recorded(lambda recorder: recorder.exchanges("move tensors to another mesh"))
    with _disable_current_modes():
        issuer = issuer_for(to, type(given[0]))
        target = issuer.stream
        with source.lock:
            target.exchange.join()
            source.exchange.join()
            route = source.exchange.source(target, rule)
            number = next(source.tensors.numbers)
            forms = [each.descriptor for each in given]

            def learn_sending() -> Hit:
                always = [source.exchange.number, to, dict(source.procs.sizes), rule, NUMBER]
                template = source.teach(
                    ((SPECIAL, "send", SENT), None), [*always, *[HOLE] * len(given)], {}, len(given), 0, 0, ()
                )
                return Hit(template, [], 0, False)

            def learn_receiving() -> Hit:
                made: list[Any] = [target.descriptor(_dense(each)) for each in forms]
                always = [*route, f"{source.procs}", len(given), NUMBER]
                template = target.teach(
                    ((SPECIAL, "receive", RECEIVED), None), always, {}, 0, len(made), LIST, ()
                )
                return Hit(template, made, LIST, True)

            source.issuer.function((SENT, route, *forms), learn_sending, given, number)
            # Nobody should wait for something that was not sent.
            target.sources[source] = None
            _, moved = issuer.function((RECEIVED, route, *forms), learn_receiving, [], number)
        return tuple(moved)


def _dense(descriptor: Descriptor) -> Form:
    shape, _, _, dtype, device = descriptor.form
    return shape, strides_of(shape), 0, dtype, device


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, to: ProcMesh, rule: Rule, *tensors: Any) -> Any:
        ctx.source, ctx.to, ctx.rule = tensors[0].procs, to, rule
        ctx.set_materialize_grads(False)
        return _moved(tensors, to, rule)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        given = [each for each in grads if each is not None]
        if not given:
            return (None, None, *grads)
        copied = tuple(dim for dim in ctx.to.sizes if dim not in ctx.rule)
        if copied:
            given = [_of_all_copies(each, copied) for each in given]
        back = {of: dim for dim, of in ctx.rule.items()}
        supply = iter(_moved(given, ctx.source, back))
        return (None, None, *[None if each is None else next(supply) for each in grads])


def _of_all_copies(gradient: Any, dims: tuple[str, ...]) -> Any:
    """Return the sum over copies, where the first of them was."""
    from mesh_tensor._collectives import reduce

    total = reduce(gradient, [dim for dim in dims if gradient.procs.sizes[dim] > 1])
    return slice_mesh(total, **dict.fromkeys(dims, 0))
