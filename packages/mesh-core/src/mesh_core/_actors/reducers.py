"""How results are combined: sum, mean, concat, or a user's function.

A rank's *share* is what it passes on: one result, or several already combined. Shares are combined in rank order.
Arrays and tensors are recognized by their module, without importing it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

Reducer: TypeAlias = Literal["sum", "mean", "concat"] | Callable[[Any, Any], Any]

NAMES = ("sum", "mean", "concat")


def check(reducer: object) -> None:
    """Raise if this cannot combine results, before anything is sent."""
    if isinstance(reducer, str):
        if reducer not in NAMES:
            from mesh_core._common.suggestions import did_you_mean

            raise ValueError(
                f"reduce={reducer!r}{did_you_mean(reducer, NAMES)}: reduce must be 'sum', 'mean', "
                "'concat' or a function of two results"
            )
    elif not callable(reducer):
        raise TypeError(
            "reduce must be 'sum', 'mean', 'concat' or a function of two results, got "
            f"{type(reducer).__name__}"
        )


def first_share(reducer: Reducer, value: Any) -> Any:
    """Return one rank's result as a reducer combines it: its share.

    >>> first_share("mean", 4.0), first_share("sum", 4.0)
    ((4.0, 1), 4.0)
    """
    return (value, 1) if reducer == "mean" else value


def combine(reducer: Reducer, shares: list[Any]) -> Any:
    """Combine several shares, given in rank order, into one.

    >>> combine("mean", [(1.0, 1), (5.0, 2)])
    (6.0, 3)
    >>> combine("concat", [[1], [2, 3]])
    [1, 2, 3]
    """
    if len(shares) == 1:
        return shares[0]
    if reducer == "sum":
        return _sum(shares)
    if reducer == "mean":
        return _sum([share[0] for share in shares]), sum(share[1] for share in shares)
    if reducer == "concat":
        return _concat(shares)
    assert callable(reducer)
    return functools.reduce(reducer, shares)


def result(reducer: Reducer, share: Any) -> Any:
    """Return the final result from the combined share.

    >>> result("mean", (6.0, 3))
    2.0
    """
    return _divide(*share) if reducer == "mean" else share


def _add(left: Any, right: Any) -> Any:
    if isinstance(left, dict) and isinstance(right, dict):
        if left.keys() != right.keys():
            odd = sorted(map(repr, left.keys() ^ right.keys()))
            raise ValueError(f"dicts are added key by key, and {', '.join(odd)} is missing from some of them")
        return {key: _add(value, right[key]) for key, value in left.items()}
    return left + right


def _sum(values: list[Any]) -> Any:
    total = _add(values[0], values[1])
    for value in values[2:]:
        # The total is referenced only here, so large arrays can be added in place.
        total = _add_into(total, value)
    return total


def _add_into(total: Any, value: Any) -> Any:
    if isinstance(total, dict) and isinstance(value, dict) and total.keys() == value.keys():
        for key, one in value.items():
            total[key] = _add_into(total[key], one)
        return total
    if (
        type(total) is type(value)
        and type(total).__module__.partition(".")[0] in ("numpy", "torch")
        and total.shape == value.shape
        and total.dtype == value.dtype
        and not getattr(total, "requires_grad", False)
    ):
        total += value
        return total
    return _add(total, value)


def _divide(total: Any, count: int) -> Any:
    if isinstance(total, dict):
        return {key: _divide(value, count) for key, value in total.items()}
    return total / count


def _concat(shares: list[Any]) -> Any:
    first = shares[0]
    module = type(first).__module__.partition(".")[0]
    if module == "numpy":
        return sys.modules[module].concatenate(shares)
    if module == "torch":
        return sys.modules[module].cat(shares)
    if isinstance(first, list):
        return [item for share in shares for item in share]
    if isinstance(first, (str, bytes)):
        return first[:0].join(shares)
    if isinstance(first, (tuple, bytearray)):
        return functools.reduce(_add, shares)
    raise TypeError(
        f"concat needs lists, tuples, strings, bytes, arrays or tensors, and an endpoint returned {type(first).__name__}; "
        "return a list of it"
    )
