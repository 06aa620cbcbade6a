"""What workers do besides PyTorch's operators: values of their place in the mesh, and collectives.

A function here takes the bench, the tensors, and then its constant arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed import AllreduceOptions, AllToAllOptions, ReduceOp
from torch.utils import _pytree as pytree

from mesh_tensor import _windows
from mesh_tensor._exchange import Results, as_told, collect, collected, receive, send
from mesh_tensor._spares import SPARES
from mesh_tensor._torch._trees import Structure, taken_apart

if TYPE_CHECKING:
    from mesh_tensor._bench import Bench

OPS = {
    "sum": ReduceOp.SUM,
    "avg": ReduceOp.SUM,
    "product": ReduceOp.PRODUCT,
    "min": ReduceOp.MIN,
    "max": ReduceOp.MAX,
    "band": ReduceOp.BAND,
    "bor": ReduceOp.BOR,
    "bxor": ReduceOp.BXOR,
}
"""How a reduction by that name is done. `avg` divides afterwards, since not all backends have it."""


def rank_tensor(bench: Bench, places: dict[Any, int]) -> torch.Tensor:
    """Return this process's coordinate."""
    return torch.tensor(places[bench.address])


def reduce(bench: Bench, tensor: torch.Tensor, op: str, group: int) -> torch.Tensor:
    """Return the same on all processes of the group: all their tensors combined."""
    one = bench.groups[group]
    with one.together() as do:
        given = one.staged(tensor)
        result = SPARES.empty(given.shape, given.dtype, given.device)
        window = one.window() if _windows.is_for(given, op) else None
        if window is not None:
            window.reduce(do, given if given.is_contiguous() else result.copy_(given), result, op)
        else:
            do("allreduce", [result.copy_(given)], _options(op))
    result = result.to(tensor.device)
    return _averaged(result, one.size) if op == "avg" else result


def _options(op: str) -> AllreduceOptions:
    options = AllreduceOptions()
    options.reduceOp = OPS[op]
    return options


def _averaged(total: torch.Tensor, size: int) -> torch.Tensor:
    return total.div_(size) if total.is_floating_point() or total.is_complex() else total // size


def reduce_scatter(bench: Bench, tensor: torch.Tensor, op: str, group: int) -> torch.Tensor:
    """Return this process's part, along the first dimension, of all tensors combined."""
    one = bench.groups[group]
    with one.together() as do:
        given = one.staged(tensor)
        window = one.window() if _windows.is_for(given, op) else None
        if window is not None:
            shape = (given.shape[0] // one.size, *given.shape[1:])
            result = SPARES.empty(shape, given.dtype, given.device)
            window.reduce_scatter(do, given.contiguous(), result, op)
        else:
            whole = given.clone(memory_format=torch.contiguous_format)
            do("allreduce", [whole], _options(op))
            result = whole.chunk(one.size)[one.rank].clone()
    result = result.to(tensor.device)
    return _averaged(result, one.size) if op == "avg" else result


def reduce_all(bench: Bench, op: str, group: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Combine several, those of one type together in one memory."""
    kinds: dict[torch.dtype, list[int]] = {}
    for at, each in enumerate(tensors):
        kinds.setdefault(each.dtype, []).append(at)
    flat: list[torch.Tensor] = []
    one = bench.groups[group]
    with one.together() as do:
        for places in kinds.values():
            rows = [tensors[at].reshape(-1) for at in places]
            length = sum(each.numel() for each in rows)
            whole = one.staged(torch.cat(rows, out=SPARES.empty((length,), rows[0].dtype, rows[0].device)))
            window = one.window() if _windows.is_for(whole, op) else None
            if window is not None:
                window.reduce(do, whole, whole, op)
            else:
                do("allreduce", [whole], _options(op))
            flat.append(whole.to(rows[0].device))
    results = list(tensors)
    for places, total in zip(kinds.values(), flat, strict=True):
        whole = _averaged(total, bench.groups[group].size) if op == "avg" else total
        parts = torch.split(whole, [tensors[at].numel() for at in places])
        for at, part in zip(places, parts, strict=True):
            results[at] = part.view(tensors[at].shape)
    return results


def all_gather(bench: Bench, tensor: torch.Tensor, group: int) -> torch.Tensor:
    """Return the tensors of all processes of the group, stacked in the order of their coordinates."""
    one = bench.groups[group]
    with one.together() as do:
        mine = one.staged(tensor).contiguous()
        result = SPARES.empty((one.size, *mine.shape), mine.dtype, mine.device)
        window = one.window() if _windows.is_for(mine) else None
        if window is not None:
            window.all_gather(do, mine, result)
        else:
            parts = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(one.size)]
            do("allgather", [parts], [mine], AllgatherOptions())
            torch.stack(parts, out=result)
    return result.to(tensor.device)


def all_to_all(bench: Bench, tensor: torch.Tensor, group: int) -> torch.Tensor:
    """Return the n-th part of each process's tensor, along the first dimension, where n is this one's coordinate."""
    one = bench.groups[group]
    with one.together() as do:
        mine = one.staged(tensor).contiguous()
        result = torch.empty_like(mine, memory_format=torch.contiguous_format)
        do("alltoall_base", result, mine, [], [], AllToAllOptions())
    return result.to(tensor.device)


def call(
    _bench: Bench, function: Any, structure: Structure, forms: list[Any], *leaves: Any
) -> list[torch.Tensor]:
    """Call a user's function, and return the tensors among its results, which have these shapes and types."""
    args, kwargs = structure.filled(leaves)
    return as_told(pytree.tree_leaves(function(*args, **kwargs)), forms)


def ask(_bench: Bench, function: Any, structure: Structure, *leaves: Any) -> list[Results]:
    """Call a user's function whose results are not known in advance."""
    args, kwargs = structure.filled(leaves)
    return [Results(*taken_apart(function(*args, **kwargs)))]


def result(_bench: Bench, whole: Results, place: int) -> torch.Tensor:
    """Return one of the results."""
    tensor: torch.Tensor = whole.leaves[place]
    return tensor.contiguous()


def alias(_bench: Bench, tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensor, which gets another name."""
    return [tensor]


def seed(bench: Bench, value: int, places: dict[Any, int] | None) -> None:
    """Seed the random numbers: differently on each process, or, without places, identically on all."""
    torch.manual_seed(value if places is None else value * 1_000_003 + places[bench.address])


SPECIAL = {
    each.__name__: each
    for each in (
        rank_tensor,
        reduce,
        reduce_all,
        reduce_scatter,
        all_gather,
        all_to_all,
        seed,
        call,
        ask,
        result,
        alias,
        collect,
        collected,
        send,
        receive,
    )
}
