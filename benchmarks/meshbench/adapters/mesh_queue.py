# mypy: disable-error-code="import-not-found, import-untyped, misc, untyped-decorator"
"""A queue of Mesh, as the page about queues shows it."""

from __future__ import annotations

from time import perf_counter
from typing import Any

from mesh_core import Actor, endpoint, this_host

_BATCH = 64
_TIMEOUT = 120.0


class User(Actor):
    """Puts and takes."""

    @endpoint
    def put(self, queue: Any, count: int) -> None:
        """Small items, one after the other."""
        for n in range(count):
            queue.put(n)
        queue.flush().get(timeout=_TIMEOUT)

    @endpoint
    def take(self, queue: Any) -> int:
        """What is there, as long as something comes."""
        from mesh_core import QueueClosed

        count = 0
        while True:
            try:
                count += len(queue.take(_BATCH).get(timeout=_TIMEOUT))
            except QueueClosed:
                return count


class Queues:
    """See `meshbench.adapter.QueueSystem`."""

    def queue_rate(self, producers: int, takers: int, items: int) -> float:
        """All of them in processes of their own, and so is the queue."""
        # Not at the top: an older mesh has none.
        from mesh_core import Queue

        queue: Any = Queue(max_items=10_000)
        with queue, this_host().spawn_procs({"users": producers + takers}) as procs:
            users: Any = procs.spawn("users", User)
            users.initialized.get(timeout=_TIMEOUT)
            start = perf_counter()
            taking = users.slice(users=slice(producers, producers + takers)).take.call(queue)
            users.slice(users=slice(0, producers)).put.call(queue, items).get(timeout=_TIMEOUT)
            queue.close()
            count: int = sum(taking.get(timeout=_TIMEOUT).values())
            taken = perf_counter() - start
        assert count == producers * items, f"{count} of {producers * items} items have come"
        return count / taken
