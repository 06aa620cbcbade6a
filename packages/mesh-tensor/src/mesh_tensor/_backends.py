"""PyTorch's backends for collectives besides gloo: NCCL, and others that are registered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from mesh_core import MeshError
from mesh_core.extensions import find, install
from mesh_tensor._extension import Tensors

if TYPE_CHECKING:
    from datetime import timedelta

    from mesh_core import ProcMesh


def use_backend(procs: ProcMesh, name: str | None, device: str = "cpu") -> None:
    """Choose one of PyTorch's backends for collectives of tensors on this kind of device from now on; ``None`` restores the default.

    The default is gloo for tensors on the CPU. For CUDA devices it is NCCL if each process of the mesh has a device of its own, and otherwise gloo, with copies
    through the CPU. A backend of :meth:`torch.distributed.Backend.register_backend` must be registered in the
    processes: import the module that does so there, for example with ``bootstrap=`` of ``spawn_procs``.

    >>> import torch
    >>> from mesh_core import this_host
    >>> from mesh_tensor import fetch, rank_tensor, reduce, use_backend
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     use_backend(procs, "gloo")
    ...     print(fetch(reduce(rank_tensor(procs, "gpus"))).values())
    [tensor(1), tensor(1)]
    """
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"the name of a backend must be a text, got {name!r}")
    chosen = (find(Tensors) or install(Tensors)).backends
    if name is None:
        chosen.pop((procs, device), None)
    else:
        chosen[procs, device] = name.lower()


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
