"""Policies at work: real processes die, and the policy's decisions are carried out."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from core_owners import WITHIN, Leaf, Owner, Told, lines, slay_pid, write_down
from core_policies import Told as Telling
from core_policies import Tolerate
from core_processes import Watch

from mesh_core import (
    Actor,
    FailureKind,
    MeshFailure,
    PluginError,
    ProcMesh,
    SupervisionError,
    endpoint,
    set_fault_handler,
    this_host,
    this_proc,
)
from mesh_core._failures import patience
from mesh_core.plugins import PolicyPlugin, ProbeResult
from mesh_core.policies import Action, Due, Ended, Escalate, Event, Failed, Ignore, Later, Policy, Stop
from mesh_core.testing import installed_plugins

pytestmark = pytest.mark.usefixtures("runtime")


class Asked:
    """Answers as the test wants, and passes every event to it."""

    def __init__(self, *answers: Sequence[Action]) -> None:
        self.answers = list(answers)
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        self.events.put(event)
        return self, self.answers.pop(0) if self.answers else []

    def next(self) -> Event:
        return self.events.get(timeout=WITHIN)


@pytest.fixture
def own(runtime: None) -> Iterator[ProcMesh]:
    """Four processes of its own for a test; the script is notified of what nobody handles."""
    with this_host().spawn_procs(per_host={"gpus": 4}, name="mortal") as procs:
        procs.initialized.get()
        yield procs


def fence(told: Told, procs: ProcMesh) -> list[MeshFailure]:
    """Every failure reported to the script before one that is caused now."""
    last: Any = procs.slice(gpus=0).spawn("fence", Leaf)
    last.pid.call_one().get(WITHIN)
    last.fail.broadcast(ValueError("the fence"))
    before = []
    while (failure := told.next()).mesh_name != "fence":
        before.append(failure)
    return before


def fail(actors: Any, rank: int = 0) -> None:
    actors.slice(gpus=rank).fail.broadcast(ValueError(f"rank {rank}"))


# Policies of the script.


def test_an_ignored_failure_is_reported_to_nobody_else(own: ProcMesh, told: Told) -> None:
    policy = Asked([Ignore()], [Ignore()])
    actors: Any = own.spawn("workers", Leaf, supervise=policy)
    pids = actors.pid.call().get(WITHIN).values()
    fail(actors, 2)
    event = policy.next()
    assert event == Failed("workers", 2, FailureKind.ACTOR_FAILED)
    assert isinstance(event, Failed) and isinstance(event.failure.exception, ValueError)
    slay_pid(pids[3])
    assert policy.next() == Failed("workers", 3, FailureKind.KILLED)
    # A death also affects the mesh of processes, which has no policy; an owner told of the actors is told of everything.
    assert fence(told, own) == []
    assert actors.slice(gpus=1).pid.call_one().get(WITHIN) == pids[1]


def test_an_escalated_failure_comes_with_its_reason(own: ProcMesh, told: Told) -> None:
    policy = Asked([Escalate("enough")], [Escalate()], [])
    actors: Any = own.spawn("workers", Leaf, supervise=policy)
    for rank, chain in ((0, ("the policy of 'workers': enough",)), (1, ()), (2, ())):
        fail(actors, rank)
        failure = told.next()
        assert (failure.rank, failure.chain) == (rank, chain)


def test_a_policy_stops_its_mesh(runtime: None, told: Told, tmp_path: Path) -> None:
    log = tmp_path / "log"
    policy = Asked([Stop()])
    procs = this_host().spawn_procs(per_host={"gpus": 3}, name="ruled", supervise=policy)
    procs.spawn("leaves", Leaf, "leaf", str(log)).pid.call().get(WITHIN)
    pids = [pid for pid in procs.pids if pid is not None]
    watch = Watch(pids[1:])
    slay_pid(pids[0])
    assert policy.next() == Failed("ruled", 0, FailureKind.KILLED)
    assert watch.wait() == []
    # In order: the living actors cleaned up. The mesh of actors has no policy, so its loss was reported to the script.
    assert lines(log) == ["leaf None"] * 2
    assert told.next().mesh_name == "leaves"
    assert policy.events.empty()


def test_a_policy_stops_actors_and_their_processes_live_on(own: ProcMesh, told: Told, tmp_path: Path) -> None:
    log = tmp_path / "log"
    policy = Asked([Stop(), Escalate("all or none")])
    actors: Any = own.spawn("workers", Leaf, "leaf", str(log), supervise=policy)
    pids = actors.pid.call().get(WITHIN).values()
    fail(actors, 1)
    assert told.next().chain == ("the policy of 'workers': all or none",)
    # In each process its own stops come after the policy's.
    again: Any = own.spawn("again", Leaf)
    assert again.pid.call().get(WITHIN).values() == pids
    actors.stop().get(WITHIN)
    assert sorted(lines(log)) == ["leaf None"] * 3 + ["leaf ValueError"]


def test_a_timer_brings_its_event_and_what_was_put_off_is_decided_then(own: ProcMesh, told: Told) -> None:
    policy = Asked([Later(0.01, Due("look"))], [Escalate("nobody came")])
    actors: Any = own.spawn("workers", Leaf, supervise=policy)
    fail(actors, 1)
    assert policy.next() == Failed("workers", 1, FailureKind.ACTOR_FAILED)
    assert policy.next() == Due("look")
    failure = told.next()
    assert (failure.rank, failure.chain) == (1, ("the policy of 'workers': nobody came",))
    assert fence(told, own) == []


def test_a_timer_can_bring_a_failure_back(own: ProcMesh, told: Told) -> None:
    seen: list[Event] = []
    done = threading.Event()

    def answer(event: Event) -> Sequence[Action]:
        seen.append(event)
        if len(seen) == 1:
            assert isinstance(event, Failed)
            return [Later(0.0, event)]
        done.set()
        return [Ignore()]

    actors: Any = own.spawn("workers", Leaf, supervise=Telling(answer))
    fail(actors, 3)
    assert done.wait(WITHIN)
    assert seen[0] is seen[1]
    assert fence(told, own) == []


def test_the_timers_of_a_stopped_mesh_are_cancelled(own: ProcMesh, told: Told) -> None:
    policy = Asked([Later(3600.0, Due("late"))])
    actors: Any = own.spawn("workers", Leaf, supervise=policy)
    process = actors._process
    run = process.owners.of(0).actors(actors._actor_id).policy

    def timers() -> int:
        """How many timers are running, after the event loop did what it was asked before."""
        passed = threading.Event()
        process.actor_host().loop.call_soon_threadsafe(passed.set)
        assert passed.wait(WITHIN)
        return len(run.timers)

    fail(actors)
    # The fence is another actor and could be faster: it is for what happens to the event.
    assert policy.next() == Failed("workers", 0, FailureKind.ACTOR_FAILED)
    fence(told, own)
    assert timers() == 1
    (timer,) = run.timers
    assert [each.mesh_name for each in run.put_off] == ["workers"]
    actors.stop().exception(WITHIN)
    assert timers() == 0
    assert timer.cancelled()
    # Its failure would still be reported at the end; mark it as reported.
    process.told(SupervisionError(failure=run.put_off[0]))


def test_an_orderly_end_that_the_owner_did_not_ask_for_is_an_event(own: ProcMesh, told: Told) -> None:
    policy = Asked()
    ruled = this_host().spawn_procs(per_host={"gpus": 2}, name="ruled", supervise=policy)
    ruled.initialized.get(WITHIN)
    stopper: Any = own.slice(gpus=0).spawn("stopper", Stopper)
    stopper.end.call_one(ruled).get(WITHIN)
    assert sorted(str(policy.next()) for _ in range(2)) == [
        "Ended(mesh='ruled', rank=0)",
        "Ended(mesh='ruled', rank=1)",
    ]
    assert fence(told, own) == []


def test_a_stop_by_the_owner_is_no_event(own: ProcMesh, told: Told) -> None:
    policy = Asked()
    ruled = this_host().spawn_procs(name="ruled", supervise=policy)
    ruled.initialized.get(WITHIN)
    ruled.stop().get(WITHIN)
    assert fence(told, own) == []
    assert policy.events.empty()


class Stopper(Actor):
    """Stops what it does not own."""

    @endpoint
    def end(self, procs: Any) -> None:
        procs.stop().get(WITHIN)


def test_a_policy_that_raises_is_reported_and_the_failure_passed_on(
    own: ProcMesh, told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    def answer(event: Event) -> Sequence[Action]:
        raise LookupError("a bad policy")

    actors: Any = own.spawn("workers", Leaf, supervise=Telling(answer))
    with caplog.at_level(logging.ERROR):
        fail(actors, 1)
        assert told.next().rank == 1
    assert "LookupError: a bad policy" in caplog.text


class Blocks:
    """Returns when it is told to."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.go = threading.Event()

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        self.asked.put(event)
        assert self.go.wait(WITHIN)
        return self, [Ignore()]


def test_a_policy_that_does_not_return_is_passed_over(
    own: ProcMesh, told: Told, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """POL-4: other meshes are repaired and reported on, and it is asked again once it has returned."""
    monkeypatch.setattr(patience, "WARN_S", 0.01)
    monkeypatch.setattr(patience, "LIMIT_S", 0.2)
    policy, other = Blocks(), Asked([Ignore()], [Escalate("other")])
    slow: Any = own.spawn("slow", Leaf, supervise=policy)
    quick: Any = own.spawn("quick", Leaf, supervise=other)
    with caplog.at_level(logging.WARNING, logger="mesh"):
        fail(slow, 0)
        policy.asked.get(timeout=WITHIN)
        fail(quick, 1)
        assert other.next().rank == 1  # type: ignore[union-attr]
        assert told.next().chain == ("the policy of 'slow': it had not returned after 0.2 s",)
        # While it blocks, it is not asked.
        fail(slow, 1)
        assert told.next().chain == ("the policy of 'slow': it had not returned after 0.2 s",)
        fail(quick, 2)
        assert told.next().chain == ("the policy of 'quick': other",)
    assert "the policy of 'slow' has not returned for 0.01 s: failures of all other meshes" in caplog.text
    assert "the policy of 'slow' has not returned for 0.2 s: it is passed over" in caplog.text
    left = [each for each in threading.enumerate() if each.name == "mesh-notices"]
    assert len(left) == 2
    policy.go.set()
    for each in left[:1]:
        each.join(WITHIN)
    assert not left[0].is_alive()
    fail(slow, 2)
    assert policy.asked.get(timeout=WITHIN).rank == 2  # type: ignore[union-attr]
    assert fence(told, own) == []


def raised(actors: Any, text: str) -> None:
    """Call until a failure of others is raised."""

    def call() -> None:
        while True:
            actors.pid.call_one().get(timeout=WITHIN)

    with pytest.raises(SupervisionError, match=text):
        call()


def test_a_fault_handler_that_does_not_return_is_passed_over(
    own: ProcMesh, told: Told, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """POL-4: what it is not asked about counts as unhandled, and policies go on."""
    monkeypatch.setattr(patience, "WARN_S", 0.01)
    monkeypatch.setattr(patience, "LIMIT_S", 0.2)
    asked: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
    go = threading.Event()

    def blocks(failure: MeshFailure) -> None:
        asked.put(failure)
        assert go.wait(WITHIN)

    policy = Asked([Ignore()], [Ignore()])
    plain: Any = own.spawn("plain", Leaf)
    watched: Any = own.spawn("watched", Leaf, supervise=policy)
    before = set_fault_handler(blocks)
    try:
        with caplog.at_level(logging.WARNING, logger="mesh"):
            fail(plain, 0)
            assert asked.get(timeout=WITHIN).rank == 0
            [first] = [each for each in threading.enumerate() if each.name == "mesh-notices"]
            fail(watched, 1)
            assert policy.next().rank == 1  # type: ignore[union-attr]
            # They are raised, as without a handler.
            raised(watched.slice(gpus=0), "'plain'.* rank 0")
            fail(plain, 1)
            raised(watched.slice(gpus=0), "'plain'.* rank 1")
        assert asked.empty()
        assert "the fault handler has not returned for 0.01 s: failures of all other meshes" in caplog.text
        assert "the fault handler has not returned for 0.2 s: it is passed over" in caplog.text
        go.set()
        first.join(WITHIN)
        assert not first.is_alive()
        fail(plain, 2)
        assert asked.get(timeout=WITHIN).rank == 2
        assert len([each for each in threading.enumerate() if each.name == "mesh-policy-watch"]) <= 1
    finally:
        go.set()
        set_fault_handler(before)


def test_failures_put_off_at_the_end_of_the_script_are_reported(script: Any) -> None:
    done = script(
        """
        import threading
        from mesh_core import Actor, endpoint, this_host
        from mesh_core.policies import Due, Later

        class Worker(Actor):
            @endpoint
            def fail(self): raise ValueError("put off")

        asked = threading.Event()

        class Patient:
            def on(self, event, now):
                asked.set()
                return self, [Later(3600.0, Due())]

        procs = this_host().spawn_procs()
        workers = procs.spawn("workers", Worker, supervise=Patient())
        workers.fail.broadcast()
        assert asked.wait(30)
        procs.stop().get(30)
        """
    )
    out, err = done.process.communicate(timeout=30)
    assert done.process.returncode == 1, out + err
    text = (out + err) if isinstance(err, str) else (out + err).decode()
    assert "nobody handled this failure" in text
    assert "put off" in text


def test_random_deaths_are_each_answered_once(own: ProcMesh, told: Told) -> None:
    chance = random.Random(7)
    events: queue.SimpleQueue[int] = queue.SimpleQueue()

    def answer(event: Event) -> Sequence[Action]:
        if isinstance(event, Due):
            return []
        assert isinstance(event, Failed) and event.rank is not None
        events.put(event.rank)
        return chance.choice(([Ignore()], [Escalate("chance")], [Ignore(), Later(0.0, Due())]))

    wanted, meshes = [], []
    for number in range(12):
        name = f"workers {number}"
        actors: Any = own.spawn(name, Leaf, supervise=Telling(answer))
        meshes.append(actors)
        ranks = chance.sample(range(4), chance.randrange(1, 5))
        wanted += ranks
        for rank in ranks:
            fail(actors, rank)
    assert sorted(events.get(timeout=WITHIN) for _ in wanted) == sorted(wanted)
    passed_on = fence(told, own)
    assert all(each.chain[0].endswith("chance") for each in passed_on)
    assert events.empty()


# By name.


@pytest.fixture
def tolerant() -> Iterator[PolicyPlugin]:
    plugin = PolicyPlugin(name="tolerant-for-test", api_version=1, create=lambda: Tolerate(1, 60.0))
    with installed_plugins(plugin, distribution="mesh-tolerant"):
        yield plugin


def test_a_registered_policy_is_given_by_name(own: ProcMesh, told: Told, tolerant: PolicyPlugin) -> None:
    actors: Any = own.spawn("workers", Leaf, supervise="tolerant-for-test")
    fail(actors, 0)
    fail(actors, 1)
    failure = told.next()
    assert failure.chain == ("the policy of 'workers': 2 failures within 60.0 s",)
    with this_host().spawn_procs(supervise="tolerant-for-test") as procs:
        procs.initialized.get(WITHIN)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("tolerent-for-test", r"no policy is called 'tolerent-for-test'; did you mean 'tolerant-for-test'\?"),
        ("Tolerant-for-test", r"no policy is called 'Tolerant-for-test'; did you mean 'tolerant-for-test'\?"),
        ("", "no policy is called ''"),
        ("rest_for_one", "policy 'rest_for_one' is in mesh-supervision, .*: pip install"),
    ],
)
def test_a_name_that_no_policy_has_is_an_error_at_the_spawn(
    own: ProcMesh, tolerant: PolicyPlugin, name: str, error: str
) -> None:
    for spawn in (
        lambda: own.spawn("workers", Leaf, supervise=name),
        lambda: this_host().spawn_procs(supervise=name),
    ):
        with pytest.raises(PluginError, match=error) as caught:
            spawn()
        assert (caught.value.kind, caught.value.name) == ("policy", name)


def test_a_registered_policy_that_cannot_be_used_is_an_error_at_the_spawn(own: ProcMesh) -> None:
    absent = PolicyPlugin(
        name="absent",
        api_version=1,
        create=lambda: Tolerate(1, 1.0),
        probe=lambda: ProbeResult.no("no quorum", remedy="start a quorum"),
    )
    wrong = PolicyPlugin(name="wrong", api_version=1, create=dict)  # type: ignore[arg-type]
    with installed_plugins(absent, wrong):
        with pytest.raises(PluginError, match=r"'absent' cannot work here: no quorum\. Try: start a quorum"):
            own.spawn("workers", Leaf, supervise="absent")
        with pytest.raises(
            TypeError, match=r"create\(\) of the policy 'wrong' of mesh-test-plugins .* got \{\}"
        ):
            own.spawn("workers", Leaf, supervise="wrong")


# Policies of actors.


class Ruler(Owner):
    """Owns workers with a policy that writes down what it is asked."""

    def __init__(self, log: str, kind: str) -> None:
        super().__init__()
        self.told_log, self.kind = log, kind

    @endpoint
    def rule(self) -> list[int]:
        policy: Any = {"scripted": Scripted(self.told_log), "slow": self._slow, "raises": self._raises}[
            self.kind
        ]
        self.procs = this_host().spawn_procs({"gpus": 3}, "hired")
        self.mesh = self.procs.spawn("hired", Leaf, supervise=policy)
        return list(self.mesh.pid.call().get(WITHIN).values())

    async def _slow(self, failure: MeshFailure) -> bool:
        write_down(self.told_log, f"begin {failure.rank}")
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        write_down(self.told_log, f"end {failure.rank}")
        return False

    def _raises(self, failure: MeshFailure) -> bool:
        raise LookupError("a bad policy")

    def __supervise__(self, failure: MeshFailure) -> bool:
        write_down(self.told_log, f"supervise {failure.rank} {failure.chain}")
        return failure.rank != 2


class Scripted:
    """Puts the first failure off, and passes the others on."""

    def __init__(self, log: str, asked: int = 0) -> None:
        self.log, self.asked = log, asked

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        write_down(self.log, f"asked {event}")
        following = Scripted(self.log, self.asked + 1)
        if isinstance(event, Ended):
            return following, []
        if isinstance(event, Due):
            return following, [Ignore()]
        if self.asked == 0:
            return following, [Later(0.0, Due("now"))]
        return following, [Escalate("again")]


def test_the_policy_of_an_actor_is_asked_in_its_process(own: ProcMesh, told: Told, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    ruler: Any = own.slice(gpus=0).spawn("ruler", Ruler, log, "scripted")
    pids = ruler.rule.call_one().get(WITHIN)
    slay_pid(pids[0])
    wait_for(log, "asked Due(name='now')")
    slay_pid(pids[2])
    failure = told.next()
    assert failure.chain == ("the policy of 'hired': again", "actor 'ruler' in mortal[0]")
    assert lines(log) == [
        "asked Failed(mesh='hired', rank=0, kind=<FailureKind.KILLED: 'killed'>)",
        "asked Due(name='now')",
        "asked Failed(mesh='hired', rank=2, kind=<FailureKind.KILLED: 'killed'>)",
        "supervise 2 (\"the policy of 'hired': again\",)",
    ]


def wait_for(log: str, line: str) -> None:
    """Until it is written; the process that writes it yields the core to nobody for long."""
    while line not in lines(log):
        os.sched_yield()


def test_policies_of_one_owner_are_asked_one_at_a_time(own: ProcMesh, told: Told, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    ruler: Any = own.slice(gpus=0).spawn("ruler", Ruler, log, "slow")
    ruler.rule.call_one().get(WITHIN)
    ruler.ask.call_one("fail", ValueError("all of them")).exception(WITHIN)  # in a call: no failure
    everyone: Any = ruler
    pids = everyone.ask.call_one("pid").get(WITHIN)
    for pid in pids:
        slay_pid(pid)
    assert told.next().rank == 2
    asked = [line for line in lines(log) if not line.startswith("supervise")]
    assert sorted(asked) == sorted(f"{what} {rank}" for what in ("begin", "end") for rank in range(3))
    assert all(asked[at].split()[1] == asked[at + 1].split()[1] for at in (0, 2, 4))


def test_a_policy_of_an_actor_that_raises_passes_on_to_the_actor(
    own: ProcMesh, told: Told, tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    ruler: Any = own.slice(gpus=0).spawn("ruler", Ruler, log, "raises")
    pids = ruler.rule.call_one().get(WITHIN)
    slay_pid(pids[2])
    assert told.next().chain == ("actor 'ruler' in mortal[0]",)
    assert lines(log) == ["supervise 2 ()"]
    # The actor itself has not failed.
    assert ruler.pid.call_one().get(WITHIN) == own.pids[0]


def test_an_owner_in_the_scripts_process_has_policies_too(told: Told, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    ruler: Any = this_proc().spawn("ruler", Ruler, log, "scripted")
    pids = ruler.rule.call_one().get(WITHIN)
    slay_pid(pids[0])
    wait_for(log, "asked Due(name='now')")
    slay_pid(pids[1])
    wait_for(log, "supervise 1 (\"the policy of 'hired': again\",)")
    ruler.stop().get(WITHIN)


class Bystander(Actor):
    """Spawns with a policy from a thread outside of actors."""

    @endpoint
    def spawn_from_a_thread(self, log: str) -> int:
        pids: list[int] = []

        def work() -> None:
            procs = this_host().spawn_procs({"gpus": 1}, "stray", supervise=Scripted(log))
            pids.extend(pid for pid in procs.pids if pid is not None)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return pids[0]


def test_a_policy_of_code_that_no_actor_runs_is_asked_in_a_worker(
    own: ProcMesh, told: Told, tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    stander: Any = own.slice(gpus=0).spawn("stander", Bystander)
    slay_pid(stander.spawn_from_a_thread.call_one(log).get(WITHIN))
    wait_for(log, "asked Due(name='now')")
    assert fence(told, own) == []
