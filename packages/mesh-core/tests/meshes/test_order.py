"""ORD-1: messages from one sender to one receiver arrive in the order in which they were sent, whatever the adverb."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from order_samples import AsyncListener, AsyncSpeaker, Listener, Speaker, Talk

from mesh_core import ProcMesh

SOON = 60.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_each_senders_messages_arrive_in_order_whatever_the_adverb(procs: ProcMesh, seed: int) -> None:
    listeners: list[Any] = [procs.spawn("threads", Listener), procs.spawn("loops", AsyncListener)]
    speakers: list[Any] = [procs.spawn("speakers", Speaker), procs.spawn("async", AsyncSpeaker)]
    rounds = 80
    calls = [each.speak.call(listeners, seed, rounds) for each in speakers]
    talks = [Talk(("script", thread), seed) for thread in range(2)]

    def speak(talk: Talk) -> None:
        for _ in range(rounds):
            talk.say(talk.dice.choice(listeners))
        for each in listeners:
            talk.hush(each)
        for future in talk.due:
            future.get(timeout=SOON)

    thread = threading.Thread(target=speak, args=(talks[0],))
    thread.start()
    speak(talks[1])
    thread.join(timeout=SOON)
    sent = sum(talk.sent for talk in talks) + sum(sum(call.get(timeout=SOON).values()) for call in calls)
    # Each sender has been told that its message was answered, or sends its question behind it.
    reports = [report for each in listeners for report in each.report.call().get(timeout=SOON).values()]
    assert [wrong for _, wrongs in reports for wrong in wrongs] == []
    assert sum(heard for heard, _ in reports) == sent
    for each in [*listeners, *speakers]:
        each.stop().get(timeout=SOON)


@pytest.mark.slow
@pytest.mark.parametrize("cls", [Listener, AsyncListener])
def test_nothing_overtakes_a_spawn_nor_is_overtaken_by_a_stop(procs: ProcMesh, cls: type[Any]) -> None:
    speakers: Any = procs.spawn("speakers", Speaker)
    for point in ({"hosts": 0, "gpus": 1}, {"hosts": procs.sizes["hosts"] - 1, "gpus": 0}):
        ends = speakers.slice(**point).spawn_and_use.call_one(procs, cls, 4, point).get(timeout=SOON)
        counts = ["(2, [])", "(4, [])"]  # on the other processes, and here
        assert ends == [(0, 2, {3}, counts, None)] * 4
    speakers.stop().get(timeout=SOON)
