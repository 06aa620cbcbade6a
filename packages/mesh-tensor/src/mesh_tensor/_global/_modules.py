"""Modules whose parameters are tensors of a whole mesh."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes

from mesh_tensor._global._host import LAID_OUT, pinned
from mesh_tensor._global._mesh import distribute
from mesh_tensor._global._sharding import placements_of
from mesh_tensor._global._tensor import GlobalTensor, laid_out_as, summed
from mesh_tensor._global._units import Spread, Units

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

    from mesh_tensor._global._mesh import Mesh

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class FullyShard:
    """Each process along a mesh dimension keeps a part of the parameters and of their optimizer state.

    The parameters are gathered while their module computes: those of an item of a list of modules, such as a transformer's block, together. They are
    kept for the backward pass. With `reshard_after_forward` they are freed when their item has computed, and gathered once more there: less memory, and
    half as many messages again. What is in no list stays, as it is needed first.
    """

    dim: str
    reshard_after_forward: bool = False


@dataclass(frozen=True)
class ColumnParallel:
    """Each process along a mesh dimension computes a part of the output features."""

    dim: str


@dataclass(frozen=True)
class RowParallel:
    """Each process along a mesh dimension has a part of the input features; the outputs are summed."""

    dim: str


Style = FullyShard | ColumnParallel | RowParallel
Plan = Mapping[str, Any]
"""For names of modules or parameters, in which `*` stands for anything: a style, several of them, or, for a parameter, its sharding as
`distribute()` takes it."""


Offload = Literal["state", "parameters"]
"""What of a module and its optimizer is in the memory of the hosts, beside gradients."""


def module_to_mesh(module: M, mesh: Mesh, plan: Plan | None = None, *, offload: Offload | None = None) -> M:
    """Move the parameters and buffers of a module to a mesh, and return the module.

    Without a plan every process has a copy of all of them, so a batch that is split over the mesh trains data-parallel. Create the
    optimizer afterwards, because the parameters are replaced.

    With `offload`, parameters and gradients are in pinned memory of the processes' hosts, where an optimizer has its state and takes its steps; modules compute
    on the mesh's devices, to which parameters are copied, asynchronously as gradients are copied back. `"state"` keeps the copies of each process's parts on
    its device until parameters change; `"parameters"` frees them when their module has computed. On a mesh of CPUs it is refused.

    A module that was made on the device `meta` gets its values on the mesh, from `reset_parameters()` of each module in it that has parameters or buffers
    there: one parameter after the other, so that neither this process nor another has to hold all of it.

    >>> import torch
    >>> from mesh_tensor import ColumnParallel, FullyShard, Mesh, RowParallel, distribute, module_to_mesh
    >>> with Mesh((1, 2), ("data", "model")) as mesh:
    ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    ...     plan = {"*": FullyShard("data"), "0": ColumnParallel("model"), "2": RowParallel("model")}
    ...     model = module_to_mesh(model, mesh, plan)
    ...     loss = model(distribute(torch.ones(2, 4), mesh, ["data", None])).square().mean()
    ...     loss.backward()
    ...     print(model[0].weight.grad.shape)
    torch.Size([8, 4])
    """
    home = _home(mesh, offload)
    with _disable_current_modes():
        planner = _Planner(module, mesh, plan or {})
        empty = _Empty(module)
        made: dict[int, nn.Parameter] = {}
        units = Units(module)
        for prefix, owner in module.named_modules():
            spread: dict[str, Spread] = {}
            for name, parameter in owner.named_parameters(prefix, recurse=False, remove_duplicate=False):
                own = name.rpartition(".")[2]
                layout = planner.layout(prefix, owner, name, parameter)
                found = made.get(id(parameter))
                if found is None:
                    found = made[id(parameter)] = _parameter(parameter, home, layout.kept)
                    # Two modules may share a parameter: its old identity must not be reused as the key of another.
                    planner.keep(parameter)
                setattr(owner, own, found)
                if layout.used != layout.kept or home is not mesh:
                    spread[own] = Spread(layout.kept, layout.used, layout.is_freed)
            for own, buffer in list(owner._buffers.items()):  # noqa: SLF001 - which are not persistent is kept
                if buffer is not None and not isinstance(buffer, GlobalTensor):
                    owner._buffers[own] = _spread(buffer, mesh, None)  # noqa: SLF001 - likewise
            if spread:
                units.gather(prefix, spread)
            for dim in planner.rows(prefix):
                owner.register_forward_hook(lambda _module, _args, output, dim=dim: summed(output, dim))
        planner.check()
        units.hook()
        empty.fill()
    return module


def _home(mesh: Mesh, offload: Offload | None) -> Mesh:
    """Return the mesh that has the parameters."""
    if offload is None:
        return mesh
    if offload not in get_args(Offload):
        raise ValueError(f"offload must be 'state' or 'parameters', got {offload!r}")
    if mesh.device.type == "cpu":
        raise ValueError(
            f"offload={offload!r} is for a mesh on other devices than CPUs: {mesh} has everything in the memory of its hosts already"
        )
    return mesh.in_host_memory(keeps_copies=offload == "state")


class _Empty:
    """The modules among others whose parameters or buffers have no values: they are on the device `meta`."""

    def __init__(self, module: nn.Module) -> None:
        self._modules: list[tuple[str, nn.Module, list[str]]] = []
        for prefix, owner in module.named_modules():
            own = {**owner._parameters, **owner._buffers}  # noqa: SLF001 - its own only
            names = [name for name, each in own.items() if each is not None and each.is_meta]
            if not names:
                continue
            if _reset_of(owner) is None:
                what = ", ".join(f"{prefix}.{name}" if prefix else name for name in names)
                raise ValueError(
                    f"{what} is on the device 'meta', and {type(owner).__name__} has no reset_parameters() that would give it values: write "
                    "one, or make the module on the CPU"
                )
            self._modules.append((prefix, owner, names))

    def fill(self) -> None:
        """Give them values."""
        for prefix, owner, names in self._modules:
            reset = _reset_of(owner)
            assert reset is not None, "found before"
            reset()
            for name in names:
                tensor: Any = getattr(owner, name)
                if tensor.is_floating_point() and bool(tensor.detach().isnan().any()):
                    raise ValueError(
                        f"{prefix}.{name}".lstrip(".")
                        + f" was on the device 'meta', and {type(owner).__name__}.reset_parameters() has left it without values: have it "
                        "set them, or make the module on the CPU"
                    )


def _reset_of(module: nn.Module) -> Any:
    """Return what gives a module's own parameters their first values; some of PyTorch's modules have it under a private name."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _spread(tensor: torch.Tensor, mesh: Mesh, placements: Any) -> GlobalTensor:
    """Return a tensor on the mesh; for one without values, one whose values are still to be set."""
    if not tensor.is_meta:
        return distribute(tensor, mesh, placements)
    # Not a number, so that it is seen if they are not.
    unset = float("nan") if tensor.is_floating_point() else 0
    made: Any = mesh.issuer.issue(
        torch.ops.aten.full.default, (list(tensor.shape), unset), {"dtype": tensor.dtype}
    )
    spread: GlobalTensor = made.redistribute(placements)
    return spread


@dataclass(frozen=True)
class _Layout:
    kept: tuple[Placement, ...]
    used: tuple[Placement, ...]
    """Its layout on the mesh while its module computes."""
    is_freed: bool = False
    """It is gathered anew for the backward pass."""


class _Planner:
    """Decides how the parameters of a module lie on a mesh."""

    def __init__(self, module: nn.Module, mesh: Mesh, plan: Plan) -> None:
        self._mesh = mesh
        self._styled: dict[str, list[Style]] = {}
        self._shardings: dict[str, Any] = {}
        self._used: set[str] = set()
        self._kept: list[Any] = []
        self._names = [name for name, _ in module.named_modules() if name]
        for pattern, what in plan.items():
            styles = [what] if isinstance(what, Style) else what
            if isinstance(styles, list) and styles and all(isinstance(each, Style) for each in styles):
                for style in styles:
                    mesh.size(style.dim)
                self._styled[pattern] = styles
            else:
                self._shardings[pattern] = what

    def keep(self, what: Any) -> None:
        self._kept.append(what)

    def rows(self, module: str) -> list[str]:
        return [each.dim for each in self._styles(module, None) if isinstance(each, RowParallel)]

    def _styles(self, module: str, parameter: str | None) -> list[Style]:
        found: list[Style] = []
        for pattern, styles in self._styled.items():
            if fnmatchcase(module, pattern) or (parameter is not None and fnmatchcase(parameter, pattern)):
                self._used.add(pattern)
                found += styles
        return found

    def layout(self, module: str, owner: nn.Module, name: str, parameter: torch.Tensor) -> _Layout:
        names = self._mesh.mesh_dim_names
        for pattern, sharding in self._shardings.items():
            if fnmatchcase(name, pattern):
                self._used.add(pattern)
                placements = placements_of(sharding, names, parameter.shape)
                return _Layout(placements, placements)
        used: list[Placement] = [Replicate()] * len(names)
        styles = self._styles(module, name)
        for style in styles:
            if not isinstance(style, FullyShard):
                dim = _split(style, owner, name)
                if dim is not None:
                    used[names.index(style.dim)] = Shard(dim)
        kept = list(used)
        for style in styles:
            if isinstance(style, FullyShard) and parameter.dim():
                at = names.index(style.dim)
                if used[at] != Replicate():
                    raise ValueError(
                        f"{name}: {style.dim!r} is to split it in two ways, by {style} and by another style"
                    )
                taken = {each.dim for each in kept if isinstance(each, Shard)}
                free = [dim for dim in range(parameter.dim()) if dim not in taken]
                kept[at] = Shard(free[0] if free else 0)
        is_freed = any(isinstance(each, FullyShard) and each.reshard_after_forward for each in styles)
        return _Layout(tuple(kept), tuple(used), is_freed)

    def check(self) -> None:
        """Raise if a part of the plan matches nothing."""
        unused = [pattern for pattern in (*self._styled, *self._shardings) if pattern not in self._used]
        if unused:
            raise ValueError(
                f"the plan's {', '.join(map(repr, unused))} is no module's or parameter's name; there are {', '.join(self._names[:8])}"
                f"{', ...' if len(self._names) > 8 else ''}"
            )


def _split(style: Style, owner: nn.Module, name: str) -> int | None:
    """Return the dimension of a parameter that a style splits."""
    by_column = isinstance(style, ColumnParallel)
    weight = name.endswith("weight")
    if isinstance(owner, nn.Linear):
        if weight:
            return 0 if by_column else 1
        return 0 if by_column else None
    if isinstance(owner, nn.Embedding):
        return 1 if by_column else 0
    raise ValueError(
        f"{type(style).__name__} is for Linear and Embedding, and {name} belongs to {type(owner).__name__}: give the parameter's "
        'sharding instead, as ["model_parallel", None]'
    )


def _parameter(parameter: torch.Tensor, mesh: Mesh, placements: tuple[Placement, ...]) -> nn.Parameter:
    if isinstance(parameter, GlobalTensor):
        raise ValueError(f"the module is on {parameter.mesh} already")
    spread = _spread(parameter.detach(), mesh, placements)
    if mesh.on_devices is not None:
        spread = pinned(spread, mesh.on_devices)
    made = nn.Parameter(spread, requires_grad=parameter.requires_grad)
    if made.requires_grad:
        own = weakref.ref(made)

        def lay_out(grad: torch.Tensor) -> torch.Tensor:
            # Summed up, or spread, once: where the gradient is made, and not wherever it is used.
            like: Any = own()
            return grad if like is None or hasattr(grad, LAID_OUT) else laid_out_as(grad, like)

        made.register_hook(lay_out)  # type: ignore[no-untyped-call]
    return made
