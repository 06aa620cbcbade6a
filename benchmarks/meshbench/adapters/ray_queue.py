# mypy: disable-error-code="import-not-found, import-untyped, misc, untyped-decorator, attr-defined, no-any-return"
"""Ray's queue, which is an actor as well."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import ray
from ray.util.queue import Queue


@ray.remote(num_cpus=0)
class User:
    """Puts and takes."""

    def put(self, queue: Any, count: int) -> None:
        """Small items, one after the other."""
        for n in range(count):
            queue.put(n)

    def take(self, queue: Any, count: int) -> int:
        """So many items, one after the other: it takes several only if it is known that they are there."""
        for _ in range(count):
            queue.get()
        return count


class Queues:
    """See `meshbench.adapter.QueueSystem`."""

    def queue_rate(self, producers: int, takers: int, items: int) -> float:
        """All of them in processes of their own, and so is the queue. Each taker takes its share, as there is no end to tell."""
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        try:
            queue = Queue(maxsize=10_000, actor_options={"num_cpus": 0})
            users = [User.remote() for _ in range(producers + takers)]
            ray.get([user.put.remote(queue, 0) for user in users])
            start = perf_counter()
            taking = [user.take.remote(queue, producers * items // takers) for user in users[producers:]]
            ray.get([user.put.remote(queue, items) for user in users[:producers]])
            count = sum(ray.get(taking))
            return count / (perf_counter() - start)
        finally:
            ray.shutdown()
