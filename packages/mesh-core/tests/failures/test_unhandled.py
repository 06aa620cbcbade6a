"""Failures that no owner handled: in the script, in its calls, and at its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from core_owners import WITHIN, Leaf, Soft, slay
from core_processes import Script, Watch
from core_samples import Coroutines

from mesh_core import ActorTimeout, MeshFailure, ProcMesh, SupervisionError, this_host

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def own(runtime: None) -> Iterator[ProcMesh]:
    """Three processes of its own for a test that may break them."""
    with this_host().spawn_procs(per_host={"gpus": 3}, name="mortal") as procs:
        procs.initialized.get()
        yield procs


def hears(call: Any) -> MeshFailure:
    """The failure that waiting for a call raises."""
    with pytest.raises(SupervisionError) as caught:
        call.get(WITHIN)
    return failure_in(caught.value)


def failure_in(error: BaseException | None) -> MeshFailure:
    assert isinstance(error, SupervisionError), error
    assert error.failure is not None
    return error.failure


def kept_waiting(procs: ProcMesh, rank: int) -> Any:
    """A call that does not return."""
    actor: Any = procs.slice(gpus=rank).spawn("waiting", Soft)
    actor.pid.call_one().get(WITHIN)
    return actor.hold.call_one()


# In calls of the script.


@pytest.mark.slow
def test_a_failure_is_raised_by_the_call_that_waits_whatever_it_waits_for(own: ProcMesh) -> None:
    waiting = kept_waiting(own, 0)
    actor: Any = own.slice(gpus=1).spawn("actor", Leaf)
    actor.fail.broadcast(ValueError("nobody waits"))
    failure = hears(waiting)
    assert (failure.mesh_name, failure.pid) == ("actor", own.pids[1])
    # Only once: the call itself continues, and others work.
    assert not waiting.done()
    with pytest.raises(ActorTimeout):
        waiting.get(0.01)
    assert own.slice(gpus=1).spawn("more", Leaf).pid.call_one().get(WITHIN) == own.pids[1]


def test_a_failure_is_raised_by_a_waiting_coroutine(own: ProcMesh) -> None:
    async def main() -> None:
        held = kept_waiting(own, 0)
        actor: Any = own.slice(gpus=1).spawn("actor", Leaf)
        await actor.pid.call_one()
        actor.fail.broadcast(ValueError("nobody waits"))
        with pytest.raises(SupervisionError) as caught:
            await held
        assert failure_in(caught.value).mesh_name == "actor"
        assert await own.slice(gpus=1).spawn("more", Leaf).pid.call_one() == own.pids[1]

    asyncio.run(main())


def test_a_failure_from_before_is_raised_by_the_next_call_that_has_to_wait(own: ProcMesh) -> None:
    ready = own.slice(gpus=0).spawn("ready", Leaf).pid.call_one()
    pid = ready.get(WITHIN)
    held = kept_waiting(own, 0)
    actor: Any = own.slice(gpus=1).spawn("actor", Leaf)
    actor.pid.call_one().get(WITHIN)
    slay(own, 2)
    actor.fail.broadcast(ValueError("nobody waits"))
    # Results that have arrived are returned nonetheless.
    assert ready.get(WITHIN) == pid
    names = {hears(held).mesh_name for _ in range(2)}
    assert names == {"actor", "mortal"}
    with pytest.raises(ActorTimeout):
        held.get(0.01)


def test_an_error_that_a_call_has_raised_is_not_raised_again(own: ProcMesh) -> None:
    actors: Any = own.spawn("actors", Leaf)
    actors.pid.call().get(WITHIN)
    doomed = actors.slice(gpus=1).exit.call_one(4)
    assert hears(doomed).exitcode == 4
    for _ in range(20):
        assert actors.slice(gpus=0).pid.call_one().get(WITHIN) == own.pids[0]
    with pytest.raises(ActorTimeout):
        kept_waiting(own, 0).get(0.05)


def test_results_include_deaths_whether_the_call_or_the_notice_is_first(own: ProcMesh) -> None:
    """SUP-1: the call reports its own ranks, even if their ends are due to be raised already."""
    actors: Any = own.spawn("actors", Leaf)
    actors.pid.call().get(WITHIN)
    pids = [slay(own, rank) for rank in (1, 2)]
    wait_for_alarm(own)
    first, *dead = actors.pid.call().get(WITHIN, return_exceptions=True).values()
    assert first == own.pids[0]
    assert [failure_in(error).pid for error in dead] == pids
    with pytest.raises(ActorTimeout):
        kept_waiting(own, 0).get(0.05)


def test_a_block_raises_what_failed_in_it(runtime: None) -> None:
    def block() -> None:
        with this_host().spawn_procs() as procs:
            fail_in(procs, "actor", watches)

    watches: list[Watch] = []
    with pytest.raises(SupervisionError) as caught:
        block()
    assert failure_in(caught.value).mesh_name == "actor"
    assert watches[0].wait() == []


def test_a_block_raises_its_own_error_first(runtime: None) -> None:
    def block() -> None:
        with this_host().spawn_procs() as procs:
            fail_in(procs, "first", watches)
            with contextlib.suppress(SupervisionError):  # or it comes later
                fail_in(procs, "second", watches)
            raise KeyError("its own")

    watches: list[Watch] = []
    with pytest.raises(KeyError, match="its own"):
        block()
    assert watches[0].wait() == []
    drain()


def fail_in(procs: ProcMesh, name: str, watches: list[Watch]) -> None:
    """Make an actor fail while nobody waits."""
    actor: Any = procs.spawn(name, Leaf)
    watches.append(Watch([actor.pid.call_one().get(WITHIN)]))
    actor.fail.broadcast(ValueError("no"))


def test_an_async_block_raises_what_failed_in_it(runtime: None) -> None:
    async def raise_own() -> None:
        async with this_host().spawn_procs() as procs:
            actor: Any = procs.spawn("actor", Leaf)
            watches.append(Watch([await actor.pid.call_one()]))
            actor.fail.broadcast(ValueError("no"))
            raise KeyError("its own")

    async def raise_failure() -> None:
        async with this_host().spawn_procs() as procs:
            actor: Any = procs.spawn("actor", Leaf)
            watches.append(Watch([await actor.pid.call_one()]))
            actor.fail.broadcast(ValueError("no"))

    watches: list[Watch] = []
    with pytest.raises(KeyError, match="its own"):
        asyncio.run(raise_own())
    drain()
    with pytest.raises(SupervisionError):
        asyncio.run(raise_failure())
    for watch in watches:
        assert watch.wait() == []


def drain() -> None:
    """Raise the failures that nobody was notified of."""
    with this_host().spawn_procs() as procs:
        while True:
            try:
                return procs.initialized.get(WITHIN)
            except SupervisionError:
                continue


def test_exception_leaves_other_failures_to_the_next_get(own: ProcMesh) -> None:
    healthy: Any = own.slice(gpus=0).spawn("healthy", Leaf)
    waiting = kept_waiting(own, 0)
    slay(own, 2)
    wait_for_alarm(own)
    assert healthy.pid.call_one().exception(WITHIN) is None
    assert isinstance(healthy.fail.call_one(KeyError()).exception(WITHIN), KeyError)
    assert healthy.pid.call().exception(WITHIN) is None
    # But it does not report success either.
    with pytest.raises(ActorTimeout):
        waiting.exception(0.01)
    assert hears(waiting).signal == signal.SIGKILL
    assert not waiting.done()


def test_a_failure_that_comes_while_exception_waits_does_not_end_the_wait(own: ProcMesh) -> None:
    gate: Any = own.slice(gpus=0).spawn("gate", Coroutines)
    doomed: Any = own.slice(gpus=2).spawn("doomed", Leaf)
    held = kept_waiting(own, 1)
    waiting = gate.enter.call_one("x")

    def fail_and_open() -> None:
        doomed.fail.broadcast(ValueError("nobody waits"))
        wait_for_alarm(own)
        gate.open.broadcast("x")

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(fail_and_open)
        assert waiting.exception(WITHIN) is None
        done.result(WITHIN)
    assert hears(held).mesh_name == "doomed"


def wait_for_alarm(procs: ProcMesh) -> None:
    """Wait for a failure that the script's next wait will raise."""
    until = time.monotonic() + WITHIN
    while not procs._process.alarmed:
        assert time.monotonic() < until
        os.sched_yield()


# Many waiters.


def test_a_hundred_threads_that_wait_for_the_dead_are_all_notified(own: ProcMesh) -> None:
    actor: Any = own.slice(gpus=1).spawn("actor", Soft)
    actor.pid.call_one().get(WITHIN)
    calls = [actor.hold.call_one() for _ in range(100)]
    under_way = threading.Barrier(101)

    def wait(call: Any) -> int | None:
        under_way.wait(WITHIN)
        return hears(call).pid

    with ThreadPoolExecutor(100) as pool:
        waiting = [pool.submit(wait, call) for call in calls]
        under_way.wait(WITHIN)
        pid = slay(own, 1)
        assert {each.result(WITHIN) for each in waiting} == {pid}
    assert all(call.done() for call in calls)


def test_a_hundred_tasks_that_wait_for_the_dead_are_all_notified(own: ProcMesh) -> None:
    async def main() -> None:
        actor: Any = own.slice(gpus=1).spawn("actor", Soft)
        await actor.pid.call_one()
        calls = [actor.hold.call_one().as_asyncio() for _ in range(100)]
        await asyncio.sleep(0)
        pid = slay(own, 1)
        async with asyncio.timeout(WITHIN):
            errors = await asyncio.gather(*calls, return_exceptions=True)
        assert {failure_in(error).pid for error in errors if isinstance(error, BaseException)} == {pid}
        assert len(errors) == 100

    asyncio.run(main())


def test_a_hundred_callers_of_a_failing_actor_are_all_notified(own: ProcMesh) -> None:
    actor: Any = own.slice(gpus=1).spawn("actor", Soft)
    calls = [actor.hold.call_one() for _ in range(100)]
    actor.fail.broadcast(ValueError("no"))
    later = [actor.pid.call_one() for _ in range(100)]
    for call in calls + later:
        assert hears(call).mesh_name == "actor"
    assert own.slice(gpus=1).spawn("more", Soft).pid.call_one().get(WITHIN) == own.pids[1]


def test_a_kill_reaches_the_waiting_caller_soon(own: ProcMesh) -> None:
    taken = []
    for rank in range(3):
        waiting = kept_waiting(own, rank)
        pid = own.pids[rank]
        assert pid is not None
        begun = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert hears(waiting).signal == 9
        taken.append(time.monotonic() - begun)
    # In fact a few milliseconds; the benchmark requires 50. A machine may be busy once, but not three times.
    assert min(taken) < 0.5


# At the end of the script.

HEADER = """
import os, signal, sys, time
from typing import Any
from core_owners import Leaf, Soft
from core_samples import Broken
from mesh_core import SpawnError, SupervisionError, set_fault_handler, shutdown, this_host

procs = this_host().spawn_procs({"gpus": 2}, "mortal")
actors: Any = procs.spawn("actors", Leaf)
pids = actors.pid.call().get(30).values()
first, second = actors.slice(gpus=0), actors.slice(gpus=1)

def hear(call: Any) -> None:
    try:
        call.get(30)
    except (SupervisionError, SpawnError, ValueError):
        return
    raise AssertionError("no failure")

"""


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ("", 0, None),
        ("first.fail.broadcast(ValueError('no'))", 1, "'actors' failed"),
        ("os.kill(pids[0], 9)\nprocs.stop", 1, "killed by signal 9"),
        ("call = first.exit.call_one(5)\nwhile not call.done(): pass", 1, "exited with status 5"),
        ("hear(first.exit.call_one(5))", 0, None),
        ("first.fail.broadcast(ValueError('no'))\nraise KeyError('its own')", 1, "KeyError: 'its own'"),
        ("first.fail.broadcast(ValueError('no'))\nhear(first.pid.call_one())", 0, None),
        (
            "first.fail.broadcast(ValueError('no'))\nprocs.spawn('held', Soft).hold.call().get(30)",
            1,
            "SupervisionError: rank 0 (gpus=0) of mesh 'actors' failed",
        ),
        ("with procs:\n    first.fail.broadcast(ValueError('no'))", 1, "SupervisionError: rank 0"),
        ("first.fail.broadcast(ValueError('no'))\nhear(first.pid.call_one())\nshutdown()", 0, None),
        (
            "first.fail.broadcast(ValueError('no'))\nprocs.stop()\nshutdown()",
            0,
            "nobody handled this failure",
        ),
        ("set_fault_handler(lambda failure: None)\nfirst.fail.broadcast(ValueError('no'))", 0, None),
        (
            "set_fault_handler(lambda failure: sys.exit(0))\nfirst.fail.broadcast(ValueError('no'))",
            1,
            "nobody handled this failure",
        ),
        ("first.fail.call_one(ValueError('no'))", 0, None),
        ("procs.spawn('broken', Broken, 'never was').ping.broadcast()", 1, "never was"),
        ("hear(procs.spawn('broken', Broken, 'never was').ping.call())", 0, None),
        ("hear(this_host().spawn_procs({'gpus': 2}, preload=['nothing']).initialized)", 0, None),
        (
            "hear(this_host().spawn_procs({'gpus': 2}, start='exec', python='/bin/false').initialized)",
            0,
            None,
        ),
        (
            "up = this_host().spawn_procs({'gpus': 2}, preload=['nothing']).initialized\nwhile not up.done(): pass",
            1,
            "nobody handled this failure",
        ),
    ],
)
def test_how_a_script_ends(script: Callable[..., Script], body: str, status: int, said: str | None) -> None:
    """SUP-1, SUP-2: what a call raised needs no other handling; everything else is reported, with status 1."""
    run = script(HEADER + body)
    _, errors = run.finish()
    assert run.process.returncode == status, errors
    assert said is None or said in errors, errors
    if said is None:
        assert "handled this failure" not in errors


@pytest.mark.usefixtures("impatient")
def test_a_failure_caught_by_an_actor_in_the_scripts_process_is_passed_on(
    script: Callable[..., Script],
) -> None:
    """SUP-2: an actor's calls are not the script's, in its process as in any other."""
    run = script(
        """
        import asyncio
        from core_owners import Leaf
        from mesh_core import Actor, SupervisionError, endpoint, this_host, this_proc

        class Catches(Actor):
            @endpoint
            def lose(self):
                try:
                    this_host().spawn_procs().spawn("mine", Leaf).exit.call_one(5).get(30)
                except SupervisionError:
                    return "caught"

            @endpoint
            async def idle(self):
                await asyncio.sleep(30)

        here = this_proc().spawn("here", Catches)
        print(here.lose.call_one().get(30), flush=True)
        here.idle.call_one().get(30)
        """
    )
    said, errors = run.finish()
    # Whichever of the two calls the script is waiting for raises it.
    assert run.process.returncode == 1, errors
    assert said in {"caught\n", ""}
    assert "exited with status 5" in errors


def test_output_of_a_script_is_kept(script: Callable[..., Script], tmp_path: Any) -> None:
    path = tmp_path / "written"
    run = script(
        HEADER + f"file = open({str(path)!r}, 'w')\nfile.write('data')\nprint('said')\n"
        "first.fail.broadcast(ValueError('no'))",
        fresh=True,
    )
    said, errors = run.finish()
    assert (run.process.returncode, said) == (1, "said\n"), errors
    assert path.read_text() == "data"


def test_a_later_runtime_does_not_know_earlier_failures(script: Callable[..., Script]) -> None:
    run = script(
        HEADER + "first.fail.broadcast(ValueError('no'))\nhear(first.pid.call_one())\n"
        "os.kill(pids[1], 9)\nshutdown()\n"
        "print(this_host().spawn_procs().spawn('more', Leaf).block is not None)\n"
        "print(this_host().spawn_procs().spawn('more', Leaf).instance.call_one('name').get(30))\n"
    )
    said, errors = run.finish()
    assert run.process.returncode == 0, errors
    assert said == "True\nmore\n"
