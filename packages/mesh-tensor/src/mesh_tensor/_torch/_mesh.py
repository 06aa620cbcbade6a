"""Meshes of devices, and groups of processes, as DTensor uses them.

DTensor finds a group by its name, and the name in its mesh of devices. PyTorch makes both from a default group. These
need none, as other users of the process may have made one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._C._distributed_c10d import (
    ProcessGroup,
    _register_process_group,
    _resolve_process_group,
    _unregister_process_group,
)
from torch.distributed.device_mesh import DeviceMesh


class Devices(DeviceMesh):
    """A mesh of devices of some kind: of this process, which has a rank in it, and of others."""

    def __init__(
        self,
        kind: str,
        shape: tuple[int, ...],
        names: tuple[str, ...],
        *,
        rank: int,
        life: int,
        groups: Mapping[str, ProcessGroup],
    ) -> None:
        """Make a mesh.

        Args:
            kind: the kind of the devices.
            shape: the number of processes in each dimension.
            names: the names of the dimensions.
            rank: of this process.
            life: another number for each mesh of this process. PyTorch caches shardings by their meshes, which must differ if their groups do.
            groups: the groups along each dimension, with this process, by their names.
        """
        mesh: Any = self
        ranks = torch.arange(int(torch.Size(shape).numel()), device="cpu").view(shape)
        super().__init__(kind, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank)
        mesh._thread_id = life  # The one part of a mesh's identity that says nothing.
        # No groups over several dimensions: PyTorch would use one to gather what two have split unevenly, in the wrong order.
        mesh._dim_group_names = list(groups)
        mesh._pg_registry.update(groups)

    def get_rank(self) -> int:
        """Return this process's rank in the whole mesh."""
        return self._rank

    def get_local_rank(self, mesh_dim: int | str | None = None) -> int:
        """Return its coordinate in one dimension."""
        names = self.mesh_dim_names or ()
        at = self.get_coordinate()
        assert at is not None, "this process is in the mesh"
        return at[names.index(mesh_dim) if isinstance(mesh_dim, str) else mesh_dim or 0]

    def meet(self) -> None:
        """Have PyTorch find the groups by their names. Destroying the default group, as programs for torchrun do, makes it forget them."""
        mesh: Any = self
        try:
            for name in mesh._pg_registry:
                _resolve_process_group(name)
                return  # All are forgotten together.
        except (RuntimeError, LookupError, ValueError):
            for name, group in mesh._pg_registry.items():
                _register_process_group(name, group)

    def close(self) -> None:
        """Leave the groups."""
        mesh: Any = self
        for name in mesh._pg_registry:
            _unregister_process_group(name)
        mesh._pg_registry.clear()
