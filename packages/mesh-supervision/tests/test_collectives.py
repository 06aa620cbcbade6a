"""Collectives that do not end, and ranks that come late to them: CLV-1, CLV-2. ``mesh why`` names the rank that has not come, or does another one. Needs PyTorch."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from collectives import Rank
from supervised import WITHIN
from test_health import actor, snap

from mesh_core import MeshError, ProcMesh, inspect, this_host
from mesh_core.extensions import uninstall
from mesh_core.inspect import Awaited, Snapshot, Waits
from mesh_supervision import Health, Ignore, Limits, TroubleKind, form_group, heal_mesh, watch_collectives
from mesh_supervision._collectives import PASSED, At
from mesh_supervision._watching._why import Culprit, Reason, confirmed, why

STARTING = 110.0
RANKS = 3


def at(
    rank: int, number: int = 7, op: str = "allreduce", root: int | None = None, what: str = "float32[4]"
) -> At:
    return At(number, op, root, what, rank, "0", f"workers[0..{RANKS - 1}]")


def reason_of(*there: At, seconds: float = 2.0) -> Reason:
    """What is said of these, on paper."""
    shown = {each.rank: Awaited(str(each), seconds) for each in there}
    base = snap(*(actor(rank) for rank in range(RANKS)))
    assert [proc.name for proc in base.procs] == [f"workers[{rank}]" for rank in range(RANKS)]
    import dataclasses

    procs = tuple(
        dataclasses.replace(proc, promises=(shown[rank],) if rank in shown else ())
        for rank, proc in enumerate(base.procs)
    )
    host = dataclasses.replace(base.hosts[0], procs=procs)
    found: Snapshot = dataclasses.replace(base, hosts=(host,))
    return why(found, Waits(0.0, (), (), (), 0), ())


def test_the_one_that_has_not_come_is_named() -> None:
    (culprit,) = reason_of(at(0), at(2)).culprits
    assert culprit.who == "trainers[1]"
    assert "has not come to collective 7 (allreduce, float32[4]), in which 2 of 3 ranks wait" in culprit.text


def test_the_one_that_is_behind_is_named() -> None:
    (culprit,) = reason_of(at(0), at(1, 6, "barrier", what=""), at(2)).culprits
    assert culprit.who == "trainers[1]"
    assert "is still in collective 6 (barrier), and has not come to collective 7" in culprit.text


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (at(2, op="broadcast", root=1), "with broadcast with rank 1, float32[4], where others do allreduce"),
        (at(2, what="float32[5]"), "with allreduce, float32[5], where others do allreduce, float32[4]"),
        (at(2, what="float64[4]"), "with allreduce, float64[4], where others do allreduce, float32[4]"),
    ],
)
def test_the_one_that_does_another_collective_is_named(other: At, text: str) -> None:
    (culprit,) = reason_of(at(0), at(1), other).culprits
    assert culprit.who == "trainers[2]"
    assert text in culprit.text


def test_those_that_have_gone_on_are_not_blamed() -> None:
    """Where root or shape differ, some ranks complete the collective, and another one waits in it forever."""
    gone = [at(rank, op=PASSED, what="") for rank in (0, 1)]
    (culprit,) = reason_of(*gone, at(2, op="broadcast", root=2)).culprits
    assert culprit.who == "trainers[2]"
    assert (
        "is in collective 7 with broadcast with rank 2, float32[4], and 2 of 3 ranks have left it: they did another one there, or with "
        "another root or shape"
    ) in culprit.text
    # One that has left only the one before has not come.
    (culprit,) = reason_of(at(0, 6, PASSED, what=""), at(1, op=PASSED, what=""), at(2)).culprits
    assert culprit.who == "trainers[0]"
    assert "has not come to collective 7" in culprit.text
    # Nobody waits.
    assert reason_of(*gone).culprits == ()


def test_when_all_have_arrived_and_agree_nobody_is_named_for_a_while() -> None:
    assert reason_of(at(0), at(1), at(2)).culprits == ()
    (culprit,) = reason_of(at(0), at(1), at(2), seconds=9.0).culprits
    assert "with all others, and it does not end" in culprit.text


def test_messages_are_followed_to_the_rank_that_sends_none() -> None:
    first, second = (at(rank, 0, "recv", rank + 1) for rank in range(2))
    (culprit,) = reason_of(first, second).culprits
    assert culprit.who == "trainers[2]"
    assert "has not sent what rank 1 waits for (recv with rank 2, float32[4])" in culprit.text
    found = reason_of(first, second, at(2, 0, "recv", 0))
    assert not found.culprits
    assert "a cycle of messages between ranks" in found.circles[0]


def test_what_was_shown_for_a_blink_is_left_out() -> None:
    assert reason_of(at(0), at(2), seconds=0.1).culprits == ()


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    pytest.importorskip("torch", reason="torch is not installed: mesh-supervision does without")
    # Processes that are made again come from the same fork server only in the same environment; PyTorch is imported once.
    env = {"OMP_NUM_THREADS": "1", "PYTEST_CURRENT_TEST": None}
    with this_host().spawn_procs(
        {"gpus": RANKS}, name="hosts", env=env, preload=["torch", "torch._dynamo"], supervise=Ignore()
    ) as procs:
        procs.initialized.get(timeout=STARTING)
        form_group(procs)
        yield procs
    for name in ("groups", "aborts", "meeting", "collectives", "healed"):
        with contextlib.suppress(MeshError):
            uninstall(f"supervision.{name}")


@pytest.fixture
def ranks(procs: ProcMesh) -> Iterator[Any]:
    """Ranks, which are killed as nothing else ends what they wait for."""
    heal_mesh(procs)
    made: Any = procs.spawn("ranks", Rank, supervise=Ignore())
    made.step.call(2).get(timeout=WITHIN)
    yield made
    kill(procs)


def kill(procs: ProcMesh) -> None:
    for pid in procs.pids:
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    while len(procs.failed()) < RANKS:
        pass


def waiting(future: Any) -> None:
    """Have somebody wait for it, as the script would."""
    threading.Thread(target=future.exception, args=(WITHIN,), daemon=True).start()


def ask() -> Reason:
    return why(inspect.snapshot(pss=False), inspect.waits(), inspect.connect(os.getpid()).stacks())


def found(is_it: Callable[[Culprit], bool]) -> Culprit:
    """Ask until the hang is there, and return the one that is named."""
    end = time.monotonic() + WITHIN
    while True:
        reason = ask()
        if len(reason.culprits) == 1 and is_it(reason.culprits[0]):
            return reason.culprits[0]
        assert time.monotonic() < end, reason


pytorch = [pytest.mark.beside, pytest.mark.slow, pytest.mark.timeout(240)]


def marked(test: Any) -> Any:
    for mark in pytorch:
        test = mark(test)
    return test


@marked
@pytest.mark.parametrize(
    ("method", "text"),
    [
        ("late", r"collective 8 (allreduce, float32[8])"),
        ("late_for_asynchronous", r"collective 7 (allreduce, float32[8])"),
    ],
)
def test_a_rank_that_does_not_come_is_named_with_its_line(ranks: Any, method: str, text: str) -> None:
    waiting(getattr(ranks, method).call(1))
    culprit = found(lambda each: "has not come to collective" in each.text)
    assert culprit.who == "ranks[1]"
    assert f"{text}, in which 2 of 3 ranks wait: runs {method} for" in culprit.text
    assert "in load" in culprit.line
    assert culprit.waiting == 2


@marked
def test_a_rank_that_waits_for_another_root_is_named(ranks: Any) -> None:
    waiting(ranks.other_root.call(1))
    culprit = found(lambda each: "never meet" in each.text)
    assert culprit.who == "ranks[1]"
    assert "is in collective 7 with broadcast with rank 2" in culprit.text


@marked
@pytest.mark.full
def test_ranks_that_went_on_where_the_root_differs_are_not_blamed(ranks: Any) -> None:
    """Only those that wait in the collective are named, whichever these are with this version of PyTorch."""
    waiting(ranks.own_root.call(2))
    end = time.monotonic() + WITHIN
    while True:
        # Twice, as the command does.
        reason = confirmed(ask)
        named = {culprit.who for culprit in reason.culprits}
        inside = {
            f"ranks[{at.rank}]"
            for proc in inspect.snapshot(pss=False).procs
            for promise in proc.promises
            if (at := At.read(promise.name)) is not None and at.op != PASSED
        }
        if inside and named:
            assert named <= inside, reason
            assert "has not come" not in str(reason)
            return
        assert time.monotonic() < end, (inside, reason)


@marked
def test_a_rank_that_has_left_one_out_is_named(ranks: Any) -> None:
    waiting(ranks.left_out.call(2))
    culprit = found(lambda each: "has not come" in each.text)
    assert culprit.who == "ranks[2]"
    assert "has nothing to do" in culprit.text


@marked
def test_a_rank_that_was_stopped_is_named(procs: ProcMesh, ranks: Any) -> None:
    pid = procs.pids[0]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        waiting(ranks.step.call(1))
        culprit = found(lambda each: "has not come" in each.text or "stopped" in each.text)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert culprit.proc == "hosts[0]"
    assert "stopped" in culprit.text


@marked
def test_messages_between_ranks(ranks: Any) -> None:
    waiting(ranks.waits_for.call(2))
    culprit = found(lambda each: "has not sent" in each.text)
    assert culprit.who == "ranks[2]"
    assert "in load" in culprit.line


@marked
def test_a_cycle_of_messages_is_reported(ranks: Any) -> None:
    waiting(ranks.circle.call())
    end = time.monotonic() + WITHIN
    while not (reason := ask()).circles:
        assert time.monotonic() < end, reason
    assert "hosts[0] (recv with rank 1, float32[4]) -> hosts[1]" in reason.circles[0]
    assert not reason.culprits


@marked
def test_another_group_can_be_watched(ranks: Any) -> None:
    ranks.make_pairs.call().get(timeout=WITHIN)
    waiting(ranks.late_in_pair.call())
    culprit = found(lambda each: "has not come" in each.text)
    assert culprit.who == "ranks[1]"
    assert "collective 1 (allreduce, float32[4]), in which 1 of 2 ranks wait" in culprit.text


@marked
def test_ranks_that_go_on_are_not_named(ranks: Any) -> None:
    """CLV-1."""
    running = ranks.step.call(300)
    while not running.done():
        snapshot = inspect.snapshot(pss=False)
        assert not [
            each
            for proc in snapshot.procs
            for each in proc.promises
            if At.read(each.name) and each.seconds > 5
        ]
    assert running.get(timeout=WITHIN).values() == [0, 1, 2]
    # What was late has ended, and is shown no longer.
    while any(proc.promises for proc in inspect.snapshot(pss=False).procs):
        pass
    assert ask().culprits == ()
    threads = ranks.shown.call().get(timeout=WITHIN).values()
    assert [each.count("mesh-collectives") for each in threads] == [1, 1, 1]


@marked
def test_what_is_not_a_group_is_refused(procs: ProcMesh) -> None:
    with pytest.raises(TypeError, match="takes a process group that this process is a member of, got None"):
        watch_collectives()


def test_only_the_rank_that_is_late_for_collectives_is_a_straggler(procs: ProcMesh, ranks: Any) -> None:
    """CLV-2. All take as long for a step, as they wait for one that works longer."""
    walkers: Any = procs.spawn("walkers", Rank, supervise=Ignore())
    for _ in range(5):
        walkers.work_and_meet.call(slow=1, usual=0.02, longer=0.3).get(timeout=WITHIN)
    snap = inspect.snapshot(pss=False)
    states = [each for each in snap.actors if each.name == "walkers"]
    assert [each.handled for each in states] == [5] * RANKS
    assert all(each.mean >= 0.3 for each in states)
    assert all((each.waited >= 0.15) == (each.rank != 1) for each in states)
    _, troubles = Health(Limits(straggler=3.0)).on(snap)
    assert [(each.kind, each.rank) for each in troubles] == [(TroubleKind.STRAGGLER, 1)]
    assert "not counting" in troubles[0].text
