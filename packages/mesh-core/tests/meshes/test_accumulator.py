"""Folding over replies as they arrive."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from core_samples import Coroutines
from port_samples import Responder, Summand, counts

from mesh_core import Accumulator, ActorError, ActorTimeout, ProcMesh, SupervisionError, this_host

pytestmark = pytest.mark.usefixtures("runtime")

SOON = 30.0


def add(total: float, value: float) -> float:
    return total + value


@pytest.fixture
def summands(procs: ProcMesh) -> Iterator[Any]:
    mesh = procs.spawn("summands", Summand)
    yield mesh
    mesh.stop().get()


def test_folds_over_all(summands: Any) -> None:
    ranks = Accumulator(summands.rank, 100, add)
    assert ranks.accumulate(2).get(timeout=SOON) == 112
    assert ranks.accumulate(factor=1).get(timeout=SOON) == 106
    largest = Accumulator(summands.rank_async, -1, max)
    future = largest.accumulate(1)
    assert (future.get(timeout=SOON), future.get(), future.done()) == (3, 3, True)


def test_awaited(summands: Any) -> None:
    async def main() -> list[float]:
        ranks = Accumulator(summands.rank_async, 0, add)
        return list(await asyncio.gather(*(ranks.accumulate(n).as_asyncio() for n in range(5))))

    assert asyncio.run(main()) == [0, 6, 12, 18, 24]


def test_folds_while_it_waits(procs: ProcMesh) -> None:
    """The first replies are folded before the last arrives, and a timeout keeps what was folded."""
    gates = procs.spawn("gates", Coroutines)
    seen: list[Any] = []
    future = Accumulator(gates.enter, 0, lambda count, key: seen.append(key) or count + 1).accumulate("door")
    flat = gates.flatten("all")
    flat.slice(all=slice(0, 3)).open.call("door").get()
    while len(seen) < 3:
        with pytest.raises(ActorTimeout):
            future.get(timeout=0.01)
    assert not future.done()
    flat.slice(all=3).open.call_one("door").get()
    assert future.get(timeout=SOON) == 4
    assert len(seen) == 4
    gates.stop().get()


def test_the_first_failure_is_raised(summands: Any) -> None:
    total = Accumulator(summands.raises_at, 0, add)
    with pytest.raises(ValueError, match="rank 2 has no result") as caught:
        total.accumulate([2]).get(timeout=SOON)
    assert isinstance(caught.value, ActorError)
    assert caught.value.rank == 2


def test_an_error_of_the_function(summands: Any) -> None:
    def refuse(total: int, value: float) -> int:
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        Accumulator(summands.rank, 0, refuse).accumulate().get(timeout=SOON)


def test_a_death_fails_the_fold(runtime: None) -> None:
    with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
        mesh: Any = procs.spawn("summands", Summand)
        future = Accumulator(mesh.wait_at, 0, add).accumulate([1])
        mesh.slice(gpus=0).nothing.call_one().get()
        pid = procs.pids[1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SupervisionError):
            future.get(timeout=SOON)


def test_cancellation_and_deadline(procs: ProcMesh) -> None:
    gates = procs.spawn("gates", Coroutines)
    future = Accumulator(gates.hold, 0, add).accumulate()
    gates.holding.call().get()
    assert future.cancel()
    assert gates.cancelled.call().get(timeout=SOON).values() == [True] * 4
    with pytest.raises(asyncio.CancelledError):
        future.get()
    with pytest.raises(ActorTimeout):
        Accumulator(gates.hold.with_options(timeout=0.05), 0, add).accumulate().get()
    gates.stop().get()


def test_bad_use(procs: ProcMesh, summands: Any) -> None:
    with pytest.raises(TypeError, match="endpoint of a mesh"):
        Accumulator(print, 0, add)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes at most 1"):
        Accumulator(summands.rank, 0, add).accumulate(1, 2)
    responders: Any = procs.spawn("responders", Responder)
    with pytest.raises(ValueError, match="any number of times"):
        Accumulator(responders.often, 0, add)
    responders.stop().get()
    assert counts()["calls"] == 0
