"""Troubles of jobs that have not failed: HLT-1."""

from __future__ import annotations

import ctypes
import math
import os
import queue
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from supervised import WITHIN

from mesh_core import Actor, ActorError, FailureKind, MeshError, SupervisionError, endpoint, this_host
from mesh_core.inspect import ActorState, HostState, ProcState, Running, Snapshot
from mesh_supervision import Health, Limits, OneForOne, Trouble, TroubleKind, watch_health


def actor(rank: int, **more: Any) -> ActorState:
    fields: dict[str, Any] = {
        "name": "trainers", "class_name": "Trainer", "rank": rank, "point": {"gpus": rank}, "proc": f"workers[{rank}]",
        "owner": "controller", "state": "idle", "age": 5.0, "queue": 0, "queue_bytes": 0, "received": 0,
        "received_bytes": 0, "handled": 10, "failed": 0, "rate": 0.0, "mean": 0.01, "longest": 0.0, "running": (),
        "actor_id": 100,
    }  # fmt: skip
    return ActorState(**{**fields, **more})


def snap(*actors: ActorState, states: dict[int, str] | None = None) -> Snapshot:
    procs = tuple(
        ProcState(
            name=f"workers[{each.rank}]", mesh="workers", rank=each.rank, point=each.point, host="b7", pid=4242 + each.rank,
            owner="controller", state=(states or {}).get(each.rank, "running"), cpu=1.0, rss=1, pss=None, threads=3,
            outgoing=0, calls=0, shm_bytes=0, actors=(each,),
        )
        for each in actors
    )  # fmt: skip
    return Snapshot(0.0, (HostState("b7", 2, 0.4, 1, 1, procs),), ())


def kinds(troubles: tuple[Trouble, ...]) -> list[tuple[TroubleKind, str]]:
    return [(each.kind, each.proc) for each in troubles]


def busy(seconds: float, **more: Any) -> ActorState:
    return actor(0, running=(Running("step", seconds, "controller"),), **more)


def test_a_handler_that_does_not_end_is_told_once_and_the_next_one_again() -> None:
    health = Health(Limits(stuck=10.0))
    health, told = health.on(snap(busy(9.9)))
    assert told == ()
    health, told = health.on(snap(busy(10.1)))
    assert kinds(told) == [(TroubleKind.STUCK, "workers[0]")]
    assert told[0].text == "trainers[0] in workers[0] has run step for 10.1 s, called by controller"
    health, told = health.on(snap(busy(20.0)))
    assert told == ()
    health, told = health.on(snap(busy(11.0, handled=11)))
    assert kinds(told) == [(TroubleKind.STUCK, "workers[0]")], "another message"


def test_a_rank_that_falls_behind_is_reported_and_noise_is_not() -> None:
    health = Health(Limits(straggler=2.0))
    usual = [0.010, 0.011, 0.009, 0.010]
    health, told = health.on(snap(*(actor(rank, mean=mean) for rank, mean in enumerate(usual))))
    assert told == ()
    slow = [0.010, 0.011, 0.035, 0.010]
    health, told = health.on(snap(*(actor(rank, mean=mean) for rank, mean in enumerate(slow))))
    assert kinds(told) == [(TroubleKind.STRAGGLER, "workers[2]")]
    assert told[0].text == (
        "trainers[2] in workers[2] takes 35 ms for a message: 3.3 times the median of its 4 ranks, 10.5 ms"
    )
    health, told = health.on(snap(*(actor(rank, mean=mean) for rank, mean in enumerate(usual))))
    health, told = health.on(snap(*(actor(rank, mean=mean) for rank, mean in enumerate(slow))))
    assert kinds(told) == [(TroubleKind.STRAGGLER, "workers[2]")], "again, after it was over"
    # Of two nobody can say, a wide spread hides what is within it, and microseconds are the machine's.
    for means in ([0.01, 0.05], [0.01, 0.03, 0.05, 0.07, 0.11], [1e-5, 1e-5, 9e-5, 1e-5]):
        _, told = Health(Limits(straggler=2.0)).on(
            snap(*(actor(rank, mean=mean) for rank, mean in enumerate(means)))
        )
        assert told == (), means
    # Who has handled little has no mean to speak of.
    few = [actor(rank, mean=mean, handled=10 if rank != 2 else 2) for rank, mean in enumerate(slow)]
    assert Health(Limits(straggler=2.0)).on(snap(*few))[1] == ()


def test_a_silent_process_is_reported_after_some_looks_and_a_stopped_one_at_once() -> None:
    health = Health(Limits(silent=3))
    for expected in ([], [], [(TroubleKind.SILENT, "workers[0]")], []):
        health, told = health.on(snap(actor(0), states={0: "silent"}))
        assert kinds(told) == expected
    health, told = health.on(snap(actor(0)))
    health, told = health.on(snap(actor(0), states={0: "silent"}))
    assert told == (), "it begins anew"
    _, told = health.on(snap(actor(0), states={0: "stopped"}))
    assert kinds(told) == [(TroubleKind.STOPPED, "workers[0]")]
    assert "SIGCONT" in told[0].text


def stragglers(means: list[float], limits: Limits | None = None, **more: Any) -> list[str]:
    actors = [actor(rank, mean=mean, **more) for rank, mean in enumerate(means)]
    return [each.proc for each in Health(limits or Limits()).on(snap(*actors))[1]]


def test_the_limits_are_these() -> None:
    defaults = Limits()
    assert (defaults.stuck, defaults.straggler, defaults.silent) == (60.0, 2.0, 3)
    assert (defaults.memory, defaults.files, defaults.warning) == (None, None, 0.8)


def test_a_handler_is_stuck_above_its_limit_only() -> None:
    assert Health(Limits(stuck=10.0)).on(snap(busy(10.0)))[1] == ()
    assert kinds(Health(Limits(stuck=10.0)).on(snap(busy(math.nextafter(10.0, 11.0))))[1]) == [
        (TroubleKind.STUCK, "workers[0]")
    ]


def test_three_ranks_of_three_messages_suffice_to_tell_a_straggler() -> None:
    assert stragglers([1.0, 1.0, 9.0]) == ["workers[2]"]
    assert stragglers([1.0, 9.0]) == []
    assert stragglers([1.0, 1.0, 9.0], handled=3) == ["workers[2]"]
    assert stragglers([1.0, 1.0, 9.0], handled=2) == []


def test_a_straggler_takes_more_than_each_of_three_bounds() -> None:
    """Times the median, five times the usual distance from it, and a millisecond."""
    assert stragglers([1.0, 1.0, 2.0]) == []
    assert stragglers([1.0, 1.0, 2.01]) == ["workers[2]"]
    spread = [90.0, 100.0, 110.0]
    limits = Limits(straggler=1.001)
    assert stragglers([*spread, 90.0, 110.0, 150.0], limits) == []
    assert stragglers([90.0, 90.0, 100.0, 110.0, 110.0 + 40.0], limits) == []
    assert stragglers([90.0, 90.0, 100.0, 110.0, 110.0 + 40.1], limits) == ["workers[4]"]
    assert stragglers([0.0, 0.0, 0.001]) == []
    assert stragglers([0.0, 0.0, 0.0011]) == ["workers[2]"]


def test_time_in_collectives_does_not_count() -> None:
    waiting = [actor(rank, mean=9.0, waited=8.0) for rank in range(3)]
    assert Health().on(snap(*waiting))[1] == ()
    assert kinds(Health().on(snap(*waiting[:2], actor(2, mean=9.0)))[1]) == [
        (TroubleKind.STRAGGLER, "workers[2]")
    ]


def test_a_silent_process_counts_its_looks_from_one() -> None:
    _, told = Health(Limits(silent=1)).on(snap(actor(0), states={0: "silent"}))
    assert [each.text for each in told] == ["process workers[0] (pid 4242) has not answered 1 times"]


def test_a_handler_hangs_above_its_limit_only() -> None:
    limits = Limits(stuck=None, hung=10.0)
    assert Health(limits).on(snap(busy(10.0)))[1] == ()
    assert kinds(Health(limits).on(snap(busy(math.nextafter(10.0, 11.0))))[1]) == [
        (TroubleKind.HUNG, "workers[0]")
    ]
    with pytest.raises(ValueError, match="hung must be a positive number or None"):
        Limits(hung=0)


def test_limits_are_accepted_up_to_their_edges() -> None:
    least = math.nextafter(0.0, 1.0)
    Limits(stuck=least, straggler=math.nextafter(1.0, 2.0), silent=1, memory=1, files=1, warning=least)
    assert Limits(warning=1).warning == 1
    for wrong in (
        {"stuck": 0}, {"stuck": -least}, {"straggler": 1.0}, {"silent": 0}, {"memory": 0}, {"files": 0},
        {"warning": 0.0}, {"warning": math.nextafter(1.0, 2.0)}, {"stuck": math.nan}, {"silent": True},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Limits(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("interval", [0, -1e-300, math.nan, True])
def test_an_interval_is_above_0(interval: float) -> None:
    with pytest.raises(ValueError, match="interval must be a positive number of seconds"):
        watch_health(interval=interval)


def test_checks_that_are_turned_off_report_nothing() -> None:
    health = Health(Limits(stuck=None, straggler=None, silent=None))
    means = [0.01, 0.01, 0.5]
    assert health.on(snap(*(actor(rank, mean=mean) for rank, mean in enumerate(means))))[1] == ()
    assert health.on(snap(busy(1e6)))[1] == ()
    for wrong in ({"stuck": 0}, {"memory": -1}, {"straggler": 1.0}, {"warning": 0.0}, {"files": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Limits(**wrong)  # type: ignore[arg-type]


class Worker(Actor):
    def __init__(self) -> None:
        self.held: list[Any] = []

    @endpoint
    def wait(self) -> None:
        threading.Event().wait()

    @endpoint
    async def wait_async(self) -> None:
        import asyncio

        await asyncio.Event().wait()

    @endpoint
    def hold(self, size: int) -> None:
        self.held.append(bytearray(os.urandom(1) * size))

    @endpoint
    def open_files(self, count: int) -> None:
        self.held += [os.open("/dev/null", os.O_RDONLY) for _ in range(count)]


@pytest.fixture
def told() -> queue.SimpleQueue[Trouble]:
    return queue.SimpleQueue()


@pytest.mark.slow
def test_the_stack_of_a_handler_that_is_stuck_is_told(told: queue.SimpleQueue[Trouble]) -> None:
    limits = Limits(stuck=0.2, straggler=None)
    with (
        watch_health(told.put, limits, interval=0.05),
        this_host().spawn_procs({"gpus": 2}, name="workers", supervise=lambda failure: True) as procs,
    ):
        workers = procs.spawn("workers", Worker, supervise=lambda failure: True)
        workers.slice(gpus=1).wait.broadcast()
        trouble = told.get(timeout=WITHIN)
        assert (trouble.kind, trouble.proc, trouble.rank) == (TroubleKind.STUCK, "workers[1]", 1)
        assert "in wait" in trouble.stack
        first, second = procs.pids
        assert trouble.pid == second
        assert first is not None
        assert second is not None
        os.kill(first, signal.SIGSTOP)
        try:
            trouble = told.get(timeout=WITHIN)
        finally:
            os.kill(first, signal.SIGCONT)
        assert (trouble.kind, trouble.proc) == (TroubleKind.STOPPED, "workers[0]")
        with pytest.raises(MeshError, match="is being watched already"):
            watch_health()
        os.kill(second, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "grow", "what"),
    [
        (Limits(memory=400_000_000, stuck=None), ("hold", 340_000_000, 200_000_000), TroubleKind.MEMORY),
        (Limits(files=400, stuck=None), ("open_files", 340, 200), TroubleKind.FILES),
    ],
    ids=["memory", "files"],
)
def test_a_process_is_warned_of_and_then_ended(
    limits: Limits, grow: tuple[str, int, int], what: TroubleKind, told: queue.SimpleQueue[Trouble]
) -> None:
    method, first, second = grow
    with (
        watch_health(told.put, limits, interval=0.05),
        this_host().spawn_procs({"gpus": 2}, name="workers", supervise=lambda failure: True) as procs,
    ):
        workers: Any = procs.spawn("workers", Worker, supervise=lambda failure: True)
        greedy = workers.slice(gpus=0)
        getattr(greedy, method).call_one(first).get(timeout=WITHIN)
        warning = told.get(timeout=WITHIN)
        assert (warning.kind, warning.proc, warning.is_fatal) == (what, "workers[0]", False)
        getattr(greedy, method).broadcast(second)
        with pytest.raises(SupervisionError) as caught:
            greedy.wait.call_one().get(timeout=WITHIN)
        ended = told.get(timeout=WITHIN)
        assert (ended.kind, ended.is_fatal) == (what, True)
        assert caught.value.failure.kind is FailureKind.KILLED
        assert "it is ended" in caught.value.failure.report()
        workers.slice(gpus=1).open_files.call_one(1).get(timeout=WITHIN)


@pytest.mark.slow
def test_troubles_are_logged_where_nobody_takes_them(caplog: pytest.LogCaptureFixture) -> None:
    seen = threading.Event()

    def broken(trouble: Trouble) -> None:
        seen.set()
        raise RuntimeError("no")

    for on_trouble, wanted in ((None, "has run wait"), (broken, "on_trouble raised")):
        caplog.clear()
        with (
            watch_health(on_trouble, Limits(stuck=0.1), interval=0.05),
            this_host().spawn_procs(supervise=lambda failure: True) as procs,
        ):
            procs.spawn("workers", Worker, supervise=lambda failure: True).wait_async.broadcast()
            while wanted not in caplog.text:
                pass
            pid = procs.pids[0]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
    assert seen.is_set()


class Chain(Actor):
    """Waits for another one, which hangs as long as a file is there."""

    def __init__(self, folder: str) -> None:
        self.hangs = Path(folder) / "hangs"

    @endpoint
    def ask(self, other: Any) -> str:
        answer: str = other.answer.call_one().get(timeout=WITHIN)
        return answer

    @endpoint
    def answer(self) -> str:
        while self.hangs.exists():
            time.sleep(0.01)
        return "here"

    @endpoint
    def hold_the_lock(self) -> None:
        ctypes.PyDLL(None).sleep(1000)


@pytest.mark.full
@pytest.mark.slow
def test_a_process_that_holds_the_interpreters_lock_is_ended_too(tmp_path: Path) -> None:
    with (
        watch_health(limits=Limits(hung=1.0), interval=0.1),
        this_host().spawn_procs({"gpus": 1}, supervise=lambda failure: True) as procs,
    ):
        chain = procs.spawn("chain", Chain, str(tmp_path), supervise=lambda failure: True)
        with pytest.raises(SupervisionError, match="signal 9"):
            chain.hold_the_lock.call_one().get(timeout=WITHIN)


@pytest.mark.slow
def test_only_the_culprit_of_a_hang_is_ended_and_its_policy_heals_it(
    told: queue.SimpleQueue[Trouble], tmp_path: Path
) -> None:
    """HLT-2: a hang ends by itself."""
    (tmp_path / "hangs").touch()
    with (
        watch_health(told.put, Limits(stuck=0.5, hung=2.0), interval=0.1),
        this_host().spawn_procs(name="askers") as askers,
        this_host().spawn_procs(name="answerers") as answerers,
    ):
        asks = askers.spawn("asks", Chain, str(tmp_path))
        answers = answerers.spawn(
            "answers", Chain, str(tmp_path), supervise=OneForOne(intensity=1, period=60.0)
        )
        [asker], [before] = askers.pids, answerers.pids
        call = asks.ask.call_one(answers)
        blamed: dict[str, bool | None] = {}
        while True:
            trouble = told.get(timeout=WITHIN)
            if trouble.kind is TroubleKind.HUNG:
                break
            blamed[trouble.proc] = trouble.is_culprit
        assert blamed == {"askers[0]": False, "answerers[0]": True}
        assert (trouble.proc, trouble.is_fatal) == ("answerers[0]", True)
        assert (
            "called by askers[0]; 1 waits for it: it is ended" in trouble.text
            and "in answer" in trouble.stack
        )
        with pytest.raises((SupervisionError, ActorError)) as caught:
            call.get(timeout=WITHIN)
        # Where it hung is kept in the failure.
        assert "as answerers[0] has hung for too long" in str(caught.value)
        assert re.search(r"test_health.py\", line \d+, in answer", str(caught.value))
        (tmp_path / "hangs").unlink()
        end = time.monotonic() + WITHIN
        while True:
            try:
                assert asks.ask.call_one(answers).get(timeout=WITHIN) == "here"
                break
            except (SupervisionError, ActorError):  # the process comes back before its actor does
                assert time.monotonic() < end
        assert answerers.pids != [before]
        assert askers.pids == [asker], "who waited goes on"
