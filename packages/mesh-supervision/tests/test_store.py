"""Which snapshots count: SNP-1 to SNP-3."""

from __future__ import annotations

import random
from typing import Any

import pytest

from mesh_supervision._store import Kept, Owner, Placed, Store, Version

A, B = Owner(1, 0), Owner(1, 1)


def kept(life: int, number: int, data: bytes = b"") -> Kept:
    return Kept(Version(life, number), data)


def test_a_version_never_goes_back() -> None:
    """SNP-1."""
    store = Store()
    life, found = store.begin(A)
    assert (life, found) == (1, None)
    assert store.save(A, kept(1, 2))
    assert not store.save(A, kept(1, 1))
    assert not store.save(A, kept(1, 2))
    assert store.save(A, kept(1, 3))
    assert store.begin(A) == (2, kept(1, 3))
    assert store.begin(B) == (1, None), "ranks are kept apart"


def test_the_dead_keep_nothing() -> None:
    """SNP-2."""
    store = Store()
    store.begin(A)
    store.save(A, kept(1, 1))
    store.begin(A)
    assert not store.save(A, kept(1, 9))
    assert not store.save(A, kept(3, 1)), "nor those that have not begun"
    assert store.save(A, kept(2, 1))


def test_what_is_planted_is_found_by_the_next_life() -> None:
    store = Store()
    store.begin(A)
    store.save(A, kept(1, 5, b"old"))
    assert store.plant(A, kept(7, 7, b"other")) == (2, 0)
    assert not store.save(A, kept(1, 6, b"from the dead"))
    life, found = store.begin(A)
    assert life == 3
    assert found is not None
    assert found.data == b"other"
    assert store.plant(B, kept(1, 1)) == (1, 0), "also for one that has never begun"


def test_the_oldest_stopped_ones_are_dropped() -> None:
    store = Store(ended_bytes=250)
    owners = [Owner(1, rank) for rank in range(4)]
    for owner in owners:
        store.begin(owner)
        store.save(owner, kept(1, 1, bytes(100)))
    for owner in owners:
        store.end(owner, 1)
    assert [store.newest(owner) is not None for owner in owners] == [False, False, True, True]
    store.begin(owners[2])
    store.end(owners[2], 1)
    store.end(owners[3], 1)
    assert store.newest(owners[2]) is not None, "that is told of a life which is over"
    store.forget(1)
    assert all(store.newest(owner) is None for owner in owners)


def test_copies_elsewhere_are_dropped_once_they_are_replaced() -> None:
    told: list[Any] = []
    for dropped in (None, lambda *what: told.append(what)):
        store = Store(dropped=dropped)
        store.begin(A)
        for number, places in enumerate([("p", "q"), ("q", "r"), ()], 1):
            known: Any = Placed(A, Version(1, number), 1, places) if places else kept(1, number)  # type: ignore[arg-type]
            assert store.save(A, known)
        assert store.save(A, kept(1, 9)), "what is kept here needs no word"
    assert told == [(A, Version(1, 1), ("p",)), (A, Version(1, 2), ("q", "r"))]


def test_stopped_ones_may_fill_their_room_to_the_last_byte() -> None:
    for room, stays in ((200, True), (199, False)):
        store = Store(ended_bytes=room)
        for owner in (A, B):
            store.begin(owner)
            store.save(owner, Kept(Version(1, 1), bytes(60), (bytes(40),)))
            store.end(owner, 1)
        assert (store.newest(A) is not None) == stays
        assert store.newest(B) is not None


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_versions_go_up(seed: int) -> None:
    chance = random.Random(seed)
    store, life, seen = Store(), 0, Version(0, 0)
    for _ in range(500):
        what = chance.randrange(10)
        if what == 0:
            begun, found = store.begin(A)
            assert begun > life
            assert found is None or found.version == seen
            life = begun
        elif what == 1:
            planted = store.plant(A, kept(1, 1))
            assert planted > seen
            life, seen = planted.life, planted
        else:
            version = Version(chance.randrange(life + 2), chance.randrange(50))
            if store.save(A, Kept(version, b"")):
                assert version > seen
                assert version.life == life
                seen = version
        found = store.newest(A)
        assert found is None or found.version == seen
