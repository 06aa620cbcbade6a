"""Distributed tensors: a tensor that looks local and runs on a mesh of processes.

>>> import torch
>>> from mesh_core import this_host
>>> from mesh_tensor import activate, fetch
>>> with this_host().spawn_procs({"gpus": 2}) as procs, activate(procs):
...     x = torch.ones(3) * 2
...     print(fetch(x).item(gpus=1))
tensor([2., 2., 2.])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_tensor import spmd
    from mesh_tensor._capture._step import Captured, capture
    from mesh_tensor._checkpoint._load import load
    from mesh_tensor._checkpoint._place import CheckpointError
    from mesh_tensor._checkpoint._safetensors import export_safetensors
    from mesh_tensor._checkpoint._save import save
    from mesh_tensor._choices import allow_clear_text, use_backend
    from mesh_tensor._collectives import all_gather, all_to_all, reduce
    from mesh_tensor._errors import CaptureError, RanksDisagree, RemoteException, StreamError
    from mesh_tensor._global._mesh import Mesh, distribute
    from mesh_tensor._global._modules import ColumnParallel, FullyShard, RowParallel, module_to_mesh
    from mesh_tensor._global._tensor import GlobalTensor
    from mesh_tensor._looking import Inspection, Part, inspect, show
    from mesh_tensor._moving import slice_mesh, to_mesh
    from mesh_tensor._remote import RemoteFunction, remote
    from mesh_tensor._replay._compiled import Compilation
    from mesh_tensor._tensor import MeshTensor
    from mesh_tensor._timeline import Span, Timeline, timeline
    from mesh_tensor._user_streams import Borrow, Stream, current_stream, default_stream
    from mesh_tensor._view import Usage, activate, fetch, fetch_shard, manual_seed, rank_tensor, share, usage
    from mesh_tensor.spmd import SPMDActor

__all__ = [
    "Borrow",
    "CaptureError",
    "Captured",
    "CheckpointError",
    "ColumnParallel",
    "Compilation",
    "FullyShard",
    "GlobalTensor",
    "Inspection",
    "Mesh",
    "MeshTensor",
    "Part",
    "RanksDisagree",
    "RemoteException",
    "RemoteFunction",
    "RowParallel",
    "SPMDActor",
    "Span",
    "Stream",
    "StreamError",
    "Timeline",
    "Usage",
    "__version__",
    "activate",
    "all_gather",
    "all_to_all",
    "allow_clear_text",
    "capture",
    "current_stream",
    "default_stream",
    "distribute",
    "export_safetensors",
    "fetch",
    "fetch_shard",
    "inspect",
    "load",
    "manual_seed",
    "module_to_mesh",
    "rank_tensor",
    "reduce",
    "remote",
    "save",
    "share",
    "show",
    "slice_mesh",
    "spmd",
    "timeline",
    "to_mesh",
    "usage",
    "use_backend",
]

# Imported when they are first named: PyTorch takes a second.
_LATER = {
    "Borrow": "mesh_tensor._user_streams",
    "CaptureError": "mesh_tensor._errors",
    "Captured": "mesh_tensor._capture._step",
    "CheckpointError": "mesh_tensor._checkpoint._place",
    "Compilation": "mesh_tensor._replay._compiled",
    "ColumnParallel": "mesh_tensor._global._modules",
    "FullyShard": "mesh_tensor._global._modules",
    "GlobalTensor": "mesh_tensor._global._tensor",
    "Inspection": "mesh_tensor._looking",
    "Mesh": "mesh_tensor._global._mesh",
    "MeshTensor": "mesh_tensor._tensor",
    "Part": "mesh_tensor._looking",
    "RanksDisagree": "mesh_tensor._errors",
    "RemoteException": "mesh_tensor._errors",
    "RemoteFunction": "mesh_tensor._remote",
    "RowParallel": "mesh_tensor._global._modules",
    "SPMDActor": "mesh_tensor.spmd",
    "Span": "mesh_tensor._timeline",
    "Stream": "mesh_tensor._user_streams",
    "StreamError": "mesh_tensor._errors",
    "Timeline": "mesh_tensor._timeline",
    "Usage": "mesh_tensor._view",
    "activate": "mesh_tensor._view",
    "all_gather": "mesh_tensor._collectives",
    "all_to_all": "mesh_tensor._collectives",
    "allow_clear_text": "mesh_tensor._choices",
    "capture": "mesh_tensor._capture._step",
    "current_stream": "mesh_tensor._user_streams",
    "default_stream": "mesh_tensor._user_streams",
    "distribute": "mesh_tensor._global._mesh",
    "export_safetensors": "mesh_tensor._checkpoint._safetensors",
    "fetch": "mesh_tensor._view",
    "fetch_shard": "mesh_tensor._view",
    "inspect": "mesh_tensor._looking",
    "load": "mesh_tensor._checkpoint._load",
    "manual_seed": "mesh_tensor._view",
    "module_to_mesh": "mesh_tensor._global._modules",
    "rank_tensor": "mesh_tensor._view",
    "reduce": "mesh_tensor._collectives",
    "remote": "mesh_tensor._remote",
    "save": "mesh_tensor._checkpoint._save",
    "share": "mesh_tensor._view",
    "show": "mesh_tensor._looking",
    "slice_mesh": "mesh_tensor._moving",
    "timeline": "mesh_tensor._timeline",
    "to_mesh": "mesh_tensor._moving",
    "usage": "mesh_tensor._view",
    "use_backend": "mesh_tensor._choices",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("mesh-tensor")
    elif name == "spmd":
        import mesh_tensor.spmd as value
    elif name in _LATER:
        import importlib

        try:
            module = importlib.import_module(_LATER[name])
        except ModuleNotFoundError as error:
            if error.name != "torch":
                raise
            raise ImportError(
                "mesh-tensor computes with PyTorch, which is not installed here: install the build that fits the machine, "
                "with `pip install torch`, or the package as mesh-tensor[torch]",
                name="torch",
            ) from error
        value = getattr(module, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
