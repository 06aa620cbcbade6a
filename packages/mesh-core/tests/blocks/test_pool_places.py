"""Which replica works next: random schedules against the rules (PLC-1..4)."""

from __future__ import annotations

import random

import pytest

from mesh_core._blocks.pool.places import Places, State


class Model:
    """Places that are driven at random, and what must hold after each step."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.per_rank = self.random.randint(1, 3)
        self.places: Places[int] = Places(self.per_rank)
        self.held: list[int] = []
        self.asking: list[int] = []
        self.states: dict[int, State] = {}
        self.numbers = 0

    def step(self) -> None:
        getattr(self, self.random.choice(["ask"] * 6 + ["back"] * 5 + ["add", "set", "remove", "drop"]))()
        self.give()

    def ask(self) -> None:
        self.numbers += 1
        self.places.ask(self.numbers)
        self.asking.append(self.numbers)

    def drop(self) -> None:
        who = self.random.choice([*self.asking, -1])
        assert self.places.drop(who) is (who in self.asking)
        self.asking = [each for each in self.asking if each != who]

    def back(self) -> None:
        if self.held:
            self.places.back(self.held.pop(self.random.randrange(len(self.held))))

    def add(self) -> None:
        place = self.random.randrange(6)
        self.places.add(place)
        self.states[place] = State.READY

    def set(self) -> None:
        place, state = self.random.randrange(6), self.random.choice(list(State))
        self.places.set(place, state)
        if place in self.states:
            self.states[place] = state

    def remove(self) -> None:
        place = self.random.randrange(6)
        self.places.remove(place)
        self.states.pop(place, None)

    def give(self) -> None:
        while (place := self.places.candidate()) is not None:
            busy = {
                each: self.held.count(each) for each, state in self.states.items() if state is State.READY
            }
            assert place in busy, "PLC-3: only where it is ready"
            assert busy[place] < self.per_rank, "PLC-1: no more than there are turns"
            assert busy[place] == min(busy.values()), "PLC-2: where it is least busy"
            assert self.places.give(place) == self.asking.pop(0), "PLC-2: in the order of asking"
            self.held.append(place)
        self.check()

    def check(self) -> None:
        ready = [place for place, state in self.states.items() if state is State.READY]
        assert self.places.turns == self.per_rank * len(ready)
        assert self.places.waiting == len(self.asking)
        assert self.places.asking() == self.asking
        if self.asking:
            # Nobody waits while a turn is free.
            assert all(self.held.count(place) >= self.per_rank for place in ready)
        for place in range(6):
            assert self.places.busy(place) == self.held.count(place)
            assert self.places.state(place) is self.states.get(place)
        assert self.places.is_hopeless is all(state is State.LOST for state in self.states.values())


@pytest.mark.parametrize("seed", range(40))
def test_random_schedules(seed: int) -> None:
    model = Model(seed)
    for _ in range(300):
        model.step()
    while model.held:
        model.back()
        model.give()


def test_the_longest_idle_place_is_first() -> None:
    places: Places[str] = Places(1)
    for place in range(3):
        places.add(place)
    given = []
    for who in "abcd":
        places.ask(who)
        place = places.candidate()
        assert place is not None
        places.give(place)
        places.back(place)
        given.append(place)
    assert given == [0, 1, 2, 0]


def test_turn_of_removed_place_is_forgotten() -> None:
    places: Places[str] = Places(2)
    places.add(0)
    places.ask("a")
    places.give(0)
    places.remove(0)
    assert (len(places), places.busy(0)) == (0, 1)
    places.back(0)
    places.back(0)
    assert places.busy(0) == 0


def ahead(count: int = 2) -> Places[str]:
    """Places that are all busy, where askers may be sent ahead."""
    places: Places[str] = Places(1)
    for place in range(count):
        places.add(place)
        places.ask(f"head {place}")
        assert places.candidate() == place
        places.give(place)
        places.lead(place)
    return places


def test_the_next_asker_is_sent_ahead_to_the_last_turn() -> None:
    places = ahead()
    for name in "ab":
        places.ask(name)
        assert places.candidate() is None
    assert (places.next_asking(), places.behind()) == ("a", 1)
    assert places.send_ahead(1) == "a"
    assert places.behind() == 0
    assert places.send_ahead(0) == "b"
    assert places.behind() is None, "one at each"
    assert (list(places.ahead()), places.idle) == ([(1, "a"), (0, "b")], 0)


def test_an_asker_that_was_sent_ahead_gets_the_turn() -> None:
    places = ahead()
    places.ask("a")
    places.send_ahead(1)
    assert places.back(1) == "a"
    assert (places.busy(1), list(places.ahead()), places.behind()) == (1, [], 1)
    assert not places.leave(1, "a"), "it has a turn"
    assert places.back(1) is None
    assert (places.busy(1), places.idle) == (0, 1)


def test_an_asker_ahead_at_a_lost_replica_gets_no_turn() -> None:
    places = ahead()
    places.ask("a")
    places.send_ahead(1)
    places.set(1, State.LOST)
    assert places.back(1, is_lost=True) is None
    assert places.leave(1, "a")
    places.ask("later")
    places.ask("a", first=True)
    assert places.next_asking() == "a"
    assert places.behind() == 0


def test_no_asker_is_sent_ahead_to_a_draining_or_shared_place() -> None:
    places = ahead()
    places.set(1, State.DRAINING)
    places.remove(0)
    assert places.behind() is None
    several: Places[str] = Places(2)
    several.add(0)
    several.ask("a")
    several.give(0)
    several.lead(0)
    assert several.behind() is None


def test_askers_are_sent_ahead_to_the_place_with_the_fewest_in_the_order_of_their_turns() -> None:
    places = ahead()
    for name in "abcde":
        places.ask(name)
    sent = []
    while (place := places.behind(2)) is not None:
        sent.append((place, places.send_ahead(place)))
    assert sent == [(1, "a"), (0, "b"), (0, "c"), (1, "d")]
    assert places.behind(1) is None and places.next_asking() == "e"
    assert [places.back(1), places.back(1)] == ["a", "d"], "PLC-4"
    assert places.behind(1) == 1
    assert [places.back(0), places.back(0), places.back(0)] == ["b", "c", None]
    assert (list(places.ahead()), places.busy(0), places.busy(1)) == ([], 0, 1)


def test_an_asker_leaves_between_others_that_are_ahead() -> None:
    places = ahead(1)
    for name in "abc":
        places.ask(name)
        places.send_ahead(0)
    assert places.behind(3) is None
    assert places.leave(0, "b")
    assert not places.leave(0, "b")
    assert places.behind(3) == 0
    assert [places.back(0), places.back(0), places.back(0)] == ["a", "c", None]


def test_those_who_come_back_are_first_in_the_order_in_which_they_came() -> None:
    places: Places[str] = Places(1)
    places.ask("later")
    for name in "ab":
        places.ask(name, first=True)
    assert (places.asking(), places.waiting) == (["a", "b", "later"], 3)
    assert places.drop("a") and not places.drop("a")
    places.add(0)
    assert places.candidate() == 0
    assert places.give(0) == "b"
    assert places.refuse() == ["later"]
    assert places.waiting == 0
