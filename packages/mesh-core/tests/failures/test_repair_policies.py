"""Policies that respawn ranks: real processes die and are replaced."""

from __future__ import annotations

import logging
import os
import queue
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from core_owners import Told, slay
from core_repair import WITHIN, Counter, until

from mesh_core import Actor, MeshFailure, ProcMesh, endpoint, this_host, this_proc
from mesh_core.extensions import ProcEnd, current_proc, watch
from mesh_core.policies import (
    Action,
    Due,
    Event,
    Failed,
    Ignore,
    Later,
    Policy,
    Repaired,
    RepairEvent,
    RepairFailed,
    Respawn,
    Restart,
    Stop,
)

pytestmark = pytest.mark.usefixtures("runtime", "awaited")


class Waiter(Actor):
    """Awaits what it is given."""

    @endpoint
    async def wait(self, counter: Any) -> None:
        await counter.begun_with.call_one()


@pytest.fixture(scope="module")
def awaited(runtime: None) -> None:
    """Makes the event loop of the script's actors wait once before, as every repair does."""
    with this_host().spawn_procs() as procs:
        counter: Any = procs.spawn("counter", Counter)
        this_proc().spawn("waiter", Waiter).wait.call_one(counter).get(timeout=WITHIN)


class Answering:
    """Answers failures with a function, and passes them to the test."""

    def __init__(self, answer: Callable[[Failed], Sequence[Action]]) -> None:
        self._answer = answer
        self._asked: queue.SimpleQueue[Failed] = queue.SimpleQueue()

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        if not isinstance(event, Failed):
            return self, []
        self._asked.put(event)
        return self, self._answer(event)

    def next(self) -> Failed:
        return self._asked.get(timeout=WITHIN)


def who(mesh: Any) -> list[int]:
    return [pid for *_, pid in mesh.who.call().get(timeout=WITHIN).values()]


def test_restart_respawns_a_failed_actor() -> None:
    policy = Answering(lambda event: [Restart()])
    with this_host().spawn_procs({"gpus": 3}) as procs:
        counters: Any = procs.spawn("counters", Counter, 4, supervise=policy)
        before = who(counters)
        counters.slice(gpus=1).fail.broadcast()
        assert policy.next().rank == 1
        assert until(lambda: who(counters)) == before
        assert counters.begun_with.call().get(timeout=WITHIN).values() == [4] * 3


def test_restart_respawns_the_process_of_its_actor() -> None:
    policy = Answering(lambda event: [Restart()])
    with this_host().spawn_procs({"gpus": 3}, supervise=lambda failure: True) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=policy)
        before = who(counters)
        for life in (1, 2):
            slay(procs, 2)
            assert policy.next().rank == 2
            assert until(lambda: who(counters))[:2] == before[:2]
            assert procs.incarnations == [0, 0, life]


def test_restart_repairs_several_losses_at_once_and_passes_none_on(told: Told) -> None:
    policy = Answering(lambda event: [Restart()])
    with this_host().spawn_procs({"gpus": 5}, supervise=lambda failure: True) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=policy)
        who(counters)
        for _ in range(5):
            pids = procs.pids[:4]
            for pid in pids:
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            assert {policy.next().rank for _ in pids} == {0, 1, 2, 3}
            until(lambda: who(counters))
        assert told.empty()


def test_restart_leaves_removed_ranks_alone() -> None:
    policy = Answering(lambda event: [Restart()])
    with this_host().spawn_procs({"gpus": 3}, supervise=lambda failure: True) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=policy)
        before = who(counters)
        smaller = procs.shrink(gpus=1)
        smaller.initialized.get(timeout=WITHIN)
        slay(procs, 0)
        assert policy.next().rank == 0
        assert until(lambda: who(counters.slice(gpus=slice(0, 2))))[1] == before[1]
        assert procs.incarnations == [1, 0, 0]


def test_respawn_and_restart_of_two_policies_go_together() -> None:
    below, above = Answering(lambda event: [Respawn()]), Answering(lambda event: [Restart()])
    with this_host().spawn_procs({"gpus": 2}, supervise=below) as procs:
        first: Any = procs.spawn("first", Counter, supervise=above)
        second: Any = procs.spawn("second", Counter, supervise=above)
        before = who(first)
        slay(procs, 0)
        assert below.next().rank == 0
        assert {above.next().mesh, above.next().mesh} == {"first", "second"}
        assert until(lambda: who(first)) == until(lambda: who(second))
        assert who(first)[1] == before[1] != who(first)[0]
        assert procs.incarnations == [1, 0]


def test_restart_of_all_ranks_stops_the_running_ones_first() -> None:
    policy = Answering(lambda event: [Restart(ranks=(0, 1, 2))])
    with this_host().spawn_procs({"gpus": 3}) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=policy)
        assert counters.hear.call(1).get(timeout=WITHIN).values() == [1] * 3
        counters.slice(gpus=2).fail.broadcast()
        policy.next()
        until(lambda: counters.hear.call(1).get(timeout=WITHIN).values().index(1))
        while any(
            counters.slice(gpus=rank).all.call_one().get(timeout=WITHIN)[:2] == [1, 1] for rank in range(2)
        ):
            until(lambda: counters.hear.call(0).get(timeout=WITHIN))
        assert counters.failed() == []


def test_a_failure_that_cannot_be_repaired_is_passed_on(told: Told) -> None:
    with this_host().spawn_procs({"gpus": 2}, supervise=lambda failure: True) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=Answering(lambda event: [Respawn()]))
        counters.initialized.get(timeout=WITHIN)
        slay(procs, 1)
        failure = told.next()
        assert (failure.mesh_name, failure.rank) == ("counters", 1)
        assert failure.chain[-1].startswith(
            "the policy of 'counters': Respawn did not succeed: Respawn(ranks=None) cannot repair actors"
        )


class Boss(Actor):
    """Owns processes and actors whose policies respawn them."""

    def __init__(self) -> None:
        self.told: list[MeshFailure] = []
        self.procs: ProcMesh = this_host().spawn_procs(
            {"gpus": 2}, supervise=Answering(lambda event: [Respawn()])
        )
        self.counters: Any = self.procs.spawn(
            "counters", Counter, supervise=Answering(lambda event: [Restart()])
        )

    @endpoint
    def workers(self) -> Any:
        return self.counters

    @endpoint
    async def lose(self, rank: int) -> int:
        return slay(self.procs, rank)

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.told.append(failure)
        return True

    @endpoint
    def heard(self) -> list[str]:
        return [failure.headline() for failure in self.told]


def test_an_actors_policies_respawn_what_it_owns() -> None:
    with this_host().spawn_procs(name="bosses") as bosses:
        boss: Any = bosses.spawn("boss", Boss)
        workers = boss.workers.call_one().get(timeout=WITHIN)
        before = who(workers)
        assert boss.lose.call_one(1).get(timeout=WITHIN) == before[1]
        now = until(lambda: who(workers))
        assert now[0] == before[0]
        assert now[1] != before[1]
        assert boss.heard.call_one().get(timeout=WITHIN) == []


# What becomes of a repair (POL-3).


class Mending(Answering):
    """Like :class:`Answering`, and also asked after each repair."""

    def __init__(
        self,
        answer: Callable[[Failed], Sequence[Action]],
        *after: Sequence[Action] | BaseException,
        due: Sequence[Action] = (),
    ) -> None:
        super().__init__(answer)
        self._after = list(after)
        self._due = due
        self.repairs: queue.SimpleQueue[RepairEvent] = queue.SimpleQueue()

    def on(self, event: Event, now: float) -> tuple[Policy, Sequence[Action]]:
        return (self, self._due) if isinstance(event, Due) else super().on(event, now)

    def on_repair(self, event: RepairEvent, now: float) -> tuple[Policy, Sequence[Action]]:
        self.repairs.put(event)
        answer = self._after.pop(0) if self._after else []
        if isinstance(answer, BaseException):
            raise answer
        return self, answer

    def after(self) -> RepairEvent:
        return self.repairs.get(timeout=WITHIN)


# Respawn is not for a mesh of actors, and so cannot succeed.
WRONG = Respawn()


class Fragile(Actor):
    """Cannot be constructed while a file exists."""

    def __init__(self, obstacle: Path) -> None:
        if obstacle.exists():
            raise RuntimeError("there is an obstacle")

    @endpoint
    def fail(self) -> None:
        raise AssertionError

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def test_a_policy_is_told_that_its_repair_is_done(told: Told) -> None:
    policy = Mending(lambda event: [Restart()])
    with this_host().spawn_procs({"gpus": 2}, supervise=lambda failure: True) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=policy)
        who(counters)
        slay(procs, 1)
        event = policy.after()
        assert event == Repaired("counters", (Restart(),))
        assert [failure.rank for failure in event.failures] == [1]
        # At once, without checking what failed.
        assert len(who(counters)) == 2
    assert told.empty()


def test_a_failed_repair_is_reported_and_tried_again(told: Told, tmp_path: Path) -> None:
    obstacle = tmp_path / "obstacle"

    class Removing(Mending):
        def on_repair(self, event: RepairEvent, now: float) -> tuple[Policy, Sequence[Action]]:
            obstacle.unlink(missing_ok=True)
            return super().on_repair(event, now)

    policy = Removing(lambda event: [Restart()], [Restart(ranks=(1,))])
    with this_host().spawn_procs({"gpus": 2}, supervise=lambda failure: True) as procs:
        fragile: Any = procs.spawn("fragile", Fragile, obstacle, supervise=policy)
        fragile.pid.call().get(timeout=WITHIN)
        obstacle.touch()
        slay(procs, 1)
        event = policy.after()
        assert isinstance(event, RepairFailed)
        assert (event.mesh, event.action) == ("fragile", Restart())
        assert "there is an obstacle" in event.reason
        assert "Restart did not succeed" in event.failures[0].chain[-1]
        assert policy.after() == Repaired("fragile", (Restart(ranks=(1,)),))
        assert len(fragile.pid.call().get(timeout=WITHIN)) == 2
    assert told.empty()


def test_a_failed_repair_without_an_answer_is_passed_on(told: Told) -> None:
    policy = Mending(lambda event: [WRONG])
    with this_host().spawn_procs({"gpus": 2}, supervise=lambda failure: True) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=policy)
        who(counters)
        slay(procs, 1)
        assert isinstance(policy.after(), RepairFailed)
        failure = told.next()
        assert (failure.mesh_name, failure.rank) == ("counters", 1)
        assert "Respawn did not succeed" in failure.chain[-1]


def test_a_failed_repair_can_be_ignored_put_off_or_end_the_mesh(told: Told) -> None:
    later = [Later(0.0, Due("again"))]
    for answer, due in (([Ignore()], ()), (later, [Restart()]), ([Stop()], ())):
        policy = Mending(lambda event: [WRONG], answer, due=due)
        with this_host().spawn_procs({"gpus": 2}, supervise=lambda failure: True) as procs:
            counters: Any = procs.spawn("counters", Counter, supervise=policy)
            who(counters)
            slay(procs, 0)
            event = policy.after()
            assert isinstance(event, RepairFailed)
            if answer is later:
                assert policy.after() == Repaired("counters", (Restart(),))
                assert len(who(counters)) == 2
    assert told.empty()


def test_a_policy_that_raises_after_a_failed_repair_passes_on(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Mending(lambda event: [WRONG], ValueError("confused"))
    with this_host().spawn_procs(supervise=lambda failure: True) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=policy)
        who(counters)
        with caplog.at_level(logging.ERROR, "mesh"):
            slay(procs, 0)
            assert told.next().mesh_name == "counters"
    assert "raised for RepairFailed" in caplog.text and "confused" in caplog.text


def test_a_policy_that_raises_after_a_repair_changes_nothing(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Mending(lambda event: [Restart()], ValueError("confused"), [])
    with this_host().spawn_procs(supervise=lambda failure: True) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=policy)
        who(counters)
        with caplog.at_level(logging.ERROR, "mesh"):
            for _ in range(2):
                slay(procs, 0)
                assert isinstance(policy.after(), Repaired)
    assert "raised for Repaired" in caplog.text and "it stays as it was" in caplog.text
    assert told.empty()


class Mender(Actor):
    """Owns actors whose policy is told about its repairs in this process."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.policy = Mending(lambda event: [WRONG], [Restart()])
        self.procs = this_host().spawn_procs({"gpus": 2}, supervise=lambda failure: True)
        self.counters: Any = self.procs.spawn("counters", Counter, supervise=self.policy)

    @endpoint
    def lose(self) -> list[str]:
        who(self.counters)
        slay(self.procs, 1)
        events = [self.policy.after(), self.policy.after()]
        who(self.counters)
        return [type(event).__name__ for event in events]

    def __supervise__(self, failure: MeshFailure) -> bool:
        return False


def test_an_actors_policy_is_notified_of_its_repairs(told: Told) -> None:
    with this_host().spawn_procs(name="menders") as procs:
        mender: Any = procs.spawn("mender", Mender)
        assert mender.lose.call_one().get(timeout=WITHIN) == ["RepairFailed", "Repaired"]
    assert told.empty()


class Living(Actor):
    """Returns the incarnation of its rank."""

    @endpoint
    def life(self) -> int:
        return current_proc().incarnation


def test_a_process_knows_its_incarnation(told: Told) -> None:
    ends: queue.SimpleQueue[ProcEnd] = queue.SimpleQueue()
    policy = Mending(lambda event: [Restart()])
    with this_host().spawn_procs({"gpus": 2}, supervise=lambda failure: True) as procs:
        living: Any = procs.spawn("living", Living, supervise=policy)
        assert living.life.call().get(timeout=WITHIN).values() == [0, 0]
        for life in (1, 2):
            watching = watch(procs, ends.put)
            slay(procs, 1)
            end = ends.get(timeout=WITHIN)
            assert end.point is not None and (end.point.rank, end.incarnation) == (1, life - 1)
            watching.cancel()
            policy.after()
            assert living.life.call().get(timeout=WITHIN).values() == [0, life]
    assert current_proc().incarnation == 0
