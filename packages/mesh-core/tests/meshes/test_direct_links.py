"""Workers that send each other much do so past their host's agent; what is promised of messages stays as it is."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_owners import lines, slay, suspend
from talk_samples import MUCH, SOON, Counter, Friend, Mortal, Place, Teller, wait_for

from mesh_core import ProcMesh, configured, this_host

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture(scope="module")
def procs(runtime: None) -> Iterator[ProcMesh]:
    """Four processes, shared by the tests."""
    with this_host().spawn_procs(per_host={"hosts": 2, "gpus": 2}, name="linked") as procs:
        procs.initialized.get()
        yield procs


def one(procs: ProcMesh, number: int) -> ProcMesh:
    """One of the four shared processes."""
    return procs.slice(hosts=number // 2, gpus=number % 2)


@pytest.mark.parametrize("most", [0, 1, 64])
def test_everybody_talks_to_everybody(most: int) -> None:
    with configured(direct_links=most), this_host().spawn_procs({"gpus": 4}) as procs:
        places: Any = procs.spawn("places", Place)
        friends: Any = procs.spawn("friends", Friend)
        each = [places.slice(gpus=n) for n in range(4)]
        calls = [friends.talk.call(each), friends.chat.call(each)]
        assert all(all(call.get(timeout=SOON).values()) for call in calls)


def test_casts_and_single_messages_of_an_actor_keep_their_order(procs: ProcMesh) -> None:
    places: Any = procs.spawn("places", Place)
    for host in range(2):
        friend: Any = one(procs, 3 * host).spawn("friend", Friend)
        nearest: Any = places.slice(hosts=1, gpus=0)
        assert friend.tell_all.call_one(places, nearest, 3 * MUCH).get(timeout=SOON) == list(range(3 * MUCH))
        friend.stop().get(timeout=SOON)
    places.stop().get(timeout=SOON)


def test_what_the_script_sent_before_is_there_before(procs: ProcMesh) -> None:
    place: Any = one(procs, 0).spawn("place", Place)
    friend: Any = one(procs, 1).spawn("friend", Friend)
    assert friend.talk.call_one([place]).get(timeout=SOON)
    for number in range(3 * MUCH):
        place.set.broadcast(number)
        assert friend.ask.call_one(place).get(timeout=SOON) == number
    friend.stop().get(timeout=SOON)
    place.stop().get(timeout=SOON)


def test_what_an_actor_told_another_before_it_answered_is_there_before(procs: ProcMesh) -> None:
    place: Any = one(procs, 0).spawn("place", Place)
    friend: Any = one(procs, 1).spawn("friend", Friend)
    between: Any = one(procs, 2).spawn("between", Friend)
    assert friend.talk.call_one([place]).get(timeout=SOON)
    for number in range(MUCH):
        friend.tell.call_one(place, number).get(timeout=SOON)
        assert place.get.call_one().get(timeout=SOON) == number
    for number in range(MUCH):
        between.have_told.call_one(friend, place, number).get(timeout=SOON)
        assert place.get.call_one().get(timeout=SOON) == number
        assert between.ask.call_one(place).get(timeout=SOON) == number
    for actors in (friend, between, place):
        actors.stop().get(timeout=SOON)


@pytest.mark.parametrize("what", ["procs", "actors"])
def test_what_was_sent_to_what_is_stopped_then_is_handled(procs: ProcMesh, tmp_path: Path, what: str) -> None:
    log = str(tmp_path / "log")
    friend: Any = one(procs, 1).spawn("friend", Friend)
    homes = this_host().spawn_procs({"gpus": 1})
    writer: Any = homes.spawn("writer", Mortal, log)
    times = 5
    for _ in range(times):
        # Much, so that there is a link, and a little more.
        friend.tell_to_write.call_one(writer, MUCH).get(timeout=SOON)
    (homes if what == "procs" else writer).stop().get(timeout=SOON)
    assert lines(log) == ["lives"] * (times * MUCH) + ["ended"]
    homes.stop().get(timeout=SOON)
    friend.stop().get(timeout=SOON)


def test_what_an_actor_has_spawned_past_the_agent_ends_with_it(fault_tolerant: None, tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    with this_host().spawn_procs({"gpus": 1}) as owners, this_host().spawn_procs({"gpus": 1}) as homes:
        place: Any = homes.spawn("place", Place)
        friend: Any = owners.spawn("friend", Friend)
        friend.spawn_at.call_one(homes, place, log).get(timeout=SOON)
        assert lines(log) == ["lives"]
        slay(owners)
        wait_for(lambda: lines(log) == ["lives", "ended"])
        assert place.echo.call_one(1).get(timeout=SOON) == 1


def test_who_calls_one_that_dies_hears_of_it(fault_tolerant: None, tmp_path: Path) -> None:
    with (
        this_host().spawn_procs({"gpus": 1}) as callers,
        this_host().spawn_procs({"gpus": 1}, name="dying") as homes,
    ):
        place: Any = homes.spawn("place", Place)
        friend: Any = callers.spawn("friend", Friend)
        talking = friend.talk_until_it_ends.call_one(place, str(tmp_path))
        wait_for((tmp_path / "ready").exists)
        slay(homes)
        assert "SIGKILL" in talking.get(timeout=SOON)
        # The caller goes on, with others.
        other: Any = callers.spawn("place", Place)
        assert friend.talk.call_one([other]).get(timeout=SOON)


@pytest.mark.full
def test_who_stands_still_itself_gives_up_no_sender(tmp_path: Path) -> None:
    with this_host().spawn_procs({"gpus": 3}) as procs:
        places: Any = procs.spawn("places", Place)
        friends: Any = procs.spawn("friends", Friend)
        receiver, between, sender = range(3)
        stopped, still = procs.pids[receiver], procs.pids[sender]
        assert stopped and still
        place, friend = places.slice(gpus=receiver), friends.slice(gpus=between)
        assert friend.talk.call_one([place]).get(timeout=SOON)
        assert friends.slice(gpus=sender).talk.call_one([place, places.slice(gpus=between)]).get(timeout=SOON)
        end = tmp_path / "end"
        said = friends.slice(gpus=sender).set_and_have_checked.call_one(place, friend, str(end))
        for _ in range(4):
            time.sleep(0.3)  # they talk meanwhile
            suspend(still)  # often in the middle of sending
            time.sleep(0.2)  # the receiver begins to wait for it
            suspend(stopped)
            time.sleep(1.2)  # longer than a sender is waited for
            os.kill(stopped, signal.SIGCONT)
            time.sleep(0.2)  # a chance to do it wrong
            os.kill(still, signal.SIGCONT)
        end.touch()
        last = said.get(timeout=SOON)
        wait_for(lambda: place.report.call_one().get(timeout=SOON)[0] == last)
        assert place.report.call_one().get(timeout=SOON) == (last, [])


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2))
def test_under_kills_nothing_is_lost_doubled_or_out_of_turn(fault_tolerant: None, seed: int) -> None:
    dice = random.Random(seed)
    with this_host().spawn_procs({"gpus": 4}) as procs, this_host().spawn_procs({"gpus": 3}) as tellers:
        counters: Any = procs.spawn("counters", Counter)
        each = [counters.slice(gpus=n) for n in range(4)]
        telling: Any = tellers.spawn("tellers", Teller)
        runs = [telling.slice(gpus=n).run.call_one(counters, each, 10 * seed + n, 6.0) for n in range(3)]
        time.sleep(1.0)  # they talk meanwhile
        victims = dice.sample(range(4), 2)
        for victim in victims:
            slay(procs, victim)
            time.sleep(dice.uniform(0.2, 1.0))
        slay(tellers, 2)
        said = {tellers.pids[n]: runs[n].get(timeout=SOON) for n in range(2)}
        for survivor in set(range(4)) - set(victims):
            heard, wrong = each[survivor].report.call_one().get(timeout=SOON)
            assert wrong == []
            assert {pid: heard[pid] for pid in said} == said
