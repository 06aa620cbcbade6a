# mypy: disable-error-code="import-not-found, import-untyped, misc, untyped-decorator, attr-defined, no-any-return"
"""Ray's ActorPool."""

from __future__ import annotations

import time
from time import perf_counter
from typing import Any

import ray
from ray.util import ActorPool


@ray.remote(num_cpus=0)
class Replica:
    """Sleeps, or does nothing."""

    def nap(self, seconds: float) -> float:
        """One of many tasks."""
        time.sleep(seconds)
        return seconds

    def naps(self, many: list[float]) -> None:
        """Many of them."""
        for seconds in many:
            time.sleep(seconds)

    def nothing(self, n: int) -> int:
        """The least that a task can be."""
        return n


class Pools:
    """See `meshbench.adapter.PoolSystem`."""

    def pool(self, replicas: int, naps: list[float], empty: int) -> tuple[float, float]:
        """Results as they come."""
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            pool = ActorPool([Replica.remote() for _ in range(replicas)])

            def nap(actor: Any, seconds: float) -> Any:
                return actor.nap.remote(seconds)

            def nothing(actor: Any, n: int) -> Any:
                return actor.nothing.remote(n)

            list(pool.map_unordered(nothing, range(200)))
            start = perf_counter()
            assert sum(1 for _ in pool.map_unordered(nap, naps)) == len(naps)
            napped = perf_counter() - start
            start = perf_counter()
            assert sum(pool.map_unordered(nothing, range(empty))) == empty * (empty - 1) // 2
            return napped, perf_counter() - start
        finally:
            ray.shutdown()

    def dealt(self, shares: list[list[float]]) -> float:
        """One call for each."""
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            actors = [Replica.remote() for _ in shares]
            ray.get([actor.nothing.remote(0) for actor in actors])
            start = perf_counter()
            ray.get([actor.naps.remote(share) for actor, share in zip(actors, shares, strict=True)])
            return perf_counter() - start
        finally:
            ray.shutdown()
