"""The tensor that users hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mesh_core.extensions import dumps
from mesh_tensor._descriptors import Descriptor
from mesh_tensor._errors import described
from mesh_tensor._extension import issuer_for
from mesh_tensor._values import numbers

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mesh_core import ProcMesh
    from mesh_tensor._collectives import Op
    from mesh_tensor._global._mesh import Mesh
    from mesh_tensor._propagate import Issuer
    from mesh_tensor._stream import Ref
    from mesh_tensor._user_streams import Stream


_GRAD: Any = torch.Tensor.grad
"""PyTorch's own attribute, which does not look at what it is given."""


class MeshTensor(torch.Tensor):
    """A tensor whose values are on the processes of a mesh."""

    __slots__ = ("descriptor", "ref")
    descriptor: Descriptor
    ref: Ref

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Let the workers do it."""
        first = args[0] if args else None
        if type(first) is not cls:
            first = first_of((*args, *(kwargs or {}).values()))
            assert first is not None, "PyTorch calls this for tensors of this class only"
        return first.descriptor.stream.issuer.issue(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        stream = self.descriptor.stream
        lane = getattr(stream.tensors, "stream", None)
        return f"MeshTensor({self.descriptor}, mesh={stream.procs}{'' if lane is None else f', stream={lane.name!r}'})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the values on the workers."""
        if not self.is_leaf:
            raise RuntimeError(
                "only tensors that were not computed from others can be copied so: detach() it, or clone() it"
            )
        found = memo.get(id(self))
        if found is None:
            found = self.detach().clone().requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                found._is_param = True  # noqa: SLF001 - how PyTorch tells parameters of such classes
            memo[id(self)] = found
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: the values are elsewhere."""
        raise TypeError(
            f"{described(self)}, cannot be pickled, as its values are on the mesh's "
            "processes: fetch() it, and pickle or send that. In a message to actors on these processes it can be an argument as it is"
        )

    def tolist(self) -> Any:
        """Wait for the tensor, and return its values as Python numbers; all processes must have the same."""
        return numbers(self)

    def data_ptr(self) -> int:
        """Refuse: what reads memory, such as `safetensors.torch.save_file`, would read none of the values."""
        raise TypeError(
            f"{described(self)}, has no memory in this process: fetch() it. To write tensors of a mesh to a file, use save(), and "
            "export_safetensors() for a file of safetensors"
        )

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The kind of device on which each process has its values."""
        return self.descriptor.form[4]

    @property
    def data(self) -> torch.Tensor:
        """The same values without gradients; assigning to it replaces the values."""
        values: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return values

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        source: Any = of_its_kind(self, "data", other)
        torch.Tensor.data.__set__(self, source)  # type: ignore[attr-defined]
        self.descriptor, self.ref = source.descriptor, source.ref

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, if there is one; a tensor of the mesh, too."""
        grad: torch.Tensor | None = _GRAD.__get__(self)
        return grad

    @grad.setter
    def grad(self, other: torch.Tensor | None) -> None:
        _GRAD.__set__(self, None if other is None else of_its_kind(self, "grad", other))

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Move the values to another device of their process, or convert them to another dtype, as in PyTorch."""
        from mesh_tensor._placing import moved

        return moved(self, args, kwargs)

    def cpu(self, *_: Any, **__: Any) -> Any:
        """Copy the values to their process's main memory."""
        return self.to("cpu")

    def cuda(self, device: Any = None, non_blocking: bool = False, memory_format: Any = None) -> Any:
        """Copy the values to their process's CUDA device."""
        return self.to(
            "cuda" if device is None else device, non_blocking=non_blocking, memory_format=memory_format
        )

    def reduce(
        self, dims: str | Sequence[str] | None = None, reduction: Op = "sum", *, scatter: bool = False
    ) -> torch.Tensor:
        """Combine the tensors of all processes along mesh dimensions: :func:`mesh_tensor.reduce`."""
        from mesh_tensor._collectives import reduce

        return reduce(self, dims, reduction, scatter=scatter)

    def to_mesh(self, procs: ProcMesh) -> MeshTensor:
        """Move the values to the processes of another mesh: :func:`mesh_tensor.to_mesh`."""
        from mesh_tensor._moving import to_mesh

        return to_mesh(self, procs)

    def slice_mesh(self, **coords: int | slice) -> MeshTensor:
        """Return the tensor on a part of its mesh: :func:`mesh_tensor.slice_mesh`."""
        from mesh_tensor._moving import slice_mesh

        return slice_mesh(self, **coords)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        """Whether the values are on CUDA devices."""
        return self.device.type == "cuda"

    @property
    def procs(self) -> ProcMesh:
        """The processes that hold its values."""
        return self.descriptor.stream.procs

    @property
    def stream(self) -> Stream:
        """The stream to which it belongs."""
        from mesh_tensor._user_streams import stream_of

        return stream_of(self.descriptor.stream.tensors)


def first_of(values: Iterable[Any]) -> MeshTensor | None:
    """Return the first tensor of a mesh among values, in lists too."""
    for each in values:
        if type(each) is MeshTensor:
            return each
        if isinstance(each, (list, tuple)) and (found := first_of(each)) is not None:
            return found
    return None


def of_its_kind(tensor: Any, name: str, other: Any) -> torch.Tensor:
    """Return what an attribute of a tensor is to be, if it is a tensor of the same view."""
    if type(other) is not type(tensor):
        how = "distribute()" if getattr(type(tensor), "is_global", False) else "share()"
        what = (
            f"a tensor of this process, {tuple(other.shape)} of {other.dtype}"
            if type(other) in (torch.Tensor, torch.nn.Parameter)
            else repr(other)
        )
        raise TypeError(
            f".{name} of a tensor of a mesh must be one too, got {what}: give it to the mesh first, with {how}. The tensor is {described(tensor)}"
        )
    found: torch.Tensor = other
    return found


def issuer_of(procs: ProcMesh | Mesh) -> Issuer:
    """Return the issuer of operators for a mesh."""
    return issuer_for(procs, MeshTensor)


def key_of(leaf: Any) -> Any:
    """Return the key of an argument in a signature."""
    if isinstance(leaf, MeshTensor):
        return leaf.descriptor
    try:
        hash(leaf)
    except TypeError:
        return type(leaf), dumps(leaf)
    return type(leaf), leaf
