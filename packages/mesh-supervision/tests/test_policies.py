"""Policies as functions of events and time: what they refuse, backoff, combinations, the breaker; and meshes on paper."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mesh_core import FailureKind, MeshFailure
from mesh_core import policies as core
from mesh_core.policies import (
    Action,
    Due,
    Ended,
    Failed,
    Later,
    Policy,
    Repaired,
    RepairFailed,
    Restart,
    Stop,
)
from mesh_supervision import (
    Backoff,
    ByKind,
    ByRank,
    Circuit,
    CircuitBreaker,
    Escalate,
    Ignore,
    Levels,
    OneForAll,
    OneForOne,
    RestForOne,
    Strategy,
    Supervisor,
)
from mesh_supervision._members import Members
from mesh_supervision.testing import Began, Rehearsal


def loss(rank: int = 0, kind: FailureKind = FailureKind.KILLED) -> Failed:
    """A failure like no other."""
    return Failed("workers", rank, kind, MeshFailure(mesh_name="workers", rank=rank, kind=kind))


# What cannot be.


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"intensity": -1}, "intensity must be a whole number from 0, got -1"),
        ({"intensity": 2.5}, "intensity must be a whole number"),
        ({"intensity": True}, "intensity must be a whole number"),
        ({"period": 0}, "period must be a finite number of seconds above 0, got 0"),
        ({"period": math.inf}, "period must be"),
        ({"settle": -0.1}, "settle must be a finite number of seconds from 0"),
        ({"restart": "always"}, "restart must be one of 'permanent', 'transient', 'temporary', got 'always'"),
        ({"ranks": {3: "never"}}, r"ranks\[3\] must be one of 'permanent'"),
        ({"scope": "host"}, "scope must be 'mesh' or 'rank', got 'host'"),
        ({"backoff": 3.0}, "backoff must be a Backoff, got 3.0"),
    ],
)
def test_a_supervisor_refuses(change: dict[str, Any], says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        OneForOne(**({"intensity": 3, "period": 60.0} | change))


def test_intensity_and_period_have_to_be_given() -> None:
    for given_ in ({}, {"intensity": 3}, {"period": 60.0}):
        with pytest.raises(TypeError, match=r"intensity|period"):
            OneForOne(**given_)  # type: ignore[arg-type]


def test_a_strategy_has_to_be_one() -> None:
    assert Supervisor("one_for_all", intensity=1, period=1.0).plan.strategy is Strategy.ONE_FOR_ALL
    with pytest.raises(
        ValueError, match=r"strategy must be one of 'one_for_one', 'one_for_all', 'rest_for_one', got 'all'"
    ):
        Supervisor("all", intensity=1, period=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scope 'rank' is for one_for_one"):
        OneForAll(intensity=1, period=1.0, scope="rank")


@pytest.mark.parametrize(
    "wrong", [{"initial": -1.0}, {"most": math.inf}, {"factor": 0.5}, {"jitter": 1.5}, {"free": -1}], ids=str
)
def test_a_backoff_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Backoff(**wrong)


LEAST = math.nextafter(0.0, 1.0)
"""The least number above 0."""


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("initial", (0, sys.float_info.max), (-LEAST, math.inf, math.nan)),
        ("most", (0, sys.float_info.max), (-LEAST, math.inf, math.nan)),
        ("factor", (1, sys.float_info.max), (math.nextafter(1.0, 0.0), math.inf, math.nan)),
        ("jitter", (0, 1), (-LEAST, math.nextafter(1.0, 2.0), math.nan)),
        ("free", (0, 1), (-1,)),
    ],
)
def test_the_edges_of_a_backoff(name: str, accepted: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    for value in accepted:
        assert getattr(Backoff(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ValueError, match=f"^{name} must be"):
            Backoff(**{name: value})


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("intensity", (0, 1), (-1,)),
        ("period", (LEAST, sys.float_info.max), (0, -LEAST, math.inf, math.nan, True, "1")),
        ("settle", (0, LEAST), (-LEAST, math.inf, math.nan)),
    ],
)
def test_the_edges_of_a_supervisor(name: str, accepted: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    for value in accepted:
        assert getattr(OneForOne(**({"intensity": 3, "period": 60.0} | {name: value})).plan, name) == value
    for value in refused:
        with pytest.raises(ValueError, match=f"^{name} must be"):
            OneForOne(**({"intensity": 3, "period": 60.0} | {name: value}))


@pytest.mark.parametrize(
    ("name", "accepted", "refused"),
    [
        ("cooldown", (LEAST, sys.float_info.max), (0, -LEAST, math.inf, math.nan)),
        ("trips", (1,), (0, -1, True, 1.0)),
    ],
)
def test_the_edges_of_a_breaker(name: str, accepted: tuple[Any, ...], refused: tuple[Any, ...]) -> None:
    for value in accepted:
        assert getattr(breaker(**{name: value}), name) == value
    for value in refused:
        with pytest.raises(ValueError, match=f"^{name} must be"):
            breaker(**{name: value})


def test_combinations_refuse_what_is_no_policy() -> None:
    for make in (
        Levels,
        lambda: Levels(OneForOne),  # type: ignore[arg-type]
        lambda: ByKind({"killed": Ignore()}, otherwise=Ignore()),  # type: ignore[dict-item]
        lambda: ByRank({"0": Ignore()}, otherwise=Ignore()),  # type: ignore[dict-item]
        lambda: ByRank({}, otherwise=None),  # type: ignore[arg-type]
        lambda: CircuitBreaker(Ignore, cooldown=1.0, trips=1),  # type: ignore[arg-type]
        lambda: CircuitBreaker(Ignore(), cooldown=0.0, trips=1),
        lambda: CircuitBreaker(Ignore(), cooldown=1.0, trips=0),
    ):
        with pytest.raises((ValueError, TypeError)):
            make()


# Backoff.


@given(
    st.builds(
        Backoff,
        initial=st.floats(0, 100),
        factor=st.floats(1, 1e6),
        most=st.floats(0, 1000),
        jitter=st.floats(0, 1),
        free=st.integers(0, 5),
        seed=st.integers(-(2**70), 2**70),
    ),
    st.integers(0, 2000),
    st.integers(0, 2**60),
)
@settings(deadline=None, max_examples=200)
def test_a_delay_is_within_its_bounds_and_always_the_same(backoff: Backoff, before: int, salt: int) -> None:
    delay = backoff.delay(before, salt)
    assert delay == backoff.delay(before, salt)
    assert 0.0 <= delay <= backoff.most
    if before < backoff.free:
        assert delay == 0.0


def test_jitter_spreads_delays_over_its_part() -> None:
    backoff = Backoff(initial=10.0, jitter=0.5, free=0)
    delays = [backoff.delay(0, salt) for salt in range(1000)]
    assert 5.0 < min(delays) < 5.2 and 9.8 < max(delays) <= 10.0
    assert len(set(delays)) == 1000
    assert delays[0] != Backoff(initial=10.0, jitter=0.5, free=0, seed=1).delay(0, 0)


def test_the_defaults_of_a_backoff() -> None:
    assert Backoff() == Backoff(initial=0.1, factor=2.0, most=30.0, jitter=0.5, free=1, seed=0)


def test_delays_grow_from_the_first_restart_that_is_not_free() -> None:
    backoff = Backoff(initial=1.0, factor=3.0, most=10.0, jitter=0.0, free=2)
    assert [backoff.delay(n) for n in range(6)] == [0.0, 0.0, 1.0, 3.0, 9.0, 10.0]
    assert Backoff(initial=1.0, factor=1e300, most=10.0, jitter=0.0, free=0).delay(9) == 10.0


def test_the_jitter_of_a_seed_is_always_this() -> None:
    """Runs can be repeated with later versions."""
    backoff = Backoff(initial=1.0, jitter=1.0, free=0, seed=7)
    assert [round(backoff.delay(0, salt), 12) for salt in range(3)] == [
        0.776902262086,
        0.316440881337,
        0.094958067452,
    ]


def test_meshes_that_fail_together_come_back_apart() -> None:
    policy = OneForOne(intensity=9, period=60.0, backoff=Backoff(initial=10.0, free=0))
    times = []
    for name in ("first", "second"):
        mesh = Rehearsal(policy, size=1, name=name)
        mesh.kill(0)
        mesh.advance(20.0)
        times += [each.at for each in mesh.restarts]
    assert len(set(times)) == 2


# Supervisors.


def test_backoff_spaces_the_restarts_of_a_crash_loop() -> None:
    backoff = Backoff(initial=1.0, jitter=0.0)
    mesh = Rehearsal(OneForOne(intensity=4, period=600.0, backoff=backoff), size=2, repair_seconds=0.0)
    for _ in range(5):
        mesh.kill(1)
        mesh.advance(10.0)
    assert [each.at for each in mesh.restarts] == [0.0, 11.0, 22.0, 34.0]
    assert len(mesh.passed_on) == 1


def test_a_policy_without_failures_at_hand_makes_one_for_what_ended_in_order() -> None:
    mesh = Rehearsal(OneForOne(intensity=1, period=60.0), size=2)
    mesh.end(1)
    mesh.advance(1.0)
    assert mesh.alive == [0, 1]
    mesh.end(1)
    mesh.advance(1.0)
    assert mesh.stopped
    assert "rank 1 ended in order; not restarted" in mesh.passed_on[0].reason


def test_events_that_mean_nothing_to_it_change_nothing() -> None:
    policy = OneForOne(intensity=1, period=60.0, restart="transient")
    for event in (Due("of somebody else"), Ended("workers", 0)):
        assert policy.on(event, 0.0)[1] == ()
    assert policy.on_repair(Repaired("workers", (Restart((0,)),)), 0.0)[1] == ()


def test_the_report_tells_exceptions_in_a_line() -> None:
    failure = MeshFailure(rank=0, exception=ValueError("first\nsecond" + "x" * 500))
    policy = OneForOne(intensity=0, period=60.0)
    _, actions = policy.on(Failed("workers", 0, failure.kind, failure), 0.0)
    reason = escalation(actions)
    assert "rank 0 raised ValueError: first; not restarted" in reason


def escalation(actions: Any) -> str:
    (found,) = [each.reason for each in actions if isinstance(each, core.Escalate)]
    return str(found)


def test_ranks_that_die_together_are_one_restart_of_all() -> None:
    mesh = Rehearsal(OneForAll(intensity=1, period=60.0), size=8)
    mesh.kill(*range(8))
    mesh.advance(1.0)
    assert mesh.restarts == [Began(0.05, tuple(range(8)))]
    assert (len(mesh.alive), mesh.passed_on, len(mesh.handled)) == (8, [], 8)


def test_the_size_is_learned_from_a_failure() -> None:
    mesh = Rehearsal(RestForOne(intensity=1, period=60.0), size=5)
    mesh.kill(3)
    mesh.advance(1.0)
    assert mesh.restarts[0].ranks == (3, 4)


# Combinations.


def test_a_level_that_gives_up_lets_those_below_begin_anew() -> None:
    policy = Levels(OneForOne(intensity=1, period=60.0), OneForAll(intensity=1, period=600.0, settle=0.0))
    mesh = Rehearsal(policy, size=3)
    for _ in range(4):
        mesh.kill(1)
        mesh.advance(1.0)
    assert [each.ranks for each in mesh.restarts] == [(1,), (0, 1, 2), (1,)]
    assert mesh.stopped
    assert mesh.passed_on[0].reason.startswith("one_for_all gave up: 1 restart is allowed within 600 s")
    assert "one_for_one gave up" in mesh.passed_on[0].reason


def test_timers_of_a_level_end_when_the_level_above_takes_over() -> None:
    """MEM-2."""
    policy = Levels(
        OneForOne(intensity=1, period=60.0, backoff=Backoff(initial=5.0, jitter=0.0, free=0)),
        OneForAll(intensity=1, period=600.0, settle=0.0),
    )
    mesh = Rehearsal(policy, size=3)
    mesh.kill(0)
    mesh.kill(1)
    mesh.advance(60.0)
    assert [each.ranks for each in mesh.restarts] == [(0, 1, 2)]
    assert (mesh.alive, mesh.put_off, len(mesh.handled)) == ([0, 1, 2], [], 2)


def test_a_repair_that_fails_is_told_to_the_policy_that_wanted_it() -> None:
    can = {0: True, 1: False}
    policy = ByRank({1: OneForOne(intensity=1, period=60.0)}, otherwise=OneForOne(intensity=9, period=60.0))
    mesh = Rehearsal(policy, size=2, starts=lambda rank: can[rank])
    mesh.kill(0)
    mesh.kill(1)
    mesh.advance(1.0)
    assert len(mesh.passed_on) == 1
    assert "rank 1 could not be restarted: rank 1 does not start; not restarted" in mesh.passed_on[0].reason


class Plain:
    """A policy of somebody who does not hear of repairs; asks for a timer first."""

    def on(self, event: Any, now: float) -> tuple[Policy, list[Action]]:
        if isinstance(event, Failed):
            return self, [Later(1.0, Due("mine"))]
        assert event == Due("mine"), "the timer comes back under the name that it had"
        return self, [Restart()]


def test_a_policy_is_busy_while_a_timer_or_a_repair_is_under_way() -> None:
    def begun(**more: Any) -> Members:
        policy = OneForOne(intensity=3, period=60.0, **more)
        return Members.of([policy, policy]).ask(1, loss(), 0.0)[0]

    for members in (begun(), begun(backoff=Backoff(free=0))):
        assert [members.busy(index) for index in range(2)] == [False, True]
        assert not members.reset(1).busy(1)


def test_an_event_of_no_rank_is_the_others() -> None:
    class Keeps:
        """Remembers the events it was asked about."""

        def __init__(self, *seen: Any) -> None:
            self.seen = seen

        def on(self, event: Any, now: float) -> tuple[Policy, tuple[Action, ...]]:
            return Keeps(*self.seen, event), ()

    policy: Any = ByRank({0: Escalate()}, otherwise=Keeps())
    whole = Failed("workers", None, FailureKind.KILLED)
    for event in (Due(), whole, Ended("workers", 1)):
        policy, _ = policy.on(event, 0.0)
    assert len(policy._members.current[1].seen) == 3  # noqa: SLF001


def test_a_rank_that_a_restart_has_stopped_is_not_restarted_again() -> None:
    policy, (action,) = OneForAll(intensity=3, period=60.0, settle=0.0, size=2).on(loss(0), 0.0)
    assert isinstance(action, Restart)
    assert policy.on(Ended("workers", 1), 0.0)[1] == ()
    single, _ = OneForOne(intensity=3, period=60.0).on(loss(0), 0.0)
    assert single.on(Ended("workers", 0), 0.0)[1] == ()
    assert len(single.on(Ended("workers", 1), 0.0)[1]) == 1


def test_policies_of_others_keep_their_timers_apart() -> None:
    """MEM-1."""
    policy = ByKind({FailureKind.KILLED: Plain()}, otherwise=Plain())
    mesh = Rehearsal(policy, size=2)
    mesh.kill(0)
    mesh.kill(1, kind=FailureKind.EXITED, exitcode=1)
    mesh.advance(2.0)
    assert mesh.alive == [0, 1]
    assert not mesh.passed_on


def test_a_failure_that_a_wrapped_policy_cannot_repair_is_passed_on() -> None:
    mesh = Rehearsal(ByKind({}, otherwise=Plain()), size=1, starts=lambda rank: False)
    mesh.kill(0)
    mesh.advance(2.0)
    assert [each.failure.rank for each in mesh.passed_on] == [0]


# The breaker.


def breaker(**changes: Any) -> CircuitBreaker:
    return CircuitBreaker(OneForOne(intensity=1, period=10.0), **({"cooldown": 30.0, "trips": 2} | changes))


def test_an_open_circuit_restarts_nothing() -> None:
    """BRK-1."""
    mesh = Rehearsal(breaker(), size=3)
    mesh.kill(1)
    mesh.advance(1.0)
    mesh.kill(1)
    assert mesh.policy.circuit is Circuit.OPEN  # type: ignore[attr-defined]
    mesh.kill(2)
    mesh.advance(29.9)
    assert (mesh.alive, len(mesh.restarts), mesh.stopped) == ([0], 1, False)
    mesh.advance(1.0)
    assert (mesh.alive, mesh.restarts[1].ranks) == ([0, 1, 2], (1, 2))
    assert not mesh.passed_on


def test_a_quiet_time_after_the_trial_closes_the_circuit() -> None:
    mesh = Rehearsal(breaker(trips=1), size=1)
    for _ in range(5):
        mesh.kill(0)
        mesh.advance(1.0)
        mesh.kill(0)
        mesh.advance(30.0)
        assert mesh.policy.circuit is Circuit.TRIAL  # type: ignore[attr-defined]
        mesh.advance(30.1)
    assert not mesh.passed_on


def test_a_failure_at_the_end_of_the_quiet_time_is_a_new_one() -> None:
    """Before that, the trial has failed."""
    policy: Policy = breaker(cooldown=30.0)
    for at in (0.0, 1.0):
        policy, (action,) = policy.on(loss(), at)
    assert isinstance(action, Later) and action.seconds == 30.0
    trial, _ = policy.on(action.event, 31.0)
    for at, circuit in ((math.nextafter(61.0, 0.0), Circuit.OPEN), (61.0, Circuit.CLOSED)):
        following, _ = trial.on(loss(), at)
        assert isinstance(following, CircuitBreaker) and following.circuit is circuit


def test_a_circuit_that_opens_too_often_passes_the_failure_on() -> None:
    """BRK-2."""
    mesh = Rehearsal(breaker(trips=2), size=1)
    mesh.kill(0)
    mesh.advance(1.0)
    for _ in range(3):
        assert not mesh.stopped
        mesh.kill(0)
        mesh.advance(31.0)
    assert len(mesh.passed_on) == 1
    assert mesh.passed_on[0].reason.startswith("the circuit was opened 2 times in a row")
    assert "one_for_one gave up" in mesh.passed_on[0].reason


def test_a_failed_repair_that_no_policy_asked_for_opens_nothing() -> None:
    strange = RepairFailed("workers", Restart((0,)), "no", (loss().failure,))
    policy, actions = breaker().on_repair(strange, 0.0)
    assert (policy.circuit, actions) == (Circuit.CLOSED, (core.Ignore(),))  # type: ignore[attr-defined]


def test_a_wrapped_policy_gets_its_own_events_back() -> None:
    mine = Due("mine")

    class Waits:
        def on(self, event: Any, now: float) -> tuple[Policy, tuple[Action, ...]]:
            if isinstance(event, Due):
                assert event is mine
                return self, (Stop(),)
            return self, (Later(1.0, mine),)

    policy, (later,) = CircuitBreaker(Waits(), cooldown=1.0, trips=1).on(loss(), 0.0)
    assert isinstance(later, Later) and later.event is not mine
    policy, actions = policy.on(later.event, 1.0)
    assert actions == (Stop(),)
    assert not policy._members.busy(0)  # type: ignore[attr-defined]  # noqa: SLF001


def test_a_trial_that_does_not_start_opens_the_circuit_again() -> None:
    mesh = Rehearsal(breaker(trips=2), size=1, starts=lambda rank: False)
    mesh.kill(0)
    mesh.advance(300.0)
    assert len(mesh.passed_on) == 1
    assert "the trial did not succeed: rank 0 does not start" in mesh.passed_on[0].reason


# Without restarts.


def test_ignore_and_escalate_never_restart() -> None:
    for policy, stopped in ((Ignore(), False), (Escalate("no"), True), (Escalate("no", stop=False), False)):
        mesh = Rehearsal(policy, size=2)
        mesh.kill(0)
        mesh.end(1)
        mesh.advance(9.0)
        assert (mesh.restarts, mesh.stopped) == ([], stopped)
        assert [each.reason for each in mesh.passed_on] == ([] if isinstance(policy, Ignore) else ["no"])


# The mesh on paper.


def test_a_rehearsal_stops_with_the_policy() -> None:
    mesh = Rehearsal(Escalate("no"), size=3)
    mesh.kill(0, 1)
    assert (mesh.alive, len(mesh.passed_on), len(mesh.handled)) == ([], 1, 1)
    mesh.kill(2)
    assert len(mesh.events) == 1


def test_a_rehearsal_makes_repairs_one_after_the_other() -> None:
    mesh = Rehearsal(OneForOne(intensity=5, period=60.0), size=3, repair_seconds=10.0)
    mesh.kill(0, 1)
    mesh.advance(5.0)
    assert (mesh.alive, mesh.restarts) == ([2], [Began(0.0, (0,))])
    mesh.advance(20.0)
    assert (mesh.alive, mesh.restarts[1:]) == ([0, 1, 2], [Began(10.0, (1,))])


def test_the_suite_finds_policies_that_break_their_promises() -> None:
    from mesh_core.plugins import PolicyPlugin
    from mesh_supervision.testing import PolicyConformance

    class Eager:
        """Restarts whatever fails, at once and for ever."""

        def on(self, event: Any, now: float) -> tuple[Policy, list[Action]]:
            return self, [Restart()] if isinstance(event, Failed) else []

        def on_repair(self, event: Any, now: float) -> tuple[Policy, list[Action]]:
            return self, [Restart()] if isinstance(event, RepairFailed) else []

    class Forgetful:
        """Puts off, and never thinks of it again."""

        def on(self, event: Any, now: float) -> tuple[Policy, list[Action]]:
            return self, [Later(1.0, Due("never"))] if isinstance(event, Failed) else []

    class Silent:
        def on(self, event: Any, now: float) -> tuple[Policy, list[Action]]:
            return self, [Stop(), core.Escalate()] if isinstance(event, Failed) else []

    class Beyond:
        def on(self, event: Any, now: float) -> tuple[Policy, list[Action]]:
            return self, [Restart((99,))] if isinstance(event, Failed) else []

    for policy, promise in (
        (Eager, "restarts_no_more_than_it_says"),
        (Eager, "ends_a_crash_loop"),
        (Forgetful, "puts_nothing_off_forever"),
        (Silent, "gives_a_reason_when_it_escalates"),
        (Beyond, "restarts_only_ranks_of_the_mesh"),
    ):

        class Suite(PolicyConformance):
            plugin = PolicyPlugin(name="broken", api_version=1, create=policy)
            distribution = "mesh-test-plugins"
            most_restarts = (3, 60.0)

        with pytest.raises(AssertionError):
            getattr(Suite(), f"test_{promise}")()
