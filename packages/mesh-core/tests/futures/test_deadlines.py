"""Deadlines and cancellation: what is cancelled is cancelled everywhere, and nothing waits forever."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from core_owners import suspend
from flow_samples import Blocker, Producer, Valve, Worker, most

from mesh_core import Accumulator, ActorTimeout, ProcMesh

pytestmark = pytest.mark.python
T = TypeVar("T")


@pytest.fixture
def workers(procs: ProcMesh) -> Iterator[Any]:
    """One actor in each process."""
    mesh = procs.spawn("worker", Worker)
    mesh.initialized.get(timeout=30)
    yield mesh
    mesh.stop().get(timeout=30)


@pytest.fixture
def blocker(procs: ProcMesh) -> Iterator[Any]:
    """A sync actor that blocks, and the valve that unblocks it."""
    one = procs.slice(hosts=0, gpus=0)
    valve = one.spawn("valve", Valve)
    valve.shut.call_one().get(timeout=30)
    mesh = one.spawn("blocker", Blocker)
    mesh.__dict__["valve"] = valve
    yield mesh
    valve.open.call_one().get(timeout=30)
    mesh.stop().get(timeout=30)
    valve.stop().get(timeout=30)


def at(mesh: Any, host: int, gpu: int) -> Any:
    return mesh.slice(hosts=host, gpus=gpu)


def begun(call: Callable[[float], T], workers: Any, who: str) -> tuple[T, float]:
    """Call with a deadline that is long enough to begin at all of them; one that arrives too late is not run."""
    timeout = 0.05
    while True:
        made = call(timeout)
        # It arrives behind the call.
        if all(f"wait {who}" in log for log in workers.seen.call().get(timeout=30).values()):
            return made, timeout
        timeout *= 2


def test_a_deadline_cancels_the_coroutine(workers: Any) -> None:
    one = at(workers, 0, 1)
    future, timeout = begun(lambda timeout: one.wait.with_options(timeout=timeout).call_one("a"), one, "a")
    with pytest.raises(ActorTimeout) as caught:
        future.get(timeout=30)
    error = caught.value
    assert "actor 'worker' on rank 1" in str(error)
    assert (error.actor, error.rank) == ("worker", 1)
    assert error.timeout == pytest.approx(timeout)
    one.until.call_one("cancelled a").get(timeout=30)


def test_a_deadline_applies_even_if_nobody_waits(workers: Any) -> None:
    one = at(workers, 0, 0)
    future, _ = begun(lambda timeout: one.wait.with_options(timeout=timeout).call_one("b"), one, "b")
    # The receiver enforces it by itself: this process has not looked at the future.
    one.until.call_one("cancelled b").get(timeout=30)
    with pytest.raises(ActorTimeout):
        future.get(timeout=30)


def test_late_ranks_are_named(procs: ProcMesh, workers: Any) -> None:
    some = workers.slice(hosts=1)
    with pytest.raises(ActorTimeout, match=r"actors 'worker' on ranks 2, 3, host .*have not answered"):
        some.wait.with_options(timeout=0.05).call("c").get(timeout=30)
    with pytest.raises(ActorTimeout, match=r"on rank 3.*goes on, and can be waited for again") as caught:
        at(workers, 1, 1).wait.call_one("d").get(timeout=0.05)
    assert caught.value.rank == 3


def test_a_stopped_process_is_reported_as_stopped(procs: ProcMesh, workers: Any) -> None:
    pid = procs.spawn("pids", Producer).pid.call().get(timeout=30).values()[2]
    suspend(pid)
    try:
        with pytest.raises(
            ActorTimeout, match=rf"process {pid} of rank 2 is stopped by a signal; SIGCONT resumes it"
        ):
            workers.until.with_options(timeout=0.3).call("never").get(timeout=30)
    finally:
        os.kill(pid, signal.SIGCONT)
    at(workers, 1, 0).left.call_one().get(timeout=30)


def test_nested_calls_inherit_the_remaining_time(workers: Any) -> None:
    one, other = at(workers, 0, 0), at(workers, 0, 1)
    assert one.left_at.call_one(other, None).get(timeout=30) is None
    left = one.left_at.with_options(timeout=20.0).call_one(other, None).get(timeout=30)
    assert 0 < left <= 20
    left = one.left_at.with_options(timeout=20.0).call_one(other, 5.0).get(timeout=30)
    assert 0 < left <= 5
    left = one.left_at.with_options(timeout=20.0).call_one(other, 50.0).get(timeout=30)
    assert 5 < left <= 20
    # The deadline ends with the message that had it.
    assert one.left_at.call_one(other, None).get(timeout=30) is None


@pytest.mark.parametrize("how", ["reduced", "folded"])
def test_combined_and_folded_calls_inherit_the_deadline(workers: Any, how: str) -> None:
    one = at(workers, 0, 0)
    assert one.left_at_all.call_one(workers, how).get(timeout=30) is None
    left = one.left_at_all.with_options(timeout=20.0).call_one(workers, how).get(timeout=30)
    assert 0 < left <= 20


def test_a_combined_call_passes_its_deadline_to_its_ranks(workers: Any) -> None:
    left = workers.left.with_options(reduce=most, timeout=20.0).call().get(timeout=30)
    assert 0 < left <= 20
    # The receivers enforce it: this process does not look at the future before.
    wait = workers.wait.with_options(reduce=most)
    future, _ = begun(lambda timeout: wait.with_options(timeout=timeout).call("e"), workers, "e")
    workers.until.call("cancelled e").get(timeout=30)
    with pytest.raises(ActorTimeout):
        future.get(timeout=30)
    assert 0 < Accumulator(workers.left.with_options(timeout=20.0), None, most).accumulate().get() <= 20


def test_options_that_are_not_given_keep_their_values(workers: Any) -> None:
    one = at(workers, 0, 0)
    for left in (
        one.left.with_options(timeout=20.0).with_options(block=False),
        one.left.with_options(timeout=20.0).with_options(),
        one.left.with_options(reduce=most).with_options(timeout=20.0),
        one.left.with_options(timeout=20.0).with_options(reduce=most),
    ):
        found = left.call().get(timeout=30)
        # Combined calls have one value, others one for each rank.
        assert 0 < (found if isinstance(found, float) else found.item()) <= 20
    assert one.left.with_options(timeout=20.0).with_options(timeout=None).call_one().get(timeout=30) is None
    both = one.left.with_options(reduce=most).with_options(reduce=None).call().get(timeout=30)
    assert both.values() == [None]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"timeout": "5"},
            TypeError,
            r"with_options\(timeout=\) must be a number of seconds or None, got '5'",
        ),
        ({"timeout": True}, TypeError, "got True"),
        ({"timeout": 0}, ValueError, "must be a positive number of seconds, got 0"),
        ({"timeout": -1e-300}, ValueError, "must be a positive number of seconds, got -1e-300"),
        ({"timeout": float("nan")}, ValueError, "got nan"),
        ({"block": 1}, TypeError, r"with_options\(block=\) must be True or False, got 1"),
    ],
)
def test_options_of_wrong_types_are_refused(
    workers: Any, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        workers.left.with_options(**options)


def test_a_deadline_reaches_through_a_sync_endpoint(workers: Any, blocker: Any) -> None:
    other = at(workers, 1, 0)
    timeout = 0.2
    # One of the two calls may come too late to begin.
    while "wait nested" not in other.seen.call_one().get(timeout=30):
        with pytest.raises(ActorTimeout):
            blocker.nested.with_options(timeout=timeout).call_one(other).get(timeout=30)
        # Its thread is free again: the nested call timed out there.
        assert blocker.seen.call_one().get(timeout=30) == []
        timeout *= 2
    other.until.call_one("cancelled nested").get(timeout=30)


def test_a_call_that_expires_in_the_queue_is_not_run(blocker: Any) -> None:
    first = blocker.block.call_one("first")
    late = blocker.block.with_options(timeout=0.05).call_one("late")
    with pytest.raises(ActorTimeout):
        late.get(timeout=30)
    unseen = blocker.block.with_options(timeout=0.05).call_one("unseen")
    threading.Event().wait(0.1)  # time itself is what is tested
    blocker.valve.open.call_one().get(timeout=30)
    assert first.get(timeout=30) == "first"
    assert blocker.seen.call_one().get(timeout=30) == ["first"]
    with pytest.raises(ActorTimeout):
        unseen.get(timeout=30)


def test_cancel_reaches_nested_calls(workers: Any) -> None:
    one, other = at(workers, 0, 0), at(workers, 1, 1)
    future = one.wait_at.call_one(other, "e")
    other.until.call_one("wait e").get(timeout=30)
    assert future.cancel()
    one.until.call_one("cancelled e").get(timeout=30)
    other.until.call_one("cancelled e").get(timeout=30)


def test_cancelling_an_await_cancels_the_call(workers: Any) -> None:
    one, other = at(workers, 0, 1), at(workers, 1, 0)

    async def main() -> None:
        task = asyncio.ensure_future(one.wait_at.call_one(other, "f").as_asyncio())
        await other.until.call_one("wait f")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        waiting = one.wait.call_one("g")
        await one.until.call_one("wait g")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await waiting

    asyncio.run(main())
    other.until.call_one("cancelled f").get(timeout=30)
    one.until.call_one("cancelled g").get(timeout=30)


def test_cancelling_a_stream(workers: Any) -> None:
    stream = workers.wait.stream("h")
    workers.until.call("wait h").get(timeout=30)
    assert stream.cancel()
    workers.until.call("cancelled h").get(timeout=30)
    assert not stream.cancel()


def test_a_stream_has_one_deadline(workers: Any) -> None:
    stream, _ = begun(lambda timeout: workers.wait.with_options(timeout=timeout).stream("i"), workers, "i")
    for future in stream:
        with pytest.raises(ActorTimeout):
            future.get(timeout=30)
    workers.until.call("cancelled i").get(timeout=30)


def test_a_stream_may_be_read_from_its_end(workers: Any) -> None:
    async def backwards() -> list[Any]:
        futures = [future async for future in workers.left.stream()]
        return [await future for future in reversed(futures)]

    for _ in range(30):
        assert [future.get(timeout=20) for future in reversed(list(workers.left.stream()))] == [None] * 4
        assert asyncio.run(backwards()) == [None] * 4


def test_a_cancelled_sync_endpoint_runs_to_its_end(procs: ProcMesh, blocker: Any) -> None:
    running = blocker.block.call_one("running")
    skipped = blocker.block.call_one("skipped")
    assert skipped.cancel()
    assert running.cancel()
    # The process takes cancellations and spawns in their order.
    fence = procs.slice(hosts=0, gpus=0).spawn("fence", Valve)
    fence.initialized.get(timeout=30)
    blocker.valve.open.call_one().get(timeout=30)
    assert blocker.seen.call_one().get(timeout=30) in (["running"], [])
    with pytest.raises(asyncio.CancelledError):
        running.get()
    fence.stop().get(timeout=30)


@pytest.mark.parametrize("seed", range(4))
def test_random_waits_cancellations_and_answers_all_end(workers: Any, blocker: Any, seed: int) -> None:
    """Calls that are answered, cancelled, timed out and dropped at random: each ends, and the actors keep working."""
    dice = random.Random(seed)
    blocker.valve.open.call_one().get(timeout=30)
    open_calls: list[tuple[str, Any]] = []
    for n in range(150):
        match dice.randrange(5):
            case 0:
                open_calls.append(("value", at(workers, 0, dice.randrange(2)).one_at_a_time.call_one(str(n))))
            case 1:
                future = workers.wait.call(str(n))
                future.cancel()
                open_calls.append(("cancelled", future))
            case 2:
                limit = dice.choice([0.0005, 0.002, 0.01])
                open_calls.append(("timeout", workers.wait.with_options(timeout=limit).call(str(n))))
            case 3:
                open_calls.append(("value", blocker.block.call_one(str(n))))
            case _:
                future = blocker.block.call_one(str(n))
                future.cancel()
    dice.shuffle(open_calls)
    for kind, future in open_calls:
        error = future.exception(timeout=30) if kind != "cancelled" else None
        assert isinstance(error, ActorTimeout) if kind == "timeout" else error is None
    assert workers.left.call().get(timeout=30).values() == [None] * 4
