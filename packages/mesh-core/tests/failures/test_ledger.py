"""The failure ledger without processes: random schedules of deaths, notices, repairs, stops and ends."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mesh_core import MeshFailure
from mesh_core._common.codes import FailureKind
from mesh_core._failures.ledger import (
    SCRIPT,
    Action,
    ActorFailed,
    Answered,
    Ask,
    CarryOut,
    Consult,
    Decided,
    Died,
    Event,
    FailureLedger,
    Interrupt,
    Key,
    Note,
    Owner,
    PassOn,
    Raised,
    ScriptEnds,
    TakenBack,
    Tell,
    Waits,
)
from mesh_core._failures.owned_meshes import Holding
from mesh_core._failures.policy_run import Decision
from mesh_core._native import Extent, Region
from mesh_core.policies import Due, Ended, Escalate, Failed, Ignore, Later, Policy, Restart, Stop

PROCS = 1
RANKS = 3


def mesh(name: str, ranks: int = RANKS) -> Any:
    return SimpleNamespace(
        _name=name, _procs_id=PROCS, _root=Region.whole(Extent(["gpus"], [ranks])), stop=lambda: None
    )


def holding(name: str = "m", actor_id: int = 0, policy: Policy | None = None, ranks: int = RANKS) -> Holding:
    return Holding(mesh(name, ranks), actor_id, policy)


def failure(key: Key, name: str = "m", reason: str = "") -> MeshFailure:
    return MeshFailure(mesh_name=name, rank=key[1], reason=reason, kind=FailureKind.KILLED, _key=key)


def died(process: tuple[int, int], *places: tuple[int, Holding, int], awaited: bool = False) -> Died:
    return Died(process, places, lambda held, rank: failure((*process, 0), held.mesh._name), awaited=awaited)


class AtScript:
    """The script's ledger, with a fault handler that handles nothing."""

    def __init__(self) -> None:
        self.ledger = FailureLedger(at_script=True)
        self.interrupts = 0

    def on(self, event: Event) -> list[MeshFailure]:
        """The failures that the caller must raise or report."""
        told: list[MeshFailure] = []
        for action in self.ledger.on(event):
            if isinstance(action, Ask):
                told += self.on(Answered(action, False, "nobody"))
            elif isinstance(action, Tell):
                told.append(action.failure)
            self.interrupts += isinstance(action, Interrupt)
        return told


KEY = (7, 1, 0)


@pytest.mark.parametrize("notice_first", [True, False])
@pytest.mark.parametrize("awaited", [True, False])
def test_a_death_raised_by_a_call_is_not_reported_again(notice_first: bool, awaited: bool) -> None:
    """SUP-1: whichever of the two reports comes first."""
    script, held = AtScript(), holding()
    tellings: list[Event] = [died(KEY[:2], (0, held, 1), awaited=awaited), Raised(KEY, 1)]
    for telling in tellings if notice_first else reversed(tellings):
        script.on(telling)
    assert not script.ledger.due
    assert script.on(Waits(1)) == script.on(ScriptEnds()) == []


def test_a_death_that_a_call_waits_for_is_left_to_that_call() -> None:
    """SUP-2: but it is reported at the end if nobody looks at the call."""
    script = AtScript()
    script.on(died(KEY[:2], (0, holding(), 1), awaited=True))
    assert (script.interrupts, script.ledger.due, script.on(Waits(1))) == (0, False, [])
    assert [each._key for each in script.on(ScriptEnds())] == [KEY]
    assert script.on(ScriptEnds()) == []


def test_all_waiting_threads_raise_a_due_failure_once() -> None:
    script = AtScript()
    script.on(died(KEY[:2], (0, holding(), 1)))
    assert (script.interrupts, script.ledger.due) == (1, True)
    for thread, times in ((1, 1), (2, 1), (1, 0), (2, 0)):
        assert [each._key for each in script.on(Waits(thread))] == [KEY] * times
    assert not script.ledger.due
    assert script.on(ScriptEnds()) == []


def test_a_woken_thread_raises_a_failure_that_another_call_raised_first() -> None:
    script = AtScript()
    script.on(died(KEY[:2], (0, holding(), 1)))
    script.on(Raised(KEY, 1))
    assert not script.ledger.due
    assert [[each._key for each in script.on(Waits(thread))] for thread in (1, 2, 2)] == [[], [KEY], []]


def test_each_thread_raises_at_least_the_last_of_two_due_failures() -> None:
    script, held = AtScript(), holding()
    for rank in (1, 2):
        script.on(died((7, rank), (0, held, rank)))
    told = [[each._key[1] for each in script.on(Waits(thread))] for thread in (1, 2, 1, 1, 2)]
    assert told == [[1], [2], [2], [], []]


def test_exceptions_that_nobody_received_are_reported() -> None:
    script = AtScript()
    script.on(died(KEY[:2], (0, holding(), 1)))
    (told,) = script.on(Waits(1))
    script.on(TakenBack(told))
    assert script.on(Waits(1)) == []
    assert script.on(ScriptEnds()) == [told]


def test_a_death_is_reported_once_for_each_incarnation() -> None:
    """SUP-3: notices may come twice, and a respawned rank can die again."""
    script, held = AtScript(), holding()
    for _ in range(2):
        script.on(died((7, 1), (0, held, 1)))
    assert held.lost == {1}
    held.regain([1])
    assert held.lost == set()
    script.on(died((8, 0), (0, held, 1)))
    script.on(died((7, 1), (0, held, 1)))
    assert [each._key[:2] for each in script.on(ScriptEnds())] == [(7, 1), (8, 0)]


def test_a_late_notice_of_an_earlier_incarnation_does_not_lose_the_rank() -> None:
    held = holding()
    event = died((7, 1), (0, held, 1))._replace(replaced=True)
    assert [type(each) for each in FailureLedger(at_script=True).on(event)] == [Ask]
    assert held.lost == set()


def test_an_owner_of_actors_is_notified_of_them_and_not_also_of_their_processes() -> None:
    procs, actors, ruled = holding("procs"), holding("actors", 5), holding("ruled", policy=Chance(None))
    places = [(3, procs, 1), (3, actors, 1), (3, ruled, 1), (4, holding("procs"), 1)]
    actions = FailureLedger(at_script=False).on(died((7, 1), *places))
    assert [(each.owner, type(each)) for each in actions] == [(3, Ask), (3, Consult), (4, Ask)]  # type: ignore[union-attr]


def test_an_orderly_end_is_reported_to_policies_only() -> None:
    ruled = holding("ruled", policy=Chance(None))
    ledger = FailureLedger(at_script=True)
    (asked,) = ledger.on(Died((7, 1), [(0, holding(), 1), (0, ruled, 1)], None))
    assert isinstance(asked, Consult)
    assert asked.event == Ended("ruled", 1)
    assert ledger.on(ScriptEnds()) == []


# Random schedules.


class Chance:
    """A policy that decides at random; an empty decision puts off."""

    def __init__(self, chance: random.Random | None) -> None:
        self._chance = chance

    def on(self, event: Any, now: float) -> tuple[Policy, list[Any]]:
        if self._chance is None:
            return self, []
        choices: list[list[Any]] = [
            [],
            [Ignore()],
            [Escalate("no")],
            [Later(1.0, Due("x"))],
            [Restart()],
            [Stop()],
        ]
        choice = self._chance.choice([*choices, None])
        if choice is None:
            raise ValueError("a policy that raises")
        return self, choice


SCRIPT_THREADS = (1, 2, 3)
UPPER, LOWER = 5, 6
"""Actors of one worker: the script owns the upper one, which owns the lower one."""
ABOVE: dict[int, Owner] = {UPPER: SCRIPT, LOWER: ((9, 0, 0), UPPER)}


class World:
    """A script and a worker, each with its ledger; messages between them arrive in any order."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.script, self.worker = FailureLedger(at_script=True), FailureLedger(at_script=False)
        self.under_way: list[partial[None]] = []
        self.later: list[partial[None]] = []
        """Repairs and timers, which may not finish before the end."""
        self.process = {rank: (PROCS, rank) for rank in range(RANKS)}
        self.lives = 1
        self.numbers = 0
        self.fates: Counter[str] = Counter()
        """By number, how often each failure was settled."""
        self.unhandled: dict[str, Key] = {}
        """Failures that no owner handled and that reached the script."""
        self.raised: Counter[tuple[Key, int]] = Counter()
        """What waiting threads raised."""
        self.told: set[Key] = set()
        """What the script knows from its own calls, or while they waited."""
        self.alarms: dict[int, int] = dict.fromkeys(SCRIPT_THREADS, 0)
        self.gone: set[int] = set()
        self.asked: set[tuple[str, Key]] = set()
        """Which mesh was notified of which death."""
        self.handler = self.chance.random() < 0.3
        self.holdings = [
            (owner, holding(f"{owner}.{actor}", actor, self.chance.choice([None, Chance(self.chance)])))
            for owner in (0, UPPER, LOWER)
            for actor in (0, owner * 10 + 1)
            if self.chance.random() < 0.7
        ]

    # Events.

    def step(self) -> None:
        steps = [self.kill, self.fail, self.respawn, self.wait, self.end_owner, self.take_back]
        self.chance.choices([self.arrive, self.perhaps_later, *steps], [8, 2, 2, 2, 1, 3, 0.2, 0.3])[0]()

    def arrive(self) -> None:
        if self.under_way:
            self.under_way.pop(self.chance.randrange(len(self.under_way)))()

    def perhaps_later(self) -> None:
        if self.later:
            self.later.pop(self.chance.randrange(len(self.later)))()

    def kill(self) -> None:
        """A process dies: both are notified, perhaps twice, and perhaps a call of the script as well."""
        rank = self.chance.randrange(RANKS)
        process, key = self.process[rank], (*self.process[rank], 0)
        awaited = self.chance.random() < 0.3
        places = [(owner, held, rank) for owner, held in self.holdings]
        orderly = self.chance.random() < 0.1
        make = None if orderly else lambda held, _: self.death(key, held.mesh._name)
        for of_script, ledger in ((True, self.script), (False, self.worker)):
            mine = [place for place in places if (place[0] == 0) == of_script and place[0] not in self.gone]
            for _ in range(self.chance.choice([1, 1, 2])):
                self.under_way.append(
                    partial(self.notice, ledger, rank, Died(process, mine, make, awaited=awaited))
                )
        if awaited and not orderly and self.chance.random() < 0.7:
            self.under_way.append(partial(self.call_raises, key))

    def fail(self) -> None:
        """An actor fails in a running process."""
        rank = self.chance.randrange(RANKS)
        for owner, held in self.holdings:
            if held.actor_id and owner not in self.gone and self.chance.random() < 0.5:
                failed = self.numbered(
                    (*self.process[rank], held.actor_id * 1000 + self.numbers), held.mesh._name
                )
                ledger = self.script if owner == 0 else self.worker
                event = ActorFailed(owner, failed, held, rank)
                self.under_way.append(partial(self.on, ledger, event))
                if self.chance.random() < 0.2:
                    self.under_way.append(partial(self.call_raises, failed._key))

    def respawn(self) -> None:
        rank = self.chance.randrange(RANKS)
        self.lives += 1
        self.process[rank] = (100 + self.lives, 0)
        for _, held in self.holdings:
            held.regain([rank])

    def end_owner(self) -> None:
        owner = self.chance.choice([UPPER, LOWER])
        self.gone |= {owner, LOWER}
        for of, held in self.holdings:
            if of in self.gone:
                held.end_policy()

    def wait(self) -> None:
        """A thread of the script waits or is woken, and raises what is due."""
        thread, due = self.chance.choice(SCRIPT_THREADS), self.script.due
        told = self.tell(self.script.on(Waits(thread)))
        assert len(told) <= 1
        assert told or not due, "what is due was not raised"
        for each in told:
            self.raised[each._key, thread] += 1
            self.told.add(each._key)

    def call_raises(self, key: Key) -> None:
        assert self.script.on(Raised(key, self.chance.choice(SCRIPT_THREADS))) == []
        self.told.add(key)

    def take_back(self) -> None:
        """The script ends while an exception is raised that nobody can catch."""
        if self.unhandled and self.told:
            number, key = self.chance.choice(sorted(self.unhandled.items()))
            if key in self.told:
                self.script.on(TakenBack(failure(key, reason=number)))
                self.told.discard(key)
                for thread in SCRIPT_THREADS:
                    self.raised[key, thread] = 0

    def death(self, key: Key, name: str) -> MeshFailure:
        assert (name, key) not in self.asked, "told twice"
        self.asked.add((name, key))
        return self.numbered(key, name)

    def numbered(self, key: Key, name: str) -> MeshFailure:
        self.numbers += 1
        return failure(key, name, reason=str(self.numbers))

    # Actions of the ledgers.

    def tell(self, actions: list[Action]) -> list[MeshFailure]:
        assert all(isinstance(each, Tell) for each in actions), actions
        return [each.failure for each in actions if isinstance(each, Tell)]

    def notice(self, ledger: FailureLedger, rank: int, event: Died) -> None:
        # The rank may have been respawned meanwhile.
        self.on(ledger, event._replace(replaced=self.process[rank] != event.process))

    def on(self, ledger: FailureLedger, event: Event) -> None:
        self.do(ledger, ledger.on(event))

    def do(self, ledger: FailureLedger, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Note(failure, handled, _):
                    self.fates[failure.reason] += 1
                    if not handled:
                        self.unhandled[failure.reason] = failure._key
                case PassOn(to, failure):
                    self.pass_on(to, failure)
                case Consult() | Ask():
                    self.under_way.append(partial(self.ask, ledger, action))
                case CarryOut(asked, decision):
                    if decision.stop:
                        asked.holding.end_policy()
                    for each in decision.timers:
                        self.later.append(partial(self.ask, ledger, asked._replace(event=each.event)))
                    if decision.repairs:
                        self.later.append(partial(self.repaired, ledger, action))
                case Interrupt():
                    pass
                case Tell():
                    raise AssertionError("nobody has asked")

    def pass_on(self, to: Owner, failure: MeshFailure) -> None:
        owner, ledger = to[1], self.script if to == SCRIPT else self.worker
        event = ActorFailed(owner, failure)
        self.under_way.append(partial(self.on, ledger, event))

    def ask(self, ledger: FailureLedger, asked: Consult | Ask) -> None:
        if asked.owner in self.gone:
            # It ends with its owner.
            self.fates.update(self.concerned(asked))
        elif isinstance(asked, Consult):
            if asked.run.closed:
                # Its mesh is being stopped.
                self.fates.update(self.concerned(asked))
            decision = asked.run.decide(asked.event, 0.0, lambda verdict: verdict)
            self.on(ledger, Decided(asked, decision))
        elif asked.owner == 0:
            assert ledger is self.script
            handled = self.handler and self.chance.random() < 0.5
            self.on(ledger, Answered(asked, handled, "the fault handler"))
        elif self.chance.random() < 0.1:
            # It raises: that is a failure of its own, of which its owner is notified.
            self.fates[asked.failure.reason] += 1
            self.pass_on(ABOVE[asked.owner], self.numbered((9, 0, 10**6 + self.numbers), "owner"))
        else:
            verdict = self.chance.random() < 0.3
            self.on(ledger, Answered(asked, verdict, "an actor", ABOVE[asked.owner]))

    def concerned(self, asked: Consult | Ask) -> list[str]:
        if isinstance(asked, Ask):
            return [asked.failure.reason]
        return [asked.event.failure.reason] if isinstance(asked.event, Failed) else []

    def repaired(self, ledger: FailureLedger, action: CarryOut) -> None:
        works, concerned = self.chance.random() < 0.6, action.decision.repaired
        outcome = Decision(handled=concerned) if works else Decision(passed_on=concerned)
        self.on(ledger, Decided(action.asked, outcome))

    # The end.

    def check(self) -> None:
        while self.under_way:
            self.arrive()
        actions = (value for waits in self.later for value in waits.args if isinstance(value, CarryOut))
        repairing = {each.reason for action in actions for each in action.decision.repaired}
        put_off = {
            each.reason: (owner, each._key)
            for owner, held in self.holdings
            for each in (held.policy.put_off if held.policy else ())
        }
        for number in map(str, range(1, self.numbers + 1)):
            ends = self.fates[number] + (number in repairing) + (number in put_off)
            assert ends == 1, f"failure {number} has come to {ends} ends"
        reported = [each._key for each in self.tell(self.script.on(ScriptEnds()))]
        assert len(reported) == len(set(reported)), "reported twice"
        known = set(self.unhandled.values()) | {key for owner, key in put_off.values() if owner == 0}
        assert set(reported) == known - self.told
        assert max(self.raised.values(), default=0) <= 1, "raised twice in one thread"
        assert not self.script.due
        assert self.script.on(Waits(1)) == self.script.on(ScriptEnds()) == []


@pytest.fixture
def quiet() -> Iterator[None]:
    """Policies that raise write to the log."""
    logger = logging.getLogger("mesh")
    logger.disabled = True
    yield
    logger.disabled = False


@pytest.mark.parametrize("seed", range(30))
def test_each_failure_is_reported_once_to_everyone_concerned(quiet: None, seed: int) -> None:
    """SUP-1, SUP-2, SUP-3: in any order of events, with the script ending at any moment."""
    for part in range(50):
        world = World(seed * 1000 + part)
        for _ in range(world.chance.randrange(100)):
            world.step()
        world.check()
