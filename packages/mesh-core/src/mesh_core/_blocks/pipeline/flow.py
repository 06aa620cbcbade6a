"""What may happen next in a pipeline: its one decision, without clock or I/O.

PIP-1: what a pipeline holds is bounded: a stage starts an item, or is read from, only while the total is below the limit of
its output. On top of ``max_bytes`` there is at most one output of each busy replica, and one more.
PIP-2: limits rise from stage to stage, so that items near the end are finished before new ones are started.
PIP-3: while no result can be taken, something may always continue, however much is held: the last stage that has items or, with
ordered results, the oldest item. So there is no deadlock, neither with items larger than any limit nor with results that wait for
an older one.
PIP-4: with ordered results, a result is given only when nothing older is in flight.
PIP-5: with ordered results, the last turn of a stage of generators goes to an item that no older item can follow: the older one
would wait for a turn whose owner may not yield. If such an item has a turn anyway (a replica was lost), it continues to be read,
however much is held.

An item is identified by its key: its index in the source, followed by the index of each value that a generator has yielded.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")
Key = tuple[int, ...]


class Item(NamedTuple, Generic[T]):
    """A value in flight."""

    key: Key
    size: int
    value: T


class Flow(Generic[T]):
    """The items of one run: those waiting for a stage, those being worked on, and results that nobody has taken."""

    def __init__(self, stages: int, max_bytes: int, *, ordered: bool) -> None:
        self._stages = stages
        self._ordered = ordered
        self._limits = [max(1, max_bytes * (i + 1) // (stages + 1)) for i in range(stages + 1)]
        self._waiting: list[list[Item[T]]] = [[] for _ in range(stages)]
        self._results: list[Item[T]] = []
        self._coming: deque[Item[T]] = deque()
        self._live: list[set[Key]] = [set() for _ in range(stages)]
        self._by_age: list[list[Key]] = [[] for _ in range(stages)]
        """A heap for each stage: the keys of all items there, and of some that have left."""
        self.bytes = [0] * (stages + 1)
        """The bytes that each stage holds, waiting or in work; the last entry is for results."""
        self.held = 0

    # What may happen.

    def wants(self, ahead: int) -> bool:
        """Whether to read an item from the source; not if ``ahead`` items wait for the first stage."""
        return len(self._waiting[0]) < ahead and self.held < self._limits[0]

    def _may(self, stage: int, key: Key) -> bool:
        if self.held < self._limits[stage + 1]:
            return True
        if self.ready:
            return False
        if self._ordered:
            return key == self._oldest(self._stages)
        return not any(self._live[stage + 1 :])

    def _oldest(self, stages: int) -> Key | None:
        """The oldest item in the first ``stages`` stages, waiting items included."""
        found: Key | None = None
        for by_age, live in zip(self._by_age[:stages], self._live, strict=False):
            while by_age and by_age[0] not in live:
                heapq.heappop(by_age)
            if by_age and (found is None or by_age[0] < found):
                found = by_age[0]
        return found

    def begin(self, stage: int, *, last: bool = False) -> Item[T] | None:
        """Return the next item that a stage may start, if any; ``last`` for the last turn of a stage of generators."""
        waiting = self._waiting[stage]
        if not waiting:
            return None
        key = waiting[0].key
        if last and self._ordered and self._comes_later(stage, key):
            return None
        return heapq.heappop(waiting) if self._may(stage, key) else None

    def _comes_later(self, stage: int, key: Key) -> bool:
        """Whether a stage may still receive something older than this."""
        before = self._oldest(stage)
        return before is not None and before < key

    def may_read(self, stage: int, item: Item[T], n: int, *, full: bool = False) -> bool:
        """Whether the ``n``-th value of a generator may be read; ``full`` if its stage has no free turn."""
        if self._may(stage, (*item.key, n)):
            return True
        waiting = self._waiting[stage]
        return (
            full
            and self._ordered
            and bool(waiting)
            and not self.ready
            and waiting[0].key == self._oldest(self._stages)
        )

    def waiting(self, stage: int) -> int:
        """How many items wait for a stage."""
        return len(self._waiting[stage])

    @property
    def ready(self) -> bool:
        """Whether a result can be taken."""
        if not self._ordered:
            return bool(self._coming)
        if not self._results:
            return False
        oldest = self._oldest(self._stages)
        return oldest is None or self._results[0].key < oldest

    @property
    def is_empty(self) -> bool:
        """Whether nothing is in flight, including results that nobody has taken."""
        return not (any(self._live) or self._coming or self._results)

    # What has happened.

    def _lives(self, stage: int, key: Key) -> None:
        self._live[stage].add(key)
        if self._ordered:
            heapq.heappush(self._by_age[stage], key)

    def add(self, item: Item[T]) -> None:
        """The source has given an item."""
        self._put(0, item)

    def _put(self, stage: int, item: Item[T]) -> None:
        self.bytes[stage] += item.size
        self.held += item.size
        if stage < self._stages:
            self._lives(stage, item.key)
            heapq.heappush(self._waiting[stage], item)
        elif self._ordered:
            heapq.heappush(self._results, item)
        else:
            self._coming.append(item)

    def _let_go(self, stage: int, item: Item[T]) -> None:
        self.bytes[stage] -= item.size
        self.held -= item.size

    def passed(self, stage: int, item: Item[T], size: int, value: T) -> None:
        """A stage has turned an item into one value."""
        self._live[stage].discard(item.key)
        self._let_go(stage, item)
        self._put(stage + 1, Item(item.key, size, value))

    def opened(self, stage: int, item: Item[T]) -> None:
        """A generator was started with an item."""
        self._live[stage].discard(item.key)
        self._lives(stage, (*item.key, 0))

    def read(self, stage: int, item: Item[T], n: int, size: int, value: T) -> None:
        """The ``n``-th value of a generator was read."""
        self._live[stage].discard((*item.key, n))
        self._lives(stage, (*item.key, n + 1))
        self._put(stage + 1, Item((*item.key, n), size, value))

    def again(self, stage: int, item: Item[T], *, opened: bool) -> None:
        """Put an item back that must be started again. ``opened`` if its generator was started, of which nothing was read."""
        if opened:
            self._live[stage].discard((*item.key, 0))
            self._lives(stage, item.key)
        heapq.heappush(self._waiting[stage], item)

    def over(self, stage: int, item: Item[T], n: int | None = None) -> None:
        """An item is finished: it has failed, or its generator has ended after ``n`` values."""
        self._live[stage].discard(item.key if n is None else (*item.key, n))
        self._let_go(stage, item)

    def take(self) -> Item[T]:
        """Return the next result; only if one is :attr:`ready`."""
        item = heapq.heappop(self._results) if self._ordered else self._coming.popleft()
        self._let_go(self._stages, item)
        return item
