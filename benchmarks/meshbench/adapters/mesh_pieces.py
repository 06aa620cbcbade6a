# mypy: disable-error-code="import-not-found, import-untyped, misc, untyped-decorator"
"""Small pieces of work with what Mesh has beside calls, which two versions of it do in turn (`meshbench.slices`)."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

_TIMEOUT = 120.0


def _seconds(work: Callable[[], object]) -> float:
    start = perf_counter()
    work()
    return perf_counter() - start


class Pieces:
    """Each takes seconds, over the actors that the system has started."""

    _all: Any

    def pool_tasks(self, count: int) -> float:
        """Empty tasks of a pool, results as they come."""
        from mesh_core import Pool

        with Pool(self._all) as pool:
            pool.submit(self._all.echo, 0).get(timeout=_TIMEOUT)
            return _seconds(lambda: sum(pool.map_unordered(self._all.echo, range(count))))

    def submitted(self, count: int) -> float:
        """Empty tasks of a pool, submitted one by one."""
        from mesh_core import Pool

        with Pool(self._all) as pool:
            pool.submit(self._all.echo, 0).get(timeout=_TIMEOUT)

            def submit() -> None:
                for future in [pool.submit(self._all.echo, n) for n in range(count)]:
                    future.get(timeout=_TIMEOUT)

            return _seconds(submit)

    def channel(self, count: int) -> float:
        """Values through a channel of this process."""
        from mesh_core import Channel

        port, receiver = Channel[int].open()

        def pass_on() -> None:
            for n in range(count):
                port.send(n)
                receiver.recv().get(timeout=_TIMEOUT)

        return _seconds(pass_on)

    def queued(self, count: int) -> float:
        """Items through a queue, put and taken by this process."""
        from mesh_core import Queue

        with Queue[int](max_items=count) as queue:
            queue.put(0)
            queue.take().get(timeout=_TIMEOUT)

            def pass_on() -> None:
                for n in range(count):
                    queue.put(n)
                taken = 0
                while taken < count:
                    taken += len(queue.take(64).get(timeout=_TIMEOUT))

            return _seconds(pass_on)

    def refs(self, count: int) -> float:
        """References made, read and dropped."""
        from mesh_core import put

        def keep() -> None:
            for n in range(count):
                put([n]).get(timeout=_TIMEOUT)

        return _seconds(keep)
