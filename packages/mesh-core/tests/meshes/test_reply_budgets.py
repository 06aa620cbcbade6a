"""Replies to a process that has stopped reading wait where they are sent, within a budget (ANS-1 to ANS-4)."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_owners import suspend
from reply_samples import Answerer, Asker, Beside, Loose

from mesh_core import (
    ActorTimeout,
    ProcMesh,
    ReplyDropped,
    SupervisionError,
    configured,
    shutdown,
    this_host,
    wait,
)
from mesh_core._common.current import current

MIB = 2**20
BUDGET = 4 * MIB
WINDOW = MIB
SIZE = 100_000
COUNT = 600
"""The size of the answers: ten times what may wait."""


@pytest.fixture(scope="module")
def answering() -> Iterator[ProcMesh]:
    """A process with a small budget that answers."""
    shutdown()
    with configured(link_budget=BUDGET), this_host().spawn_procs(name="answering") as procs:
        procs.initialized.get(timeout=60)
        yield procs
    shutdown()


@pytest.fixture
def beside(answering: ProcMesh) -> Iterator[Any]:
    beside = answering.spawn("beside", Beside)
    beside.let.call_one(False).get(timeout=30)
    yield beside
    beside.let.call_one(True).get(timeout=30)
    beside.stop().get(timeout=30)


@pytest.fixture
def asking(answering: ProcMesh) -> Iterator[ProcMesh]:
    """A process that calls, and that is stopped now and then."""
    with this_host().spawn_procs(name="asking", supervise=lambda failure: True) as procs:
        procs.initialized.get(timeout=60)
        yield procs


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    suspend(pid)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def until_held(beside: Any) -> int:
    """Wait until more waits than may, so that those who answer stop. Return how many answers were made by then."""
    until = time.monotonic() + 60
    while (waiting := beside.waiting.call_one().get(timeout=30))[1] <= BUDGET:
        assert time.monotonic() < until, waiting
    return int(beside.made.call_one().get(timeout=30))


def resident(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


@pytest.mark.sampled(3, full=True)
@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "coroutine", "raising", "raising_coroutine", "concurrent"])
def test_a_stopped_caller_holds_up_those_who_answer_it(
    answering: ProcMesh, asking: ProcMesh, beside: Any, how: str
) -> None:
    answerer = answering.spawn("answerer", Loose if how == "concurrent" else Answerer)
    asker = asking.spawn("asker", Asker, supervise=lambda failure: True)
    asker.begin.call_one(answerer, how, SIZE, COUNT).get(timeout=60)
    pid, before = asker.pid.call_one().get(timeout=30), resident(os.getpid())
    with stopped(pid):
        beside.let.call_one(True).get(timeout=30)
        made = until_held(beside)
        # What nobody reads, what waits, and one for each that had begun.
        begun = 40 if how == "concurrent" else 1
        assert made * SIZE <= WINDOW + BUDGET + (2 + begun) * (SIZE + 2000)
        _, waiting = beside.waiting.call_one().get(timeout=30)
        # An exception's traceback also holds its arguments.
        each = 6 * SIZE if how.startswith("raising") else SIZE + 2000
        assert waiting <= BUDGET + begun * each
        # The script's process relays between them.
        assert resident(os.getpid()) - before < 20 * MIB
        assert beside.made.call_one().get(timeout=30) <= made + begun
    assert asker.collect.call_one(backwards=True).get(timeout=60) == list(range(COUNT))[::-1]
    assert beside.waiting.call_one().get(timeout=30) == (0, 0)
    answerer.stop().get(timeout=30)


@pytest.mark.slow
def test_within_the_budget_others_are_answered_meanwhile(
    answering: ProcMesh, asking: ProcMesh, beside: Any
) -> None:
    answerer, asker = (
        answering.spawn("answerer", Answerer),
        asking.spawn("asker", Asker, supervise=lambda failure: True),
    )
    count = (WINDOW + BUDGET // 2) // SIZE
    asker.begin.call_one(answerer, "plain", SIZE, count).get(timeout=60)
    with stopped(asker.pid.call_one().get(timeout=30)):
        beside.let.call_one(True).get(timeout=30)
        # Behind all of those, on the same thread.
        assert answerer.plain.call_one(7, 5).get(timeout=30) == (7, bytes(5))
        assert beside.waiting.call_one().get(timeout=30)[0] > 0
    assert asker.collect.call_one(backwards=False).get(timeout=60) == list(range(count))
    answerer.stop().get(timeout=30)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["plain", "coroutine"])
def test_the_death_of_the_caller_releases_those_who_answer_it(
    answering: ProcMesh, asking: ProcMesh, beside: Any, how: str
) -> None:
    answerer, asker = (
        answering.spawn("answerer", Answerer),
        asking.spawn("asker", Asker, supervise=lambda failure: True),
    )
    asker.begin.call_one(answerer, how, SIZE, COUNT).get(timeout=60)
    pid = asker.pid.call_one().get(timeout=30)
    with stopped(pid):
        beside.let.call_one(True).get(timeout=30)
        until_held(beside)
        os.kill(pid, signal.SIGKILL)
        assert getattr(answerer, how).call_one(7, 5).get(timeout=60) == (7, bytes(5))
    # The process is told of the death in another way than of this call's end.
    until = time.monotonic() + 60
    while (waiting := beside.waiting.call_one().get(timeout=30)) != (0, 0):
        assert time.monotonic() < until, waiting
    with pytest.raises(SupervisionError):
        asker.ping.call_one().get(timeout=30)
    answerer.stop().get(timeout=30)


@pytest.mark.slow
def test_deadlines_release_those_who_answer(answering: ProcMesh, asking: ProcMesh, beside: Any) -> None:
    answerer, asker = (
        answering.spawn("answerer", Answerer),
        asking.spawn("asker", Asker, supervise=lambda failure: True),
    )
    asker.begin.call_one(answerer, "plain", SIZE, COUNT, 3.0).get(timeout=60)
    with stopped(asker.pid.call_one().get(timeout=30)):
        beside.let.call_one(True).get(timeout=30)
        until_held(beside)
        assert answerer.plain.call_one(7, 5).get(timeout=60) == (7, bytes(5))
        until = time.monotonic() + 60
        while beside.waiting.call_one().get(timeout=30) != (0, 0):
            assert time.monotonic() < until
    with pytest.raises(ActorTimeout):
        asker.collect.call_one(backwards=True).get(timeout=60)
    answerer.stop().get(timeout=30)


@pytest.mark.slow
def test_a_process_that_stops_sends_its_last_replies_first(asking: ProcMesh) -> None:
    with this_host().spawn_procs(name="brief") as brief:
        beside = brief.spawn("beside", Beside)
        answerer, asker = (
            brief.spawn("answerer", Answerer),
            asking.spawn("asker", Asker, supervise=lambda failure: True),
        )
        beside.let.call_one(False).get(timeout=30)
        asker.begin.call_one(answerer, "plain", SIZE, 40).get(timeout=60)
        with stopped(asker.pid.call_one().get(timeout=30)):
            beside.let.call_one(True).get(timeout=30)
            while beside.made.call_one().get(timeout=30) < 40:
                pass
            assert beside.waiting.call_one().get(timeout=30)[0] > 0
            stop = brief.stop()
        stop.get(timeout=60)
    assert asker.collect.call_one(backwards=True).get(timeout=60) == list(range(40))[::-1]


@pytest.fixture
def frugal() -> Iterator[ProcMesh]:
    """A script, and processes, that hold 4 MiB of replies."""
    shutdown()
    with configured(reply_budget=4 * MIB), this_host().spawn_procs({"gpus": 2}, name="frugal") as procs:
        yield procs
    shutdown()


def held() -> int:
    return int(current().runtime.counts()["held_reply_bytes"])


@pytest.mark.slow
def test_replies_that_nobody_looks_at_are_dropped_beyond_the_budget(frugal: ProcMesh) -> None:
    answerer = frugal.slice(gpus=0).spawn("answerer", Answerer)
    frugal.slice(gpus=0).spawn("beside", Beside).let.call_one(True).get(timeout=30)
    futures = [answerer.plain.call_one(number, MIB) for number in range(10)]
    assert len(wait(futures, timeout=60)[0]) == 10
    assert 3 * MIB < held() <= 4 * MIB
    # In any order: what arrived is right, and what did not says so.
    kept = [future.get() for future in futures[:3]]
    assert [number for number, _ in kept] == [0, 1, 2]
    with pytest.raises(ReplyDropped, match="raise reply_budget") as dropped:
        futures[9].get()
    assert (dropped.value.actor, dropped.value.rank) == ("answerer", 0)
    assert dropped.value.size is not None and dropped.value.size > MIB
    # There is room again.
    del futures
    gc.collect()
    assert held() == 0
    assert answerer.plain.call_one(1, 3 * MIB).get(timeout=30) == (1, bytes(3 * MIB))
    # A single reply may be larger than the budget.
    assert answerer.plain.call_one(1, 9 * MIB).get(timeout=30) == (1, bytes(9 * MIB))


@pytest.mark.slow
def test_a_call_to_many_says_whose_reply_was_dropped(frugal: ProcMesh) -> None:
    answerers = frugal.spawn("answerers", Answerer)
    frugal.spawn("beside", Beside).let.call(True).get(timeout=30)
    with pytest.raises(ReplyDropped) as dropped:
        answerers.plain.call(1, 3 * MIB).get(timeout=60)
    assert dropped.value.rank in (0, 1)
    # The error's traceback holds the other reply.
    del dropped
    gc.collect()
    assert answerers.plain.call(1, MIB).get(timeout=60).values() == [(1, bytes(MIB))] * 2


@pytest.mark.slow
def test_a_future_that_is_dropped_makes_room(frugal: ProcMesh) -> None:
    answerer = frugal.slice(gpus=0).spawn("answerer", Answerer)
    frugal.slice(gpus=0).spawn("beside", Beside).let.call_one(True).get(timeout=30)
    future = answerer.plain.call_one(0, MIB)
    for number in range(1, 20):
        assert wait([future], timeout=30)[0]
        future = answerer.plain.call_one(number, MIB)
    assert future.get(timeout=30) == (19, bytes(MIB))
