"""The names of PyTorch's that the package uses although they begin with an underscore, or are in a module that does.

PyTorch may change them with any release. A test checks that no other ones are used, and that each exists.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from typing import Any

from mesh_core import MeshError

PROVEN = ("2.11", "2.15")
"""The releases with which the numbers of the global view were compared with those of one process; it works with newer ones too, if they lack
nothing. The per-rank view works with 2.6."""
OLDEST = "2.11"
"""The oldest release with which it can be tried. Before, DTensor fails in one process alone where it gathers parts of different sizes, and the
others wait for it; and it loses the shape of a single number that is expanded."""
TRIED = "MESH_TENSOR_ANY_RELEASE"
"""The environment variable that lets the global view run on releases between these that were not compared."""


@dataclass(frozen=True, slots=True)
class Private:
    """A private name of PyTorch's."""

    name: str
    why: str
    """What it is used for."""
    for_global: bool = False
    """Only the global view needs it."""
    of_instances: bool = False
    """The class does not have it, but its instances do."""


def _all(prefix: str, names: str, why: str, **more: Any) -> list[Private]:
    return [Private(f"{prefix}.{name}", why, **more) for name in names.split()]


_C10D = "torch._C._distributed_c10d"
_DTENSOR = "torch.distributed.tensor.DTensor"
_MESH = "torch.distributed.device_mesh.DeviceMesh"
PRIVATE: tuple[Private, ...] = (
    # Operators and their schemas.
    *_all(
        "torch.ops.aten.add.Tensor",
        "_schema _overloadname",
        "what an operator takes, changes and is called: PyTorch reads it everywhere",
    ),
    *_all("torch._ops", "HigherOrderOperator OpOverload", "the types of operators"),
    Private("torch._library.custom_ops.OPDEFS", "operators written in Python, to import them in workers"),
    Private(
        "torch._library.custom_ops.CustomOpDef._init_fn",
        "the function of such an operator, which knows its module",
        of_instances=True,
    ),
    *_all(
        "torch.ops.aten", "_to_copy.default _local_scalar_dense.default", "what `to` and `item` are made of"
    ),
    Private(
        "torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default",
        "what GradScaler asks, and reads in the script",
        for_global=True,
    ),
    *_all(
        "torch.ops._c10d_functional",
        "wait_tensor all_reduce_ all_gather_into_tensor reduce_scatter_tensor",
        "sums under way while others are computed",
        for_global=True,
    ),
    # Tensors.
    Private("torch.Tensor._make_wrapper_subclass", "tensors without memory"),
    Private("torch.Tensor._version", "whether a tensor was changed"),
    Private("torch.Tensor._is_zerotensor", "whether a tensor has memory"),
    Private(
        "torch.Tensor._is_param",
        "parameters of classes of tensors: a mark that PyTorch sets and reads",
        of_instances=True,
    ),
    Private("torch.UntypedStorage._cdata", "which memory a tensor has, also if it has no bytes"),
    Private("torch._C._storage_Use_Count", "whether memory can be used again"),
    Private("torch._debug_has_internal_overlap", "whether elements of a tensor share memory"),
    *_all(
        "torch.nn.Module",
        "_buffers _parameters",
        "a module's own tensors, without those of its parts",
        of_instances=True,
    ),
    # Dispatch.
    *_all("torch._C", "DispatchKey DispatchKeySet", "autocast for a device that the script does not have"),
    *_all(
        "torch._C",
        "_ForceDispatchKeyGuard _dispatch_tls_local_exclude_set _dispatch_tls_local_include_set",
        "complex numbers that operators conjugate lazily, also within a mode",
        for_global=True,
    ),
    *_all(
        "torch._C",
        "DisableTorchFunctionSubclass _disabled_torch_function_impl",
        "attributes of tensors at a tenth of the cost",
    ),
    *_all(
        "torch._C",
        "_dispatch_key_for_device _dispatch_has_kernel_for_dispatch_key",
        "whether a device has an operator, or needs ours",
    ),
    Private("torch._C._current_graph_task_id", "whether autograd is computing gradients"),
    Private("torch._C._len_torch_dispatch_stack", "whether other modes see operators too"),
    Private("torch._C._nn._parse_to", "the arguments of `to`, as modules read them"),
    *_all(
        "torch.utils._python_dispatch",
        "TorchDispatchMode _disable_current_modes _get_current_dispatch_mode_stack",
        "whether operators are seen while a mesh is active",
    ),
    Private("torch.utils._mode_utils.no_dispatch", "ordinary tensors while operators are seen"),
    *_all(
        "torch.utils._pytree",
        "TreeSpec tree_flatten tree_flatten_with_path tree_leaves tree_map tree_map_only tree_structure tree_unflatten",
        "tensors in lists, tuples and dictionaries",
    ),
    # The forms of results.
    *_all(
        "torch._subclasses.fake_tensor",
        "FakeTensor FakeTensorMode DataDependentOutputException DynamicOutputShapeException",
        "what an operator returns, without computing it",
    ),
    # Compilation.
    *_all("torch._dynamo", "list_backends lookup_backend", "compilers by their names"),
    Private("torch._inductor.config", "a compiler without processes of its own"),
    # Groups of processes that need no default group.
    *_all(
        _C10D,
        "AllgatherOptions PrefixStore ProcessGroup ProcessGroupGloo TCPStore",
        "groups that are made anew while others go on",
    ),
    Private(f"{_C10D}.ProcessGroupGloo._Options", "gloo between given places, with a time limit"),
    *_all(f"{_C10D}.ProcessGroupGloo._Options", "_devices _timeout", "likewise"),
    Private(f"{_C10D}.ProcessGroupGloo._set_default_timeout", "likewise"),
    Private("torch.distributed.Backend._plugins", "backends that others have registered"),
    Private(
        "torch.distributed.distributed_c10d._DistributedBackendOptions", "what such a backend is made with"
    ),
    # The global view: groups that DTensor finds.
    Private(
        f"{_C10D}._create_work_from_future",
        "collectives through the CPU, for processes that share a device",
        for_global=True,
    ),
    *_all(
        _C10D,
        "_register_process_group _resolve_process_group _unregister_process_group",
        "DTensor finds groups by their names",
        for_global=True,
    ),
    *_all(
        f"{_C10D}.ProcessGroup",
        "_register_backend _set_default_backend _set_group_name",
        "likewise",
        for_global=True,
    ),
    *_all(
        _MESH,
        "_dim_group_names _rank",
        "the names of a mesh's groups, and this process's rank",
        for_global=True,
        of_instances=True,
    ),
    Private(
        f"{_MESH}._thread_id", "tells meshes of the same ranks apart", for_global=True, of_instances=True
    ),
    Private(
        f"{_MESH}._pg_registry",
        "where a mesh keeps its groups",
        for_global=True,
        of_instances=True,
    ),
    # The global view: DTensors.
    *_all(
        _DTENSOR,
        "_local_tensor _spec",
        "a process's part, without a copy; its layout, which hashes once",
        for_global=True,
        of_instances=True,
    ),
    Private(
        f"{_DTENSOR}._op_dispatcher.unwrap_to_op_info",
        "what DTensor decides about an operator",
        for_global=True,
    ),
    Private(
        f"{_DTENSOR}._op_dispatcher.sharding_propagator.propagate_op_sharding", "likewise", for_global=True
    ),
    Private(
        "torch.distributed.tensor._sharding_prop",
        "whether it was DTensor that raised an error",
        for_global=True,
    ),
    *_all(
        "torch.distributed.tensor",
        "_collective_utils _redistribute",
        "their loggers warn on every process",
        for_global=True,
    ),
    *_all("torch.distributed.tensor._dtensor_spec", "DTensorSpec TensorMeta", "layouts", for_global=True),
    Private(
        "torch.distributed.tensor._utils.compute_local_shape_and_global_offset",
        "which part of a tensor a process has",
        for_global=True,
    ),
    Private(
        "torch.distributed._functional_collectives.AsyncCollectiveTensor",
        "what a collective will give",
        for_global=True,
    ),
)


def found(name: str) -> Any:
    """Return what has this name; raises `ImportError` or `AttributeError` if nothing does."""
    parts = name.split(".")
    value: Any = importlib.import_module(parts[0])
    for at, part in enumerate(parts[1:], 2):
        try:
            value = getattr(value, part)
        except AttributeError:
            if not hasattr(value, "__path__"):
                raise
            value = importlib.import_module(".".join(parts[:at]))
    return value


def check_release() -> None:
    """Raise if the global view does not work with this PyTorch, and say why."""
    import torch
    from torch.torch_version import TorchVersion

    otherwise = "The per-rank view works with this one"
    release = TorchVersion(torch.__version__)
    compared = f"{', '.join(PROVEN)} or newer"
    if release < OLDEST:
        raise MeshError(
            f"the global view needs PyTorch {compared}, and this is {torch.__version__}, whose DTensor fails in one process alone "
            f"where parts differ in size: install a newer one, with mesh-tensor[global] for example. {otherwise}"
        )
    is_compared = ".".join(torch.__version__.split(".")[:2]) in PROVEN
    if release < PROVEN[-1] and not is_compared and os.environ.get(TRIED) != "1":
        raise MeshError(
            f"the global view needs PyTorch {compared}, and this is {torch.__version__}, whose numbers were not compared with those of one "
            f"process. Install one of those; to try it all the same, set {TRIED}=1. {otherwise}"
        )
    if lacks := missing(for_global=True):
        raise MeshError(
            f"the global view does not work with PyTorch {torch.__version__}, which lacks "
            f"{'; '.join(f'{each.name}, for {each.why}' for each in lacks)}. {otherwise}"
        )


def missing(*, for_global: bool) -> list[Private]:
    """Return what this PyTorch lacks of the names that a view needs, but for those that only instances have."""
    return [
        each
        for each in PRIVATE
        if (for_global or not each.for_global) and not each.of_instances and not _is_there(each.name)
    ]


def _is_there(name: str) -> bool:
    try:
        found(name)
    except (AttributeError, ImportError):
        return False
    return True
