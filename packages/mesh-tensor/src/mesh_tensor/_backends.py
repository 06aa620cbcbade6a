"""PyTorch's backends for collectives besides gloo: NCCL, and others that are registered."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from mesh_core import MeshError

if TYPE_CHECKING:
    from datetime import timedelta


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
