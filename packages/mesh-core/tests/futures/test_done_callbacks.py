"""`Future.add_done_callback`: called once, however a future ends, and does not count as looking at it (CBK-1, CBK-2)."""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from core_processes import Script
from core_samples import Echo

from mesh_core import Actor, ActorTimeout, BrokenPromise, Future, Promise, endpoint, gather, this_host

pytestmark = [pytest.mark.usefixtures("runtime", "started"), pytest.mark.python]

SOON = 30.0


class Told:
    """What callbacks were given, and where they ran."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[Future[Any], str]] = queue.SimpleQueue()

    def __call__(self, future: Future[Any]) -> None:
        assert future.done()
        self.queue.put((future, threading.current_thread().name))

    def next(self) -> Future[Any]:
        future, thread = self.queue.get(timeout=SOON)
        assert thread == "mesh-callbacks"
        return future

    def is_empty(self) -> bool:
        """Whether nothing more comes, once everything that was due has come."""
        heard()
        return self.queue.empty()


def heard() -> None:
    """Wait until the callback thread has processed everything that is done by now."""
    promise, told = Promise[None](), threading.Event()
    promise.future.add_done_callback(lambda _future: told.set())
    promise.set_result(None)
    assert told.wait(SOON)
    del promise
    gc.collect()


@pytest.fixture(scope="module")
def started(runtime: None) -> None:
    """The thread runs from the first callback until the end of the runtime."""
    heard()


@pytest.fixture
def told() -> Told:
    return Told()


def test_a_callback_is_called_when_a_promise_is_kept(told: Told) -> None:
    promise = Promise[int]()
    promise.future.add_done_callback(told)
    assert told.is_empty()
    promise.set_result(5)
    assert told.next().get() == 5
    assert told.is_empty()


def test_a_callback_of_a_done_future_is_called_at_once() -> None:
    promise, threads = Promise[int](), []
    promise.set_result(5)
    promise.future.add_done_callback(lambda future: threads.append((threading.get_ident(), future.get())))
    assert threads == [(threading.get_ident(), 5)]


def test_a_callback_is_called_for_cancelled_broken_and_failed_promises(told: Told) -> None:
    given_up, broken, failed = Promise[int](), Promise[int](), Promise[int]()
    for promise in (given_up, broken, failed):
        promise.future.add_done_callback(told)
    given_up.future.cancel()
    with pytest.raises(asyncio.CancelledError):
        told.next().get()
    del promise, broken
    assert isinstance(told.next().exception(), BrokenPromise)
    failed.set_exception(ValueError("failed"))
    assert isinstance(told.next().exception(), ValueError)
    assert told.is_empty()


def test_a_callback_is_called_when_a_deadline_passes(told: Told) -> None:
    long, short = Promise[int](timeout=1000.0), Promise[int]("short", timeout=0.01)
    for promise in (long, short):
        promise.future.add_done_callback(told)
    with pytest.raises(ActorTimeout, match="promise 'short' did not finish within its deadline"):
        told.next().get()
    assert short.cancelled
    long.set_result(1)
    assert told.next().get() == 1


def test_many_deadlines_of_finished_futures_do_no_harm(told: Told) -> None:
    short = Promise[int](timeout=500.0)
    short.future.add_done_callback(told)
    for n in range(300):
        promise = Promise[int](timeout=1000.0 + n)
        promise.future.add_done_callback(told)
        promise.set_result(n)
        assert told.next().get() == n
    short.set_result(-1)
    assert told.next().get() == -1


def test_a_callback_of_a_gathering_is_called_at_a_members_deadline(told: Told) -> None:
    first, last = Promise[int](timeout=0.01), Promise[int](timeout=0.02)
    both = gather(first.future, last.future, return_exceptions=True)
    both.add_done_callback(told)
    assert [type(each) for each in told.next().get()] == [ActorTimeout, ActorTimeout]
    assert told.is_empty()


def test_callbacks_of_calls(told: Told) -> None:
    with this_host().spawn_procs({"gpus": 2}) as procs:
        echo = procs.spawn("echo", Echo)
        echo.echo.call(3).add_done_callback(told)
        assert told.next().get().values() == [3, 3]
        echo.slice(gpus=0).fail.call_one(ValueError("expected")).add_done_callback(told)
        assert isinstance(told.next().exception(), ValueError)
        for future in echo.echo.stream(4):
            future.add_done_callback(told)
    assert sorted(future.get() for future in (told.queue.get(timeout=SOON)[0] for _ in range(2))) == [4, 4]


def test_callbacks_of_gatherings_and_of_then(told: Told) -> None:
    one, two, three = Promise[int](), Promise[int](), Promise[int]()
    nested = gather(gather(one.future, two.future), three.future)
    nested.add_done_callback(told)
    one.future.then(lambda value: value + 1).add_done_callback(told)
    one.set_result(1)
    assert told.next().get() == 2
    three.set_result(3)
    assert told.is_empty()
    two.set_result(2)
    assert told.next().get() == [[1, 2], 3]
    assert told.is_empty()


def test_a_callback_of_a_gathering_is_called_at_the_first_failure(told: Told) -> None:
    one, two = Promise[int](), Promise[int]()
    gather(one.future, two.future).add_done_callback(told)
    one.set_exception(ValueError("one"))
    assert isinstance(told.next().exception(), ValueError)
    two.set_result(2)
    assert told.is_empty()


def test_callbacks_of_one_future_run_in_order() -> None:
    promise, said = Promise[int](), []
    for n in range(20):
        promise.future.add_done_callback(lambda _future, n=n: said.append(n))  # type: ignore[misc]
    promise.set_result(1)
    heard()
    assert said == list(range(20))


def test_each_of_many_callbacks_is_called_once() -> None:
    counts = [0] * 500
    promises = [Promise[int]() for _ in counts]

    def count(n: int) -> Callable[[Future[int]], None]:
        def add(_future: Future[int]) -> None:
            counts[n] += 1

        return add

    def keep_all() -> None:
        for promise in promises:
            promise.set_result(0)

    thread = threading.Thread(target=keep_all)
    thread.start()
    for n, promise in enumerate(promises):
        promise.future.add_done_callback(count(n))
    thread.join()
    heard()
    assert counts == [1] * 500


def test_a_raising_callback_is_logged_and_the_others_are_called(
    told: Told, caplog: pytest.LogCaptureFixture
) -> None:
    promise = Promise[int]("weights")

    def fail(_future: Future[int]) -> None:
        raise SystemExit("a callback's own")

    promise.future.add_done_callback(fail)
    promise.future.add_done_callback(told)
    with caplog.at_level(logging.ERROR, "mesh"):
        promise.set_result(1)
        assert told.next().get() == 1
    record = next(record.getMessage() for record in caplog.records)
    assert (
        "a done-callback of promise 'weights' raised an exception" in record and "a callback's own" in record
    )


def test_a_callback_that_raises_immediately_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    promise = Promise[int]("weights")
    promise.set_result(1)

    def fail(_future: Future[int]) -> None:
        raise ValueError("a callback's own")

    with caplog.at_level(logging.ERROR, "mesh"):
        promise.future.add_done_callback(fail)
    assert "a done-callback of promise 'weights' raised an exception" in caplog.text


def test_a_callback_does_not_count_as_looking(caplog: pytest.LogCaptureFixture) -> None:
    promise = Promise[int]("weights")
    done = threading.Event()
    promise.future.add_done_callback(lambda _future: done.set())
    with caplog.at_level(logging.ERROR, "mesh"):
        promise.set_exception(ValueError("nobody sees this"))
        assert done.wait(SOON)
        del promise
        heard()
    assert "nobody has looked at its future: promise 'weights': ValueError: nobody sees this" in caplog.text


def test_a_callback_that_looks_counts_as_looking(caplog: pytest.LogCaptureFixture) -> None:
    promise, seen = Promise[int]("weights"), queue.SimpleQueue[str]()
    promise.future.add_done_callback(lambda future: seen.put(repr(future.exception())))
    with caplog.at_level(logging.ERROR, "mesh"):
        promise.set_exception(ValueError("seen"))
        assert seen.get(timeout=SOON) == "ValueError('seen')"
        del promise
        heard()
    assert caplog.text == ""


def test_a_dropped_future_is_reported_and_freed(told: Told) -> None:
    promise = Promise[int]()
    promise.future.add_done_callback(told)
    gone = weakref.ref(promise.future)
    promise.set_result(1)
    told.next()
    del promise
    heard()
    gc.collect()
    assert gone() is None


def test_a_callback_may_add_another_and_make_calls(told: Told) -> None:
    promise, second = Promise[int](), Promise[int]()

    def hear(_future: Future[int]) -> None:
        second.future.add_done_callback(told)
        second.set_result(2)

    promise.future.add_done_callback(hear)
    promise.set_result(1)
    assert told.next().get() == 2


def test_arguments_that_are_not_functions_are_refused() -> None:
    promise = Promise[int]()
    with pytest.raises(TypeError, match=r"add_done_callback\(\) must be given a function"):
        promise.future.add_done_callback(5)  # type: ignore[arg-type]


class Telling(Actor):
    """Uses callbacks in a worker."""

    @endpoint
    def hear(self) -> tuple[int, str]:
        promise, said = Promise[int](), queue.SimpleQueue[tuple[int, str]]()
        promise.future.add_done_callback(
            lambda future: said.put((future.get(), threading.current_thread().name))
        )
        promise.set_result(3)
        return said.get(timeout=SOON)


def test_it_works_in_a_worker() -> None:
    with this_host().spawn_procs() as procs:
        assert procs.spawn("telling", Telling).hear.call_one().get(timeout=SOON) == (3, "mesh-callbacks")


def test_callbacks_are_called_at_and_after_the_end_of_the_runtime(
    script: Callable[..., Script],
) -> None:
    running = script("""
        import queue, threading
        from core_samples import Gate
        from mesh_core import Promise, shutdown, this_host
        said = queue.SimpleQueue()
        promise = Promise()
        promise.future.add_done_callback(lambda future: said.put(future.get()))
        shutdown()
        promise.set_result("after the end")
        print(said.get(timeout=30), flush=True)
        again = Promise()
        again.future.add_done_callback(lambda future: said.put(future.get()))
        again.set_result("anew")
        print(said.get(timeout=30), flush=True)
        shutdown()
        print([thread.name for thread in threading.enumerate()], flush=True)
    """)
    assert [running.line() for _ in range(3)] == ["after the end", "anew", "['MainThread']"]
    running.finish()
    assert running.process.returncode == 0


def test_a_blocking_callback_does_not_delay_the_interpreters_end(script: Callable[..., Script]) -> None:
    running = script("""
        import threading
        from mesh_core import Promise
        promise, begun = Promise(), threading.Event()
        def block(future):
            begun.set()
            threading.Event().wait()
        promise.future.add_done_callback(block)
        promise.set_result(1)
        begun.wait(30)
        print("ends", flush=True)
    """)
    assert running.line() == "ends"
    running.finish()
    assert running.process.returncode == 0


def test_a_forked_copy_raises(script: Callable[..., Script]) -> None:
    running = script("""
        import os
        from mesh_core import MeshError, Promise
        promise = Promise()
        promise.future.add_done_callback(print)
        pid = os.fork()
        if pid == 0:
            try:
                promise.future.add_done_callback(print)
            except MeshError:
                print("refused", flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
    """)
    assert running.line() == "refused"
    running.finish()
