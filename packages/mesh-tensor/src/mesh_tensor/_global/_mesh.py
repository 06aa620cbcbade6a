"""Meshes of the global view."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from mesh_core import MeshError, configured, this_host
from mesh_core.extensions import find, install
from mesh_tensor._errors import described, line_of
from mesh_tensor._extension import Tensors
from mesh_tensor._global._host import HostStream
from mesh_tensor._global._sharding import Sharding, placements_of
from mesh_tensor._global._tensor import GlobalTensor, stream_of
from mesh_tensor._parts._numbered import Numbered
from mesh_tensor._placing import device_named
from mesh_tensor._streams._loans import user_frame
from mesh_tensor._tensor import MeshTensor
from mesh_tensor._torch._names import check_release

if TYPE_CHECKING:
    from mesh_core import ProcMesh
    from mesh_tensor._global._tensor import GlobalIssuer, GlobalStream


_PRELOAD = ("torch.distributed.tensor", "torch._dynamo")
"""What DTensor imports, some of it only when it is first used: imported once for all processes, not in each."""


class Mesh:
    """An array of processes with named dimensions, over which tensors are spread.

    Without `procs` it spawns its processes on this machine, and stops them in `stop()` or at the end of a `with` block.

    >>> import torch
    >>> from mesh_tensor import Mesh, distribute, fetch
    >>> with Mesh(shape=(2, 1), mesh_dim_names=("data_parallel", "model_parallel")) as mesh:
    ...     x = distribute(torch.arange(6.0).view(3, 2), mesh, ["data_parallel", None])
    ...     print(fetch(x @ x.T))
    tensor([[ 1.,  3.,  5.],
            [ 3., 13., 23.],
            [ 5., 23., 41.]])
    """

    def __init__(
        self,
        shape: Sequence[int],
        mesh_dim_names: Sequence[str] | None = None,
        procs: ProcMesh | None = None,
        *,
        device: str | torch.device = "cpu",
        name: str | None = None,
        start_timeout: float | None = None,
    ) -> None:
        """Spawn the processes, or take those that are given.

        Args:
            shape: the number of processes in each dimension.
            mesh_dim_names: the names of the dimensions.
            procs: the processes, if they are there already.
            device: the kind of device on which each process has its parts of tensors, such as ``"cuda"``. Which one of them a process
                uses is decided by `CUDA_VISIBLE_DEVICES`, and by its index on the host if several are visible. This process needs none.
            name: the name of those that it spawns.
            start_timeout: how many seconds those that it spawns may take to start, and to import PyTorch; without it they have the
                setting ``spawn_timeout``.
        """
        check_release()
        if start_timeout is not None and not start_timeout > 0:
            raise ValueError(f"start_timeout must be positive, got {start_timeout}")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        names = tuple(f"dim_{dim}" for dim in range(len(shape))) if mesh_dim_names is None else mesh_dim_names
        self.shape: tuple[int, ...] = shape
        self.mesh_dim_names: tuple[str, ...] = (names,) if isinstance(names, str) else tuple(names)
        self.device: torch.device = device_named(device)
        self._check()
        self._hosts: dict[bool, HostMesh] = {}
        sizes = dict(zip(self.mesh_dim_names, self.shape, strict=True))
        self._own = procs is None
        if procs is None:
            share = max(1, (os.cpu_count() or 1) // math.prod(shape))
            env = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(share)}
            with nullcontext() if start_timeout is None else configured(spawn_timeout=start_timeout):
                procs = this_host().spawn_procs(sizes, name, preload=_PRELOAD, env=env)
        elif start_timeout is not None:
            raise ValueError(
                "start_timeout= is for processes that the mesh spawns itself; those given as procs= have the setting spawn_timeout of "
                "where they were spawned"
            )
        elif procs.sizes != sizes:
            procs = _arranged(procs, sizes)
        self.procs: ProcMesh = procs
        self._tensors = find(Tensors) or install(Tensors)
        try:
            self._stream = self._met(procs)
        except MeshError:
            if self._own:
                try:
                    if procs.initialized.done():
                        # Why they could not start says more than that they are not there.
                        procs.initialized.get()
                finally:
                    procs.stop()
            raise

    def _met(self, procs: ProcMesh) -> GlobalStream:
        """Return a stream to the processes."""
        return stream_of(self._tensors, self, procs)

    def _check(self) -> None:
        if not self.shape or any(not isinstance(size, int) or size < 1 for size in self.shape):
            raise ValueError(f"the shape of a mesh must be positive numbers, got {self.shape}")
        if self.device.type == "meta":
            raise ValueError(
                "the device of a mesh must have values, got 'meta': use torch.device('meta') for forms alone"
            )
        if len(self.mesh_dim_names) != len(self.shape):
            raise ValueError(
                f"{len(self.mesh_dim_names)} names {self.mesh_dim_names} for {len(self.shape)} dimensions {self.shape}: give one for each"
            )
        if len(set(self.mesh_dim_names)) != len(self.shape):
            raise ValueError(f"the names of a mesh's dimensions must differ, got {self.mesh_dim_names}")

    on_devices: Mesh | None = None
    """Of a mesh whose tensors are in the memory of the hosts: the one beside it."""

    def in_host_memory(self, *, keeps_copies: bool) -> HostMesh:
        """Return a mesh of the same processes whose tensors are in the memory of their hosts; the same one each time."""
        found = self._hosts.get(keeps_copies)
        if found is None:
            found = self._hosts[keeps_copies] = HostMesh(self, keeps_copies=keeps_copies)
        return found

    @property
    def issuer(self) -> GlobalIssuer:
        """The issuer of its operators."""
        return cast("GlobalIssuer", self._stream.issuer)

    def size(self, dim: str | None = None) -> int:
        """Return the number of processes, or the size of one dimension."""
        if dim is None:
            return math.prod(self.shape)
        if dim not in self.mesh_dim_names:
            raise ValueError(
                f"{self} has no dimension {dim!r}; it has {', '.join(map(repr, self.mesh_dim_names))}"
            )
        return self.shape[self.mesh_dim_names.index(dim)]

    def execute(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function on every process, with DTensors in place of tensors; wait, and return its result.

        Of an ordinary tensor among the arguments every process gets a copy, as from `distribute(tensor, mesh)`. DTensors in the
        result become mesh tensors; everything else must be the same on all processes.

        >>> import torch
        >>> from mesh_tensor import Mesh, distribute, fetch
        >>> with Mesh((2,), ("data",)) as mesh:
        ...     x = distribute(torch.arange(4.0), mesh, ["data"])
        ...     y, kind = mesh.execute(lambda x: (x * 2, type(x).__name__), x)
        ...     print(kind, fetch(y))
        DTensor tensor([0., 2., 4., 6.])
        """
        stream = self._stream

        def give(value: Any) -> Any:
            if isinstance(value, MeshTensor):
                raise TypeError(
                    f"an argument is of the per-rank view, and the function is to run on {self}: fetch() it, and distribute() what is to be "
                    f"given. It is {described(value)}"
                )
            if isinstance(value, GlobalTensor):
                if value.mesh is not self:
                    raise ValueError(f"an argument is on {value.mesh}, and the function is to run on {self}")
                return value
            return distribute(value, self) if isinstance(value, torch.Tensor) else value

        def name(value: Any) -> Any:
            return Numbered(value.ref.number) if isinstance(value, GlobalTensor) else value

        with _disable_current_modes(), stream.lock:
            # Kept until the processes have answered: the caller may have no other reference to an argument.
            given = tree_map(give, (args, kwargs))
            number = next(self._tensors.numbers)
            instruction = stream.numbered(user_frame())
            form, said = stream.agreed_on("execute", number, instruction, function, *tree_map(name, given))
            made = [stream.ref() for kind, _ in said if kind == "form"]
            stream.tell("adopt", number, [each.number for each in made])
            supply = iter(made)
            leaves = [self.issuer.made(what, next(supply)) if kind == "form" else what for kind, what in said]
        return form.filled(leaves)

    def stop(self) -> None:
        """Stop the processes that it spawned; on given processes, free its tensors."""
        if self._stream.stopped:
            return
        for each in self._hosts.values():
            each.stop()
        self._stream.stop()
        if self._own:
            self.procs.stop().get()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        sizes = ", ".join(
            f"{name}={size}" for name, size in zip(self.mesh_dim_names, self.shape, strict=True)
        )
        return f"Mesh({sizes})"


class HostMesh(Mesh):
    """A mesh beside another one, of the same processes, whose tensors are in the memory of the hosts."""

    def __init__(self, on_devices: Mesh, *, keeps_copies: bool) -> None:
        self.on_devices = on_devices
        self.keeps_copies = keeps_copies
        """Parameters have copies on the devices between two steps."""
        super().__init__(on_devices.shape, on_devices.mesh_dim_names, on_devices.procs)

    def _met(self, procs: ProcMesh) -> GlobalStream:
        return stream_of(self._tensors, self, procs, HostStream)

    def __repr__(self) -> str:
        return f"{super().__repr__()} in the hosts' memory"


def _arranged(procs: ProcMesh, sizes: dict[str, int]) -> ProcMesh:
    if len(procs) != math.prod(sizes.values()):
        raise ValueError(
            f"a mesh of {sizes} has {math.prod(sizes.values())} processes, and {procs} has {len(procs)}: give as many"
        )
    whole = procs.flatten("all")
    if len(sizes) == 1:
        return whole.rename(all=next(iter(sizes)))
    return whole.split(all=tuple(sizes), **sizes)


def distribute(tensor: torch.Tensor, mesh: Mesh, sharding_spec: Sharding = None) -> GlobalTensor:
    """Spread a tensor over a mesh.

    `sharding_spec` is a list with one entry for each dimension of the tensor: the name of the mesh dimension that splits it, a tuple of several, or `None`.
    Alternatively it has one of PyTorch's placements for each dimension of the mesh. Without it, every process gets a copy. A tensor that is already on the
    mesh is redistributed, and gradients flow through; a tensor of this process becomes a leaf.
    """
    if isinstance(tensor, GlobalTensor):
        if tensor.mesh is not mesh:
            raise ValueError(
                f"a tensor of one mesh cannot be distributed over another one, {mesh}: fetch() it first. It is {described(tensor)}"
            )
        return tensor.redistribute(sharding_spec)
    if isinstance(tensor, MeshTensor):
        raise TypeError(
            f"a tensor of the per-rank view cannot be distributed: fetch() what is to be. It is {described(tensor)}"
        )
    try:
        placements = placements_of(sharding_spec, mesh.mesh_dim_names, tensor.shape)
    except (ValueError, TypeError) as error:
        frame = user_frame()
        raise type(error)(
            f"{error}. A tensor of this process, {tuple(tensor.shape)} of {tensor.dtype}, was to be distributed over {mesh}, at "
            f"{line_of((frame.f_code, frame.f_lasti))}"
        ) from None
    mesh.issuer.stream.tensors.recorded(lambda recorder: recorder.spreads())
    result = mesh.issuer.distribute(tensor, placements)
    result.requires_grad_(tensor.requires_grad)
    return result
