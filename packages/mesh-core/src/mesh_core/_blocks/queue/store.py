"""The items of a queue, and which taker gets them, without clock or I/O.

QUE-1: an item is in one place at a time: it waits to be put, is ready, or is with one taker, until it is acknowledged or dropped.
QUE-2: the items of one producer become ready in the order in which they were put, and are delivered in the order in which they
became ready. An item that came back is delivered before all that became ready after it.
QUE-3: no item is added if that would exceed a limit. Limits count ready items and items with takers. An item that is
larger than the limit of bytes may be added to an empty queue.
QUE-4: takers are served in the order in which they came.
QUE-5: an item that was leased as often as allowed is dropped instead of coming back.
QUE-6: a process that has ended gets nothing: its items come back once, and take calls of it that arrive later are ignored.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

Owner = tuple[int, int, int]
"""The process that puts or takes, by its address."""

_ENDED_KEPT = 4096
"""How many ended processes are remembered; the messages of earlier ones have long arrived."""


@dataclass(slots=True, eq=False)
class Entry:
    """One item in the queue."""

    data: Any
    """The item itself, as it came; the queue never looks into it."""
    size: int
    producer: str
    made: float
    version: Any
    number: int = 0
    """Its place in the order of the queue."""
    deliveries: int = 0
    """How often it was delivered."""
    leases: int = 0
    """How often it was leased and not acknowledged."""


@dataclass(slots=True, eq=False)
class Delivery:
    """Items that are with a taker."""

    owner: Owner
    number: int
    entries: dict[int, Entry] = field(default_factory=dict)
    until: float | None = None
    """When the lease ends; None for items that belong to the taker once it confirms that they have arrived."""


@dataclass(slots=True, eq=False)
class Taker:
    """A take call that waits for items."""

    owner: Owner
    number: int
    most: int
    lease: float | None
    answer: Any
    """Called with the entries; with an empty list if the queue is closed and empty."""


@dataclass(slots=True, eq=False)
class Putter:
    """Items of one producer that wait for room."""

    entries: deque[Entry]
    answer: Any
    """Called when all were added; with false if the queue was closed before that."""


class Store:
    """The state of a queue."""

    def __init__(
        self,
        max_items: int | None,
        max_bytes: int | None,
        most_deliveries: int | None = None,
        on_drop: Callable[[Entry], object] | None = None,
    ) -> None:
        self._most_deliveries = most_deliveries
        self._on_drop = on_drop
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._numbers = itertools.count(1)
        self._ready: deque[Entry] = deque()
        self._returned: list[tuple[int, Entry]] = []
        self._out: OrderedDict[tuple[Owner, int], Delivery] = OrderedDict()
        self._takers: OrderedDict[tuple[Owner, int], Taker] = OrderedDict()
        self._putters: deque[Putter] = deque()
        self._ended: OrderedDict[Owner, None] = OrderedDict()
        self._expiries: list[tuple[float, int, tuple[Owner, int]]] = []
        self.items = 0
        """How many items are ready or with takers."""
        self.bytes = 0
        self.put_items = 0
        self.given_back = 0
        self.dropped = 0
        self.closed = False

    # Putting.

    def put(self, entries: Iterable[Entry], answer: Any, now: float) -> None:
        """Add items as room permits, and then call ``answer(True)``."""
        if self.closed:
            answer(False)
            return
        self._putters.append(Putter(deque(entries), answer))
        self.settle(now)

    def put_now(self, entry: Entry, now: float) -> bool:
        """Add an item if there is room and no other producer waits; otherwise return false."""
        if self.closed or self._putters or not self._fits(entry):
            return False
        self._add(entry)
        self.settle(now)
        return True

    def _fits(self, entry: Entry) -> bool:
        if self._max_items is not None and self.items >= self._max_items:
            return False
        return self._max_bytes is None or not self.items or self.bytes + entry.size <= self._max_bytes

    def _add(self, entry: Entry) -> None:
        entry.number = next(self._numbers)
        self._ready.append(entry)
        self.items += 1
        self.bytes += entry.size
        self.put_items += 1

    # Taking.

    def take(self, taker: Taker, now: float) -> None:
        """Deliver items to the taker, now or when there are some."""
        if taker.owner in self._ended:
            return
        self._takers[taker.owner, taker.number] = taker
        self.settle(now)

    def leave(self, owner: Owner, number: int) -> Taker | None:
        """A taker stops waiting; returns it if it was waiting."""
        return self._takers.pop((owner, number), None)

    def confirm(self, owner: Owner, number: int, now: float) -> None:
        """Items have arrived, and now belong to their taker."""
        if (delivery := self._out.pop((owner, number), None)) is not None:
            for entry in delivery.entries.values():
                self._drop(entry)
        self.settle(now)

    def undo(self, owner: Owner, number: int, now: float) -> None:
        """A taker gives up: items that it has not looked at come back."""
        self._takers.pop((owner, number), None)
        self._give_back(self._out.pop((owner, number), None), looked=False)
        self.settle(now)

    def ack(self, owner: Owner, number: int, entries: Iterable[int], now: float) -> int:
        """Leased items are done with; returns how many of them were still leased."""
        done = self._pop(owner, number, entries)
        for entry in done:
            self._drop(entry)
        self.settle(now)
        return len(done)

    def release(self, owner: Owner, number: int, entries: Iterable[int], now: float) -> int:
        """Leased items come back; returns how many of them were still leased."""
        back = self._pop(owner, number, entries)
        for entry in back:
            self._return(entry)
        self.settle(now)
        return len(back)

    def _pop(self, owner: Owner, number: int, entries: Iterable[int]) -> list[Entry]:
        """Remove those of the entries that the delivery still has."""
        delivery = self._out.get((owner, number))
        if delivery is None:
            return []
        found = [delivery.entries.pop(each) for each in entries if each in delivery.entries]
        if not delivery.entries:
            del self._out[owner, number]
        return found

    def renew(self, owner: Owner, number: int, until: float) -> bool:
        """Extend a lease; false if it has ended."""
        delivery = self._out.get((owner, number))
        if delivery is None or delivery.until is None:
            return False
        delivery.until = until
        heapq.heappush(self._expiries, (until, number, (owner, number)))
        return True

    def gone(self, owner: Owner, now: float) -> None:
        """A process has ended: its items come back, and it gets nothing more."""
        self._ended[owner] = None
        if len(self._ended) > _ENDED_KEPT:
            self._ended.popitem(last=False)
        for key in [key for key in self._takers if key[0] == owner]:
            del self._takers[key]
        for key in [key for key in self._out if key[0] == owner]:
            self._give_back(self._out.pop(key))
        self.settle(now)

    def _give_back(self, delivery: Delivery | None, *, looked: bool = True) -> None:
        if delivery is not None:
            for entry in delivery.entries.values():
                self._return(entry, leased=looked and delivery.until is not None)

    def _return(self, entry: Entry, *, leased: bool = True) -> None:
        self.given_back += 1
        entry.leases += leased
        if leased and self._most_deliveries is not None and entry.leases >= self._most_deliveries:
            self.dropped += 1
            self._drop(entry)
            if self._on_drop is not None:
                self._on_drop(entry)
            return
        heapq.heappush(self._returned, (entry.number, entry))

    def _drop(self, entry: Entry) -> None:
        self.items -= 1
        self.bytes -= entry.size

    # What follows.

    def settle(self, now: float) -> None:
        """Deliver what can be delivered, and add what there is room for, until nothing more can be done."""
        self._expire(now)
        while True:
            while self._takers and (self._ready or self._returned):
                _, taker = self._takers.popitem(last=False)
                self._give(taker, now)
            if not self._putters:
                break
            putter = self._putters[0]
            while putter.entries and self._fits(putter.entries[0]):
                self._add(putter.entries.popleft())
            if not putter.entries:
                self._putters.popleft()
                putter.answer(True)
            elif not (self._takers and (self._ready or self._returned)):
                break
        if self.is_over:
            takers, self._takers = self._takers, OrderedDict()
            for taker in takers.values():
                taker.answer([])

    def _give(self, taker: Taker, now: float) -> None:
        found: list[Entry] = []
        while len(found) < taker.most and (self._ready or self._returned):
            entry = heapq.heappop(self._returned)[1] if self._returned else self._ready.popleft()
            entry.deliveries += 1
            found.append(entry)
        key = (taker.owner, taker.number)
        delivery = self._out[key] = Delivery(*key, {each.number: each for each in found})
        if taker.lease is not None:
            delivery.until = now + taker.lease
            heapq.heappush(self._expiries, (delivery.until, taker.number, key))
        taker.answer(found)

    def _expire(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] <= now:
            until, _, key = heapq.heappop(self._expiries)
            delivery = self._out.get(key)
            if delivery is not None and delivery.until == until:
                self._give_back(self._out.pop(key))

    @property
    def next_expiry(self) -> float | None:
        """The earliest end of a lease."""
        while self._expiries:
            until, _, key = self._expiries[0]
            delivery = self._out.get(key)
            if delivery is not None and delivery.until == until:
                return until
            heapq.heappop(self._expiries)
        return None

    @property
    def is_over(self) -> bool:
        """Whether it is closed and empty."""
        return self.closed and not self.items

    @property
    def ready(self) -> int:
        """How many can be taken."""
        return len(self._ready) + len(self._returned)

    @property
    def leased(self) -> int:
        """How many are with takers."""
        return sum(len(each.entries) for each in self._out.values())

    @property
    def putters(self) -> int:
        """How many producers wait for room."""
        return len(self._putters)

    @property
    def takers(self) -> int:
        """How many takers wait for items."""
        return len(self._takers)

    def close(self, *, discard: bool, now: float) -> None:
        """Add nothing more. What is left can be taken, unless it is discarded."""
        self.closed = True
        putters, self._putters = self._putters, deque()
        for putter in putters:
            putter.answer(False)
        if discard:
            for entry in [*self._ready, *(each for _, each in self._returned)]:
                self._drop(entry)
            self._ready.clear()
            self._returned.clear()
        self.settle(now)
