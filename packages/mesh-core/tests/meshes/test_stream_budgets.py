"""Items of generators and values sent to ports of streamed calls are limited if the caller reads slowly."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from flow_samples import Fountain, Level, Recorder, Valve

from mesh_core import ProcMesh, configured, shutdown, this_host
from mesh_core._common.current import current

MIB = 2**20
BUDGET = 4 * MIB
INITIAL = MIB
SIZE = 100_000
SOON = 30.0
HELD = (BUDGET + INITIAL) // SIZE
"""This many items fit if the caller reads nothing."""

WAYS = ["items", "items_async", "by_port", "by_port_async", "elsewhere"]


@pytest.fixture(scope="module")
def procs() -> Iterator[ProcMesh]:
    """Two processes; callers have small budgets."""
    shutdown()
    with configured(mailbox_budget=BUDGET), this_host().spawn_procs({"gpus": 2}, name="streams") as procs:
        procs.initialized.get(timeout=60)
        yield procs
    shutdown()


@pytest.fixture
def fountain(procs: ProcMesh) -> Iterator[Any]:
    one = procs.slice(gpus=0)
    fountain, level = one.spawn("fountain", Fountain), one.spawn("level", Level)
    fountain.initialized.get(timeout=SOON)
    fountain.__dict__["level"] = level
    yield fountain
    level.stop().get(timeout=SOON)
    fountain.stop().get(timeout=SOON)


def lag(fountain: Any) -> int:
    """Wait until as much was sent as a caller that reads nothing takes; return how many items."""
    while (made := fountain.level.made.call_one().get(timeout=SOON)) < 30:
        pass
    return made  # type: ignore[no-any-return]


def start(fountain: Any, way: str, count: int) -> Any:
    other = (fountain,) if way == "elsewhere" else ()
    return getattr(fountain, way).stream(SIZE, count, *other)


@pytest.mark.parametrize("way", WAYS)
def test_a_caller_that_reads_nothing_holds_its_budget(fountain: Any, way: str) -> None:
    stream = start(fountain, way, 400)
    made = lag(fountain)
    assert made <= HELD + 2
    for number, item in enumerate(stream):
        assert item.get(timeout=SOON)[0] == number
        # The sender is at most the budget ahead of the reader.
        if number % 50 == 0:
            assert fountain.level.made.call_one().get(timeout=SOON) <= number + HELD + 3
    assert number == 399
    assert fountain.level.made.call_one().get(timeout=SOON) == 400


@pytest.mark.parametrize("way", WAYS)
def test_a_caller_that_reads_in_a_coroutine(fountain: Any, way: str) -> None:
    async def read() -> list[int]:
        return [(await item)[0] async for item in start(fountain, way, 200)]

    assert asyncio.run(read()) == list(range(200))


@pytest.mark.parametrize("way", WAYS)
def test_futures_may_be_collected_first(fountain: Any, way: str) -> None:
    futures = list(start(fountain, way, 200))
    assert futures[-1].get(timeout=SOON)[0] == 199
    assert [future.get(timeout=SOON)[0] for future in futures] == list(range(200))


@pytest.mark.parametrize("way", ["items", "items_async"])
@pytest.mark.parametrize("how", ["cancel", "drop", "leave"])
def test_giving_up_the_stream_ends_the_generator(fountain: Any, way: str, how: str) -> None:
    stream = start(fountain, way, 10**9)
    lag(fountain)
    if how == "cancel":
        stream.cancel()
    elif how == "leave":
        for item in stream:
            item.get(timeout=SOON)
            break
    del stream
    gc.collect()
    # The next one has its turn only once that has ended.
    assert fountain.ended.call_one().get(timeout=SOON)


@pytest.mark.parametrize("way", WAYS)
def test_an_error_comes_after_the_items(fountain: Any, way: str) -> None:
    other = (fountain,) if way == "elsewhere" else ()
    stream = getattr(fountain, way).stream(SIZE, 100, *other, fail=True)
    lag(fountain)
    *items, last = stream
    assert [item.get(timeout=SOON)[0] for item in items] == list(range(100))
    with pytest.raises(ValueError, match="after 100"):
        last.get(timeout=SOON)


def test_items_that_a_coroutine_does_not_await_come_before_the_end(fountain: Any) -> None:
    stream = fountain.carelessly.stream(SIZE, 100)
    assert [item.get(timeout=SOON)[0] for item in stream] == list(range(100))


def test_the_port_of_a_stream_travels_with_a_message_that_waits(procs: ProcMesh, fountain: Any) -> None:
    one = procs.slice(gpus=1)
    valve, slow = one.spawn("valve", Valve), one.spawn("slow", Recorder)
    valve.shut.call_one().get(timeout=SOON)
    stream = fountain.hand_on.stream(slow, SIZE, 100)
    # It has sent everything, and no longer waits.
    fountain.meters.call_one().get(timeout=SOON)
    valve.open.call_one().get(timeout=SOON)
    assert [item.get(timeout=SOON) for item in stream] == [0, 1, 2, 3, 4]
    slow.stop().get(timeout=SOON)
    valve.stop().get(timeout=SOON)


@pytest.mark.usefixtures("fault_tolerant")
def test_the_death_of_the_caller_ends_the_generator(fountain: Any) -> None:
    with this_host().spawn_procs(name="mortal") as mortal:
        reader = mortal.spawn("reader", Fountain)
        reader.begin.call_one(fountain, SIZE).get(timeout=SOON)
        lag(fountain)
        os.kill(reader.pid.call_one().get(timeout=SOON), signal.SIGKILL)
        assert fountain.ended.call_one().get(timeout=SOON)


def test_an_actor_that_reads_its_own_process_s_stream(procs: ProcMesh, fountain: Any) -> None:
    reader = procs.slice(gpus=0).spawn("reader", Fountain)
    assert reader.read.call_one(fountain, SIZE, 200).get(timeout=SOON) == 200
    assert reader.read_async.call_one(fountain, SIZE, 200).get(timeout=SOON) == 200
    reader.stop().get(timeout=SOON)


def test_nothing_is_kept_of_streams_that_have_ended(fountain: Any) -> None:
    def count() -> int:
        return fountain.meters.call_one().get(timeout=SOON)  # type: ignore[no-any-return]

    before = count()
    for _ in range(20):
        assert len(list(fountain.items.stream(10, 3))) == 3
    assert count() <= before + 1
    assert current().runtime.counts()["deferred"] == 0
