"""Calls of a mesh that its policy has given up say why, whoever makes them, wherever and whenever."""

from __future__ import annotations

import time
from typing import Any

import pytest
from supervised import WITHIN, Boss, Worker

from mesh_core import Actor, SupervisionError, endpoint, this_host
from mesh_core.testing import LocalCluster
from mesh_supervision import OneForOne

pytestmark = [pytest.mark.slow]

REASON = "the policy of 'workers': one_for_one gave up: 0 restarts are allowed within 60 s"


class Friend(Actor):
    """Has been given a reference to others."""

    @endpoint
    def errors(self, workers: Any) -> list[tuple[str, str]]:
        """What it hears from each, twice."""
        said = []
        for place in [*range(len(workers))] * 2:
            try:
                workers.slice(gpus=place).who.call_one().get(timeout=WITHIN)
            except Exception as error:
                said.append((type(error).__name__, str(error)))
            else:
                said.append(("", ""))
        return said

    @endpoint
    def failure(self, workers: Any) -> tuple[Any, ...]:
        try:
            workers.slice(gpus=0).who.call_one().get(timeout=WITHIN)
        except SupervisionError as error:
            failure = error.failure
            assert failure is not None
            return failure.mesh_name, failure.rank, failure.id, failure.kind, len(failure.mesh)
        return ()


def until_heard(friend: Any, workers: Any) -> None:
    """Wait until what an actor has decided is known to another: the news takes a moment."""
    until = time.monotonic() + WITHIN
    while ("", "") in friend.errors.call_one(workers).get(timeout=WITHIN):
        assert time.monotonic() < until


def all_say(friend: Any, workers: Any, reason: str) -> None:
    said = friend.errors.call_one(workers).get(timeout=WITHIN)
    assert {name for name, _ in said} == {"SupervisionError"}, said
    assert all(reason in text for _, text in said), said


@pytest.mark.parametrize("way", ["exit", "raise"])
def test_a_friend_hears_why(way: str, told: Any) -> None:
    with (
        this_host().spawn_procs(name="friends") as friends,
        this_host().spawn_procs({"gpus": 3}) as procs,
    ):
        friend: Any = friends.spawn("friend", Friend)
        workers: Any = procs.spawn("workers", Worker, supervise=OneForOne(intensity=0, period=60.0))
        assert friend.errors.call_one(workers).get(timeout=WITHIN) == [("", "")] * 6
        unlucky = workers.slice(gpus=1)
        (unlucky.leave.broadcast(3) if way == "exit" else unlucky.fail.broadcast())
        failure = told.next()
        all_say(friend, workers, REASON)
        with pytest.raises(SupervisionError) as here:
            workers.slice(gpus=0).who.call_one().get(timeout=WITHIN)
        assert here.value.failure is not None
        assert here.value.failure.id == failure.id
        said = friend.failure.call_one(workers).get(timeout=WITHIN)
        assert said == ("workers", 1, failure.id, failure.kind, 3)
        if way == "raise":
            all_say(friend, workers, "raised RuntimeError: out of luck")
        with this_host().spawn_procs(name="late") as late:
            # One that begins later is told too.
            all_say(late.spawn("late", Friend), workers, REASON)
    assert told.empty()


def test_friends_of_an_actor_s_workers_hear_why() -> None:
    with this_host().spawn_procs({"friends": 2}, name="all") as procs:
        boss: Any = procs.slice(friends=0).spawn("boss", Boss)
        friend: Any = procs.slice(friends=1).spawn("friend", Friend)
        workers = boss.reference.call_one().get(timeout=WITHIN)
        give_up(boss, workers)
        until_heard(friend, workers)
        all_say(friend, workers, "1 restart is allowed within 60 s, and this would be number 2")
        # So does the script, which is not the owner here.
        with pytest.raises(SupervisionError, match="1 restart is allowed"):
            workers.slice(gpus=0).who.call_one().get(timeout=WITHIN)


@pytest.mark.full
def test_friends_on_other_hosts_hear_why(told: Any) -> None:
    with (
        LocalCluster(hosts=3) as cluster,
        cluster.attach() as hosts,
        hosts.spawn_procs(name="friends") as friends,
    ):
        team = [friends.slice(hosts=place).spawn("friend", Friend) for place in range(3)]
        with hosts.slice(hosts=0).spawn_procs({"gpus": 2}, name="gpus") as procs:
            workers: Any = procs.spawn("workers", Worker, supervise=OneForOne(intensity=0, period=60.0))
            workers.who.call().get(timeout=WITHIN)
            workers.slice(gpus=1).leave.broadcast(3)
            told.next()
            for friend in team:
                all_say(friend, workers, REASON)
        with hosts.slice(hosts=1).spawn_procs(name="bosses") as bosses:
            boss: Any = bosses.spawn("boss", Boss)
            workers = boss.reference.call_one().get(timeout=WITHIN)
            give_up(boss, workers)
            for friend in team:
                until_heard(friend, workers)
                all_say(friend, workers, "1 restart is allowed within 60 s, and this would be number 2")
    assert told.empty()


def give_up(boss: Any, workers: Any) -> None:
    """Let rank 1 exit until its boss's policy gives it up."""
    until = time.monotonic() + 2 * WITHIN
    while not boss.reports.call_one().get(timeout=WITHIN):
        assert time.monotonic() < until
        workers.slice(gpus=1).leave.broadcast(3)
