"""PyTorch's backends for collectives besides gloo: NCCL, and others that are registered; and how PyTorch finds a mesh's groups."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, cast

from mesh_core import MeshError

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import timedelta

_STAGED = (
    *("allreduce", "allreduce_coalesced", "broadcast", "barrier"),
    *("allgather", "allgather_coalesced", "_allgather_base", "all_gather_single"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single", "scatter", "gather", "reduce"),
)
"""What PyTorch calls of a group; the names differ between releases."""


def check(name: str) -> None:
    """Raise if this process has no backend of that name."""
    import torch.distributed as dist

    if name == "nccl" and not dist.is_nccl_available():
        raise MeshError("this build of PyTorch has no NCCL")
    if name != "nccl" and name.upper() not in dist.Backend._plugins:  # noqa: SLF001 - where registered ones are
        known = ", ".join(sorted(each.lower() for each in dist.Backend._plugins))  # noqa: SLF001 - likewise
        raise MeshError(
            f"no backend {name!r} is registered in this process; there are gloo, nccl and those registered: {known or 'none'}. Import what "
            "registers it there, with bootstrap= of spawn_procs for example"
        )


def connected(name: str, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Create this process's place in a group of a backend."""
    import torch.distributed as dist

    if name == "nccl":
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 - its only name
        return ProcessGroupNCCL(store, rank, size, options)
    plugin = dist.Backend._plugins[name.upper()]  # noqa: SLF001 - nothing else makes one without a default group
    create = cast("Any", plugin.creator_fn)
    if not plugin.extended_api:
        return create(store, rank, size, timeout)
    told: Any = dist.distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]  # noqa: SLF001 - what such a function is given
    told.store, told.group_rank, told.group_size = store, rank, size
    told.timeout, told.group_id = timeout, name
    told.global_ranks_in_group = list(range(size))
    return create(told, None)


def named(name: str, kind: str, made: Any, backend: str, on_cpu: Any) -> Any:
    """Let PyTorch find a group by its name: for tensors on a kind of device by this backend, for those of the CPU by gloo."""
    import torch
    from torch._C._distributed_c10d import ProcessGroup, _register_process_group

    group: Any
    register: Any = _register_process_group
    if kind == "cpu" or backend != "gloo":
        group = ProcessGroup(made.rank(), made.size())
        group._set_default_backend(ProcessGroup.BackendType.GLOO)  # noqa: SLF001 - as PyTorch does where it makes groups
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, on_cpu)  # noqa: SLF001 - likewise
    else:
        group = _staged_class()(made)
    if kind != "cpu" and backend != "gloo":
        which = getattr(ProcessGroup.BackendType, backend.upper(), ProcessGroup.BackendType.CUSTOM)
        group._register_backend(torch.device(kind), which, made)  # noqa: SLF001 - likewise
    group._set_group_name(name)  # noqa: SLF001 - likewise
    register(name, group)
    return group


@cache
def _staged_class() -> type:
    """Return a kind of group that carries tensors of any device through the CPU, for devices without collectives among each other."""
    import torch
    from torch._C._distributed_c10d import ProcessGroup, _create_work_from_future
    from torch.futures import Future
    from torch.utils._pytree import tree_leaves, tree_map_only

    def through_cpu(name: str) -> Callable[..., Any]:
        def collective(self: Any, *args: Any, **kwargs: Any) -> Any:
            copies: dict[int, torch.Tensor] = {}

            def copy(tensor: torch.Tensor) -> torch.Tensor:
                found = copies.get(id(tensor))
                if found is None:
                    found = copies[id(tensor)] = tensor.detach().to("cpu", copy=True).contiguous()
                return found

            given, named = tree_map_only(torch.Tensor, copy, (args, kwargs))
            work = getattr(self.gloo, name)(*given, **named)
            if work is not None:
                work.wait()
            # Their first argument is what all of them write to.
            for each in tree_leaves(args[:1]):
                if isinstance(each, torch.Tensor):
                    each.detach().copy_(copies[id(each)])
            done: Any = Future()
            done.set_result(list(copies.values()))
            return _create_work_from_future(done)

        return collective

    def start(self: Any, gloo: Any) -> None:
        ProcessGroup.__init__(self, gloo.rank(), gloo.size())
        self.gloo = gloo

    body: dict[str, Any] = {name: through_cpu(name) for name in _STAGED if hasattr(ProcessGroup, name)}
    body |= {"__init__": start, "size": lambda self: self.gloo.size(), "getBackendName": lambda _: "gloo"}
    return type("Staged", (ProcessGroup,), body)
