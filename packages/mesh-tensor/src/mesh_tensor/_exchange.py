"""How a process gives its tensors to other processes and to actors, and receives theirs.

A function here takes the bench, the instruction's number for errors, and the controller's arguments. They run in the order of the stream.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from mesh_core import MeshError, context
from mesh_core.extensions import NotYet, current_proc, find
from mesh_tensor._arrivals import LENT, MOVED, RETURNED, Arrivals
from mesh_tensor._errors import RemoteException
from mesh_tensor._instructions import GONE, LOST, Failed
from mesh_tensor._torch._trees import taken_apart

if TYPE_CHECKING:
    from mesh_core import ProcMesh
    from mesh_tensor._arrivals import Address
    from mesh_tensor._bench import Bench


@dataclass(frozen=True)
class Results:
    """The results of a function, until each of its tensors has a name."""

    leaves: list[Any]
    shape: Any


def arrivals() -> Arrivals:
    """Return this process's instance."""
    found = find(Arrivals)
    if found is None:
        raise MeshError("nothing can arrive in this process: its controller has not said so")
    return found


def lend(bench: Bench, count: int, number: int, ref: int) -> None:
    """Have a copy of a tensor for an actor of this process, as it is now."""
    arrivals().lend((bench.controller, LENT, number), _copied(bench, count, ref, "giving it to an actor"))


def unlend(bench: Bench, _: int, number: int) -> None:
    """No actor of this process wants it. At the process's end arrivals are over before this is called."""
    here = find(Arrivals)
    if here is not None:
        here.drop((bench.controller, LENT, number))


def send(  # noqa: PLR0917 - a message
    bench: Bench,
    mesh: int,
    to: ProcMesh,
    sizes: dict[str, int],
    rule: dict[str, str],
    number: int,
    *tensors: Any,
) -> None:
    """Send tensors, or why they are missing, to those processes of another mesh that have this one's place in the common dimensions."""
    here = arrivals()
    rank = here.rank(bench.controller, mesh)
    assert rank is not None, "the controller has said so before"
    place: dict[str, int] = {}
    for dim, size in reversed(sizes.items()):
        rank, place[dim] = divmod(rank, size)
    sent = [_sendable(bench, LOST if each is None else each) for each in tensors]
    # Processes that have ended are reported by their own mesh.
    with suppress(MeshError):
        here.tell(
            to.slice(**{dim: place[of] for dim, of in rule.items()}),
            ("value", (bench.controller, MOVED, number), sent),
        )


def _sendable(bench: Bench, value: Any) -> Any:
    """Return a tensor as it is sent; an error here is raised where it is waited for."""
    try:
        found = _shown(bench, bench.now, value, "to_mesh")
        return found if isinstance(found, Failed) else found.contiguous()
    except Exception as error:  # noqa: BLE001 - told to who asks
        return Failed(bench.now, "to_mesh", error)


def receive(  # noqa: PLR0917 - a message
    bench: Bench, source: int, here: int, name: str, count: int, number: int
) -> list[Any]:
    """Return tensors from another mesh, once they are here, or why they have failed."""
    try:
        values: list[Any] = arrivals().take((bench.controller, MOVED, number), (source, here))
    except MeshError as error:
        values = [Failed(bench.now, "to_mesh", error)] * count
    for value in values:
        if isinstance(value, Failed):
            if value.operator != "to_mesh":
                value.error = f"{value.operator} failed on {name}, where it comes from: {value.error}"
                value.operator = "to_mesh"
            value.instruction = bench.now
    return values


def collect(bench: Bench, number: int) -> list[Any]:
    """Wait for the result of an actor of this process."""
    kind, value = arrivals().take((bench.controller, RETURNED, number))
    if kind == "failed":
        raise MeshError(value)
    leaves, shape = taken_apart(value.get())
    # The memory of the reference is needed for the next result.
    own = [each.clone() if isinstance(each, torch.Tensor) else each for each in leaves]
    return [Results(own, shape)]


def collected(bench: Bench, forms: list[Any], number: int) -> list[torch.Tensor]:
    """Wait for the result of an actor of this process, whose tensors have these shapes and types."""
    (found,) = collect(bench, number)
    return as_told(found.leaves, forms)


def as_told(leaves: list[Any], forms: list[Any]) -> list[torch.Tensor]:
    """Return the tensors among results, which must have the shapes and types that the script was told."""
    tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
    if len(tensors) != len(forms):
        raise ValueError(
            f"it has returned {len(tensors)} tensors here, and {len(forms)} where the forms of its results were found"
        )
    for place, (tensor, (shape, dtype)) in enumerate(zip(tensors, forms, strict=True)):
        if tensor.shape != tuple(shape) or tensor.dtype != dtype:
            raise ValueError(
                f"tensor {place} of its result is {tuple(tensor.shape)} of {tensor.dtype} here, and {tuple(shape)} of {dtype} where the "
                "forms of its results were found: correct the function given as propagate=, or give propagate='ask'"
            )
    return tensors


def arrive(controller: Address, mesh: int, size: int, number: int, what: str) -> torch.Tensor:
    """Return a tensor that was given to an actor of this process; called where the message is read."""
    here = find(Arrivals)
    if here is None or here.rank(controller, mesh) is None:
        raise MeshError(
            f"{what}, is an argument in {current_proc()}, which is none of its processes: move it there with to_mesh(), or fetch() it "
            "and pass its values"
        )
    key = controller, LENT, number
    only = f"{what}, can be an argument of endpoints and constructors only: pass it in a call, or fetch() it and pass its values"
    try:
        messaged = context().message_rank.extent
    except MeshError:
        raise MeshError(only) from None
    if _is_on_loop():
        coming = here.later(key)
        if coming is not None:
            raise NotYet(only, coming)
    value = here.take(key)
    count = math.prod(messaged.sizes)
    if count < size:
        here.tell_taken(controller, mesh, number, count)
    if isinstance(value, Failed):
        raise RemoteException(
            f"{what}, has failed on {current_proc()}, in {value.operator}: {value.error}\nThe traceback there:\n{value.trace}",
            operator=value.operator,
            point=None,
            trace=value.trace,
        )
    found: torch.Tensor = value
    return found


def _is_on_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _there(bench: Bench, count: int, ref: int, operator: str) -> Any:
    """Return this process's part of a tensor, or why it is missing."""
    return _shown(bench, count, bench.find(ref), operator)


def _shown(bench: Bench, count: int, value: Any, operator: str) -> Any:
    """Return a copy of this process's part of a tensor, or why it is missing."""
    if hasattr(value, "placements"):
        try:
            bench.refresh(value)
        except Exception as error:  # noqa: BLE001 - told to who asks
            return Failed(count, operator, error)
        value = getattr(value, "_mesh_failed", None) or value.to_local()
    return Failed(count, operator, MeshError(GONE)) if value is LOST else value


def _copied(bench: Bench, count: int, ref: int, operator: str) -> Any:
    value = _there(bench, count, ref, operator)
    return value if isinstance(value, Failed) else value.detach().clone()
