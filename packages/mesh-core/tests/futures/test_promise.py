"""Promises: results set by any code, from any thread, also by native code (CMP-1, CMP-2, CMP-3)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import logging
import os
import pickle
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core_processes import Script

from mesh_core import (
    Actor,
    ActorTimeout,
    BrokenPromise,
    Future,
    MeshError,
    ProcMesh,
    Promise,
    SupervisionError,
    configured,
    endpoint,
    gather,
    get_include,
    inspect,
    this_host,
    this_proc,
    wait,
)

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]

SOON = 30.0


def in_thread(work: Callable[[], object], name: str = "setter") -> threading.Thread:
    """Run it in a separate thread."""
    thread = threading.Thread(target=work, name=name)
    thread.start()
    return thread


def test_a_result_is_set_once_and_read_repeatedly() -> None:
    promise = Promise[list[int]]("numbers")
    future = promise.future
    assert isinstance(future, Future) and future is promise.future
    assert not future.done()
    value = [1]
    assert promise.set_result(value) is True
    assert future.done() and future.get() is value and future.result(timeout=0) is value
    assert future.exception() is None


def test_an_exception_is_raised_by_get_and_returned_by_exception() -> None:
    promise = Promise[int]()
    error = ValueError("no")
    assert promise.set_exception(error)
    for _ in range(2):
        with pytest.raises(ValueError, match="no") as raised:
            promise.future.get()
        assert raised.value is error
    assert promise.future.exception() is error


def test_an_exception_keeps_its_earlier_traceback() -> None:
    def broken_here() -> None:
        raise ValueError("no")

    promise = Promise[int]()
    try:
        broken_here()
    except ValueError as error:
        promise.set_exception(error)
    depths = []
    for future in (promise.future, promise.future, gather(promise.future), promise.future.then(str)):
        with pytest.raises(ValueError, match="no") as raised:
            future.get()
        assert raised.traceback[-1].name == "broken_here"
        depths.append(len(raised.traceback))
    assert depths[0] == depths[1]


def test_setting_a_result_wakes_the_waiter() -> None:
    promise = Promise[int]()
    thread = in_thread(lambda: promise.set_result(7))
    assert promise.future.get(timeout=SOON) == 7
    thread.join()


def test_a_result_outlives_the_thread_that_set_it() -> None:
    promise = Promise[int]()
    in_thread(lambda: promise.set_result(7)).join()
    assert promise.future.get(timeout=0) == 7


def test_many_threads_wait_for_one_promise() -> None:
    promise = Promise[object]()
    ready, got = threading.Barrier(5), []

    def wait() -> None:
        ready.wait(SOON)
        got.append(promise.future.get(timeout=SOON))

    threads = [in_thread(wait) for _ in range(4)]
    ready.wait(SOON)
    value = object()
    promise.set_result(value)
    for thread in threads:
        thread.join(SOON)
    assert got == [value] * 4


def test_setting_a_second_outcome_raises_and_names_the_first() -> None:
    promise = Promise[int]("answer")
    in_thread(lambda: promise.set_result(1)).join()
    with pytest.raises(
        MeshError, match=r"promise 'answer' already has a result of type 'int', set by a thread that"
    ):
        promise.set_result(2)
    with pytest.raises(MeshError, match="cannot set_exception"):
        promise.set_exception(ValueError("late"))
    assert promise.future.get() == 1

    failed = Promise[int]()
    failed.set_exception(ValueError("first"))
    with pytest.raises(MeshError, match=r"has failed with ValueError\('first'\), set by this thread"):
        failed.set_result(1)
    assert isinstance(failed.future.exception(), ValueError)


def test_one_of_many_setters_wins() -> None:
    promise = Promise[int]()
    ready, won, refused = threading.Barrier(8), [], []

    def give(n: int) -> None:
        ready.wait(SOON)
        try:
            if promise.set_result(n):
                won.append(n)
        except MeshError:
            refused.append(n)

    threads = [in_thread(lambda n=n: give(n)) for n in range(8)]  # type: ignore[misc]
    for thread in threads:
        thread.join(SOON)
    assert len(won) == 1 and len(refused) == 7
    assert promise.future.get() == won[0]


def test_a_cancelled_promise_ignores_a_late_result() -> None:
    promise = Promise[int]("unwanted")
    assert not promise.cancelled
    assert promise.future.cancel() is True
    assert promise.future.cancel() is False
    assert promise.cancelled
    assert promise.set_result(1) is False
    assert promise.set_exception(ValueError("no")) is False
    with pytest.raises(asyncio.CancelledError, match="promise 'unwanted' was cancelled"):
        promise.future.get()


def test_cancel_of_a_kept_promise_is_false() -> None:
    promise = Promise[int]()
    promise.set_result(1)
    assert promise.future.cancel() is False
    assert not promise.cancelled
    assert promise.future.get() == 1


def test_cancel_wakes_other_threads() -> None:
    promise = Promise[int]()
    found: list[BaseException | None] = []
    waits = threading.Event()

    def wait() -> None:
        waits.set()
        found.append(promise.future.exception(timeout=SOON))

    thread = in_thread(wait)
    waits.wait(SOON)
    promise.future.cancel()
    thread.join(SOON)
    assert isinstance(found[0], asyncio.CancelledError)


def test_a_timeout_leaves_the_promise_open() -> None:
    promise = Promise[int]("slow")
    with pytest.raises(ActorTimeout, match=r"promise 'slow' has not finished within 0\.001 s"):
        promise.future.get(timeout=0.001)
    promise.set_result(1)
    assert promise.future.get() == 1


def test_a_deadline_cancels_the_promise() -> None:
    promise = Promise[int]("slow", timeout=0.001)
    with pytest.raises(ActorTimeout, match=r"promise 'slow' did not finish within its deadline of 0.001 s"):
        promise.future.get()
    assert promise.cancelled and promise.set_result(1) is False
    for wrong in (0, -1):
        with pytest.raises(ValueError, match="must be a positive number"):
            Promise[int](timeout=wrong)
    with pytest.raises(TypeError, match="must be a number"):
        Promise[int](timeout="1")  # type: ignore[arg-type]


def test_a_dropped_promise_is_broken() -> None:
    future = Promise[int]("weights").future
    with pytest.raises(BrokenPromise, match="promise 'weights' was dropped before it had a result"):
        future.get(timeout=SOON)


def test_a_promise_dropped_by_another_thread_wakes_the_waiter() -> None:
    promises = [Promise[int]()]
    future = promises[0].future
    thread = in_thread(promises.clear)
    assert isinstance(future.exception(timeout=SOON), BrokenPromise)
    thread.join(SOON)


def test_a_kept_promise_may_be_dropped() -> None:
    promise = Promise[int]()
    future = promise.future
    promise.set_result(3)
    del promise
    assert future.get() == 3


def test_then_changes_the_result() -> None:
    promise = Promise[int]()
    twice = promise.future.then(lambda n: 2 * n).then(str)
    assert not twice.done()
    promise.set_result(4)
    assert twice.get() == "8"


def test_cancelling_the_future_of_then_cancels_the_promise() -> None:
    promise = Promise[int]()
    twice = promise.future.then(lambda n: 2 * n)
    assert twice.cancel()
    assert promise.cancelled
    assert isinstance(promise.future.exception(), asyncio.CancelledError)


def test_awaited_and_set_from_a_thread() -> None:
    async def main() -> int:
        promise = Promise[int]()
        thread = in_thread(lambda: promise.set_result(5))
        value = await promise.future
        thread.join()
        return value

    assert asyncio.run(main()) == 5


def test_set_by_a_coroutine_for_another() -> None:
    async def main() -> str:
        promise = Promise[str]()
        waiting = asyncio.ensure_future(promise.future.as_asyncio())
        await asyncio.sleep(0)
        promise.set_result("told")
        return await waiting

    assert asyncio.run(main()) == "told"


def test_cancelling_a_coroutine_cancels_the_promise() -> None:
    async def main() -> bool:
        promise = Promise[int]()
        waiting = promise.future.as_asyncio()
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        return promise.cancelled

    assert asyncio.run(main())


def test_awaiting_outside_a_loop_raises() -> None:
    promise = Promise[int]()
    coroutine = promise.future.__await__()
    with pytest.raises(MeshError, match="asyncio event loop"):
        next(coroutine)


def test_invalid_outcomes_are_refused() -> None:
    promise = Promise[int]()
    with pytest.raises(TypeError, match="must be given an exception, got 'no'"):
        promise.set_exception("no")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="StopIteration"):
        promise.set_exception(StopIteration())
    assert not promise.future.done()


def test_neither_end_can_be_pickled_or_copied() -> None:
    promise = Promise[int]()
    for refused in (lambda: pickle.dumps(promise), lambda: copy.copy(promise)):
        with pytest.raises(TypeError, match="cannot pickle a promise") as raised:
            refused()
        assert "Channel.open" in raised.value.advice  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="cannot pickle a future"):
        pickle.dumps(promise.future)


def test_reprs_show_the_state() -> None:
    promise = Promise[int]("p")
    assert repr(promise) == "<Promise: promise 'p', open>"
    assert repr(promise.future) == "<Future of promise 'p': waiting>"
    promise.set_result(1)
    assert repr(promise) == "<Promise: promise 'p', kept>"
    assert repr(Promise[int]()) == "<Promise: a promise, open>"
    promise = Promise[int]("q")
    promise.future.cancel()
    assert repr(promise) == "<Promise: promise 'q', cancelled>"


# Failures that nobody looks at (UNS-1).


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about promises."""
    return [record.getMessage() for record in caplog.records if record.name == "mesh"]


def test_an_exception_that_nobody_looks_at_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "mesh")
    promise = Promise[int]("weights")
    promise.set_exception(ValueError("no\nmore"))
    assert lines(caplog) == []
    del promise
    gc.collect()
    assert lines(caplog) == [
        "a promise has failed, and nobody has looked at its future: promise 'weights': ValueError: no"
    ]


def test_an_exception_that_somebody_looked_at_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "mesh")
    for look in (Future.exception, lambda future: future.then(str).exception()):
        promise = Promise[int]()
        promise.set_exception(ValueError("no"))
        look(promise.future)
        del promise
    cancelled = Promise[int]()
    cancelled.set_exception(asyncio.CancelledError())
    del cancelled
    late = Promise[int]()
    late.future.cancel()
    late.set_exception(ValueError("late"))
    del late
    gc.collect()
    assert lines(caplog) == []


def test_an_exception_that_is_still_held_at_the_end_is_logged(script: Callable[..., Script]) -> None:
    _, errors = script("""
        from mesh_core import Promise
        promise = Promise("weights")
        promise.set_exception(ValueError("no"))
    """).finish()
    assert errors.count("promise 'weights': ValueError: no") == 1


def test_values_in_cycles_with_their_promise_are_collected() -> None:
    class Value:
        promise: Any

    gone = threading.Event()
    value = Value()
    value.promise = Promise[Value]()
    value.promise.set_result(value)
    value.promise.future.get()

    class Told:
        def __del__(self) -> None:
            gone.set()

    value.told = Told()  # type: ignore[attr-defined]
    unlooked = Value()
    unlooked.promise = Promise[Value]()
    unlooked.promise.set_result(unlooked)
    unlooked_gone = threading.Event()

    class ToldToo:
        def __del__(self) -> None:
            unlooked_gone.set()

    unlooked.told = ToldToo()  # type: ignore[attr-defined]
    del value, unlooked
    gc.collect()
    assert gone.is_set() and unlooked_gone.is_set()


# In actors.


class Keeper(Actor):
    """Waits for promises that it makes itself."""

    def __init__(self) -> None:
        self.promise = Promise[str]("kept")

    @endpoint
    def made_by_a_thread(self) -> str:
        promise = Promise[str]()
        thread = in_thread(lambda: promise.set_result("by a thread"))
        value = promise.future.get(timeout=SOON)
        thread.join(SOON)
        return value

    @endpoint(concurrent=True)
    async def wait(self) -> str:
        return await self.promise.future

    @endpoint(concurrent=True)
    async def keep(self, value: str) -> bool:
        return self.promise.set_result(value)

    @endpoint
    def wait_in_vain(self) -> str:
        return Promise[str]("endless", timeout=None).future.get()

    @endpoint
    def block(self) -> str:
        self.endless = Promise[str]("endless")
        return self.endless.future.get()


def test_an_endpoint_waits_for_a_thread(procs: ProcMesh) -> None:
    keeper = procs.slice(hosts=0, gpus=0).spawn("keeper", Keeper)
    assert keeper.made_by_a_thread.call_one().get(timeout=SOON) == "by a thread"
    waiting = keeper.wait.call_one()
    assert keeper.keep.call_one("told").get(timeout=SOON)
    assert waiting.get(timeout=SOON) == "told"
    with pytest.raises(BrokenPromise, match="endless"):
        keeper.wait_in_vain.call_one().get(timeout=SOON)
    keeper.stop().get()


def test_an_actor_in_this_process_waits_for_a_promise(procs: ProcMesh) -> None:
    keeper = this_proc().spawn("keeper", Keeper)
    assert keeper.made_by_a_thread.call_one().get(timeout=SOON) == "by a thread"
    keeper.stop().get()


def test_a_deadline_is_inherited(procs: ProcMesh) -> None:
    keeper = procs.slice(hosts=0, gpus=0).spawn("keeper", Keeper)
    with pytest.raises(ActorTimeout):
        keeper.block.with_options(timeout=0.05).call_one().get()
    # The endpoint has also ended, or this would wait for it.
    assert keeper.made_by_a_thread.call_one().get(timeout=SOON) == "by a thread"
    keeper.stop().get()


def test_inspect_works_while_an_actor_waits_for_a_promise(procs: ProcMesh) -> None:
    keeper = procs.slice(hosts=0, gpus=0).spawn("keeper", Keeper)
    waiting = keeper.wait.call_one()
    assert "keeper" in str(inspect.snapshot())
    keeper.keep.call_one("told")
    assert waiting.get(timeout=SOON) == "told"
    keeper.stop().get()


class Mortal(Actor):
    """Dies when told to."""

    @endpoint
    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["get", "await", "gather", "wait"])
def test_a_failure_that_nobody_handles_ends_the_wait(runtime: None, how: str) -> None:
    promise = Promise[int]()
    with this_host().spawn_procs(name="mortals") as mortals:
        mortals.spawn("mortal", Mortal).die.broadcast()

        async def main() -> int:
            return await promise.future

        ways: dict[str, Callable[[], object]] = {
            "get": promise.future.get,
            "await": lambda: asyncio.run(main()),
            "gather": gather(promise.future).get,
            "wait": lambda: wait([promise.future]),
        }
        with pytest.raises(SupervisionError, match="mortal"):
            ways[how]()
    # The promise is unaffected.
    assert promise.set_result(1)
    assert promise.future.get() == 1


# The end.


def test_ctrl_c_interrupts_the_wait(script: Callable[..., Script]) -> None:
    running = script("""
        from mesh_core import Promise
        promise = Promise("endless")
        try:
            print("waits", flush=True)
            promise.future.get()
        except KeyboardInterrupt:
            print("left")
        promise.set_result(1)
        print(promise.future.get())
    """)
    assert running.line() == "waits"
    running.process.send_signal(signal.SIGINT)
    assert running.line() == "left"
    assert running.line() == "1"
    running.finish()
    assert running.process.returncode == 0


def test_a_forked_copy_raises(script: Callable[..., Script]) -> None:
    running = script("""
        import os
        from mesh_core import MeshError, Promise, gather, wait
        promise = Promise("p")
        failed = Promise("failed")
        failed.set_exception(ValueError("once only"))
        def tried(work):
            try:
                return f"did {work()}"
            except MeshError as error:
                return "refused" if "fork" in str(error) else str(error)
        pid = os.fork()
        if pid == 0:
            for work in (
                lambda: promise.set_result(1),
                lambda: promise.set_exception(ValueError()),
                lambda: promise.future.get(timeout=1),
                lambda: gather(promise.future),
                lambda: wait([promise.future], timeout=1),
                Promise,
            ):
                print(tried(work))
            del promise, failed
            os._exit(0)
        os.waitpid(pid, 0)
        print(promise.set_result(2), promise.future.get())
    """)
    assert [running.line() for _ in range(6)] == ["refused"] * 6
    assert running.line() == "True 2"
    assert running.finish()[1].count("once only") == 1


def test_a_promise_can_be_kept_after_shutdown(script: Callable[..., Script]) -> None:
    running = script("""
        import threading
        from mesh_core import Promise, gather, shutdown
        early = Promise()
        shutdown()
        threading.Timer(0, early.set_result, [1]).start()
        late = Promise()
        both = gather(early.future, late.future)
        threading.Timer(0, late.set_result, [2]).start()
        print(both.get(timeout=30), early.future.get())
    """)
    assert running.line() == "[1, 2] 1"
    running.finish()


def test_the_script_ends_although_threads_wait(script: Callable[..., Script]) -> None:
    running = script("""
        import threading
        from mesh_core import Promise
        promise = Promise()
        for _ in range(3):
            threading.Thread(target=promise.future.get, daemon=True).start()
        print("ends")
    """)
    assert running.line() == "ends"
    _, errors = running.finish()
    assert running.process.returncode == 0 and not errors


# Any interleaving.


class Pit:
    """A promise, and everything that is done to it at the same time."""

    def __init__(self, name: str) -> None:
        self._promises = [Promise[float](name)]
        self.future = self._promises[0].future
        self.accepted: list[object] = []
        self.seen: list[object] = []

    def _try(self, give: Callable[[Promise[float]], bool], value: float) -> None:
        with contextlib.suppress(MeshError, IndexError):
            if give(self._promises[0]):
                self.accepted.append(value)

    def give(self, value: float) -> None:
        self._try(lambda promise: promise.set_result(value), value)

    def fail(self, value: float) -> None:
        self._try(lambda promise: promise.set_exception(KeyError(value)), value)

    def cancel(self, _: float) -> None:
        if self.future.cancel():
            self.accepted.append("cancelled")

    def drop(self, _: float) -> None:
        self._promises.clear()

    def look(self, _: float) -> None:
        self.seen.append(self.future.exception(timeout=SOON) or self.future.get())

    def check(self) -> None:
        """The one caller that was told it was first really was first, and everyone saw its outcome."""
        found = self.future.exception() or self.future.get()
        assert self.seen == [found, found]
        if isinstance(found, BrokenPromise):
            assert self.accepted == []
        elif isinstance(found, asyncio.CancelledError):
            assert self.accepted == ["cancelled"]
        else:
            assert self.accepted == [found.args[0] if isinstance(found, KeyError) else found]


@pytest.mark.parametrize("seed", range(40))
def test_any_interleaving_has_one_outcome(seed: int) -> None:
    chance = random.Random(seed)
    pits = [Pit(f"p{n}") for n in range(6)]
    work = [
        step
        for pit in pits
        for step in (pit.give, pit.give, pit.fail, pit.cancel, pit.drop, pit.look, pit.look)
    ]
    chance.shuffle(work)
    # Each thread begins with the steps that others wait for. Otherwise all might wait for later steps.
    parts = [sorted(work[n::4], key=lambda step: step.__name__ == "look") for n in range(4)]
    values = [[chance.random() for _ in part] for part in parts]
    ready = threading.Barrier(len(parts))

    def run(n: int) -> None:
        ready.wait(SOON)
        for step, value in zip(parts[n], values[n], strict=True):
            step(value)

    threads = [in_thread(lambda n=n: run(n)) for n in range(len(parts))]  # type: ignore[misc]
    for thread in threads:
        thread.join(SOON)
    for pit in pits:
        pit.check()


def test_a_promise_works_without_spinning() -> None:
    with configured(spin_us=0):
        promise = Promise[int]()
        thread = in_thread(lambda: promise.set_result(1))
        assert promise.future.get(timeout=SOON) == 1
        thread.join(SOON)


def test_the_documented_c_declaration_matches_the_header(page: Callable[[str], str]) -> None:
    declared = page("docs/concepts/promises.md").split("```c\n")[1].split("```")[0]
    assert declared in Path(get_include(), "mesh_core", "promise.h").read_text()
