"""The machine of versions and leases, without memory, sockets or time."""

import random

import pytest

from mesh_rdma._publication._versions import Ask, Lease, Refusal, Versions


def test_a_version_is_leased_when_it_is_finished():
    versions = Versions(2, 0)
    assert isinstance(versions.ask("early", Ask()), Refusal)
    assert versions.ask("waiting", Ask(wait=True)) is None
    at = versions.begin(1)
    assert isinstance(versions.ask("early", Ask()), Refusal)
    assert versions.finish() == [("waiting", Lease(at, 1))]
    assert versions.ask("late", Ask()) == Lease(at, 1)


def test_a_leased_slot_and_the_newest_are_not_filled():
    versions = Versions(2, 0)
    first = versions.begin(1)
    versions.finish()
    versions.ask("reader", Ask())
    second = versions.begin(2)
    assert second != first
    versions.finish()
    assert versions.begin(3) is None
    versions.gone("reader")
    assert versions.begin(3) == first


def test_without_leases_the_oldest_is_filled():
    versions = Versions(3, 0)
    slots = []
    for number in range(1, 8):
        slots.append(versions.begin(number))
        versions.finish()
    assert slots[:3] == slots[3:6]
    assert versions.held() == [5, 6, 7]


def test_a_refusal_names_what_was_asked_for():
    versions = Versions(2, 0)
    nothing = "is there; nothing has been published yet"
    for ask, wanted in (
        (Ask(), "no version"),
        (Ask(floor=3), "no version from 3 on"),
        (Ask(2, 1), "no version 2"),
    ):
        assert versions.ask("reader", ask) == Refusal(f"{wanted} {nothing}")
    for number in (1, 2):
        versions.begin(number)
        versions.finish()
    assert isinstance(versions.ask("reader", Ask(floor=2)), Lease)
    assert versions.ask("other", Ask(floor=3)) == Refusal("no version from 3 on is there; there are 1, 2")


def test_a_reader_asks_again_only_when_it_has_given_back():
    versions = Versions(2, 0)
    versions.begin(1)
    versions.finish()
    assert isinstance(versions.ask("leases", Ask()), Lease)
    assert versions.ask("waits", Ask(version=2, wait=True)) is None
    for reader in ("leases", "waits"):
        again = versions.ask(reader, Ask())
        assert isinstance(again, Refusal) and again.reason == "it has asked already"
        versions.gone(reader)
        assert isinstance(versions.ask(reader, Ask()), Lease)


@pytest.mark.parametrize("wait", [False, True])
def test_what_never_comes_is_refused_at_once(wait):
    versions = Versions(2, 0)
    for number in (1, 2, 5):
        versions.begin(number)
        versions.finish()
    for number in (1, 3, 4):
        refused = versions.ask("reader", Ask(version=number, wait=wait))
        assert isinstance(refused, Refusal)
        assert "there are 2, 5" in refused.reason
    assert isinstance(versions.ask("reader", Ask(version=2, floor=3, wait=wait)), Refusal)


def test_waiters_for_a_skipped_or_failed_version_are_notified():
    versions = Versions(2, 0)
    for reader, number in (("skipped", 1), ("failed", 2), ("later", 3)):
        assert versions.ask(reader, Ask(version=number, wait=True)) is None
    versions.begin(2)
    ((reader, outcome),) = versions.abort()[:1]
    assert reader == "skipped" and isinstance(outcome, Refusal)
    assert versions.readers == 1
    versions.begin(3)
    assert [reader for reader, _ in versions.finish()] == ["later"]


def test_a_failed_version_leaves_the_others():
    versions = Versions(2, 0)
    versions.begin(1)
    versions.finish()
    versions.begin(2)
    versions.abort()
    assert versions.held() == [1]
    with pytest.raises(ValueError, match="greater than 2"):
        versions.begin(2)


def test_numbers_go_on_from_what_readers_have_seen():
    versions = Versions(2, 0)
    versions.noticed(57)
    with pytest.raises(ValueError, match="greater than 57"):
        versions.begin(57)
    assert versions.begin(58) is not None


def test_closing_notifies_waiters_and_keeps_leases():
    versions = Versions(2, 0)
    versions.begin(1)
    versions.finish()
    versions.ask("holder", Ask())
    versions.ask("waiting", Ask(version=2, wait=True))
    assert versions.close() == ["waiting"]
    assert versions.holders() == {"holder": 1}
    assert isinstance(versions.ask("late", Ask(wait=True)), Refusal)


def test_a_copy_begins_a_version_again_that_it_could_not_have():
    """VER-3: no two publish it."""
    versions = Versions(2, -1, is_copy=True)
    assert versions.begin(7) is not None
    assert versions.ask("waits", Ask(version=7, wait=True)) is None
    assert versions.abort() == []
    assert versions.begin(7) is not None
    ((reader, lease),) = versions.finish()
    assert (reader, lease.version) == ("waits", 7)
    with pytest.raises(ValueError, match="greater than 7"):
        versions.begin(7)
    # One that a reader has seen meanwhile stays out of reach.
    versions.begin(8)
    versions.noticed(9)
    versions.abort()
    with pytest.raises(ValueError, match="greater than 9"):
        versions.begin(8)


class Model:
    """The machine with simulated memory and readers, which looks after each step whether all is as promised."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.versions = Versions(self.dice.randint(2, 4), self.dice.choice((0, 1000)))
        self.memory: dict[int, int | None] = {}
        self.filling: tuple[int, int] | None = None
        self.leases: dict[int, Lease] = {}
        self.waiting: dict[int, Ask] = {}
        self.finished: list[int] = []
        self.next_reader = 0

    def told(self, outcomes):
        for reader, outcome in outcomes:
            self.outcome(reader, self.waiting.pop(reader), outcome)

    def outcome(self, reader, ask, outcome):
        number = outcome.version if isinstance(outcome, Lease) else None
        if number is not None:
            assert ask.version in {None, number} and (ask.floor is None or number >= ask.floor)
            if ask.version is None:
                assert number == self.finished[-1]
            assert self.memory[outcome.slot] == number, "VER-1"
            self.leases[reader] = outcome
            return
        # VER-5: not there, and never to come, or not worth waiting for.
        fits = [each for each in self.versions.held() if ask.version in {None, each}]
        fits = [each for each in fits if ask.floor is None or each >= ask.floor]
        if ask.version is None:
            assert not ask.wait
            fits = [each for each in fits if each == self.finished[-1]]
        assert not fits
        coming = self.filling is not None and self.filling[1] == ask.version
        below = ask.version is not None and ask.floor is not None and ask.version < ask.floor
        assert not ask.wait or below or (ask.version <= self.versions.last and not coming)

    def begin(self):
        number = self.versions.last + self.dice.randint(1, 3)
        at = self.versions.begin(number)
        if at is None:
            assert len({lease.slot for lease in self.leases.values()} | {self.newest_slot()}) == len(
                self.memory
            )
            return
        # VER-2, VER-4
        assert all(lease.slot != at for lease in self.leases.values())
        assert self.memory.get(at) is None or self.memory[at] != self.versions.newest
        self.memory[at] = None
        self.filling = (at, number)

    def newest_slot(self):
        return next(at for at, number in self.memory.items() if number == self.versions.newest)

    def end(self):
        at, number = self.filling
        self.filling = None
        if self.dice.random() < 0.1:
            self.told(self.versions.abort())
            return
        self.memory[at] = number
        assert not self.finished or number > self.finished[-1]
        self.finished.append(number)
        self.told(self.versions.finish())

    def ask(self):
        number = self.dice.choice((None, None, self.versions.last + self.dice.randint(-4, 3)))
        floor = self.dice.choice((None, None, self.versions.last + self.dice.randint(-4, 3)))
        ask = Ask(number, floor, self.dice.random() < 0.5)
        reader, self.next_reader = self.next_reader, self.next_reader + 1
        outcome = self.versions.ask(reader, ask)
        if outcome is None:
            assert ask.wait
            self.waiting[reader] = ask
        else:
            self.outcome(reader, ask, outcome)

    def leave(self):
        readers = [*self.leases, *self.waiting]
        if readers:
            reader = self.dice.choice(readers)
            self.leases.pop(reader, None)
            self.waiting.pop(reader, None)
            self.versions.gone(reader)

    def step(self):
        choices = [
            self.ask,
            self.ask,
            self.leave,
            self.leave,
            self.begin if self.filling is None else self.end,
        ]
        self.dice.choice(choices)()
        if self.dice.random() < 0.02:
            self.told(self.versions.noticed(self.versions.last + self.dice.randint(-5, 5)))
        for lease in self.leases.values():
            assert self.memory[lease.slot] == lease.version
        assert self.versions.holders() == {r: lease.version for r, lease in self.leases.items()}
        assert self.versions.readers == len(self.leases) + len(self.waiting)
        assert self.versions.held() == sorted(n for n in self.memory.values() if n is not None)


@pytest.mark.parametrize("seed", range(60))
def test_random_schedules(seed):
    model = Model(seed)
    for _ in range(300):
        model.step()
