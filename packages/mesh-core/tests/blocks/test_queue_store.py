"""The decisions of a queue, with random schedules: QUE-1..4, QUE-6."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from mesh_core._blocks.queue.store import Entry, Store, Taker

OWNERS = [(1, rank, 0) for rank in range(3)]


class Schedule:
    """A queue, and what its users have seen."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.max_items = self.random.choice([None, 1, 3, 10])
        self.max_bytes = self.random.choice([None, 1, 50, 500])
        self.store = Store(self.max_items, self.max_bytes)
        self.now = 0.0
        self.made: Counter[str] = Counter()
        self.answers: list[bool] = []
        self.waiting: dict[tuple[Any, int], list[Any]] = {}
        self.held: dict[tuple[Any, int], dict[int, Entry]] = {}
        self.leases: dict[tuple[Any, int], float] = {}
        self.over: set[int] = set()
        self.entered = 0
        self.refused = 0
        self.took_part: list[tuple[str, int]] = []
        self.numbers = 0
        self.owners = list(OWNERS)
        """The users that are alive; when one ends, another takes its place."""
        self.ranks = itertools.count(len(OWNERS))

    def entry(self, producer: str) -> Entry:
        self.made[producer] += 1
        return Entry(self.made[producer], self.random.choice([1, 10, 40, 600]), producer, self.now, None)

    def put(self) -> None:
        producer = self.random.choice("abc")
        entries = [self.entry(producer) for _ in range(self.random.randint(1, 4))]

        def answer(done: bool) -> None:
            self.answers.append(done)

        self.store.put(entries, answer, self.now)

    def put_now(self) -> None:
        # A separate producer: it may be served before others that wait to put.
        had_room = self.store.items < (self.max_items or 1 << 30)
        entry = self.entry("now")
        if self.store.put_now(entry, self.now):
            assert had_room
            assert self.store.putters == 0

    def take(self) -> None:
        self.numbers += 1
        owner, lease = self.random.choice(self.owners), self.random.choice([None, 1.0, 5.0])
        key = (owner, self.numbers)
        most = self.random.randint(1, 4)

        def answer(entries: list[Entry]) -> None:
            first = next(iter(self.waiting))
            assert first == key, "takers are served in the order in which they came"
            del self.waiting[key]
            if not entries:
                assert self.store.closed
                return
            assert 1 <= len(entries) <= most
            for entry in entries:
                assert entry.number not in self.over
                assert all(entry.number not in held for held in self.held.values())
                if entry.deliveries == 1:
                    self.took_part.append((entry.producer, entry.data))
            self.held[key] = {entry.number: entry for entry in entries}
            if lease is not None:
                self.leases[key] = self.now + lease

        self.waiting[key] = []
        self.store.take(Taker(owner, self.numbers, most, lease, answer), self.now)

    def leave(self) -> None:
        if self.waiting:
            key = self.random.choice(list(self.waiting))
            del self.waiting[key]
            assert self.store.leave(*key) is not None

    def confirm(self) -> None:
        for key in [key for key in self.held if key not in self.leases][:1]:
            self.over.update(self.held.pop(key))
            self.store.confirm(*key, self.now)

    def undo(self) -> None:
        keys = [*self.held, *self.waiting]
        if keys:
            key = self.random.choice(keys)
            self.held.pop(key, None)
            self.waiting.pop(key, None)
            self.leases.pop(key, None)
            self.store.undo(*key, self.now)

    def settle_leases(self, what: str) -> None:
        keys = [key for key, until in self.leases.items() if until > self.now]
        if not keys:
            return
        key = self.random.choice(keys)
        named = self.random.sample(list(self.held[key]), self.random.randint(1, len(self.held[key])))
        for number in named:
            del self.held[key][number]
        if not self.held[key]:
            del self.held[key], self.leases[key]
        if what == "ack":
            self.over.update(named)
        assert getattr(self.store, what)(*key, [*named, 10**9], self.now) == len(named)

    def renew(self) -> None:
        for key, until in list(self.leases.items())[:1]:
            assert self.store.renew(*key, self.now + 3.0) == (until > self.now or key in self.held)
            self.leases[key] = self.now + 3.0

    def gone(self) -> None:
        place = self.random.randrange(len(self.owners))
        owner, self.owners[place] = self.owners[place], (1, next(self.ranks), 0)
        for kept in (self.waiting, self.held, self.leases):
            for key in [key for key in kept if key[0] == owner]:
                del kept[key]
        self.store.gone(owner, self.now)

    def pass_time(self) -> None:
        self.now += self.random.choice([0.1, 1.0, 3.0])
        for key in [key for key, until in self.leases.items() if until <= self.now]:
            del self.leases[key], self.held[key]
        self.store.settle(self.now)

    def check(self) -> None:
        held = sum(map(len, self.held.values()))
        assert self.store.leased == held
        assert self.store.items == self.store.ready + held
        assert self.store.put_items == self.store.items + len(self.over)
        if self.max_items is not None:
            assert self.store.items <= self.max_items
        if self.max_bytes is not None and self.store.items > 1:
            assert self.store.bytes <= self.max_bytes
        if self.store.ready:
            assert not self.waiting
        if self.store.next_expiry is not None:
            assert self.store.next_expiry == min(self.leases.values())
        else:
            assert not self.leases


@pytest.mark.parametrize("block", range(8))
def test_random_schedules_keep_places_limits_and_order(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        one = Schedule(seed)
        steps: list[Callable[[], None]] = [
            *[one.put] * 4,
            one.put_now,
            *[one.take] * 4,
            one.leave,
            *[one.confirm] * 2,
            one.undo,
            partial(one.settle_leases, "ack"),
            partial(one.settle_leases, "release"),
            one.renew,
            one.gone,
            one.pass_time,
        ]
        for _ in range(200):
            one.random.choice(steps)()
            one.check()
        for producer in "abc":
            first = [number for name, number in one.took_part if name == producer]
            assert first == list(range(1, len(first) + 1)), f"seed {seed}"
        assert all(one.answers)


@pytest.mark.parametrize("seed", range(100))
def test_a_closed_store_is_emptied_before_it_ends(seed: int) -> None:
    one = Schedule(seed)
    for _ in range(20):
        one.random.choice([one.put, one.put, one.take])()
    waited = one.store.putters
    one.store.close(discard=False, now=one.now)
    assert one.answers.count(False) == waited
    while one.held or one.store.ready:
        one.take()
        for key in list(one.held):
            one.leases.pop(key, None)
            one.over.update(one.held[key])
            numbers = list(one.held.pop(key))
            if one.store.ack(*key, numbers, one.now) != len(numbers):
                raise AssertionError(seed)
    assert one.store.is_over
    one.take()
    assert not one.waiting


def test_returned_items_come_before_later_ones() -> None:
    store = Store(None, None)
    seen: list[int] = []
    store.put([Entry(n, 1, "a", 0.0, None) for n in range(5)], lambda done: None, 0.0)
    for number in (1, 2):
        store.take(
            Taker((1, 0, 0), number, 1, None, lambda entries: seen.extend(e.data for e in entries)), 0.0
        )
    store.undo((1, 0, 0), 2, 0.0)
    store.undo((1, 0, 0), 1, 0.0)
    store.take(Taker((1, 0, 0), 3, 5, None, lambda entries: seen.extend(e.data for e in entries)), 0.0)
    assert seen == [0, 1, 0, 1, 2, 3, 4]


def test_an_item_larger_than_the_limit_needs_an_empty_queue() -> None:
    store = Store(None, 10)
    done: list[bool] = []
    store.put([Entry("large", 100, "a", 0.0, None), Entry("small", 1, "a", 0.0, None)], done.append, 0.0)
    assert (store.items, done) == (1, [])
    got: list[Any] = []
    store.take(Taker((1, 0, 0), 1, 5, None, lambda entries: got.extend(e.data for e in entries)), 0.0)
    store.confirm((1, 0, 0), 1, 0.0)
    assert (got, store.items, done) == (["large"], 1, [True])


def entry(name: str, size: int = 1) -> Entry:
    return Entry(name, size, "a", 0.0, None)


def test_a_queue_is_full_at_its_limits() -> None:
    """QUE-3."""
    items, nbytes = Store(2, None), Store(None, 10)
    assert [items.put_now(entry(name), 0.0) for name in "abc"] == [True, True, False]
    assert [nbytes.put_now(entry(name, size), 0.0) for name, size in (("a", 4), ("b", 7), ("c", 6))] == [
        *(True, False, True)
    ]
    assert (nbytes.items, nbytes.bytes) == (2, 10)


def leased(store: Store, number: int, now: float, lease: float | None = 1.0) -> list[Entry]:
    found: list[Entry] = []
    store.take(Taker(OWNERS[0], number, 9, lease, found.extend), now)
    return found


def test_a_lease_ends_just_at_its_time() -> None:
    store = Store(None, None)
    store.put_now(entry("a"), 0.0)
    assert len(leased(store, 1, 0.0)) == 1
    assert store.next_expiry == 1.0
    store.settle(math.nextafter(1.0, 0.0))
    assert (store.leased, store.ready, store.given_back) == (1, 0, 0)
    store.settle(1.0)
    assert (store.leased, store.ready, store.given_back) == (0, 1, 1)
    assert store.next_expiry is None


@pytest.mark.parametrize("most", [1, 2])
def test_an_item_is_dropped_after_as_many_leases_as_allowed(most: int) -> None:
    """QUE-5; items that belong to their taker are not leased."""
    dropped: list[Entry] = []
    store = Store(None, None, most_deliveries=most, on_drop=dropped.append)
    store.put_now(entry("a"), 0.0)
    leased(store, 1, 0.0, lease=None)
    store.undo(OWNERS[0], 1, 0.0)
    for number in range(most):
        assert (store.items, store.dropped) == (1, 0)
        leased(store, number + 2, float(number))
        store.settle(number + 1.0)
    assert (store.items, store.bytes, store.dropped, len(dropped)) == (0, 0, 1, 1)


# QUE-6
def test_4096_processes_that_have_ended_are_remembered() -> None:
    store = Store(None, None)
    for rank in range(4096):
        store.gone((2, rank, 0), 0.0)
    for first, takers in ((0, 0), (4096, 1)):
        store.take(Taker((2, 0, 0), 1, 1, None, lambda entries: None), 0.0)
        assert store.takers == takers
        store.gone((2, 4096 + first, 0), 0.0)


# QUE-6
def test_a_take_call_after_its_process_ended_is_ignored() -> None:
    store = Store(None, None)
    given: dict[str, list[Any]] = {}

    def take(owner: int, number: int, name: str) -> None:
        def answer(entries: list[Entry]) -> None:
            given[name] = [entry.data for entry in entries]

        store.take(Taker(OWNERS[owner], number, 9, None, answer), 0.0)

    take(0, 1, "waits")
    store.gone(OWNERS[0], 0.0)
    take(0, 2, "late")
    store.put([Entry("a", 1, "producer", 0.0, None)], lambda done: None, 0.0)
    assert (given, store.ready, store.takers) == ({}, 1, 0)
    take(1, 1, "lives")
    assert given == {"lives": ["a"]}
