"""The per-rank view: every process of a mesh computes its own tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import torch
from torch._ops import HigherOrderOperator
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from mesh_core import ProcMesh, ValueMesh
from mesh_core.extensions import find, install
from mesh_tensor._descriptors import HERE
from mesh_tensor._errors import StreamError, described, part_of
from mesh_tensor._extension import Tensors
from mesh_tensor._placing import device_named, unseen
from mesh_tensor._streams._guard import name_of
from mesh_tensor._streams._usage import total_usage
from mesh_tensor._tensor import MeshTensor, issuer_of
from mesh_tensor._values import of_mesh, values

if TYPE_CHECKING:
    from mesh_tensor._global._mesh import Mesh
    from mesh_tensor._global._tensor import GlobalTensor
    from mesh_tensor._propagate import Issuer

S = TypeVar("S")


class PerRank(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes factories create their tensors on the mesh."""

    def __init__(self, issuer: Issuer, device: torch.device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.issuer = issuer
        self.device = device
        """Where factories create their tensors by default."""
        self.supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls: Any = self.issuer.cls
        if cls in types:
            if len(types) == 1 and not _others():
                # As PyTorch would call it next.
                return cls.__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.lift_fresh.default:
            # `torch.tensor`: made here, and meant for the mesh.
            with _disable_current_modes():
                made = self.here().share(args[0])
            return made if self.device is None else made.to(self.device)
        if isinstance(func, HigherOrderOperator):
            if any(
                isinstance(each, (self.issuer.cls, MeshTensor)) for each in pytree.tree_leaves((args, kwargs))
            ):
                raise _not_for_mesh_tensors(func)
            return func(*args, **(kwargs or {}))
        if not _makes_tensors(func) or _has_tensor(args) or (kwargs and _has_tensor(kwargs.values())):
            return func(*args, **(kwargs or {}))
        named = (kwargs or {}).get("device")
        if named is not None and named.type not in HERE:
            kwargs = kwargs | {"device": device_named(named)}
        elif self.device is not None and (named is None or named.type == "cpu"):
            kwargs = (kwargs or {}) | {"device": self.device}
        return self.here().issue(func, args, kwargs)

    def here(self) -> Issuer:
        """The issuer for the mesh on the stream that is active."""
        issuer = self.issuer
        tensors = issuer.stream.tensors
        if not tensors.guard.on:
            return issuer
        if getattr(issuer.stream, "mesh", None) is not None:
            if tensors.guard.active is not None:
                raise StreamError(
                    f"{name_of(tensors.guard.active)} is active, and tensors of the global view are on the default stream only"
                )
            return issuer
        return issuer_of(issuer.stream.procs)


_others: Callable[[], int] = torch._C._len_torch_dispatch_stack  # noqa: SLF001 - there is no other name for it
"""The number of modes besides the one that is being asked."""


def _not_for_mesh_tensors(operator: HigherOrderOperator) -> NotImplementedError:
    """Operators that take functions work on what PyTorch's compiler has traced."""
    name = operator.name()  # type: ignore[no-untyped-call]
    instead = (
        "use torch.nn.functional.scaled_dot_product_attention(attn_mask=...), which does,"
        if name == "flex_attention"
        else "write it with operators on tensors,"
    )
    return NotImplementedError(
        f"{name} takes functions that PyTorch's compiler has traced, and does not work on tensors of a mesh: {instead} and "
        "capture() the step if it is to be compiled"
    )


def _makes_tensors(func: Any) -> bool:
    return any("Tensor" in str(each.type) for each in func._schema.returns)  # noqa: SLF001


def _has_tensor(values: Iterable[Any]) -> bool:
    return any(
        isinstance(each, torch.Tensor) or (isinstance(each, (list, tuple)) and _has_tensor(each))
        for each in values
    )


@dataclass(frozen=True)
class Usage:
    """The number of tensors that this process has on a process of a mesh, and their bytes."""

    tensors: int
    nbytes: int
    """Memory of tensors that share it, such as views, counts once."""


def usage(procs: ProcMesh) -> ValueMesh[Usage]:
    """Wait until everything that was issued is done, and return the number and bytes of the tensors that this process has on each process."""
    main = (find(Tensors) or install(Tensors)).issuer(procs, MeshTensor).stream
    with _disable_current_modes():
        answers = total_usage(main)
        return ValueMesh.of(answers.extent, [Usage(*answer[1]) for _, answer in answers])


@contextmanager
def activate(procs: ProcMesh | Mesh, *, device: str | torch.device | None = None) -> Iterator[None]:
    """Create tensors on the processes of a mesh, one on each, inside a `with` block.

    Factories (`torch.ones`, `torch.randn`, `nn.Linear`) create a tensor on every process. Operators on such tensors run on every
    process, inside and outside the block. For a `Mesh`, factories create tensors that are spread over it.

    With `device="cuda"`, factories create their tensors on each process's own CUDA device, whether or not this process has one. Processes
    choose it by `CUDA_VISIBLE_DEVICES`, and by their index on the host if several are visible. A `Mesh` has its own `device=`.

    >>> import torch
    >>> from mesh_core import this_host
    >>> from mesh_tensor import activate, fetch
    >>> with this_host().spawn_procs({"gpus": 2}) as procs, activate(procs):
    ...     y = torch.ones(2, 2) @ torch.full((2, 1), 3.0)
    ...     print(fetch(y).item(gpus=1))
    tensor([[6.],
            [6.]])
    """
    issuer = issuer_of(procs)
    issuer.stream.check()
    where = None if device is None else device_named(device)
    mesh = getattr(issuer.stream, "mesh", None)
    if mesh is not None:
        if where is not None and where != mesh.device:
            raise ValueError(
                f"{mesh} has its tensors on {str(mesh.device)!r}, got device={device!r}: in the global view the kind of device is the mesh's, "
                f"Mesh(..., device={where.type!r})"
            )
        where = None if mesh.device.type == "cpu" else mesh.device
    elif where is not None and where.type not in HERE:
        issuer.use_device(where.type)
    with unseen(), PerRank(issuer, where):
        yield


def share(tensor: torch.Tensor, procs: ProcMesh) -> MeshTensor:
    """Send a tensor to all processes of a mesh, and return it as a mesh tensor."""
    if type(tensor) is MeshTensor:
        raise TypeError(
            f"share() takes a tensor of this process, and it is on a mesh already: {described(tensor)}"
        )
    issuer = issuer_of(procs)
    issuer.stream.tensors.recorded(lambda recorder: recorder.spreads())
    with _disable_current_modes():
        result: MeshTensor = issuer.share(tensor)
        return result


def rank_tensor(procs: ProcMesh, dim: str) -> MeshTensor:
    """Return a tensor that contains, on each process, its coordinate along one dimension of the mesh.

    >>> from mesh_core import this_host
    >>> from mesh_tensor import fetch, rank_tensor
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     print(fetch(rank_tensor(procs, "gpus") * 10).values())
    [tensor(0), tensor(10)]
    """
    issuer = issuer_of(procs)
    result: MeshTensor = issuer.special(
        "rank_tensor", ((), torch.int64), (), (issuer.stream.groups.places(dim),), dim
    )
    return result


def manual_seed(seed: int, procs: ProcMesh, *, shared: bool = False) -> None:
    """Seed the random numbers of a mesh's processes: differently on each or, with `shared`, identically on all."""
    if not isinstance(procs, ProcMesh):
        raise TypeError(
            f"manual_seed() seeds the processes of a ProcMesh, got {procs!r}. In the global view random numbers come from the script's own "
            "generator: call torch.manual_seed()"
        )
    issuer = issuer_of(procs)
    issuer.special("seed", None, (), (seed, None if shared else issuer.stream.groups.ranks()), seed, shared)


@overload
def fetch(  # type: ignore[overload-overlap]
    tensor: GlobalTensor, *, timeout: float | None = None
) -> torch.Tensor: ...
@overload
def fetch(tensor: torch.Tensor, *, timeout: float | None = None) -> ValueMesh[torch.Tensor]: ...
def fetch(tensor: torch.Tensor, *, timeout: float | None = None) -> ValueMesh[torch.Tensor] | torch.Tensor:
    """Wait for a tensor, and return the tensor of each process or, in the global view, the whole tensor."""
    if isinstance(tensor, torch.Tensor) and getattr(type(tensor), "is_global", False):
        from mesh_tensor._global._tensor import whole

        return whole(cast("GlobalTensor", tensor), timeout)
    return values(of_mesh(tensor), timeout)


def fetch_shard(
    tensor: S, *, timeout: float | None = None, shard: Mapping[str, int] | None = None, **coords: int
) -> S:
    """Wait for a tensor, and return the part of one process: the one at these coordinates, by default the first.

    Of a list, a dict or a tuple with tensors, the parts of all of them are returned in the same form. Coordinates may also be given as
    a mapping, ``shard={"gpus": 1}``.

    >>> from mesh_core import this_host
    >>> from mesh_tensor import fetch_shard, rank_tensor
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     x = rank_tensor(procs, "gpus")
    ...     print(fetch_shard({"x": x, "more": [x + 1]}, gpus=1))
    {'x': tensor(1), 'more': [tensor(2)]}
    """
    at = {**(shard or {}), **coords}
    if isinstance(tensor, torch.Tensor):
        return cast("S", _part(tensor, at, timeout)())
    leaves, shape = pytree.tree_flatten(tensor)
    if not any(isinstance(each, torch.Tensor) for each in leaves):
        raise TypeError(
            f"fetch_shard() takes tensors of a mesh, alone or in lists, dicts and tuples, got {tensor!r}"
        )
    # All are asked for before the first is waited for.
    waits = [_part(each, at, timeout) if isinstance(each, torch.Tensor) else None for each in leaves]
    found = [each if wait is None else wait() for each, wait in zip(leaves, waits, strict=True)]
    return cast("S", pytree.tree_unflatten(found, shape))


def _part(tensor: torch.Tensor, coords: dict[str, int], timeout: float | None) -> Callable[[], torch.Tensor]:
    """Ask for one process's part of a tensor; return what waits for it."""
    if getattr(type(tensor), "is_global", False):
        from mesh_tensor._global._tensor import part

        return partial(part, cast("GlobalTensor", tensor), coords, timeout)
    tensor = of_mesh(tensor)
    stream = tensor.descriptor.stream
    if stream.tensors.guard.on:
        stream.tensors.guard.check_value("fetch_shard", tensor)
    procs = stream.procs
    place = {dim: coords.get(dim, 0) for dim in procs.sizes} | coords
    chosen = part_of(tensor, procs, place)
    with _disable_current_modes():
        asked = stream.ask("get", tensor.ref.number, of=chosen)

    def wait() -> torch.Tensor:
        with _disable_current_modes():
            ((_, answer),) = stream.wait(asked, timeout)
            # In the mesh of the one process that was asked it has no coordinates.
            point = next(each for each, _ in procs if all(each[dim] == at for dim, at in place.items()))
            value: torch.Tensor = stream.value(point, answer)
            return value

    return wait
