"""Copies between the memory of a process and that of its device, of tensors of two meshes of the same processes (OFF-1).

These functions are not noted by decisions, which keep operators only: they wait for devices, and have others wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from mesh_tensor import _devices as devices
from mesh_tensor._instructions import Failed, Instead
from mesh_tensor._parts._call import failure_of, mark
from mesh_tensor._parts._layouts import in_order
from mesh_tensor._torch._dtensor import DTensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor.placement_types import Placement

    from mesh_tensor._parts._worker import Worker


class Copying:
    """One of these functions, for a mesh."""

    __slots__ = ("_function", "_home")

    def __init__(self, function: Callable[..., Any], home: Worker) -> None:
        self._function = function
        self._home = home

    def __call__(self, *args: Any) -> Any:
        return self._function(self._home, *args)


def settle(home: Worker) -> None:
    """Wait until all copies have happened."""
    copies = [*home.arriving, *home.leaving]
    home.arriving, home.leaving = [], []
    devices.finish(copies)


def pin(home: Worker, tensor: DTensor, kind: str) -> DTensor:
    """Return a tensor of this process's memory where the device reads and writes by itself."""
    made = DTensor(
        devices.pinned(_local(tensor).contiguous(), kind), _spec(home, tensor), requires_grad=False
    )
    _mark(home, [tensor], [made])
    return made


def take(home: Worker, *given: Any) -> list[DTensor]:
    """Return tensors of devices in this process's memory, with these layouts."""
    *tensors, number, wanted = given
    source: Worker = home.bench.mesh(number)
    laid_out = _laid_out(source, tensors, wanted)
    made, copies = devices.taken([_local(each).contiguous() for each in laid_out], source.device.type)
    home.arriving += copies
    results = [
        DTensor(local, _spec(home, each), requires_grad=False)
        for local, each in zip(made, laid_out, strict=True)
    ]
    _mark(home, laid_out, results)
    return results


def bring(home: Worker, *given: Any) -> list[DTensor]:
    """Return tensors of this process's memory on its device."""
    *tensors, number, _ = given
    source: Worker = home.bench.mesh(number)
    arriving, source.arriving = source.arriving, []
    devices.finish(arriving)
    if source.sums.any:
        source.sums.make_way(tensors, writes=False)
    if source.copies.any:
        source.refresh(tensors)
    specs = [_spec(home, each) for each in tensors]
    raised: Exception | None = None
    try:
        made, copies = devices.brought([_local(each).contiguous() for each in tensors], home.device.type)
        source.leaving += copies
        results = [DTensor(local, spec, requires_grad=False) for local, spec in zip(made, specs, strict=True)]
    except RuntimeError as error:
        # The device is full, perhaps in this process alone: the others wait for it in what comes next.
        raised = error
        results = [home.zeros(spec) for spec in specs]
    _mark(home, tensors, results)
    if raised is not None:

        def note(failed: Failed) -> None:
            home.failures = True
            mark(results, failed)

        raise Instead(raised, results, note)
    return results


def _laid_out(
    source: Worker, tensors: Sequence[DTensor], wanted: Sequence[tuple[Placement, ...]]
) -> list[DTensor]:
    """Return tensors with these layouts; their sums travel together."""
    if source.sums.any:
        source.sums.make_way(tensors, writes=False)
    if source.copies.any:
        source.refresh(tensors)
    found: list[Any] = []
    for tensor, placements in zip(tensors, wanted, strict=True):
        layout = tuple(Replicate() if isinstance(each, Partial) else each for each in placements)
        moved: Any = tensor
        if tensor.placements != layout:
            moved = source.sums.put_off(tensor, layout)
            if moved is None:
                in_memory_order: Any = tensor.contiguous()
                moved = in_memory_order.redistribute(source.mesh, layout)
                mark(moved, failure_of(tensor))
        found.append(moved)
    if source.sums.any:
        source.sums.finish()
    return found


def _spec(home: Worker, tensor: DTensor) -> DTensorSpec:
    """Return the layout on this mesh, with the elements in order."""
    meta = in_order(tensor._spec.tensor_meta)  # noqa: SLF001 - its form
    return DTensorSpec(home.mesh, tuple(tensor.placements), meta)


def _local(tensor: DTensor) -> torch.Tensor:
    """Return this process's part, once it has arrived."""
    local: Any = tensor._local_tensor  # noqa: SLF001 - without a copy
    arrived: torch.Tensor = local.trigger_wait() if hasattr(local, "trigger_wait") else local
    return arrived


def _mark(home: Worker, given: Sequence[DTensor], made: Sequence[DTensor]) -> None:
    for one, other in zip(given, made, strict=True):
        if (failed := failure_of(one)) is not None:
            home.failures = True
            mark(other, failed)


COPYING: dict[str, Callable[..., Any]] = {each.__name__: each for each in (settle, pin, take, bring)}
