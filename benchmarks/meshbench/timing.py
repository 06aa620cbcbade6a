"""Loops that time one operation at a time, and the order statistics of what they give."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

WARM_UP = 50
"""Operations done before timing starts: connections made, caches filled, code specialised."""


@dataclass(frozen=True)
class PairTimes:
    """Seconds of calls between actors of two procs, beside the script's own."""

    script: list[float]
    """From the script to a plain endpoint."""

    sync: list[float]
    """From a plain endpoint to a plain endpoint."""

    awaited: list[float]
    """From a coroutine to a plain endpoint."""

    coroutines: list[float]
    """From a coroutine to a coroutine."""

    cpu: float
    """Processor time of the script's process for each call between plain endpoints."""


def sample(times: int, operation: Callable[[], object], *, warm_up: int = WARM_UP) -> list[float]:
    """Seconds that each of `times` runs of `operation` took, one after the other.

    Example:
        >>> len(sample(3, lambda: None))
        3
    """
    for _ in range(warm_up):
        operation()
    taken = []
    for _ in range(times):
        start = perf_counter()
        operation()
        taken.append(perf_counter() - start)
    return taken


async def sample_async(
    times: int, operation: Callable[[], Awaitable[object]], *, warm_up: int = WARM_UP
) -> list[float]:
    """As `sample`, each run awaited in the running loop."""
    for _ in range(warm_up):
        await operation()
    taken = []
    for _ in range(times):
        start = perf_counter()
        await operation()
        taken.append(perf_counter() - start)
    return taken


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least `q` of all values do not exceed (nearest rank, nothing made up).

    Example:
        >>> quantile([4.0, 1.0, 3.0, 2.0], 0.5), quantile([1.0, 2.0], 0.99)
        (2.0, 2.0)
    """
    if not values:
        raise ValueError("quantile of no values: measure at least once")
    ordered = sorted(values)
    rank = -(-len(ordered) * q // 1)
    return ordered[max(int(rank), 1) - 1]
