"""The state machine against its invariants: all short sequences of events, and long random ones."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from mesh_supervision import Backoff, RestartType, Strategy
from mesh_supervision._machine import (
    START,
    Action,
    Begin,
    Death,
    GiveUp,
    Nothing,
    Plan,
    Ranks,
    State,
    Wait,
    died,
    due,
    failed_to_start,
    restarted,
    started,
)

TYPES = list(RestartType)


class World:
    """Ranks that live and die, timers and restarts, around the machine; checks the invariants with every step."""

    def __init__(self, plan: Plan, size: int) -> None:
        self.plan = plan
        self.size = size
        self.state: State = START
        self.now = 0.0
        self.dead: set[int] = set()
        self.timers: list[tuple[float, object, int]] = []
        self.repairs: list[tuple[Ranks, int, set[int]]] = []
        """What is under repair, for whose death, and who has died since that began."""
        self.began: list[tuple[float, int]] = []
        self.gave_up = 0

    def die(self, rank: int, *, normal: bool = False) -> None:
        if rank in self.dead:
            return
        self.dead.add(rank)
        if self.repairs:
            self.repairs[0][2].add(rank)
        token = object()
        death = Death(rank, "died", token, normal, self.size)
        self._step(died(self.plan, self.state, death, self.now), token, rank)

    def next_timer(self) -> None:
        if self.timers:
            first = min(self.timers, key=lambda each: each[0])
            self.timers.remove(first)
            at, token, rank = first
            self.now = max(self.now, at)
            step = due(self.plan, self.state, token, self.now)
            if step is not None:
                self._step(step, token, rank)

    def finish(self, *, succeeds: bool = True) -> None:
        if not self.repairs:
            return
        ranks, cause, since = self.repairs.pop(0)
        if succeeds:
            self.dead -= set(range(self.size) if ranks is None else ranks) - since
            self.state = started(self.state, ranks)
            return
        token = object()
        death = Death(cause, "no", token, False, self.size)
        self._step(failed_to_start(self.plan, self.state, ranks, death, self.now), token, cause)

    def drain(self) -> None:
        """Let everything that is under way come to a good end."""
        while self.timers or self.repairs:
            self.finish()
            self.next_timer()

    def _step(self, step: tuple[State, Action], token: object, rank: int) -> None:
        before, (self.state, action) = self.state, step
        assert isinstance(action, (Begin, Wait, GiveUp, Nothing))
        if before.over:
            assert isinstance(action, Nothing), "RST-4: nothing is done after it has given up"
        if isinstance(action, GiveUp):
            self.gave_up += 1
            assert action.report.count("\n") == self.plan.intensity + 1, "the report tells every attempt"
        if isinstance(action, Wait):
            self.timers.append((self.now + action.seconds, token, rank))
        if isinstance(action, Begin):
            self._check_order(before, action)
            self.began.append((self.now, rank))
            self.repairs.append((action.start, rank, set()))
        assert self.gave_up <= 1, "RST-4: it gives up once"
        self._check_intensity()

    def _check_order(self, before: State, action: Begin) -> None:
        start = action.start or ()
        assert list(start) == sorted(set(start)), "RST-2: started in start order"
        assert list(action.stop) == sorted(set(action.stop), reverse=True), "RST-2: stopped in reverse"
        assert not before.gone & {*start, *action.stop}, "RST-3: nothing is done to what is gone"
        assert not [each for each in start if self.plan.type_of(each) is RestartType.TEMPORARY], "RST-3"
        assert set(start) <= set(range(self.size))

    def _check_intensity(self) -> None:
        by = {0: [at for at, _ in self.began]}
        if self.plan.per_rank:
            by = {rank: [at for at, who in self.began if who == rank] for rank in range(self.size)}
        for times in by.values():
            for first, past in zip(times, times[self.plan.intensity :], strict=False):
                assert past - first > self.plan.period, "RST-1: no more than `intensity` within `period`"


MOVES = ("die 0", "die 1", "end 1", "finish", "fail", "timer", "wait 3", "wait 11")


def play(world: World, moves: tuple[str, ...]) -> None:
    for move in moves:
        word, _, number = move.partition(" ")
        match word:
            case "die":
                world.die(int(number))
            case "end":
                world.die(int(number), normal=True)
            case "finish":
                world.finish()
            case "fail":
                world.finish(succeeds=False)
            case "timer":
                world.next_timer()
            case _:
                world.now += float(number)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", Strategy)
@pytest.mark.parametrize("settle", [0.0, 1.0])
def test_all_short_sequences(strategy: Strategy, settle: float) -> None:
    """Every sequence of four moves after the first death, with two ranks of different types and an intensity of one."""
    plan = Plan(
        strategy=strategy,
        intensity=1,
        period=10.0,
        types={1: RestartType.TRANSIENT},
        settle=settle,
    )
    for moves in itertools.product(MOVES, repeat=4):
        play(World(plan, 2), ("die 0", *moves))


@pytest.mark.parametrize(
    "types", list(itertools.product(TYPES, repeat=3)), ids=lambda types: "-".join(t.value for t in types)
)
def test_all_types_of_three_ranks(types: tuple[RestartType, ...]) -> None:
    """Each strategy, each rank dies first, each other one dies next, while the restart is under way or after it."""
    for strategy in Strategy:
        for first, second in itertools.product(range(3), repeat=2):
            for between, normal in itertools.product(("none", "finish", "fail"), (False, True)):
                plan = Plan(
                    strategy=strategy, intensity=2, period=10.0, types=dict(enumerate(types)), settle=0.0
                )
                world = World(plan, 3)
                world.die(first, normal=normal)
                if between != "none":
                    world.finish(succeeds=between == "finish")
                world.die(second, normal=normal)
                wants = types[first] is RestartType.PERMANENT or (
                    types[first] is RestartType.TRANSIENT and not normal
                )
                assert bool(world.began and world.began[0][1] == first) == wants


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_sequences(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        size = chance.randrange(1, 6)
        strategy = chance.choice(list(Strategy))
        plan = Plan(
            strategy=strategy,
            intensity=chance.randrange(5),
            period=chance.choice((1.0, 10.0, 100.0)),
            backoff=chance.choice((None, Backoff(seed=seed), Backoff(free=0, initial=3.0, jitter=1.0))),
            types={rank: chance.choice(TYPES) for rank in range(size) if chance.random() < 0.4},
            per_rank=strategy is Strategy.ONE_FOR_ONE and chance.random() < 0.3,
            settle=chance.choice((0.0, 0.05, 2.0)),
        )
        world = World(plan, size)
        for _ in range(60):
            world.now += chance.choice((0.0, 0.0, 0.01, 1.0, 20.0))
            match chance.randrange(7):
                case 0 | 1:
                    world.finish()
                case 2:
                    world.finish(succeeds=False)
                case 3 | 4:
                    world.next_timer()
                case _:
                    world.die(chance.randrange(size), normal=chance.random() < 0.2)
        world.drain()
        permanent = {rank for rank in range(size) if plan.type_of(rank) is RestartType.PERMANENT}
        assert world.state.over or not world.dead & permanent, "what is to live lives in the end"


def test_deaths_that_come_together_are_one_restart_of_all() -> None:
    world = World(Plan(strategy=Strategy.ONE_FOR_ALL, intensity=1, period=60.0, settle=0.05), 8)
    for rank in range(8):
        world.die(rank)
    world.next_timer()
    world.finish()
    assert (len(world.began), world.gave_up, world.dead) == (1, 0, set())


def test_a_death_during_a_restart_of_all_leads_to_another_one() -> None:
    """RST-5."""
    world = World(Plan(strategy=Strategy.ONE_FOR_ALL, intensity=2, period=60.0, settle=0.0), 3)
    world.die(0)
    world.die(1)
    world.die(2)
    assert len(world.began) == 2, "the third death is part of the second restart, which has not begun"
    world.finish()
    world.finish()
    assert world.dead == set()


def test_a_restart_that_waits_is_told_in_the_report() -> None:
    plan = Plan(
        strategy=Strategy.ONE_FOR_ONE,
        intensity=1,
        period=60.0,
        backoff=Backoff(free=0, initial=5.0, jitter=0.0),
    )
    state, action = died(plan, START, Death(0, "was killed", "a"), 0.0)
    assert action == Wait(5.0)
    state, action = died(plan, state, Death(1, "exited with status 3", "b"), 1.0)
    assert isinstance(action, GiveUp)
    assert action.report.splitlines() == [
        "one_for_one gave up: 1 restart is allowed within 60 s, and this would be number 2",
        "    1. 1.000 s before: rank 0 was killed; its restart was still waiting",
        "    2. now: rank 1 exited with status 3; not restarted",
    ]
    assert due(plan, state, "a", 5.0) is None, "RST-4"


@pytest.mark.parametrize(
    "plan",
    [
        Plan(Strategy.ONE_FOR_ONE, 1, 10.0),
        Plan(Strategy.ONE_FOR_ONE, 1, 10.0, per_rank=True),
        Plan(Strategy.ONE_FOR_ALL, 1, 10.0, settle=0.0),
        Plan(Strategy.ONE_FOR_ONE, 1, 10.0, backoff=Backoff(jitter=0.0)),
    ],
    ids=["plain", "per rank", "all", "backoff"],
)
def test_a_restart_counts_until_its_period_is_over(plan: Plan) -> None:
    """RST-1."""
    state, action = died(plan, START, Death(0, "died", "a", size=2), 0.0)
    assert isinstance(action, Begin)
    state = started(state, action.start)
    _, last = died(plan, state, Death(0, "died", "b", size=2), 10.0)
    assert isinstance(last, GiveUp)
    _, next_one = died(plan, state, Death(0, "died", "b", size=2), math.nextafter(10.0, 11.0))
    assert isinstance(next_one, Begin)


def test_without_an_intensity_the_first_death_is_the_last() -> None:
    _, action = died(Plan(Strategy.ONE_FOR_ONE, 0, 10.0), START, Death(0, "died"), 0.0)
    assert isinstance(action, GiveUp)
    assert action.report.splitlines()[0] == (
        "one_for_one gave up: 0 restarts are allowed within 10 s, and this would be number 1"
    )


def test_each_rank_may_have_an_intensity_of_its_own() -> None:
    plan = Plan(strategy=Strategy.ONE_FOR_ONE, intensity=1, period=60.0, per_rank=True)
    world = World(plan, 4)
    for rank in range(4):
        world.die(rank)
        world.finish()
    assert world.gave_up == 0
    world.die(2)
    assert world.gave_up == 1


def test_the_short_way_decides_as_the_long_one() -> None:
    """RST-1, where most deaths are decided."""
    chance, taken = random.Random(7), 0
    for _ in range(900):
        plan = Plan(Strategy.ONE_FOR_ONE, chance.randint(0, 4), chance.uniform(0.5, 6.0))
        assert plan.is_plain
        state, now = START, 0.0
        for _ in range(30):
            now += chance.choice([0.0, 0.3, 1.0, 3.0])
            rank = chance.randrange(3)
            short = restarted(plan, state, rank, "died", now)
            after, action = died(plan, state, Death(rank, "died", None, False, 3), now)
            if short is not None:
                taken += 1
                assert action == Begin((rank,), (rank,))
                # It may keep restarts that do not count any more until the intensity is reached.
                assert short._replace(attempts=()) == after._replace(attempts=())
                assert [each for each in short.attempts if each.at >= now - plan.period] == [
                    each for each in after.attempts if each.at >= now - plan.period
                ]
            state = short or after
            if state.running and chance.random() < 0.7:
                state = started(state, state.running[0])
    assert taken > 1000
    for other in (
        Plan(Strategy.ONE_FOR_ALL, 3, 1.0),
        Plan(Strategy.ONE_FOR_ONE, 3, 1.0, backoff=Backoff()),
        Plan(Strategy.ONE_FOR_ONE, 3, 1.0, per_rank=True),
        Plan(Strategy.ONE_FOR_ONE, 3, 1.0, types={0: RestartType.TEMPORARY}),
        Plan(Strategy.ONE_FOR_ONE, 3, 1.0, restart=RestartType.TRANSIENT),
    ):
        assert not other.is_plain
