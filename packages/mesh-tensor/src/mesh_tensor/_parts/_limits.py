"""Operators for which DTensor differs from a single process, and layouts for which it does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

WHOLE = frozenset(
    {
        # Their results are values: DTensor gives that of one part only.
        "aten::equal",
        "aten::_local_scalar_dense",
        "aten::is_nonzero",
        # DTensor wants the default group for these,
        "aten::convolution",
        "aten::convolution_backward",
        # counts the parts' rows for those of the whole,
        "aten::native_group_norm",
        "aten::native_group_norm_backward",
        # takes the whole's shape for that of a part,
        "aten::view_copy",
        # drops a dimension where a part has one row, whatever the others have,
        "aten::squeeze_copy",
        # takes their dimension for one of this process's part,
        "aten::linalg_cross",
        # takes no part of what belongs together,
        "aten::linalg_ldl_solve",
        # has rows of the result where the right side has parts of a batch,
        "aten::linalg_solve_triangular",
        # forgets that a dimension of one element was kept,
        "aten::logsumexp",
        # multiplies complex numbers, which gloo cannot,
        "aten::prod",
        # cuts blocks out of a part that are larger than it,
        "aten::pixel_unshuffle",
        # does not know what it is made of,
        "aten::conj_physical",
        # forgets to conjugate what their kernels conjugate lazily,
        "aten::linalg_lstsq",
        "aten::linalg_pinv",
        # and reduces the parts, and then what was there once more.
        "aten::scatter_reduce",
        "aten::scatter_reduce_",
    }
)


INDEXED = frozenset(
    {
        "aten::gather",
        "aten::scatter",
        "aten::scatter_",
        "aten::scatter_add",
        "aten::scatter_add_",
    }
)
"""A tensor, a dimension and indices: DTensor splits both alike, though they may be of different sizes."""


FILLING = frozenset(
    {"aten::copy", "aten::copy_", "aten::fill", "aten::fill_", "aten::full_like", "aten::ones_like"}
)
"""DTensor sets each summand to the value, and so their sum to another one; where it copies, some releases do."""


DIVIDING = frozenset({"aten::div", "aten::div_"})
"""DTensor of PyTorch 2.11 divides by summands, as if the quotients were those of a sum, where the divisor has more dimensions."""


NONEMPTY = frozenset(
    {
        "aten::_batch_norm_with_update",
        "aten::_native_batch_norm_legit",
        "aten::amax",
        "aten::amin",
        "aten::aminmax",
        "aten::argmax",
        "aten::argmin",
        "aten::batch_norm_backward",
        "aten::linalg_vector_norm",
        "aten::max",
        "aten::max_pool2d_with_indices",
        "aten::max_pool2d_with_indices_backward",
        "aten::max_pool3d_with_indices",
        "aten::max_pool3d_with_indices_backward",
        "aten::min",
        "aten::native_batch_norm",
        "aten::native_batch_norm_backward",
        "aten::norm",
        "aten::renorm",
    }
)
"""They fail if there is no element: a process with an empty part would, and DTensor lets the others wait for it."""


SEEKING = frozenset({"aten::argmax", "aten::argmin"})
"""DTensor seeks in the parts as they are, says that the result is laid out as if it had redistributed them, and of equals takes the first that it finds."""


ORDERED = frozenset(
    {
        # It is given strides.
        "aten::as_strided",
        # They factor the matrix, or its transpose if it is contiguous, and the formula of the gradient asks the script's tensor which it was.
        "aten::_linalg_det",
        "aten::_linalg_slogdet",
        # They read what they are given as if it were contiguous.
        "aten::adaptive_max_pool3d_backward",
        "aten::fractional_max_pool2d_backward",
        "aten::fractional_max_pool3d_backward",
    }
)
"""Their values depend on how their arguments lie in memory. Gathered parts do not lie as the whole tensor does, and on each release in another way."""


GATHERED = {"aten::native_layer_norm_backward": (5, 6), "aten::_fused_rms_norm_backward": (4,)}
"""Arguments that each process needs all of: DTensor of some releases leaves them split as they are."""


REDUCING = frozenset(
    {
        "aten::amax",
        "aten::amin",
        "aten::count_nonzero",
        "aten::linalg_vector_norm",
        "aten::mean",
        "aten::nansum",
        "aten::norm",
        "aten::std",
        "aten::std_mean",
        "aten::sum",
        "aten::var",
        "aten::var_mean",
    }
)
"""For them an empty list of dimensions means all; DTensor takes it for none, and keeps the sum of each part."""


MASKED = {"aten::embedding": (0, 1, None), "aten::gather": (0, 2, 1)}
"""A tensor, its indices, and the dimension that they refer to, by default the first. If that is split, DTensor takes an index that no process has for one
that another process has, and gives zeros."""


def dims_given(func: Any) -> int | None:
    """Return which argument of a reduction is the list of its dimensions, if it takes one."""
    schema = func._schema  # noqa: SLF001 - as the whole of PyTorch reads it
    if schema.name not in REDUCING:
        return None
    return next(
        (
            place
            for place, each in enumerate(schema.arguments)
            if each.name == "dim" and str(each.type) in ("List[int]", "Optional[List[int]]")
        ),
        None,
    )


def in_order(local: torch.Tensor, is_contiguous: bool) -> torch.Tensor:
    """Return the same values, contiguous or not."""
    if is_contiguous:
        return local.contiguous()
    if local.dim() > 1 and local.is_contiguous():
        return local.mT.contiguous().mT
    return local


def is_unaligned(tensor: Any, dim: int, index: Any, *_: Any) -> bool:
    """Return whether a tensor and the indices into it are split and of different sizes: their parts do not belong together."""
    sizes = list(zip(tensor.shape, index.shape, strict=False))
    is_split = any(type(each) is not Replicate for value in (tensor, index) for each in value.placements)
    return is_split and any(
        one != other for at, (one, other) in enumerate(sizes) if at != dim % max(1, len(sizes))
    )


NORMS = frozenset({"aten::linalg_vector_norm", "aten::norm"})
"""DTensor of PyTorch 2.11 adds norms of parts as if the sum were a norm."""


MEANS = {
    "aten::mse_loss_backward": 3,
    "aten::smooth_l1_loss_backward": 3,
    "aten::huber_loss_backward": 3,
    "aten::soft_margin_loss_backward": 3,
    "aten::binary_cross_entropy_backward": 4,
}
"""Where these have their `reduction`. As a mean, DTensor has each process divide by the number of its own elements."""
MEAN, SUM = 1, 2
ENTROPIES = frozenset({"aten::nll_loss_forward", "aten::nll_loss2d_forward"})
"""Their mean is their sum divided by the weight of all targets, of which each process knows its own. DTensor gathers all of what was predicted instead."""


def parts_of(tensor: DTensor) -> dict[int, int]:
    """Return which dimensions are split, and into how many parts."""
    parts: dict[int, int] = {}
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            parts[placement.dim] = parts.get(placement.dim, 1) * size
    return parts


def has_empty_parts(tensor: DTensor) -> bool:
    """Return whether some process's part of a tensor has no elements."""
    return any(0 in found for found in _sizes_of_parts(tensor).values())


def has_lone_rows(tensor: DTensor, dims: int | Sequence[int] | None = None) -> bool:
    """Return whether in one of these dimensions, or in any, some process's part has one element of several."""
    among = [dims] if isinstance(dims, int) else range(tensor.dim()) if dims is None else dims
    asked = {each % max(1, tensor.dim()) for each in among}
    return any(
        1 in found and tensor.shape[dim] > 1 for dim, found in _sizes_of_parts(tensor).items() if dim in asked
    )


def _sizes_of_parts(tensor: DTensor) -> dict[int, set[int]]:
    """Return which dimensions are split, and how many elements a part may have there."""
    sizes: dict[int, set[int]] = {}
    for placement, parts in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if isinstance(placement, Shard):
            had = sizes.get(placement.dim, {tensor.shape[placement.dim]})
            # Each is cut into parts of the same size, and a remainder.
            steps = [(size, -(-size // parts)) for size in had]
            sizes[placement.dim] = {
                max(0, min(step, size - at * step)) for size, step in steps for at in range(parts)
            }
    return sizes


def is_kept(shape: Sequence[int], dim: int, to: Sequence[int]) -> bool:
    """Return whether a view leaves a dimension as it is: the same size, and as many elements before it."""
    if -1 in to:
        to = list(to)
        to[to.index(-1)] = math.prod(shape) // max(1, -math.prod(to))
    before = math.prod(shape[:dim])
    return any(size == shape[dim] and math.prod(to[:at]) == before for at, size in enumerate(to))
