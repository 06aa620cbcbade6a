"""``@endpoint(on_restart=)``: calls that wait until their actor is respawned, and calls that do not."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from core_lasting import WITHIN, Caller, Held, Owner, Teller, Writer, await_file
from core_pool import join_pool_thread

from mesh_core import (
    Actor,
    ActorError,
    ActorTimeout,
    Pool,
    Port,
    SupervisionError,
    Undeliverable,
    endpoint,
    gather,
    this_host,
)
from mesh_core.policies import Escalate, Ignore, Restart, Stop

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm")]


@pytest.fixture(scope="module")
def warm(runtime: None) -> None:
    """Start the threads that such calls and repairs need, and let them wait once."""
    policy = Held()
    policy.go.set()
    with supervised(policy) as (_, teller, pids):
        teller.hear.call_one(0).get(timeout=WITHIN)
        kill(pids[0])
        await_end(teller)
        teller.hear.call_one(0).get(timeout=WITHIN)


@contextmanager
def supervised(policy: Any, count: int = 1, folder: Path | str = "") -> Iterator[tuple[Any, Any, list[int]]]:
    with this_host().spawn_procs({"n": count}, supervise=lambda failure: True) as procs:
        tellers: Any = procs.spawn("tellers", Teller, str(folder), supervise=policy)
        yield procs, tellers, tellers.pid.call().get(timeout=WITHIN).values()
        if isinstance(policy, Held):
            policy.is_over = True


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


# Calls made during a repair.


def test_calls_wait_for_the_next_process_and_keep_their_order() -> None:
    """LST-2: those that waited arrive in order, before later calls."""
    policy = Held()
    with supervised(policy) as (_, teller, pids):
        assert teller.hear.call_one(0).get(timeout=WITHIN) == (pids[0], [0])
        kill(pids[0])
        policy.wait()
        calls = [teller.hear.call_one(n) for n in range(1, 30)]
        assert not any(call.done() for call in calls)
        policy.go.set()
        found = [call.get(timeout=WITHIN) for call in calls]
        assert {pid for pid, _ in found}.isdisjoint(pids)
        assert found[-1][1] == list(range(1, 30))
        # From here on, calls are sent at once again.
        assert teller.hear.call_one(30).get(timeout=WITHIN)[1][-1] == 30


def test_calls_wait_for_an_actor_that_has_failed_in_a_process_that_lives() -> None:
    policy = Held()
    with supervised(policy) as (_, teller, pids):
        teller.fail.broadcast()
        policy.wait()
        calls = [teller.hear.call_one(n) for n in range(5)]
        policy.go.set()
        assert [call.get(timeout=WITHIN) for call in calls] == [
            (pids[0], list(range(n + 1))) for n in range(5)
        ]


def test_calls_outlast_several_lives() -> None:
    policy = Held()
    policy.go.set()
    with supervised(policy) as (procs, teller, pids):
        seen, pid = set(pids), pids[0]
        for n in range(4):
            if n % 2:
                teller.fail.broadcast()
            else:
                life = procs.incarnations[0]
                kill(pid)
                # The repair may be done before its failure was seen here.
                while not teller.failed() and procs.incarnations[0] == life:
                    os.sched_yield()
            pid, heard = teller.hear.call_one(n).get(timeout=WITHIN)
            assert heard == [n]
            seen.add(pid)
        assert len(seen) == 3


def await_end(teller: Any) -> None:
    while not teller.failed():
        os.sched_yield()


def test_callers_in_other_processes_wait_too() -> None:
    policy = Held()
    with (
        this_host().spawn_procs({"n": 2}) as others,
        supervised(policy) as (_, teller, pids),
    ):
        callers: Any = others.spawn("callers", Caller)
        assert callers.hear.call(teller, 0).get(timeout=WITHIN).values() == pids * 2
        kill(pids[0])
        policy.wait()
        calls = [callers.hear.call(teller, 1), callers.hear_blocking.call(teller, 2), teller.hear.call_one(3)]
        policy.go.set()
        first, second, (pid, heard) = (call.get(timeout=WITHIN) for call in calls)
        assert {*first.values(), *second.values()} == {pid} != set(pids)
        assert set(teller.hear.call_one(4).get(timeout=WITHIN)[1]) == {1, 2, 3, 4} >= set(heard)


def test_an_owner_in_a_worker_is_asked_as_well() -> None:
    with this_host().spawn_procs() as procs:
        owner: Any = procs.spawn("owner", Owner)
        teller = owner.make.call_one().get(timeout=WITHIN)
        pid = teller.pid.call_one().get(timeout=WITHIN)
        kill(pid)
        owner.wait.call_one().get(timeout=WITHIN)
        await_end(teller)
        calls = [teller.hear.call_one(n) for n in range(3)]
        owner.go.call_one().get(timeout=WITHIN)
        found = [call.get(timeout=WITHIN) for call in calls]
        assert found[-1][1] == [0, 1, 2]
        assert found[0][0] != pid


def test_calls_wait_while_others_are_restarted_with_the_dead_one() -> None:
    policy = Held(lambda event: [Restart((0, 1, 2))])
    with supervised(policy, 3) as (_, tellers, pids):
        kill(pids[1])
        policy.wait()
        for n in (0, 2):
            assert tellers.slice(n=n).hear.call_one(1).get(timeout=WITHIN) == (pids[n], [1])
        call = tellers.slice(n=1).hear.call_one(2)
        policy.go.set()
        # They are stopped in order and respawned in place. No call fails meanwhile.
        for n in (0, 2):
            pid, heard = tellers.slice(n=n).hear.call_one(3).get(timeout=WITHIN)
            while heard != [3]:
                pid, heard = tellers.slice(n=n).hear.call_one(3).get(timeout=WITHIN)
            assert pid == pids[n]
        assert call.get(timeout=WITHIN)[0] not in pids


def test_a_stranger_among_the_calls_is_an_answer() -> None:
    policy = Held()
    policy.go.set()
    with supervised(policy) as (_, teller, pids):
        with pytest.raises(KeyError):
            teller.reject.call_one().get(timeout=WITHIN)
        assert teller.hear.call_one(1).get(timeout=WITHIN) == (pids[0], [1])


# Calls in progress.


def test_a_call_in_progress_fails_if_it_would_have_to_be_repeated(tmp_path: Path) -> None:
    """LST-1: it may have run, and is not declared idempotent."""
    policy = Held()
    policy.go.set()
    with supervised(policy, folder=tmp_path) as (_, teller, pids):
        call = teller.begin.call_one("one")
        await_file(tmp_path / "one")
        kill(pids[0])
        with pytest.raises(SupervisionError, match="SIGKILL"):
            call.get(timeout=WITHIN)
        assert teller.hear.call_one(1).get(timeout=WITHIN)[0] not in pids


def test_a_call_in_progress_is_sent_again_if_declared_idempotent(tmp_path: Path) -> None:
    policy = Held()
    with supervised(policy, folder=tmp_path) as (_, teller, pids):
        call = teller.again.call_one("one")
        await_file(tmp_path / "one")
        # Behind the first, in a process that will never reach it.
        behind = teller.hear.call_one(1)
        kill(pids[0])
        policy.wait()
        assert not call.done()
        policy.go.set()
        assert call.get(timeout=WITHIN) not in pids
        # It may have begun, as far as anybody knows.
        with pytest.raises(SupervisionError):
            behind.get(timeout=WITHIN)


def test_a_coroutine_interrupted_by_its_actors_failure(tmp_path: Path) -> None:
    policy = Held()
    policy.go.set()
    with supervised(policy, folder=tmp_path) as (_, teller, pids):
        call = teller.begin_later.call_one("one")
        await_file(tmp_path / "one")
        teller.fail_beside.broadcast()
        with pytest.raises(SupervisionError, match="a test"):
            call.get(timeout=WITHIN)
        assert teller.begin_later.call_one("one").get(timeout=WITHIN) == pids[0]


def test_an_interrupted_coroutine_is_sent_again(tmp_path: Path) -> None:
    policy = Held()
    policy.go.set()
    with supervised(policy, folder=tmp_path) as (_, teller, pids):
        call = teller.again_later.call_one("one")
        await_file(tmp_path / "one")
        kill(pids[0])
        assert call.get(timeout=WITHIN) not in pids


# Actors that do not come back.


@pytest.mark.parametrize(
    "actions", [[Escalate("a test")], [Stop(), Escalate("a test")], [Ignore()], [Stop()]]
)
def test_a_policy_that_gives_up_ends_the_wait(actions: list[Any], fault_tolerant: None) -> None:
    policy = Held(lambda event: actions)
    with supervised(policy) as (_, teller, pids):
        kill(pids[0])
        policy.wait()
        calls = [teller.hear.call_one(n) for n in range(3)]
        policy.go.set()
        for call in calls:
            assert isinstance(call.exception(timeout=WITHIN), (SupervisionError, Undeliverable))
        assert isinstance(
            teller.hear.call_one(4).exception(timeout=WITHIN), (SupervisionError, Undeliverable)
        )


@pytest.mark.parametrize("what", ["actors", "processes"])
def test_a_stop_ends_the_wait(what: str, fault_tolerant: None) -> None:
    policy = Held()
    with supervised(policy) as (procs, teller, pids):
        kill(pids[0])
        policy.wait()
        call = teller.hear.call_one(1)
        (teller if what == "actors" else procs).stop()
        assert isinstance(call.exception(timeout=WITHIN), (SupervisionError, Undeliverable))


def test_an_actor_that_was_stopped_alone_is_not_waited_for() -> None:
    with supervised(Held(), 2) as (_, tellers, _):
        one = tellers.slice(n=1)
        one.stop().get(timeout=WITHIN)
        assert isinstance(one.hear.call_one(1).exception(timeout=WITHIN), Undeliverable)
        tellers.respawn([1]).get(timeout=WITHIN)
        assert one.hear.call_one(2).get(timeout=WITHIN)[1] == [2]


def test_without_a_policy_that_restarts_calls_fail_at_once(fault_tolerant: None) -> None:
    with supervised(lambda failure: True) as (_, teller, pids):
        kill(pids[0])
        await_end(teller)
        assert isinstance(teller.hear.call_one(1).exception(timeout=WITHIN), SupervisionError)


# Deadlines and cancellation.


def test_a_deadline_passes_while_a_call_waits() -> None:
    policy = Held()
    with supervised(policy) as (_, teller, pids):
        kill(pids[0])
        policy.wait()
        call = teller.hear.with_options(timeout=0.05).call_one(1)
        with pytest.raises(ActorTimeout, match=r"tellers\.hear .*0\.05 s.*to be respawned"):
            call.get()
        policy.go.set()
        # It was not sent later.
        assert teller.hear.call_one(2).get(timeout=WITHIN)[1] == [2]


def test_a_call_that_waits_is_cancelled() -> None:
    policy = Held()

    async def give_up(teller: Any) -> None:
        task = asyncio.ensure_future(teller.hear.call_one(2).as_asyncio())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with supervised(policy) as (_, teller, pids):
        kill(pids[0])
        policy.wait()
        call, kept = teller.hear.call_one(1), teller.hear.call_one(3)
        assert call.cancel()
        asyncio.run(give_up(teller))
        policy.go.set()
        assert kept.get(timeout=WITHIN)[1] == [3]
        with pytest.raises(asyncio.CancelledError):
            call.get()


def test_a_call_in_progress_is_cancelled(tmp_path: Path) -> None:
    with supervised(Held(), folder=tmp_path) as (_, teller, pids):
        call = teller.begin_later.call_one("one")
        await_file(tmp_path / "one")
        assert call.cancel()
        assert teller.hear.call_one(1).get(timeout=WITHIN) == (pids[0], [1])


# Other adverbs, and other ways to wait.


def test_choose_and_gather() -> None:
    policy = Held()
    with supervised(policy, 2) as (_, tellers, pids):
        assert tellers.hear.choose(1).get(timeout=WITHIN)[0] in pids
        kill(pids[0])
        policy.wait()
        calls = [tellers.slice(n=n).hear.call_one(5) for n in (0, 1)]
        both = gather(*calls)
        assert not both.done()
        policy.go.set()
        (first, _), (second, _) = both.get(timeout=WITHIN)
        assert first not in pids and second == pids[1]


def test_a_pool_takes_tasks_back_and_reruns_them() -> None:
    policy = Held()
    policy.go.set()
    with supervised(policy, 2) as (_, tellers, pids), Pool(tellers, retries=3) as pool:
        tasks = [pool.submit(tellers.hear, n) for n in range(100)]
        tasks[99].cancel()
        kill(pids[0])
        assert all(task.get(timeout=WITHIN)[0] > 0 for task in tasks[:99])
    join_pool_thread()


def test_a_wait_for_itself_is_refused() -> None:
    with supervised(Held()) as (_, teller, _):
        for ask in (teller.ask_itself, teller.ask_itself_later):
            with pytest.raises(ActorError, match="is waiting for its own endpoint"):
                ask.call_one(teller).get(timeout=WITHIN)


def test_nothing_is_kept_of_calls_that_are_over() -> None:
    policy = Held()
    with supervised(policy) as (_, teller, pids):
        kill(pids[0])
        policy.wait()
        calls = [teller.hear.call_one(n) for n in range(10)]
        seen = [weakref.ref(call) for call in calls]
        assert all(call.cancel() for call in calls[:5])
        policy.go.set()
        gc.collect()
        gc.disable()
        try:
            calls[-1].get(timeout=WITHIN)
            calls.clear()
            teller.hear.call_one(10).get(timeout=WITHIN)
            # The thread that set the last outcome may still hold it.
            while any(each() is not None for each in seen):
                os.sched_yield()
        finally:
            gc.enable()


def test_the_end_of_the_runtime_ends_the_wait() -> None:
    code = """
        from core_lasting import *
        import os, signal
        from mesh_core import this_host, shutdown

        policy = Held()
        procs = this_host().spawn_procs(supervise=lambda failure: True)
        teller = procs.spawn("teller", Teller, supervise=policy)
        os.kill(teller.pid.call_one().get(20), signal.SIGKILL)
        policy.wait()
        call = teller.hear.call_one(1)
        shutdown()
        print(type(call.exception(20)).__name__)
    """
    said = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=WITHIN,
        check=True,
    )
    assert said.stdout == "MeshError\n"


# The option.


def test_invalid_uses_of_on_restart() -> None:
    with pytest.raises(TypeError, match="idempotent=True"):

        class Twice(Actor):
            @endpoint(on_restart="retry")
            def pay(self) -> None: ...

    with pytest.raises(TypeError, match="through a port or as a generator"):

        class Items(Actor):
            @endpoint(on_restart="wait")
            def items(self) -> Iterator[int]:
                yield 1

    with pytest.raises(TypeError, match="through a port or as a generator"):

        class Handed(Actor):
            @endpoint(on_restart="wait", explicit_response_port=True)  # type: ignore[call-overload]
            def answer(self, port: Port[int]) -> None: ...

    with pytest.raises(ValueError, match="'fail', 'retry' or 'wait'"):

        class Typo(Actor):
            @endpoint(on_restart="later")  # type: ignore[call-overload]
            def answer(self) -> None: ...


def test_wrong_arguments_are_refused_at_once() -> None:
    with supervised(Held()) as (_, teller, _):
        with pytest.raises(TypeError, match="missing required argument 'n'"):
            teller.hear.call_one()
        unpicklable: Callable[[], Any] = (n for n in ())  # type: ignore[assignment]
        with pytest.raises((TypeError, ActorError)):
            teller.hear.call_one(unpicklable)
        assert teller.hear.call_one(1).get(timeout=WITHIN)[1] == [1]


def test_nothing_is_lost_or_done_twice_while_actors_die(tmp_path: Path) -> None:
    """LST-1, with actors that die at any moment."""
    policy = Held()
    policy.go.set()
    path = tmp_path / "words"
    with this_host().spawn_procs(supervise=lambda failure: True) as procs:
        writer: Any = procs.spawn("writer", Writer, str(path), supervise=policy)
        over = threading.Event()

        def write(who: int) -> tuple[list[str], list[str]]:
            """Write words until told to stop; return those that were written, and those whose outcome is unknown."""
            done, unknown = [], []
            n = 0
            while not over.is_set():
                n += 1
                word = f"{who} {n}"
                calls = [writer.once.call_one(word), writer.perhaps_twice.call_one(f"again {word}")]
                error = calls[0].exception(WITHIN)
                assert error is None or isinstance(error, (SupervisionError, Undeliverable)), error
                (done if error is None else unknown).append(word)
                assert calls[1].get(timeout=WITHIN) > 0
                done.append(f"again {word}")
            return done, unknown

        with ThreadPoolExecutor(3) as threads:
            writing = [threads.submit(write, who) for who in range(3)]
            try:
                for life in range(8):
                    pid = writer.perhaps_twice.call_one("next").get(timeout=WITHIN)
                    if life % 2:
                        writer.fail.broadcast()
                    else:
                        kill(pid)
            finally:
                over.set()
        written = Counter(path.read_text().splitlines())
        for each in writing:
            done, unknown = each.result(WITHIN)
            assert all(written[word] == 1 for word in done if not word.startswith("again"))
            assert all(written[word] >= 1 for word in done)
            assert all(written[word] <= 1 for word in unknown)
