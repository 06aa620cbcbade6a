"""What a script chooses for its collectives: PyTorch's backend, and whether they may go between machines."""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING

from mesh_core.extensions import find, install
from mesh_tensor._extension import Tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

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


def allow_clear_text(addresses: Mapping[str, str] | None = None) -> None:
    """Allow collectives between hosts, which are neither encrypted nor authenticated. Call it only on a network that you trust.

    Otherwise, the first collective of a mesh on several machines raises an error. Each process listens on one address of its host: the one
    given here for the host's name, else that of the interface in ``GLOO_SOCKET_IFNAME``, else the address at which other hosts reach it. The
    call applies to meshes of this process that have not run a collective yet.

    >>> from mesh_tensor import allow_clear_text
    >>> allow_clear_text({"node-1": "10.0.0.1", "node-2": "10.0.0.2"})
    """
    chosen = dict(addresses or {})
    for host, address in chosen.items():
        try:
            ip_address(address)
        except ValueError:
            raise ValueError(
                f"the address of host {host!r} must be a number such as 10.0.0.1, got {address!r}"
            ) from None
    (find(Tensors) or install(Tensors)).clear_text = chosen
