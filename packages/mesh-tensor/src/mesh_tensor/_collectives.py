"""What crosses the processes of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

import torch
from torch.utils._python_dispatch import _disable_current_modes

from mesh_tensor._descriptors import strides_of
from mesh_tensor._errors import described
from mesh_tensor._instructions import HOLE, LIST, SPECIAL
from mesh_tensor._propagate import Hit
from mesh_tensor._values import of_mesh

if TYPE_CHECKING:
    from mesh_tensor._tensor import MeshTensor

Op = Literal["sum", "avg", "mean", "product", "prod", "min", "max", "band", "bor", "bxor", "stack"]
_SPELLINGS = {"mean": "avg", "prod": "product"}
_LINEAR = ("sum", "avg")


@overload
def reduce(
    tensor: torch.Tensor, dims: str | Sequence[str] | None = None, op: Op = "sum", *, scatter: bool = False
) -> torch.Tensor: ...
@overload
def reduce(
    tensor: Sequence[torch.Tensor], dims: str | Sequence[str] | None = None, op: Op = "sum"
) -> list[torch.Tensor]: ...
def reduce(
    tensor: torch.Tensor | Sequence[torch.Tensor],
    dims: str | Sequence[str] | None = None,
    op: Op = "sum",
    *,
    scatter: bool = False,
) -> torch.Tensor | list[torch.Tensor]:
    """Combine the tensors of all processes along mesh dimensions, by default all dimensions. Each process gets the result.

    With `scatter`, each process keeps only its own part of the first dimension. `op="stack"` stacks the tensors in a
    new first dimension; `"mean"` and `"prod"` are other names of `"avg"` and `"product"`. Gradients flow through sums, averages and stacks. A list of tensors is reduced in one piece, element by
    element; no gradients flow through it.

    >>> from mesh_core import this_host
    >>> from mesh_tensor import fetch, rank_tensor, reduce
    >>> with this_host().spawn_procs({"gpus": 4}) as procs:
    ...     print(fetch(reduce(rank_tensor(procs, "gpus"), "gpus")).values())
    [tensor(6), tensor(6), tensor(6), tensor(6)]
    """
    how = _named(op)
    if not isinstance(tensor, torch.Tensor):
        return _reduce_all([of_mesh(each) for each in tensor], dims, how, scatter)
    tensor = of_mesh(tensor)
    along = _dims(tensor, dims)
    if how == "stack":
        if scatter:
            raise ValueError("a stack cannot be scattered: each process would get its own tensor back")
        return all_gather(tensor, dims)
    if tensor.requires_grad and torch.is_grad_enabled():
        if how not in _LINEAR:
            raise ValueError(f"no gradient flows through reduce(op={op!r}): detach() the tensor first")
        result: torch.Tensor = _Reduce.apply(tensor, along, how, scatter)
        return result
    return _reduce(tensor, along, how, scatter)


def _named(op: str) -> str:
    """Return the name by which the processes know a reduction."""
    known = [each for each in get_args(Op) if each not in _SPELLINGS]
    how = _SPELLINGS.get(op, op)
    if how not in known:
        raise ValueError(
            f"op must be {', '.join(map(repr, known[:-1]))} or {known[-1]!r}, got {op!r}; 'mean' stands for 'avg', and 'prod' for 'product'"
        )
    return how


def all_gather(tensor: torch.Tensor, dims: str | Sequence[str] | None = None) -> torch.Tensor:
    """Gather the tensors of all processes along mesh dimensions on each of them, stacked in a new first dimension."""
    tensor = of_mesh(tensor)
    along = _dims(tensor, dims)
    if tensor.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _Gather.apply(tensor, along)
        return result
    return _gather(tensor, along)


def all_to_all(tensor: torch.Tensor, dims: str | Sequence[str] | None = None) -> torch.Tensor:
    """Exchange parts between processes: row n of each tensor goes to the process with coordinate n."""
    tensor = of_mesh(tensor)
    issuer = tensor.descriptor.stream.issuer
    number, size = issuer.stream.groups.along(_dims(tensor, dims), tensor.device.type)
    _check_parts(tensor, size)
    result: torch.Tensor = issuer.special(
        "all_to_all", (tuple(tensor.shape), tensor.dtype), (tensor.detach(),), (number,), number
    )
    return result


def _reduce(tensor: MeshTensor, dims: tuple[str, ...], op: str, scatter: bool) -> torch.Tensor:
    issuer = tensor.descriptor.stream.issuer
    number, size = issuer.stream.groups.along(dims, tensor.device.type)
    shape = tuple(tensor.shape)
    if scatter:
        _check_parts(tensor, size)
        shape = (shape[0] // size, *shape[1:])
    result: torch.Tensor = issuer.special(
        "reduce_scatter" if scatter else "reduce", (shape, tensor.dtype), (tensor,), (op, number), op, number
    )
    return result


def _reduce_all(
    tensors: list[MeshTensor], dims: str | Sequence[str] | None, op: str, scatter: bool
) -> list[torch.Tensor]:
    if scatter or op == "stack":
        raise ValueError(
            "a list of tensors can be reduced, but neither scattered nor stacked: do so one by one"
        )
    if not tensors:
        return []
    if torch.is_grad_enabled() and any(each.requires_grad for each in tensors):
        raise ValueError(
            "no gradient flows through reduce() of a list: detach() its tensors, or reduce them one by one"
        )
    issuer = tensors[0].descriptor.stream.issuer
    stream = issuer.stream
    others = {each.procs for each in tensors} - {stream.procs}
    if others:
        raise ValueError(
            f"reduce() got tensors of two meshes and works on one; move them to one first, with to_mesh(). They are:\n"
            f"  {described(tensors[0])}\n  {described(next(each for each in tensors if each.procs in others))}"
        )
    kinds = sorted({each.device.type for each in tensors})
    if len(kinds) > 1:
        raise ValueError(f"reduce() got tensors on {' and on '.join(kinds)}: it works on one kind of device")
    number, _ = stream.groups.along(_dims(tensors[0], dims), *kinds)

    def learn() -> Hit:
        made: list[Any] = []
        for each in tensors:
            shape = tuple(each.shape)
            made.append(stream.descriptor((shape, strides_of(shape), 0, each.dtype, each.device)))
        arguments = [op, number, *[HOLE] * len(tensors)]
        template = stream.teach(
            ((SPECIAL, "reduce_all", ""), None), arguments, {}, len(tensors), len(made), LIST, ()
        )
        return Hit(template, made, 0, True)

    key = ("reduce_all", op, number, *[each.descriptor for each in tensors])
    with _disable_current_modes():
        _, results = issuer.function(key, learn, list(tensors))
    return results


def _gather(tensor: MeshTensor, dims: tuple[str, ...]) -> torch.Tensor:
    issuer = tensor.descriptor.stream.issuer
    number, size = issuer.stream.groups.along(dims, tensor.device.type)
    result: torch.Tensor = issuer.special(
        "all_gather", ((size, *tensor.shape), tensor.dtype), (tensor,), (number,), number
    )
    return result


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, dims: tuple[str, ...], op: str, scatter: bool) -> Any:
        ctx.dims, ctx.op, ctx.scatter = dims, op, scatter
        return _reduce(tensor, dims, op, scatter)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        if ctx.scatter:
            whole = _gather(grad, ctx.dims).flatten(0, 1)
            size = whole.shape[0] // grad.shape[0]
            return (whole / size if ctx.op == "avg" else whole), None, None, None
        return _reduce(grad, ctx.dims, ctx.op, False), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any, dims: tuple[str, ...]) -> Any:
        ctx.dims = dims
        return _gather(tensor, dims)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _reduce(grads[0], ctx.dims, "sum", True).squeeze(0), None


def _dims(tensor: MeshTensor, dims: str | Sequence[str] | None) -> tuple[str, ...]:
    sizes = tensor.procs.sizes
    if dims is None:
        return tuple(sizes)
    found = (dims,) if isinstance(dims, str) else tuple(dims)
    for each in found:
        if each not in sizes:
            raise ValueError(
                f"{tensor.procs} has no dimension {each!r}; it has {', '.join(map(repr, sizes))}. It is the mesh of {described(tensor)}"
            )
    return found


def _check_parts(tensor: torch.Tensor, size: int) -> None:
    if not tensor.dim() or tensor.shape[0] % size:
        raise ValueError(
            f"the first dimension of {tuple(tensor.shape)} must have a multiple of {size} elements, a part for each process: pad it. It is "
            f"that of {described(tensor)}"
        )
