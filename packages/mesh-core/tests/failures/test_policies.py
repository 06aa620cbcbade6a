"""Policies as functions of state, event and time, and what their answers mean: no process, no thread, no clock."""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from core_policies import Grace, Told, Tolerate
from core_typing import mypy

import mesh_core.policies
from mesh_core import FailureKind, MeshFailure
from mesh_core._failures import patience
from mesh_core._failures.policy_run import PolicyRun, failed, policy_of
from mesh_core._failures.supervision import _now
from mesh_core.plugins import PolicyPlugin
from mesh_core.policies import (
    Action,
    Due,
    Ended,
    Escalate,
    Event,
    Failed,
    Ignore,
    Later,
    Policy,
    Respawn,
    Restart,
    Stop,
    checked_actions,
)
from mesh_core.testing import FakeClock, PolicyPluginConformance, installed_plugins

pytestmark = pytest.mark.python


def loss(rank: int = 0) -> Failed:
    """A failure that differs from all others."""
    return Failed("workers", rank, "killed", MeshFailure(mesh_name="workers", rank=rank, signal=9))


def run_of(answer: Callable[[Event], Sequence[Action]] | Policy) -> PolicyRun:
    return PolicyRun(answer if isinstance(answer, Policy) else Told(answer), "workers")


def test_every_public_name_is_documented(page: Any) -> None:
    text = page("docs/how-to/supervise-workers.md") + page("docs/reference/api.md")
    for name in mesh_core.policies.__all__:
        assert f"`{name}" in text, f"neither page mentions {name}"
        value = getattr(mesh_core.policies, name)
        if name not in ("Action", "Event"):  # names of unions, which have no docstring
            assert (value.__doc__ or "").strip()


# Pure policies.


def test_third_failure_within_the_period_stops_and_escalates() -> None:
    policy = Tolerate(most=2, period=30.0)
    for now in (0.0, 1.0):
        policy, actions = policy.on(loss(), now)
        assert actions == [Ignore()]
    policy, actions = policy.on(loss(), now=2.0)
    assert actions == [Stop(), Escalate("3 failures within 30.0 s")]


def test_old_failures_do_not_count() -> None:
    policy = Tolerate(most=1, period=30.0)
    for now in (0.0, 31.0, 62.0):
        policy, actions = policy.on(loss(), now)
        assert actions == [Ignore()]


class TestTolerate(PolicyPluginConformance):
    plugin = PolicyPlugin(
        name="tolerate-for-test", api_version=1, create=lambda: Tolerate(3, 60.0), summary="ignores a few"
    )
    distribution = "mesh-test-plugins"

    @pytest.fixture(autouse=True)
    def installed(self) -> Any:
        with installed_plugins(self.plugin):
            yield


class TestGrace(TestTolerate):
    plugin = PolicyPlugin(name="grace", api_version=1, create=lambda: Grace(5.0), summary="waits")


def test_the_suite_fails_for_a_policy_that_breaks_its_promises() -> None:
    class Counting:
        """Changes itself, and returns no actions for some failures."""

        def __init__(self) -> None:
            self.asked = 0

        def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
            self.asked += 1
            return self, [] if self.asked % 3 else [Ignore(), Escalate()]

    class Suite(PolicyPluginConformance):
        plugin = PolicyPlugin(name="counting", api_version=1, create=Counting)

    for promise in ("answers_every_event_with_actions", "answers_every_failure", "is_pure"):
        with pytest.raises((AssertionError, ValueError)):
            getattr(Suite(), f"test_{promise}")()


def test_invalid_actions_are_refused() -> None:
    assert [Later(seconds, Due()).seconds for seconds in (0, 1e300)] == [0, 1e300]
    for seconds in (-1e-300, float("nan"), float("inf"), "1"):
        with pytest.raises(ValueError, match="seconds of Later must be a finite number from 0"):
            Later(seconds, Due())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="event of Later must be a Due or a Failed, got 'due'"):
        Later(1.0, "due")  # type: ignore[arg-type]
    assert checked_actions([]) == ()
    for wrong in (None, Ignore(), "stop", {Ignore()}):
        with pytest.raises(TypeError, match="must return a sequence of actions"):
            checked_actions(wrong)
    with pytest.raises(
        TypeError, match="an action must be Ignore, Escalate, Stop, Restart, Respawn or Later, got 'stop'"
    ):
        checked_actions(["stop"])
    for repair in (Restart(), Respawn((1,))):
        for other in (Stop(), Escalate()):
            with pytest.raises(ValueError, match="Restart and Respawn without Escalate and Stop, got both"):
                checked_actions([repair, other])
    with pytest.raises(ValueError, match="Ignore or Escalate, got both"):
        checked_actions([Ignore(), Escalate()])


# What answers mean.


@pytest.mark.parametrize("repair", [Restart(), Restart((0, 1)), Respawn()])
def test_a_repair_is_neither_handled_nor_passed_on_before_it_is_done(repair: Action) -> None:
    run = run_of(lambda event: [repair])
    event = loss(2)
    decision = run.settle(event, run.ask(event, 0.0))
    assert (decision.handled, decision.passed_on, decision.repairs) == ((), (), (repair,))
    assert decision.repaired == (event.failure,)
    assert not run.closed
    assert run.passed_on(event.failure, "no").chain == ("the policy of 'workers': no",)


def test_a_repair_is_about_all_that_was_put_off() -> None:
    run = run_of(lambda event: [Later(1.0, Due())] if isinstance(event, Failed) else [Restart()])
    first, second = loss(1), loss(2)
    for event in (first, second):
        assert run.settle(event, run.ask(event, 0.0)).repaired == ()
    decision = run.settle(Due(), run.ask(Due(), 1.0))
    assert decision.repaired == (first.failure, second.failure)
    assert run.put_off == ()


@pytest.mark.parametrize(
    ("actions", "fate", "stops"),
    [
        ([], "passed_on", False),
        ([Ignore()], "handled", False),
        ([Escalate()], "passed_on", False),
        ([Stop()], "handled", True),
        ([Stop(), Ignore()], "handled", True),
        ([Stop(), Escalate()], "passed_on", True),
        ([Later(1.0, Due())], "put_off", False),
        ([Later(1.0, Due()), Ignore()], "handled", False),
        ([Later(1.0, Due()), Escalate()], "passed_on", False),
        ([Later(1.0, Due()), Stop()], "handled", True),
    ],
    ids=str,
)
def test_the_meaning_of_each_answer_to_a_failure(actions: list[Action], fate: str, stops: bool) -> None:
    run, event = run_of(lambda _: actions), loss()
    decision = run.decide(event, 0.0, _now)
    fates = {"handled": decision.handled, "passed_on": decision.passed_on, "put_off": run.put_off}
    assert fates == {name: ((event.failure,) if name == fate else ()) for name in fates}
    assert (decision.stop, run.closed) == (stops, stops)
    wanted = tuple(each for each in actions if isinstance(each, Later))
    assert decision.timers == (() if stops else wanted)


def test_a_due_timer_decides_about_everything_that_was_put_off() -> None:
    run = run_of(Grace(5.0))
    first, second = loss(0), loss(1)
    assert run.decide(first, 0.0, _now).timers == (Later(5.0, Due("grace")),)
    run.decide(second, 1.0, _now)
    assert run.put_off == (first.failure, second.failure)
    decision = run.decide(Due("grace"), 5.0, _now)
    assert [each.rank for each in decision.passed_on] == [0, 1]
    assert decision.passed_on[0].chain == ("the policy of 'workers': 5.0 s are over",)
    assert run.put_off == ()


def test_a_failure_that_was_put_off_can_come_back_itself() -> None:
    asked: list[Event] = []

    def answer(event: Event) -> list[Action]:
        asked.append(event)
        return [Ignore()] if asked.count(event) > 1 else [Later(1.0, event)]  # type: ignore[arg-type]

    run, first, second = run_of(answer), loss(0), loss(1)
    run.decide(first, 0.0, _now)
    run.decide(second, 0.0, _now)
    decision = run.decide(first, 1.0, _now)
    assert decision.handled == (first.failure,)
    assert run.put_off == (second.failure,)


def test_a_timer_or_an_orderly_end_without_an_answer_changes_nothing() -> None:
    run = run_of(lambda event: [Later(9.0, Due())] if isinstance(event, Failed) else [])
    event = loss()
    run.decide(event, 0.0, _now)
    for other in (Due("x"), Ended("workers", 1)):
        decision = run.decide(other, 1.0, _now)
        assert (decision.handled, decision.passed_on, run.put_off) == ((), (), (event.failure,))


def test_a_coroutine_that_does_not_return_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """POL-4."""
    monkeypatch.setattr(patience, "LIMIT_S", 0.01)
    ended = []

    async def endless(_: MeshFailure) -> bool:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)
        return True

    event = loss()
    decision = asyncio.run(PolicyRun(policy_of(endless), "workers").decide_async(event, 0.0))
    assert decision.passed_on == (event.failure,)
    assert ended == [1]


def test_a_stop_ends_the_events() -> None:
    told = Told(lambda _: [Stop()])
    run = run_of(told)
    run.decide(loss(), 0.0, _now)
    assert run.decide(loss(1), 1.0, _now).handled == ()
    assert len(told.events) == 1


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()], ids=repr
)
def test_a_policy_that_raises_passes_on_what_it_was_asked(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """POL-2."""

    def answer(event: Event) -> list[Action]:
        if event == Due("crash"):
            raise error
        return [Later(1.0, Due("crash"))]

    for decide in (lambda run, event: run.decide(event, 0.0, _now), decide_async):
        run, event = run_of(answer), loss()
        decide(run, event)
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            decision = decide(run, Due("crash"))
        assert (decision.passed_on, run.put_off) == ((event.failure,), ())
        assert "the policy of 'workers' raised for Due(name='crash')" in caplog.text


def decide_async(run: PolicyRun, event: Event) -> Any:
    return asyncio.run(run.decide_async(event, 0.0))


@pytest.mark.parametrize(
    "answer", [None, [Ignore()], (Tolerate(1, 1.0), None), (Tolerate(1, 1.0), ["stop"]), ("x", [])], ids=str
)
def test_a_policy_that_returns_something_invalid_passes_on(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong:
        def on(self, event: Event, now: float) -> Any:
            return answer

    event = loss()
    decision = run_of(Wrong()).decide(event, 0.0, _now)
    assert decision.passed_on == (event.failure,)
    assert "raised for Failed(mesh='workers'" in caplog.text


def test_one_policy_object_serves_many_meshes() -> None:
    policy = Tolerate(most=1, period=9.0)
    for _ in range(3):
        run = run_of(policy)
        assert run.decide(loss(), 0.0, _now).handled
        assert run.decide(loss(), 1.0, _now).stop


# Functions.


@pytest.mark.parametrize("verdict", [True, False, "yes", None])
@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_a_function_is_a_policy_whose_verdict_decides(verdict: Any, kind: str) -> None:
    asked: list[MeshFailure] = []

    def plain(failure: MeshFailure) -> Any:
        asked.append(failure)
        return verdict

    async def coroutine(failure: MeshFailure) -> Any:
        await asyncio.sleep(0)
        return plain(failure)

    function: Callable[[MeshFailure], bool | Awaitable[bool]] = plain if kind == "plain" else coroutine
    for decide in (lambda run, event: run.decide(event, 0.0, _now), decide_async):
        run, event = PolicyRun(policy_of(function), "workers"), loss()
        decision = decide(run, event)
        assert (decision.handled if verdict else decision.passed_on) == (event.failure,)
        assert (run.put_off, decision.stop) == ((), False)
        decide(run, Ended("workers", 1))
        decide(run, Due())
    assert len(asked) == 2


def test_a_class_in_place_of_a_policy_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"must be a policy object, got the class Tolerate. Try Tolerate\(...\)"
    ):
        policy_of(Tolerate)


@pytest.mark.parametrize(
    "failure",
    [
        MeshFailure(exception=ValueError()),
        MeshFailure(exitcode=3),
        MeshFailure(signal=9, out_of_memory=True),
        MeshFailure(kind=FailureKind.HOST_DEAD),
        MeshFailure(),
    ],
    ids=lambda failure: failure.kind.value,
)
def test_the_event_has_the_kind_of_the_failure(failure: MeshFailure) -> None:
    assert failed(failure, "workers") == Failed("workers", None, failure.kind)
    assert failed(failure, "workers").failure is failure


# Random schedules.


class Chaos:
    """Answers at random; sometimes raises."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        if self.chance.random() < 0.1:
            raise LookupError("chaos")
        menu: list[Action] = [
            Ignore(),
            Escalate("chaos"),
            Later(self.chance.uniform(0, 5), Due("x")),
            Stop(),
        ]
        weights = [3, 3, 4, 0.1]
        actions = self.chance.choices(menu, weights, k=self.chance.randrange(3))
        if isinstance(event, Failed) and self.chance.random() < 0.3:
            actions.append(Later(self.chance.uniform(0, 5), event))
        return self, actions


@pytest.mark.once
@pytest.mark.parametrize("seed", range(200))
def test_every_failure_is_handled_passed_on_or_put_off_once(seed: int) -> None:
    """POL-1, on random schedules, with timers on a simulated clock."""
    chance, clock = random.Random(seed), FakeClock()
    run = run_of(Chaos(chance))
    logging.getLogger("mesh").disabled = True
    asked: list[MeshFailure] = []
    handled: list[MeshFailure] = []
    passed_on: list[tuple[int | None, int | None]] = []

    def give(event: Event) -> None:
        if run.closed:
            return
        if isinstance(event, Failed) and event.failure not in asked:
            asked.append(event.failure)
        decision = run.decide(event, clock(), _now)
        handled.extend(decision.handled)
        passed_on.extend((each.rank, each.pid) for each in decision.passed_on)
        assert not (decision.stop and (decision.timers or run.put_off))
        for timer in decision.timers:
            clock.call_later(timer.seconds, lambda event=timer.event: give(event))

    try:
        for number in range(60):
            clock.advance(chance.uniform(0, 2))
            failure = MeshFailure(mesh_name="workers", rank=number % 4, pid=number)
            give(
                chance.choice(
                    (Failed("workers", number % 4, "exited", failure), Ended("workers", 1), Due("y"))
                )
            )
            settled = {each.pid for each in handled} | {pid for _, pid in passed_on}
            open_ = {each.pid for each in run.put_off}
            assert {each.pid for each in asked} == settled | open_
            if run.closed:
                assert open_ == set()
    finally:
        logging.getLogger("mesh").disabled = False


# Types.

TYPED = """
from collections.abc import Sequence
from dataclasses import dataclass

from mesh_core import Actor, MeshFailure, this_host
from mesh_core.plugins import Plugin, PluginKind, PluginManager, PolicyPlugin, ProbeResult
from mesh_core.policies import Action, Due, Escalate, Event, Failed, Ignore, Later, Policy

class Worker(Actor): ...

@dataclass(frozen=True)
class Good:
    def on(self, event: Event, now: float) -> tuple["Good", Sequence[Action]]:
        return self, [Later(1.0, event)] if isinstance(event, Failed) else [Ignore()]

class Bad:
    def on(self, event: Event) -> list[str]:
        return []

async def function(failure: MeshFailure) -> bool:
    return True

procs = this_host().spawn_procs(supervise=Good())
reveal_type(procs.spawn("a", Worker, supervise=Good()))
reveal_type(procs.spawn("a", Worker, supervise=function))
reveal_type(procs.spawn("a", Worker, supervise="one_for_one"))
reveal_type(Good().on(Due(), 0.0))
this_host().spawn_procs(supervise=Bad())
PolicyPlugin(name="good", api_version=1, create=Good)
PolicyPlugin(name="bad", api_version=1, create=Bad)

@dataclass(frozen=True)
class Capabilities:
    lanes: int

@dataclass(frozen=True, kw_only=True)
class RailPlugin(Plugin[Capabilities]): ...

RAILS = PluginKind(
    word="rail", group="mesh.rails", hook="mesh_register_rails", descriptor=RailPlugin,
    api_version=1, capabilities=Capabilities, owner="mesh-rails",
)
rail = PluginManager().get(RAILS, "fast")
reveal_type(rail)
reveal_type(rail.probe().capabilities)

def probe() -> ProbeResult[Capabilities]:
    return ProbeResult.yes(Capabilities(lanes=4)) if procs else ProbeResult.no("none", remedy="buy one")

def other() -> ProbeResult[int]:
    return ProbeResult.yes(4)

RailPlugin(name="fast", api_version=1, create=dict, probe=probe)
RailPlugin(name="fast", api_version=1, create=dict, probe=other)
"""


@pytest.mark.once
@pytest.mark.full
@pytest.mark.slow
def test_policies_and_kinds_are_typed(tmp_path: Any) -> None:
    program = tmp_path / "program.py"
    program.write_text(TYPED)
    told = [
        re.sub(r"^.*program\.py:\d+: |mesh_core\._failures\.policies\.", "", line) for line in mypy(program)
    ]
    assert [line.partition('type is "')[2].rstrip('"') for line in told if "Revealed" in line] == [
        "program.Worker",
        "program.Worker",
        "program.Worker",
        "tuple[program.Good, typing.Sequence[Ignore | Escalate | Stop | Restart | Respawn | Later]]",
        "program.RailPlugin",
        "program.Capabilities | None",
    ]
    errors = [line for line in told if line.startswith("error")]
    assert len(errors) == 3, "\n".join(told)
    for line, word in zip(errors, ("supervise", "create", "probe"), strict=True):
        assert f'Argument "{word}"' in line
