"""OTP's rules, case by case.

Each rule is told here in our own words, with the section in which OTP documents it: "Principles" is `sup_princ` of the OTP Design
Principles, "supervisor" the module's page in STDLIB (both as of OTP 27). Where the pages leave something open, what the module
does counts ("module").
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mesh_supervision import RestartType, Strategy
from mesh_supervision._machine import (
    START,
    Action,
    Begin,
    Death,
    GiveUp,
    Nothing,
    Plan,
    State,
    died,
    failed_to_start,
    started,
)

ONE, ALL, REST = Strategy.ONE_FOR_ONE, Strategy.ONE_FOR_ALL, Strategy.REST_FOR_ONE
P, TR, TE = RestartType.PERMANENT, RestartType.TRANSIENT, RestartType.TEMPORARY
CRASH, NORMAL = False, True


@dataclass(frozen=True)
class Rule:
    where: str
    says: str
    strategy: Strategy
    types: str
    """Of the children in start order: p, t (transient), x (temporary)."""
    dies: int
    how: bool
    stop: tuple[int, ...] | None
    """Which others are stopped, in which order; ``None`` if nothing is to happen."""
    start: tuple[int, ...] = ()
    before: tuple[tuple[int, bool], ...] = field(default=())
    """What has died earlier, each dealt with to its end."""


RULES = [
    Rule("Principles, one_for_one", "only the one that has died is restarted", ONE, "ppp", 1, CRASH, (), (1,)),
    Rule(
        "Principles, one_for_all",
        "all others are stopped in reverse start order, then all are started in start order",
        ALL, "pppp", 1, CRASH, (3, 2, 0), (0, 1, 2, 3),
    ),
    Rule(
        "Principles, rest_for_one",
        "those started after it are stopped, last first; it and they are started",
        REST, "pppp", 1, CRASH, (3, 2), (1, 2, 3),
    ),
    Rule("Principles, rest_for_one", "the last one has no rest", REST, "ppp", 2, CRASH, (), (2,)),
    Rule("Principles, rest_for_one", "with the first one it is all of them", REST, "ppp", 0, CRASH, (2, 1), (0, 1, 2)),
    Rule("supervisor, restart", "a permanent child is always restarted: after a crash", ONE, "p", 0, CRASH, (), (0,)),
    Rule("supervisor, restart", "a permanent child is always restarted: after a normal end", ONE, "p", 0, NORMAL, (), (0,)),
    Rule(
        "supervisor, restart", "so that a normal end of a permanent child concerns its siblings",
        ALL, "ppp", 2, NORMAL, (1, 0), (0, 1, 2),
    ),
    Rule("supervisor, restart", "a transient child is restarted after a crash", ONE, "t", 0, CRASH, (), (0,)),
    Rule("supervisor, restart", "a transient child is not restarted after a normal end", ONE, "t", 0, NORMAL, None),
    Rule(
        "supervisor, restart", "and its normal end does not concern its siblings", ALL, "ptp", 1, NORMAL, None
    ),
    Rule("supervisor, restart", "a temporary child is never restarted: after a crash", ONE, "x", 0, CRASH, None),
    Rule("supervisor, restart", "a temporary child is never restarted: after a normal end", ONE, "x", 0, NORMAL, None),
    Rule(
        "supervisor, restart", "the crash of a temporary child does not concern its siblings: one_for_all",
        ALL, "pxp", 1, CRASH, None,
    ),
    Rule(
        "supervisor, restart", "the crash of a temporary child does not concern its siblings: rest_for_one",
        REST, "xpp", 0, CRASH, None,
    ),
    Rule(
        "supervisor, restart", "a temporary sibling is stopped with the others, and not started again: one_for_all",
        ALL, "pxp", 2, CRASH, (1, 0), (0, 2),
    ),
    Rule(
        "supervisor, restart", "a temporary sibling is stopped with the others, and not started again: rest_for_one",
        REST, "ppxp", 1, CRASH, (3, 2), (1, 3),
    ),
    Rule(
        "module, restart of one_for_all", "a temporary child that is dead already is no child any more",
        ALL, "pxp", 0, CRASH, (2,), (0, 2), before=((1, CRASH),),
    ),
    Rule(
        "module, restart of one_for_all",
        "a transient child that has ended normally is still a child, and is started with the others",
        ALL, "ptp", 0, CRASH, (2, 1), (0, 1, 2), before=((1, NORMAL),),
    ),
    Rule(
        "module, restart of rest_for_one", "those before the dead one are not touched, even if they have ended",
        REST, "tpp", 1, CRASH, (2,), (1, 2), before=((0, NORMAL),),
    ),
]  # fmt: skip

TYPES = {"p": P, "t": TR, "x": TE}


def plan_of(strategy: Strategy, types: str, intensity: int = 9, period: float = 60.0) -> Plan:
    return Plan(
        strategy=strategy,
        intensity=intensity,
        period=period,
        types={rank: TYPES[each] for rank, each in enumerate(types)},
        settle=0.0,
    )


def die(plan: Plan, state: State, rank: int, now: float = 0.0, how: bool = CRASH) -> tuple[State, Action]:
    return died(plan, state, Death(rank, "died", object(), how, len(plan.types)), now)


def settled(step: tuple[State, Action]) -> State:
    """The state once what was begun has succeeded."""
    state, action = step
    return started(state, action.start) if isinstance(action, Begin) else state


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.where}: {rule.says}")
def test_rule(rule: Rule) -> None:
    plan, state = plan_of(rule.strategy, rule.types), START
    for rank, how in rule.before:
        state = settled(die(plan, state, rank, how=how))
    _, action = die(plan, state, rule.dies, how=rule.how)
    if rule.stop is None:
        assert isinstance(action, Nothing)
        return
    assert isinstance(action, Begin)
    assert tuple(rank for rank in action.stop if rank != rule.dies) == rule.stop
    assert action.start == rule.start


# supervisor, "Restart intensity and period": more than MaxR restarts within MaxT seconds end all children, then the supervisor.


def crashes(plan: Plan, *times: float) -> list[Action]:
    state, actions = START, []
    for now in times:
        step = die(plan, state, 0, now)
        state = settled(step)
        actions.append(step[1])
    return actions


def test_as_many_restarts_as_the_intensity_are_made() -> None:
    actions = crashes(plan_of(ONE, "p", intensity=3, period=5.0), 0.0, 1.0, 2.0)
    assert all(isinstance(each, Begin) for each in actions)


def test_one_more_than_the_intensity_gives_up() -> None:
    actions = crashes(plan_of(ONE, "p", intensity=3, period=5.0), 0.0, 1.0, 2.0, 3.0)
    assert isinstance(actions[-1], GiveUp)


def test_intensity_0_allows_no_restart() -> None:
    (action,) = crashes(plan_of(ONE, "p", intensity=0), 0.0)
    assert isinstance(action, GiveUp)


def test_restarts_of_longer_ago_than_the_period_do_not_count() -> None:
    actions = crashes(plan_of(ONE, "p", intensity=1, period=5.0), 0.0, 5.001, 10.002)
    assert all(isinstance(each, Begin) for each in actions)


def test_a_restart_exactly_one_period_ago_counts() -> None:
    """module, add_restart: what is not older than the period is kept."""
    actions = crashes(plan_of(ONE, "p", intensity=1, period=5.0), 0.0, 5.0)
    assert isinstance(actions[-1], GiveUp)


def test_burst_and_sustained_rate() -> None:
    """Principles, "Tuning the intensity and period": 5 within 30 s allows a burst of 5, and then one for each 6 s."""
    plan = plan_of(ONE, "p", intensity=5, period=30.0)
    assert all(isinstance(each, Begin) for each in crashes(plan, *[0.0] * 5, 31.0))
    assert isinstance(crashes(plan, *[0.0] * 6)[-1], GiveUp)
    assert all(isinstance(each, Begin) for each in crashes(plan, *[n * 6.001 for n in range(50)]))


@pytest.mark.parametrize("strategy", [ALL, REST])
def test_a_restart_of_several_children_counts_as_one(strategy: Strategy) -> None:
    """module, restart: it is counted before the strategy is looked at."""
    actions = crashes(plan_of(strategy, "pppp", intensity=2), 0.0, 0.0)
    assert all(isinstance(each, Begin) for each in actions)


@pytest.mark.parametrize(("types", "how"), [("t", NORMAL), ("x", CRASH)])
def test_an_end_that_needs_no_restart_does_not_count(types: str, how: bool) -> None:
    plan, state = plan_of(ONE, types, intensity=0), START
    for _ in range(5):
        state, action = die(plan, state, 0, how=how)
        assert isinstance(action, Nothing)


def test_restarts_of_all_children_count_together() -> None:
    plan, state = plan_of(ONE, "ppp", intensity=2), START
    for rank in (0, 1):
        state = settled(die(plan, state, rank))
    assert isinstance(die(plan, state, 2)[1], GiveUp)


def test_a_start_that_fails_is_tried_again_and_counts() -> None:
    """module, restart: a failed start leads to another restart, which is counted like any other."""
    plan = plan_of(ONE, "p", intensity=2)
    state, action = die(plan, START, 0)
    assert isinstance(action, Begin)
    death = Death(0, "no", object(), False, 1)
    state, action = failed_to_start(plan, state, (0,), death, 0.0)
    assert isinstance(action, Begin)
    state, action = failed_to_start(plan, state, (0,), death, 0.0)
    assert isinstance(action, GiveUp)


def test_giving_up_is_final() -> None:
    """supervisor: it terminates; the one above decides whether it is started again, with nothing to remember."""
    plan = plan_of(ONE, "pp", intensity=0)
    state, action = die(plan, START, 0)
    assert isinstance(action, GiveUp)
    for rank in (0, 1):
        state, action = die(plan, state, rank, now=1e6)
        assert isinstance(action, Nothing)
