"""Policies at work: real processes die, others take their places, and crash loops come to an end."""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from supervised import WITHIN, Boss, Heard, Worker

from mesh_core import FailureKind, ProcMesh, SupervisionError, shutdown, this_host
from mesh_core.policies import Failed, Policy
from mesh_supervision import (
    Backoff,
    ByKind,
    CircuitBreaker,
    Escalate,
    Ignore,
    Levels,
    OneForAll,
    OneForOne,
    RestForOne,
)

pytestmark = [pytest.mark.slow]

Slay = Callable[[ProcMesh, int], int]


def lives(workers: Any) -> list[tuple[int, int]]:
    """Process and age of each: the age begins with 1."""
    return workers.who.call().get(timeout=WITHIN).values()  # type: ignore[no-any-return]


@pytest.mark.python
@pytest.mark.parametrize(
    ("policy", "again"),
    [
        (OneForOne(intensity=3, period=60.0), {1}),
        (OneForAll(intensity=3, period=60.0), {0, 1, 2}),
        (RestForOne(intensity=3, period=60.0), {1, 2}),
    ],
    ids=["one_for_one", "one_for_all", "rest_for_one"],
)
def test_a_killed_rank_is_replaced(policy: Policy, again: set[int], slay: Slay, told: Any) -> None:
    heard = Heard(policy)
    with this_host().spawn_procs({"gpus": 3}) as procs:
        workers: Any = procs.spawn("workers", Worker, supervise=heard)
        last = workers.slice(gpus=1)
        before = lives(workers)
        for _ in range(2):
            killed = slay(procs, 1)
            heard.repaired()
            after = lives(workers)
            assert {rank for rank, (_, age) in enumerate(after) if age == 1} == again
            # Actors beside it are made again in the processes that they had.
            assert [pid for pid, _ in after][::2] == [pid for pid, _ in before][::2]
            assert after[1][0] not in (killed, before[1][0])
            assert last.who.call_one().get(timeout=WITHIN)[0] == after[1][0], "references stay good"
        assert procs.incarnations == [0, 2, 0]
    assert told.empty()


@pytest.mark.parametrize("strategy", [OneForOne, OneForAll, RestForOne])
def test_ranks_that_die_while_others_are_restarted_come_back(strategy: Any, slay: Slay, told: Any) -> None:
    chance = random.Random(2026)
    policy = strategy(intensity=500, period=600.0, settle=0.01)
    with this_host().spawn_procs({"gpus": 4}, supervise=Ignore()) as procs:
        workers: Any = procs.spawn("workers", Worker, supervise=policy)
        lives(workers)
        for count in (4, 1, 2, 1, 4, 1, 1):
            for rank in chance.sample(range(4), count):
                with contextlib.suppress(ProcessLookupError, AssertionError):  # dead, or not there yet
                    slay(procs, rank)
            if count == 1:
                while not answers(workers, chance.randrange(4)):
                    pass
        while not all(answers(workers, rank) for rank in range(4)):
            pass
    assert told.empty()


def answers(workers: Any, rank: int) -> bool:
    try:
        workers.slice(gpus=rank).who.call_one().get(timeout=WITHIN)
    except (SupervisionError, ConnectionError):
        return False
    return True


def test_processes_are_restarted_too(slay: Slay, told: Any) -> None:
    heard = Heard(OneForAll(intensity=1, period=60.0))
    with this_host().spawn_procs({"gpus": 3}, supervise=heard) as procs:
        before = procs.pids
        slay(procs, 2)
        heard.repaired()
        assert not set(before) & set(procs.pids), "those that were stopped for it are not taken for ended"
        assert procs.incarnations == [1, 1, 1]
    assert told.empty()


def test_a_process_that_ends_in_order_is_restarted_if_it_is_permanent(told: Any) -> None:
    heard = Heard(OneForOne(intensity=3, period=60.0, ranks={0: "transient"}))
    with this_host().spawn_procs({"gpus": 2}, supervise=heard) as procs:
        procs.slice(gpus=0).stop().get(timeout=WITHIN)
        procs.slice(gpus=1).stop().get(timeout=WITHIN)
        heard.repaired()
        assert procs.incarnations == [0, 1]
    assert told.empty()


SCRIPT = """
import os, signal
from supervised import Worker
from mesh_core import this_host
from mesh_supervision import OneForOne

procs = this_host().spawn_procs({"gpus": 4})
workers = procs.spawn("workers", Worker, supervise=OneForOne(intensity=1, period=60.0))
pid, _ = workers.who.call().get(timeout=30).values()[2]
os.kill(pid, signal.SIGKILL)
while procs.incarnations[2] == 0:
    pass
"""


def test_the_end_of_the_script_is_no_attempt() -> None:
    """A rank is just being restarted, or was, when the script ends and stops all of them."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, env=env, timeout=50)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("whole", [True, False], ids=["processes", "actors"])
def test_a_mesh_that_is_stopped_while_a_rank_is_restarted_is_no_attempt(
    whole: bool, slay: Slay, told: Any
) -> None:
    heard = Heard(OneForOne(intensity=1, period=60.0))
    procs = this_host().spawn_procs({"gpus": 3}, supervise=Ignore())
    workers: Any = procs.spawn("workers", Worker, supervise=heard)
    lives(workers)
    slay(procs, 1)
    heard.wait(Failed)
    (procs if whole else workers).stop().get(timeout=WITHIN)
    procs.stop().get(timeout=WITHIN)
    # A script is told of what is left when it ends.
    shutdown()
    assert told.empty()


def test_an_exit_with_status_0_is_no_failure_of_a_transient_rank(told: Any) -> None:
    heard = Heard(OneForOne(intensity=3, period=60.0, restart="transient"))
    with this_host().spawn_procs({"gpus": 2}) as procs:
        workers: Any = procs.spawn("workers", Worker, supervise=heard)
        for rank, status in enumerate((0, 1)):
            with pytest.raises(SupervisionError):
                workers.slice(gpus=rank).leave.call_one(status).get(timeout=WITHIN)
        heard.repaired()
        assert [point.rank for point in workers.failed()] == [0]
    assert told.empty()


@pytest.mark.parametrize("way", ["exit", "raise"])
def test_a_crash_loop_ends_at_its_intensity_with_a_report(
    way: str, slay: Slay, told: Any, tmp_path: Path
) -> None:
    obstacle = tmp_path / "obstacle"
    with this_host().spawn_procs({"gpus": 2}) as procs:
        policy = OneForOne(intensity=3, period=60.0, backoff=Backoff(initial=0.01))
        workers: Any = procs.spawn("workers", Worker, obstacle, supervise=policy)
        lives(workers)
        obstacle.write_text(way)
        slay(procs, 1)
        report = told.next().report()
        for rank in (0, 1, 0, 1):
            # Every call says so, to the other rank too, which was stopped.
            with pytest.raises(SupervisionError, match="one_for_one gave up"):
                workers.slice(gpus=rank).who.call_one().get(timeout=WITHIN)
    assert told.empty(), "it escalates once"
    headline, *attempts = report[report.index("one_for_one gave up") :].splitlines()[:5]
    assert headline == "one_for_one gave up: 3 restarts are allowed within 60 s, and this would be number 4"
    died = "exited with status 3" if way == "exit" else "could not be restarted: there is an obstacle"
    assert re.fullmatch(
        r" +1\. .* s before: rank 1 was killed by signal 9 \(SIGKILL\); restarted at once", attempts[0]
    )
    for number, line in enumerate(attempts[1:3], 2):
        assert re.fullmatch(rf" +{number}\. .* s before: rank 1 {died}; restarted after .* s", line)
    assert attempts[3].strip() == f"4. now: rank 1 {died}; not restarted"


def test_actors_without_a_policy_on_processes_that_are_restarted_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with this_host().spawn_procs(supervise=OneForOne(intensity=3, period=60.0)) as procs:
        procs.spawn("covered", Worker, supervise=OneForOne(intensity=3, period=60.0))
        assert not caplog.records
        procs.spawn("uncovered", Worker)
    (record,) = caplog.records
    assert "the actors 'uncovered' will not be restarted" in record.getMessage()


def test_the_owner_is_notified_when_it_gives_up() -> None:
    with this_host().spawn_procs(name="bosses") as bosses:
        boss: Any = bosses.spawn("boss", Boss)
        workers = boss.reference.call_one().get(timeout=WITHIN)
        lives(workers)
        for _ in range(2):
            workers.slice(gpus=1).leave.broadcast(3)
            while not (reports := boss.reports.call_one().get(timeout=WITHIN)):
                try:
                    if workers.slice(gpus=1).who.call_one().get(timeout=WITHIN)[1] == 1:
                        break
                except (SupervisionError, ConnectionError):
                    continue
        while not (reports := boss.reports.call_one().get(timeout=WITHIN)):
            pass
    (report,) = reports
    assert "1 restart is allowed within 60 s, and this would be number 2" in report
    assert report.count("rank 1 exited with status 3") == 2


def test_levels_restart_all_when_one_rank_does_not_help(slay: Slay, told: Any) -> None:
    heard = Heard(Levels(OneForOne(intensity=1, period=60.0), OneForAll(intensity=1, period=60.0)))
    with this_host().spawn_procs({"gpus": 2}) as procs:
        workers: Any = procs.spawn("workers", Worker, supervise=heard)
        lives(workers)
        slay(procs, 0)
        heard.repaired()
        assert [age for _, age in lives(workers)] == [1, 2]
        slay(procs, 0)
        heard.repaired()
        assert [age for _, age in lives(workers)] == [1, 1]
        slay(procs, 0)
        heard.repaired()
        slay(procs, 0)
        report = told.next().report()
    assert "one_for_all gave up" in report
    assert "one_for_one gave up" in report


def test_a_breaker_leaves_the_dead_alone_and_tries_again(slay: Slay, told: Any) -> None:
    heard = Heard(CircuitBreaker(OneForOne(intensity=0, period=60.0), cooldown=0.2, trips=3))
    with this_host().spawn_procs({"gpus": 2}) as procs:
        workers: Any = procs.spawn("workers", Worker, supervise=heard)
        lives(workers)
        slay(procs, 1)
        heard.wait(Failed)
        assert workers.slice(gpus=0).who.call_one().get(timeout=WITHIN)[1] == 2
        heard.repaired()
        assert [age for _, age in lives(workers)] == [3, 1]
    assert told.empty()


def test_kinds_have_policies_of_their_own(slay: Slay, told: Any) -> None:
    heard = Heard(
        ByKind(
            {FailureKind.KILLED: OneForOne(intensity=1, period=60.0), FailureKind.EXITED: Ignore()},
            otherwise=Escalate("an actor has failed"),
        )
    )
    with this_host().spawn_procs({"gpus": 3}) as procs:
        workers: Any = procs.spawn("workers", Worker, supervise=heard)
        lives(workers)
        slay(procs, 0)
        heard.repaired()
        workers.slice(gpus=1).leave.broadcast(7)
        heard.wait(Failed)
        assert workers.slice(gpus=0).who.call_one().get(timeout=WITHIN)[1] == 1
        workers.slice(gpus=2).fail.broadcast()
        assert told.next().chain == ("the policy of 'workers': an actor has failed",)


@pytest.mark.parametrize("name", ["one_for_one", "one_for_all", "rest_for_one"])
def test_by_name(name: str, slay: Slay, told: Any) -> None:
    with this_host().spawn_procs({"gpus": 2}, name="procs") as procs:
        workers: Any = procs.spawn("workers", Worker, supervise=name)
        before = lives(workers)
        slay(procs, 1)
        while True:
            try:
                after = lives(workers)
            except (SupervisionError, ConnectionError):
                continue
            if after[1][0] != before[1][0]:
                break
    assert told.empty()
