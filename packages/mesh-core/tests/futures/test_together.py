"""Several futures at once: gather, wait and as_completed, for all kinds of futures."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_processes import Script
from core_samples import Coroutines

from mesh_core import (
    Actor,
    ActorTimeout,
    BrokenPromise,
    MeshError,
    ProcMesh,
    Promise,
    SupervisionError,
    as_completed,
    configured,
    current_rank,
    endpoint,
    gather,
    this_host,
    wait,
    wait_async,
)

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]

SOON = 30.0


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
def pool() -> Iterator[concurrent.futures.ThreadPoolExecutor]:
    with concurrent.futures.ThreadPoolExecutor(2) as found:
        yield found


def promises(count: int) -> list[Promise[Any]]:
    return [Promise[Any](f"p{n}") for n in range(count)]


# gather


def test_gather_keeps_the_order_of_its_arguments(one: Any, pool: Any) -> None:
    first, second = promises(2)
    given = concurrent.futures.Future[int]()
    both = gather(first.future, one.echo.call_one("call"), given, second.future, pool.submit(abs, -3))
    second.set_result("second")
    assert not both.done()
    given.set_result(9)
    first.set_result("first")
    assert both.get(timeout=SOON) == ["first", "call", 9, "second", 3]
    assert both.done() and both.get() == ["first", "call", 9, "second", 3]


def test_gather_of_nothing() -> None:
    assert gather().get(timeout=0) == []


def test_gather_raises_the_first_failure_at_once() -> None:
    a, b, c = promises(3)
    together = gather(a.future, b.future, c.future)
    c.set_exception(KeyError("c"))
    b.set_exception(ValueError("b"))
    with pytest.raises(KeyError, match="c"):
        together.get(timeout=SOON)
    assert not a.cancelled
    a.set_result(1)
    assert a.future.get() == 1
    assert isinstance(together.exception(), KeyError)
    b.future.exception()


def test_gather_with_return_exceptions_waits_for_all() -> None:
    a, b = promises(2)
    together = gather(a.future, b.future, return_exceptions=True)
    error = ValueError("a")
    a.set_exception(error)
    assert not together.done()
    b.set_result(2)
    assert together.get(timeout=SOON) == [error, 2]


def test_cancelling_a_gather_cancels_the_rest(pool: Any) -> None:
    a, b = promises(2)
    foreign = concurrent.futures.Future[int]()
    together = gather(a.future, b.future, foreign)
    a.set_result(1)
    assert together.cancel() is True and together.cancel() is False
    assert b.cancelled and not a.cancelled and foreign.cancelled()
    with pytest.raises(asyncio.CancelledError):
        together.get()


def test_cancelling_one_gathering_leaves_the_others(pool: Any) -> None:
    running = concurrent.futures.Future[int]()
    running.set_running_or_notify_cancel()
    one, other = gather(running), gather(running)
    assert one.cancel()
    assert not other.done()
    running.set_result(1)
    assert other.get(timeout=SOON) == [1]


def test_a_gather_timeout_says_what_it_waits_for() -> None:
    a, b = promises(2)
    together = gather(a.future, b.future)
    a.set_result(1)
    with pytest.raises(ActorTimeout, match=r"a gathering of 2 futures .* \(waiting for promise 'p1'\)"):
        together.get(timeout=0.001)
    b.set_result(2)
    assert together.get() == [1, 2]


def test_gathers_may_be_nested() -> None:
    a, b, c = promises(3)
    inner = gather(a.future, b.future).then(sum)
    outer = gather(inner, c.future.then(str))
    thread = threading.Thread(target=lambda: [p.set_result(n) for n, p in enumerate((b, a, c))])
    thread.start()
    assert outer.get(timeout=SOON) == [1, "2"]
    thread.join()


def test_an_inner_gather_is_checked_after_each_step() -> None:
    a, b, c = promises(3)
    outer = gather(gather(a.future, b.future), c.future)
    for n, promise in enumerate((a, c, b)):
        assert not outer.done()
        promise.set_result(n)
    assert outer.done()
    assert outer.get(timeout=0) == [[0, 2], 1]


def test_an_inner_failure_ends_the_outer_gather_at_once() -> None:
    a, b, c = promises(3)
    outer = gather(gather(a.future, b.future), c.future)
    threading.Timer(0, a.set_exception, [ValueError("a")]).start()
    with pytest.raises(ValueError, match="a"):
        outer.get(timeout=SOON)
    for promise in (b, c):
        promise.set_result(1)


def test_gather_awaited() -> None:
    async def main() -> list[Any]:
        async def give(value: int) -> int:
            await asyncio.sleep(0)
            return value

        a, b = promises(2)
        together = gather(a.future, give(1), asyncio.ensure_future(give(2)), gather(b.future))
        a.set_result(0)
        threading.Timer(0, b.set_result, [3]).start()
        return await together

    assert asyncio.run(main()) == [0, 1, 2, [3]]


def test_cancelling_a_coroutine_cancels_what_it_gathers() -> None:
    async def main() -> tuple[bool, bool]:
        (a,) = promises(1)
        task = asyncio.ensure_future(asyncio.sleep(60))
        waiting = gather(a.future, task).as_asyncio()
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await asyncio.wait([task])
        return a.cancelled, task.cancelled()

    assert asyncio.run(main()) == (True, True)


def test_awaitables_need_a_loop() -> None:
    async def nothing() -> None:
        pass

    coroutine = nothing()
    with pytest.raises(MeshError, match=r"none runs in this thread.*run_coroutine_threadsafe"):
        gather(coroutine)
    coroutine.close()
    with pytest.raises(TypeError, match=r"gather\(\) must be futures or awaitables, got 3"):
        gather(3)  # type: ignore[call-overload]


def test_waiting_for_a_future_of_the_own_loop_is_refused() -> None:
    async def main() -> None:
        own = asyncio.get_running_loop().create_future()
        for blocks in (gather(own).get, lambda: wait([own]), lambda: next(as_completed([own]))):
            with pytest.raises(MeshError, match=r"deadlock.*Await it instead"):
                blocks()
        own.set_result(1)
        assert await gather(own) == [1]

    asyncio.run(main())


def test_futures_of_a_loop_in_another_thread() -> None:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        made: concurrent.futures.Future[asyncio.Future[int]] = concurrent.futures.Future()
        loop.call_soon_threadsafe(lambda: made.set_result(loop.create_future()))
        foreign = made.result()
        together = gather(foreign)
        assert not together.done()
        loop.call_soon_threadsafe(foreign.set_result, 4)
        assert together.get(timeout=SOON) == [4]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_a_future_of_a_closed_loop_is_refused() -> None:
    loop = asyncio.new_event_loop()
    foreign = loop.create_future()
    loop.close()
    with pytest.raises(MeshError, match="its event loop is closed"):
        gather(foreign)


class Selfish(Actor):
    """Waits for itself."""

    @endpoint
    def wait(self) -> str:
        return "done"

    @endpoint
    def gather(self, me: Any) -> Any:
        return gather(me.wait.call_one()).get()

    @endpoint
    def wait_for_any(self, me: Any) -> Any:
        return len(wait([me.wait.call_one()]))


def test_an_actor_that_gathers_its_own_endpoint_gets_an_error(procs: ProcMesh) -> None:
    mesh = procs.slice(hosts=0, gpus=0).spawn("selfish", Selfish)
    for call in (mesh.gather, mesh.wait_for_any):
        with pytest.raises(MeshError, match="is waiting for its own endpoint"):
            call.call_one(mesh).get(timeout=SOON)
    mesh.stop().get()


def test_a_members_deadline_ends_the_gathering(held: Any) -> None:
    (a,) = promises(1)
    late = held.enter.with_options(timeout=0.05).call_one("x")
    with pytest.raises(ActorTimeout, match=r"held\.enter did not finish within its deadline"):
        gather(a.future, late).get(timeout=SOON)
    late = held.enter.with_options(timeout=0.05).call_one("x")

    async def main() -> None:
        with pytest.raises(ActorTimeout, match=r"held\.enter did not finish within its deadline"):
            await gather(a.future, late)

    asyncio.run(main())
    a.set_result(1)


# wait


def test_wait_returns_finished_futures_in_order() -> None:
    a, b, c, d = promises(4)
    futures = [each.future for each in (a, b, c, d)]
    assert wait(futures, timeout=0) == ([], futures)
    c.set_result(1)
    assert wait(futures, count=1) == ([c.future], [a.future, b.future, d.future])
    rest = [a.future, b.future, d.future]
    d.set_exception(ValueError())
    a.future.cancel()
    # In the order given: they were done before.
    assert wait(rest, count=2, timeout=SOON) == ([a.future, d.future], [b.future])
    del b
    done, pending = wait([rest[1]], timeout=SOON)
    assert done == [rest[1]] and not pending and isinstance(done[0].exception(), BrokenPromise)
    d.future.exception()


def test_wait_takes_every_kind_of_future(one: Any, held: Any, echo: Any, pool: Any) -> None:
    (a,) = promises(1)
    never = concurrent.futures.Future[int]()
    given: list[Any] = [
        never,
        a.future,
        one.echo.call_one(1),
        echo.echo.call(2),
        pool.submit(int),
        *one.echo.stream(3),
    ]
    a.set_result(0)
    done, pending = wait(given, count=5, timeout=SOON)
    assert sorted(map(given.index, done)) == [1, 2, 3, 4, 5]
    assert pending == [never]
    assert done[0].result() is not None


def test_repeated_waits_ignore_finished_futures() -> None:
    (a,) = promises(1)
    foreign = concurrent.futures.Future[int]()
    for _ in range(100):
        assert wait([a.future, foreign], timeout=0)[0] == []
    assert len(foreign._done_callbacks) == 1  # type: ignore[attr-defined]
    a.set_result(1)
    foreign.set_result(2)
    assert len(wait([a.future, foreign])[0]) == 2


def test_wait_refuses_invalid_arguments() -> None:
    (a,) = promises(1)

    async def nothing() -> None:
        pass

    coroutine = nothing()
    with pytest.raises(TypeError, match=r"wait\(\) must be given futures, got <coroutine"):
        wait([coroutine])
    coroutine.close()
    with pytest.raises(TypeError, match="must be given an iterable of futures"):
        wait(a.future)  # type: ignore[arg-type]
    for wrong in (0, -1, True, 1.5):
        with pytest.raises(ValueError, match=r"wait\(count=\) must be a positive integer"):
            wait([a.future], count=wrong)  # type: ignore[arg-type]
    assert wait([]) == ([], [])
    a.set_result(1)
    assert wait([a.future, a.future], count=5) == ([a.future], [])


class Mortal(Actor):
    """Rank 1 dies, and rank 0 does not answer."""

    @endpoint
    def work(self) -> None:
        if current_rank().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


@pytest.mark.once
@pytest.mark.usefixtures("fault_tolerant")
def test_a_dead_rank_is_done() -> None:
    # The other rank never stops by itself.
    with configured(stop_timeout=0.5), this_host().spawn_procs({"gpus": 2}) as two:
        call = two.spawn("mortal", Mortal).work.call()
        (a,) = promises(1)
        done, pending = wait([a.future, call], count=1, timeout=SOON)
        assert done == [call] and pending == [a.future]
        assert isinstance(call.exception(), SupervisionError)
        a.set_result(1)


def test_wait_for_thousands_of_promises() -> None:
    each = promises(5000)
    futures = [promise.future for promise in each]
    order = list(range(5000))
    random.Random(7).shuffle(order)
    coming = as_completed(futures, timeout=SOON)
    thread = threading.Thread(target=lambda: [each[n].set_result(n) for n in order])
    thread.start()
    assert len(wait(futures, timeout=SOON)[0]) == 5000
    thread.join()
    assert [future.get() for future in coming] == order


# as_completed


def test_as_completed_yields_futures_as_they_finish() -> None:
    each = promises(3)
    coming = as_completed([promise.future for promise in each], timeout=SOON)
    got = []
    for n in (2, 0, 1):
        each[n].set_result(n)
        got.append(next(coming).get())
    assert got == [2, 0, 1] and len(coming) == 0
    assert list(coming) == []


def test_as_completed_times_out() -> None:
    a, b = promises(2)
    a.set_result(1)
    coming = as_completed([a.future, b.future], timeout=0.01)
    assert next(coming) == a.future
    with pytest.raises(ActorTimeout, match=r"1 of 2 futures have not finished within 0\.01 s"):
        next(coming)
    b.set_result(2)


def test_as_completed_in_a_coroutine(pool: Any) -> None:
    async def main() -> list[Any]:
        each = promises(2)
        own = asyncio.get_running_loop().create_future()
        got: list[Any] = []
        steps: Iterator[Callable[[], object]] = iter(
            [lambda: each[1].set_result("b"), lambda: own.set_result("c"), lambda: each[0].set_result("a")]
        )
        threading.Timer(0, next(steps)).start()
        futures: list[Any] = [each[0].future, each[1].future, own]
        async for future in as_completed(futures, timeout=SOON):
            got.append(future.result())
            for step in itertools.islice(steps, 1):
                step()
        return got

    assert asyncio.run(main()) == ["b", "c", "a"]


def test_leaving_as_completed_early_stops_listening() -> None:
    a, b = promises(2)
    a.set_result(1)
    for future in as_completed([a.future, b.future]):
        assert future.get() == 1
        break
    b.set_result(2)
    assert b.future.get() == 2


def test_ctrl_c_interrupts_each_wait(script: Callable[..., Script]) -> None:
    running = script("""
        from mesh_core import Promise, as_completed, gather, wait
        a, b = Promise(), Promise()
        both = [a.future, b.future]
        for work in (gather(*both).get, lambda: wait(both), lambda: list(as_completed(both))):
            try:
                print("waits", flush=True)
                work()
            except KeyboardInterrupt:
                print("left", flush=True)
    """)
    for _ in range(3):
        assert running.line() == "waits"
        running.process.send_signal(signal.SIGINT)
        assert running.line() == "left"
    running.finish()
    assert running.process.returncode == 0


@pytest.mark.parametrize("seed", range(20))
def test_any_interleaving_ends(seed: int) -> None:
    chance = random.Random(seed)
    each: list[Promise[int] | None] = list(promises(12))
    futures = [promise.future for promise in each if promise is not None]
    together = gather(*futures, return_exceptions=True)
    nested = gather(gather(*futures[:6]), *futures[6:])
    seen: list[list[Any]] = []

    def collect() -> None:
        seen.append(list(as_completed(futures, timeout=SOON)))

    def shrink() -> None:
        left, done = futures, []
        while left:
            some, left = wait(left, count=chance.randint(1, 3), timeout=SOON)
            done += some
        seen.append(done)

    def finish(places: list[int]) -> None:
        for n in places:
            kind = chance.randrange(4)
            promise = each[n]
            assert promise is not None
            if kind == 0:
                promise.future.cancel()
            elif kind == 1:
                promise.set_exception(ValueError(n))
            elif kind == 2:
                each[n] = None
            else:
                promise.set_result(n)
            del promise

    places = list(range(12))
    chance.shuffle(places)
    threads = [
        threading.Thread(target=work)
        for work in (
            collect,
            shrink,
            together.get,
            nested.exception,
            lambda: finish(places[:6]),
            lambda: finish(places[6:]),
        )
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON)
        assert not thread.is_alive()
    assert [sorted(map(futures.index, done)) for done in seen] == [list(range(12))] * 2
    results = together.get(timeout=0)
    for future, result in zip(futures, results, strict=True):
        assert (future.exception() or future.get()) == result
    failed = [result for result in results if isinstance(result, BaseException)]
    assert (nested.exception() in failed) if failed else nested.get() == [results[:6], *results[6:]]


# wait_async


def test_wait_async_does_not_block_the_loop(one: Any, pool: Any) -> None:
    async def main() -> None:
        first, second, third = promises(3)
        second.set_result(2)
        loop = asyncio.get_running_loop()
        task = loop.create_task(asyncio.sleep(0, "slept"))
        given = [first.future, second.future, third.future, one.echo.call_one(5), pool.submit(abs, -1), task]
        # Only this loop can finish it.
        loop.call_soon(first.set_result, 1)
        done, pending = await wait_async(given, count=5, timeout=SOON)
        assert done[0] is second.future and set(map(id, [*done, *pending])) == set(map(id, given))
        assert pending == [third.future] and not third.cancelled

    asyncio.run(main())


def test_wait_async_of_all_of_none_and_of_too_many() -> None:
    async def main() -> None:
        assert await wait_async([]) == ([], [])
        (promise,) = promises(1)
        asyncio.get_running_loop().call_soon(promise.set_exception, ValueError("done all the same"))
        done, pending = await wait_async([promise.future], count=7)
        assert (done, pending) == ([promise.future], [])
        assert isinstance(promise.future.exception(), ValueError)

    asyncio.run(main())


def test_wait_async_returns_what_is_done_after_its_timeout() -> None:
    async def main() -> None:
        late, kept = promises(2)
        kept.set_result(1)
        done, pending = await wait_async([late.future, kept.future], timeout=0.01)
        assert (done, pending) == ([kept.future], [late.future])

    asyncio.run(main())


def test_cancelling_wait_async_cancels_no_future() -> None:
    async def main() -> None:
        (promise,) = promises(1)
        task = asyncio.ensure_future(wait_async([promise.future]))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not promise.cancelled
        promise.set_result(1)
        assert await promise.future == 1

    asyncio.run(main())


def test_wait_async_ends_futures_at_their_deadlines() -> None:
    async def main() -> None:
        promise = Promise[int](timeout=0.01)
        done, pending = await wait_async([promise.future])
        assert done == [promise.future] and not pending and promise.cancelled

    asyncio.run(main())


@pytest.mark.parametrize("count", [0, -1, True, 1.5])
def test_wait_async_with_an_invalid_count(count: Any) -> None:
    with pytest.raises(ValueError, match=r"wait_async\(count=\) must be a positive integer or None"):
        asyncio.run(wait_async([], count=count))


def test_wait_async_raises_a_pending_failure(procs: ProcMesh) -> None:
    async def main() -> None:
        (promise,) = promises(1)
        with this_host().spawn_procs() as other:
            dying = other.spawn("dying", Coroutines)
            await dying
            pid = other.pids[0]
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(SupervisionError):
                await wait_async([promise.future], timeout=SOON)

    asyncio.run(main())
