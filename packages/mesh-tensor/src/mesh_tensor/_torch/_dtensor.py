"""What DTensor decides about an operator before it computes anything."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch.distributed.tensor import DTensor, _sharding_prop
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

__all__ = [
    "DTensorSpec",
    "TensorMeta",
    "compute_local_shape_and_global_offset",
    "decided",
    "is_refusal",
    "is_trusted",
    "squeezes_parts",
]


def decided(func: Any, args: Any, kwargs: Any) -> Any:
    """Return how DTensor shards an operator: the layout of its result, and those of its arguments. Raises if it cannot say."""
    dispatcher: Any = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(func, args, kwargs)
    return dispatcher.sharding_propagator.propagate_op_sharding(info.schema)


_SEARCHED = frozenset(
    {
        "aten::_unsafe_masked_index",
        "aten::_unsafe_masked_index_put_accumulate",
        "aten::batch_norm_backward",
        "aten::native_batch_norm_backward",
    }
)
"""Where DTensor has no rule for them, it searches all layouts of all that they are made of, for minutes."""
_REPLACED = frozenset({"aten::_index_put_impl_", "aten::constant_pad_nd", "aten::index_put"})
"""Their first rules were wrong: results that do not fit the layouts, indices into the whole taken for ones into a part."""
_SQUEEZING = frozenset({"aten::squeeze", "aten::squeeze_"})


def is_trusted(func: Any) -> bool:
    """Return whether this release shards an operator as it should; others can be tried."""
    name = func._schema.name
    if name not in _SEARCHED and name not in _REPLACED:
        return True
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    return func in getattr(propagator, "op_single_dim_strategy_funcs", ())


def squeezes_parts(func: Any) -> bool:
    """Return whether this release drops a dimension where a part has one element, whatever the whole tensor has."""
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    return func._schema.name in _SQUEEZING and not hasattr(propagator, "squeeze_op_to_dims_variant")


def is_refusal(error: BaseException) -> bool:
    """Return whether DTensor has raised an error because it cannot shard an operator on such layouts.

    All processes get it, before anything is computed: it follows from layouts and forms.
    """
    # Its assertions are about layouts. Some releases raise another error from that of the decision, in another module.
    return isinstance(error, AssertionError) or any(
        _is_of_deciding(each.__traceback__) for each in (error, error.__cause__) if each is not None
    )


def _is_of_deciding(trace: TracebackType | None) -> bool:
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == _sharding_prop.__name__:
            return True
        trace = trace.tb_next
    return False
