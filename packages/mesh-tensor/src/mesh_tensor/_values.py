"""The values of a tensor of a mesh of which each process has its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch.utils._python_dispatch import _disable_current_modes

from mesh_core import ValueMesh
from mesh_tensor._descriptors import Descriptor
from mesh_tensor._errors import RanksDisagree, described
from mesh_tensor._stream import same

if TYPE_CHECKING:
    import torch

    from mesh_tensor._tensor import MeshTensor


def of_mesh(tensor: torch.Tensor) -> MeshTensor:
    """Return it, if it is a tensor of a mesh."""
    if not isinstance(getattr(tensor, "descriptor", None), Descriptor):
        raise TypeError(f"not a tensor of a mesh but {type(tensor).__name__}: its values are in this process")
    if getattr(type(tensor), "is_global", False):
        raise TypeError(
            f"{described(tensor)}, is of the global view, and this is for tensors of which each process has its own"
        )
    return cast("MeshTensor", tensor)


def values(tensor: MeshTensor, timeout: float | None = None) -> ValueMesh[torch.Tensor]:
    """Wait for a tensor, and return the tensor of each process."""
    stream = tensor.descriptor.stream
    if stream.tensors.guard.on:
        stream.tensors.guard.check_value("fetch", tensor)
    with _disable_current_modes():
        answers = stream.wait(stream.ask("get", tensor.ref.number), timeout)
        return ValueMesh.of(answers.extent, [stream.value(point, answer) for point, answer in answers])


def numbers(tensor: MeshTensor) -> Any:
    """Wait for a tensor that is the same on all processes, and return its values as Python's numbers."""
    (where, first), *rest = [(point, each.tolist()) for point, each in values(tensor)]
    for point, each in rest:
        if not same(each, first):
            raise RanksDisagree(
                f"{where} and {point} have other values of {tensor!r}: there can be only one list. Reduce the tensor over the mesh "
                "first, or fetch the value of one process with fetch_shard()."
            )
    return first
