"""The policy on a mesh on paper, the conformance suite, and once at work."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from datetime import UTC, datetime, time, timedelta, timezone
from typing import Any

import pytest
from mesh_nightwatch import NIGHTWATCH, NightWatch, Pager

from mesh_core import Actor, MeshFailure, endpoint, set_fault_handler, this_host
from mesh_core.policies import Action, Event, Policy, Repaired, RepairEvent
from mesh_supervision import OneForOne
from mesh_supervision.testing import PolicyConformance, Rehearsal

MIDNIGHT = datetime(2026, 6, 1, tzinfo=UTC).timestamp()
HOUR = 3600.0


class TestNightWatch(PolicyConformance):
    plugin = NIGHTWATCH
    distribution = "mesh-nightwatch"
    most_restarts = (3, HOUR)


def rehearsal(hour: float, **options: Any) -> Rehearsal:
    policy = NightWatch(policy=OneForOne(intensity=2, period=HOUR), **options)
    return Rehearsal(policy, size=3, epoch=MIDNIGHT + hour * HOUR)


@pytest.mark.parametrize(
    ("hour", "night"), [(0, True), (5.99, True), (6, False), (15, False), (21.99, False), (22, True)]
)
def test_restarts_at_night_only(hour: float, night: bool) -> None:
    mesh = rehearsal(hour)
    mesh.kill(1)
    mesh.advance(60.0)
    assert (1 in mesh.alive, len(mesh.restarts), len(mesh.passed_on)) == (
        (True, 1, 0) if night else (False, 0, 1)
    )
    assert not mesh.stopped


def test_a_night_within_a_day_and_another_zone() -> None:
    siesta = {"begin": time(13), "end": time(15), "zone": timezone(timedelta(hours=2))}
    for hour, restarts in ((11.5, 1), (13.5, 0)):
        mesh = rehearsal(hour, **siesta)
        mesh.kill(0)
        mesh.advance(60.0)
        assert len(mesh.restarts) == restarts


def test_the_policy_of_the_night_gives_up() -> None:
    mesh = rehearsal(1.0)
    for _ in range(3):
        mesh.kill(1)
        mesh.advance(60.0)
    assert mesh.stopped
    assert "one_for_one gave up: 2 restarts are allowed within 3600 s" in mesh.passed_on[0].reason


def test_days_do_not_count_against_the_night() -> None:
    mesh = rehearsal(21.99)
    for rank in range(3):
        mesh.kill(rank)
    mesh.advance(300.0)
    assert not mesh.restarts


class Worker(Actor):
    @endpoint
    def crash(self) -> None:
        raise RuntimeError("crash")


class Heard:
    """Lets the test wait until the policy has been told of a repair."""

    def __init__(self, policy: Any, repaired: queue.SimpleQueue[Repaired]) -> None:
        self.policy = policy
        self.repaired = repaired

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        policy, actions = self.policy.on(event, now)
        return Heard(policy, self.repaired), actions

    def on_repair(self, event: RepairEvent, now: float) -> tuple[Policy, Sequence[Action]]:
        policy, actions = self.policy.on_repair(event, now)
        if isinstance(event, Repaired):
            self.repaired.put(event)
        return Heard(policy, self.repaired), actions


def test_at_work_by_night_and_by_day() -> None:
    pages: queue.SimpleQueue[str] = queue.SimpleQueue()
    repaired: queue.SimpleQueue[Repaired] = queue.SimpleQueue()
    now = datetime.now(UTC)
    begin, end = (now - timedelta(hours=2)).time(), (now + timedelta(hours=2)).time()
    night = Heard(NightWatch(policy=OneForOne(intensity=1, period=HOUR), begin=begin, end=end), repaired)
    day = NightWatch(policy=OneForOne(intensity=1, period=HOUR), begin=end, end=begin)
    set_fault_handler(Pager(pages.put))
    try:
        with this_host().spawn_procs({"gpus": 2}) as procs:
            procs.spawn("night", Worker, supervise=night).slice(gpus=1).crash.broadcast()
            repaired.get(timeout=30)
            procs.spawn("day", Worker, supervise=day).slice(gpus=1).crash.broadcast()
            page = pages.get(timeout=30)
    finally:
        set_fault_handler(None)
    assert "rank 1 (gpus=1) of mesh 'day' failed" in page
    assert "by day: somebody has to look at it" in page
    assert pages.empty()


def test_the_pager_takes_nothing_else() -> None:
    with pytest.raises(LookupError, match="no night watch was asked about"):
        Pager(print)(MeshFailure(mesh_name="other", rank=0))
