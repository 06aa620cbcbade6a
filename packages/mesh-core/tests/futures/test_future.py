"""Futures: waiting for results in scripts, threads and coroutines, cancellation, deadlines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from core_samples import Coroutines, Gate

from mesh_core import ActorError, ActorTimeout, Future, MeshError, ProcMesh, configured, this_host

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]


@pytest.fixture
def one(echo: Any) -> Any:
    return echo.slice(hosts=0, gpus=0)


@pytest.fixture
def held(procs: ProcMesh) -> Iterator[Any]:
    """One actor with endpoints that do not return."""
    mesh = procs.slice(hosts=0, gpus=1).spawn("held", Coroutines)
    yield mesh
    mesh.stop().get()


@pytest.fixture
def other(procs: ProcMesh) -> Iterator[Any]:
    """Another such actor, in another process."""
    mesh = procs.slice(hosts=1, gpus=1).spawn("other", Coroutines)
    yield mesh
    mesh.stop().get()


def test_get_may_be_called_repeatedly(one: Any) -> None:
    future = one.echo.call_one([1])
    first = future.get()
    assert first == [1]
    assert future.get() is first
    assert future.result() is first
    assert future.done()
    assert future.exception() is None


def test_an_error_is_raised_by_every_get(one: Any) -> None:
    future = one.fail.call_one(ValueError("no"))
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            future.get()
    error = future.exception()
    assert isinstance(error, ValueError) and isinstance(error, ActorError)
    assert future.exception() is error


def test_an_error_raised_twice_does_not_grow_its_traceback(one: Any) -> None:
    future = one.fail.call_one(ValueError("no"))

    def depth() -> int:
        try:
            future.get()
        except ValueError as error:
            trace, count = error.__traceback__, 0
            while trace is not None:
                trace, count = trace.tb_next, count + 1
            return count
        raise AssertionError("nothing was raised")

    assert depth() == depth()


def test_done_never_waits(held: Any) -> None:
    future = held.enter.call_one("x")
    assert not future.done()
    held.open.call_one("x").get()
    assert future.get() == "x"
    assert future.done()


def test_the_repr_shows_the_state(one: Any, held: Any) -> None:
    waiting = held.enter.call_one("x")
    assert repr(waiting) == "<Future of held.enter: waiting>"
    held.open.call_one("x").get()
    waiting.get()
    assert repr(waiting) == "<Future of held.enter: done>"
    failed = one.fail.call_one(KeyError())
    failed.exception()
    assert repr(failed) == "<Future of echo.fail: failed>"


def test_iterating_over_a_future_says_to_wait(one: Any) -> None:
    future = one.echo.call_one({"a": 1})
    with pytest.raises(
        TypeError, match=r"cannot iterate over <Future of echo\.echo: \w+>: wait for its result first"
    ):
        list(future)
    assert future.get(timeout=30) == {"a": 1}


def test_asking_a_broadcast_for_its_reply_names_call(one: Any) -> None:
    with pytest.raises(
        AttributeError, match=r"no reply, so there is no get\(\)\. Use call\(\) or call_one\(\)"
    ):
        one.echo.broadcast(1).get()


# Timeouts.


def test_a_timeout_does_not_affect_the_call(held: Any) -> None:
    future = held.enter.call_one("x")
    with pytest.raises(ActorTimeout, match=r"held\.enter has not finished within 0\.01 s") as caught:
        future.get(timeout=0.01)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.timeout == 0.01
    with pytest.raises(ActorTimeout):
        future.exception(timeout=0)
    held.open.call_one("x").get()
    assert future.get(timeout=30) == "x"


def test_get_with_a_timeout_that_is_long_enough(one: Any) -> None:
    assert one.echo.call_one(1).get(timeout=30) == 1
    assert one.echo.call_one(1).get(timeout=float("inf")) == 1


def test_nan_is_no_timeout(held: Any) -> None:
    future = held.enter.call_one("x")
    with pytest.raises(ValueError, match="NaN"):
        future.get(timeout=float("nan"))
    future.cancel()


def test_wait_for_does_not_harm_the_loop(held: Any) -> None:
    async def main() -> str:
        future = held.enter.call_one("x")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(future.as_asyncio(), 0.01)
        return await held.notes.call_one()

    assert asyncio.run(main()) == [("in", "x")]


# Deadlines.


def began(held: Any) -> bool:
    """Whether ``hold`` began. A call that arrives after its deadline does not."""
    holding = held.holding.call_one()
    held.notes.call_one().get(timeout=30)  # answered after it
    return bool(holding.done())


def test_a_deadline_cancels_the_remote_coroutine(held: Any) -> None:
    timeout = 0.5
    while True:
        future = held.hold.with_options(timeout=timeout).call_one()
        with pytest.raises(ActorTimeout, match=rf"deadline of {timeout} s; it was cancelled") as caught:
            future.get()
        assert caught.value.timeout == timeout
        if began(held):
            break
        timeout *= 2
    assert held.cancelled.call_one().get(timeout=30)
    with pytest.raises(ActorTimeout):
        future.get()


def test_a_deadline_that_the_receiver_notices_first_gives_the_same_error(held: Any) -> None:
    future = held.hold.with_options(timeout=0.05).call_one()
    # Nobody waits for it here, so the answer is the receiver's.
    while not future.done():
        pass
    with pytest.raises(ActorTimeout, match=r"deadline of 0\.05 s; it was cancelled") as caught:
        future.get()
    assert caught.value.timeout == 0.05


def test_a_deadline_counts_from_the_call(held: Any) -> None:
    future = held.enter.with_options(timeout=0.05).call_one("x")
    assert not threading.Event().wait(0.1)
    with pytest.raises(ActorTimeout, match=r"deadline of 0\.05 s"):
        future.get(timeout=30)


def test_a_shorter_timeout_comes_before_the_deadline(held: Any) -> None:
    future = held.enter.with_options(timeout=60).call_one("x")
    with pytest.raises(ActorTimeout, match="the call goes on"):
        future.get(timeout=0.01)
    held.open.call_one("x").get()
    assert future.get() == "x"


def test_a_deadline_applies_to_await(held: Any) -> None:
    async def main(limit: float) -> None:
        with pytest.raises(ActorTimeout, match="deadline"):
            await held.hold.with_options(timeout=limit).call_one()

    timeout = 0.5
    asyncio.run(main(timeout))
    while not began(held):
        timeout *= 2
        asyncio.run(main(timeout))
    assert held.cancelled.call_one().get(timeout=30)


def test_a_call_within_its_deadline(echo: Any) -> None:
    assert echo.echo.with_options(timeout=30).call(3).get().values() == [3] * 4


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_deadline_must_be_positive(echo: Any, timeout: float) -> None:
    with pytest.raises(ValueError, match="positive number of seconds"):
        echo.echo.with_options(timeout=timeout)


# Cancelling.


def test_cancel_ends_the_remote_coroutine_and_not_the_actor(held: Any, other: Any) -> None:
    future = held.hold_all.call_one(other)
    later = held.notes.call_one()
    other.enter.call_one("begun").get()
    assert not later.done()
    assert future.cancel()
    assert later.get() == ["cancelled"]
    with pytest.raises(asyncio.CancelledError):
        future.get()
    assert not future.cancel()


def test_cancel_of_a_call_that_has_not_begun_skips_it(held: Any, other: Any) -> None:
    first = held.hold_all.call_one(other)
    second = held.note.call_one("never")
    third = held.note.call_one("third")
    assert second.cancel()
    other.enter.call_one("begun").get()
    first.cancel()
    third.get()
    assert held.notes.call_one().get() == ["cancelled", "third"]


def test_cancel_of_a_call_in_a_sync_queue_skips_it(procs: ProcMesh, one: Any) -> None:
    box: Any = procs.slice(hosts=0, gpus=0).spawn("held", Coroutines)
    blocked = one.call.call_one(wait_for, box)
    skipped = one.fail.call_one(ValueError("was run"))
    assert skipped.cancel()
    box.open.call_one("go").get()
    assert blocked.get() == "go"
    with pytest.raises(asyncio.CancelledError):
        skipped.get()
    assert one.echo.call_one(1).get() == 1
    box.stop().get()


def wait_for(box: Any) -> Any:
    return box.enter.call_one("go").get()


def test_cancel_after_the_end_does_nothing(one: Any) -> None:
    future = one.echo.call_one(1)
    future.get()
    assert not future.cancel()
    assert future.get() == 1


def test_an_awaiting_task_that_is_cancelled_cancels_the_call(held: Any) -> None:
    async def main() -> list[Any]:
        task = asyncio.ensure_future(held.hold.call_one().as_asyncio())
        seen = held.cancelled.call_one()
        # A coroutine that has not begun would be skipped instead of cancelled.
        await held.holding.call_one()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return [await seen, await held.notes.call_one()]

    assert asyncio.run(main()) == [True, []]


def test_a_task_that_is_cancelled_before_it_began_cancels_the_call(held: Any) -> None:
    async def main() -> bool:
        task = held.hold.call_one().as_asyncio()
        held.holding.call_one().get()  # without letting the loop run
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        seen: bool = await held.cancelled.call_one()
        return seen

    assert asyncio.run(main())


def test_cancel_from_another_thread_wakes_the_waiter(held: Any) -> None:
    future = held.enter.call_one("x")
    caught: list[BaseException] = []
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        try:
            future.get()
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    assert future.cancel()
    thread.join(30)
    assert not thread.is_alive()
    assert isinstance(caught[0], (asyncio.CancelledError, MeshError))


# Coroutines.


def test_a_future_may_be_awaited_repeatedly(one: Any) -> None:
    async def main() -> list[Any]:
        future = one.echo_async.call_one([1])
        return [await future, await future, future.get()]

    first, second, third = asyncio.run(main())
    assert first is second is third


def test_two_tasks_await_one_future(held: Any) -> None:
    async def main() -> list[Any]:
        future = held.enter.call_one("x")

        async def wait() -> Any:
            return await future

        tasks = [asyncio.ensure_future(wait()) for _ in range(3)]
        await asyncio.sleep(0)
        await held.open.call_one("x")
        return await asyncio.gather(*tasks)

    assert asyncio.run(main()) == ["x"] * 3


def test_await_raises_the_error(one: Any) -> None:
    async def main() -> None:
        await one.fail.call_one(KeyError("k"))

    with pytest.raises(KeyError):
        asyncio.run(main())


def test_await_in_one_loop_after_another(one: Any) -> None:
    async def main(n: int) -> int:
        return int(await one.echo.call_one(n))

    assert [asyncio.run(main(n)) for n in range(5)] == list(range(5))


def test_as_asyncio_serves_wait_and_gather(echo: Any, held: Any) -> None:
    async def main() -> tuple[int, int]:
        slow = held.enter.call_one("x").as_asyncio()
        quick = echo.echo.call(1).as_asyncio()
        done, pending = await asyncio.wait([slow, quick], return_when=asyncio.FIRST_COMPLETED)
        assert done == {quick}
        await held.open.call_one("x")
        await slow
        return len(done), len(pending)

    assert asyncio.run(main()) == (1, 1)


def test_the_loop_runs_while_a_coroutine_awaits(held: Any) -> None:
    async def main() -> list[str]:
        order = []

        async def other() -> None:
            order.append("other")
            await held.open.call_one("x")

        task = asyncio.ensure_future(other())
        order.append(await held.enter.call_one("x"))
        await task
        return order

    assert asyncio.run(main()) == ["other", "x"]


# Threads, and futures made from a future.


def test_many_threads_wait_for_one_future(held: Any) -> None:
    future = held.enter.call_one("x")
    seen: list[Any] = []
    threads = [threading.Thread(target=lambda: seen.append(future.get())) for _ in range(8)]
    for thread in threads:
        thread.start()
    held.open.call_one("x").get()
    for thread in threads:
        thread.join(30)
    assert seen == ["x"] * 8


def test_then(one: Any) -> None:
    assert one.echo.call_one(20).then(lambda n: n + 1).then(str).get() == "21"


def test_then_passes_a_failure_on(one: Any) -> None:
    changed = one.fail.call_one(KeyError("k")).then(lambda n: n + 1)
    with pytest.raises(KeyError):
        changed.get()


def test_then_and_its_source_are_independent(one: Any) -> None:
    """Looking at the source first does not take the result away from the future made from it, nor the other way round."""
    source = one.echo.call_one(20)
    changed = source.then(lambda n: n + 1)
    assert (source.get(), changed.get()) == (20, 21)
    source = one.echo.call_one(20)
    changed = source.then(lambda n: n + 1)
    assert (changed.get(), source.get()) == (21, 20)


def test_dropped_futures_do_no_harm(one: Any) -> None:
    for n in range(100):
        one.echo.call_one(n)
    assert one.echo.call_one("last").get() == "last"


def test_a_call_returns_a_future(one: Any) -> None:
    assert isinstance(one.echo.call_one(1), Future)


def test_a_deadline_frees_the_caller_of_a_sync_endpoint_that_is_stuck() -> None:
    """Only the end of its process can end the endpoint, and that is not waited for longer than necessary."""
    with configured(stop_timeout=0.5), this_host().spawn_procs() as own:
        gate = own.spawn("gate", Gate)
        with pytest.raises(ActorTimeout, match="deadline"):
            gate.block.with_options(timeout=0.1).call_one().get()
