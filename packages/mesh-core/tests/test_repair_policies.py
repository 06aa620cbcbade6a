"""Policies that have ranks made again: real processes die, and others take their places."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from core_owners import Told, slay
from core_repair import WITHIN, Counter, until

from mesh_core import Actor, MeshFailure, ProcMesh, endpoint, this_host, this_proc
from mesh_core.policies import Action, Event, Failed, Policy, Respawn, Restart

pytestmark = pytest.mark.usefixtures("runtime", "awaited")


class Waiter(Actor):
    """Awaits what it is given."""

    @endpoint
    async def wait(self, counter: Any) -> None:
        await counter.begun_with.call_one()


@pytest.fixture(scope="module")
def awaited(runtime: None) -> None:
    """The event loop of the script's own actors has waited before, as it does in every repair."""
    with this_host().spawn_procs() as procs:
        counter: Any = procs.spawn("counter", Counter)
        this_proc().spawn("waiter", Waiter).wait.call_one(counter).get(timeout=WITHIN)


class Answering:
    """Answers failures as a function says, and hands them to the test."""

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


def test_restart_makes_a_failed_actor_again() -> None:
    policy = Answering(lambda event: [Restart()])
    with this_host().spawn_procs({"gpus": 3}) as procs:
        counters: Any = procs.spawn("counters", Counter, 4, supervise=policy)
        before = who(counters)
        counters.slice(gpus=1).fail.broadcast()
        assert policy.next().rank == 1
        assert until(lambda: who(counters)) == before
        assert counters.begun_with.call().get(timeout=WITHIN).values() == [4] * 3


def test_restart_makes_the_process_again_below_its_actor() -> None:
    policy = Answering(lambda event: [Restart()])
    with this_host().spawn_procs({"gpus": 3}, supervise=lambda failure: True) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=policy)
        before = who(counters)
        for life in (1, 2):
            slay(procs, 2)
            assert policy.next().rank == 2
            assert until(lambda: who(counters))[:2] == before[:2]
            assert procs.incarnations == [0, 0, life]


def test_restart_mends_several_losses_at_once_and_passes_none_on(told: Told) -> None:
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


def test_restart_leaves_alone_what_was_taken_away() -> None:
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


def test_restart_of_all_ranks_begins_with_those_that_live() -> None:
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


def test_what_cannot_be_made_again_is_passed_on(told: Told) -> None:
    with this_host().spawn_procs({"gpus": 2}, supervise=lambda failure: True) as procs:
        counters: Any = procs.spawn("counters", Counter, supervise=Answering(lambda event: [Respawn()]))
        counters.initialized.get(timeout=WITHIN)
        slay(procs, 1)
        failure = told.next()
        assert (failure.mesh_name, failure.rank) == ("counters", 1)
        assert failure.chain[-1].startswith(
            "the policy of 'counters': Respawn did not succeed: Respawn(ranks=None) is for processes"
        )


class Boss(Actor):
    """Owns processes and actors, whose policies make them again."""

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


def test_an_actor_s_policies_make_what_it_owns_again() -> None:
    with this_host().spawn_procs(name="bosses") as bosses:
        boss: Any = bosses.spawn("boss", Boss)
        workers = boss.workers.call_one().get(timeout=WITHIN)
        before = who(workers)
        assert boss.lose.call_one(1).get(timeout=WITHIN) == before[1]
        now = until(lambda: who(workers))
        assert now[0] == before[0]
        assert now[1] != before[1]
        assert boss.heard.call_one().get(timeout=WITHIN) == []
