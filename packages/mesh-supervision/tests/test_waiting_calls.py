"""Calls that wait for their actor's next life, under the policies that bring it back, and those that do not."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from supervised import WITHIN

from mesh_core import Actor, ProcMesh, SupervisionError, endpoint, this_host
from mesh_core.policies import Policy
from mesh_supervision import Backoff, CircuitBreaker, Ignore, Levels, OneForAll, OneForOne, RestForOne

pytestmark = pytest.mark.slow

Slay = Callable[[ProcMesh, int], int]


class Teller(Actor):
    """Tells which process it is in."""

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint(on_restart="retry", idempotent=True)
    def pid_of_any_life(self) -> int:
        return os.getpid()


def pids(tellers: Any) -> list[int]:
    """Each rank's process, whichever life it is in."""
    calls = [teller.pid_of_any_life.call_one() for _, teller in tellers]
    return [call.get(timeout=WITHIN) for call in calls]


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize(
    "policy",
    [
        OneForOne(intensity=9, period=60.0, backoff=Backoff(initial=0.01, free=0)),
        OneForAll(intensity=9, period=60.0),
        RestForOne(intensity=9, period=60.0),
        CircuitBreaker(OneForOne(intensity=1, period=60.0), cooldown=0.05, trips=3),
        Levels(OneForOne(intensity=1, period=60.0), OneForAll(intensity=9, period=60.0)),
    ],
    ids=["one_for_one", "one_for_all", "rest_for_one", "breaker", "levels"],
)
def test_no_call_fails_while_several_die(policy: Policy, slay: Slay) -> None:
    with this_host().spawn_procs({"gpus": 3}, supervise=Ignore()) as procs:
        tellers: Any = procs.spawn("tellers", Teller, supervise=policy)
        before = pids(tellers)
        slay(procs, 2)
        slay(procs, 1)
        after = pids(tellers)
        assert after[0] == before[0]
        assert {*after[1:]}.isdisjoint(before)


@pytest.mark.parametrize(
    "policy",
    [OneForOne(intensity=9, period=60.0, restart="temporary"), OneForAll(intensity=0, period=60.0)],
    ids=["temporary", "intensity"],
)
def test_a_rank_that_stays_down_is_not_waited_for(policy: Policy, slay: Slay, told: Any) -> None:
    with this_host().spawn_procs({"gpus": 2}, supervise=Ignore()) as procs:
        tellers: Any = procs.spawn("tellers", Teller, supervise=policy)
        pids(tellers)
        slay(procs, 1)
        error = tellers.slice(gpus=1).pid_of_any_life.call_one().exception(timeout=WITHIN)
        assert isinstance(error, SupervisionError)
