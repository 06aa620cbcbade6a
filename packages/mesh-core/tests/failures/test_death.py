"""Processes that die: who is notified, how fast, and what continues."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
from core_owners import slay_pid, suspend
from core_processes import Watch, family
from core_samples import Caller, Coroutines, Echo, Gate, exit_now

from mesh_core import ActorTimeout, MeshError, ProcMesh, SupervisionError, this_host

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def own(runtime: None, fault_tolerant: None) -> Any:
    """Four processes of its own for a test that may break them."""
    with this_host().spawn_procs(per_host={"gpus": 4}, name="mortal") as procs:
        procs.initialized.get()
        yield procs


def kill(procs: ProcMesh, rank: int, number: int = signal.SIGKILL) -> int:
    pid = procs.pids[rank]
    assert pid is not None
    if number == signal.SIGKILL:
        slay_pid(pid)
    elif number == signal.SIGSTOP:
        suspend(pid)
    else:
        os.kill(pid, number)
    return pid


def test_a_waiting_call_fails_at_once(own: ProcMesh) -> None:
    gates = own.spawn("gates", Coroutines)
    waiting = gates.enter.call("door")
    gates.open.call("other").get()
    pid = kill(own, 2)
    gates.slice(gpus=slice(0, 2)).open.call("door").get()
    gates.slice(gpus=3).open.call("door").get()
    with pytest.raises(SupervisionError) as caught:
        waiting.get()
    failure = caught.value.failure
    assert failure is not None
    assert (failure.signal, failure.exitcode, failure.rank, failure.pid) == (9, None, 2, pid)
    assert dict(failure.point or {}) == {"gpus": 2}
    assert failure.mesh_name == "gates"
    assert failure.host == this_host()._name
    assert "killed by signal 9 (SIGKILL)" in str(caught.value)
    values = waiting.get(return_exceptions=True).values()
    assert [values[0], values[1], values[3]] == ["door"] * 3
    assert isinstance(values[2], SupervisionError)


def test_exception_returns_a_death_while_others_work(own: ProcMesh) -> None:
    gates = own.spawn("gates", Coroutines)
    waiting = gates.enter.call("door")
    gates.open.call("other").get()
    kill(own, 2)
    error = waiting.exception(timeout=30)
    assert isinstance(error, SupervisionError)
    assert error.failure is not None and error.failure.rank == 2
    assert waiting.done() and error.results is None
    gates.slice(gpus=slice(0, 2)).open.call("door").get()
    gates.slice(gpus=3).open.call("door").get()
    assert waiting.exception(timeout=30) is error


def test_get_raises_the_same_error_again(own: ProcMesh) -> None:
    gates = own.spawn("gates", Coroutines)
    waiting = gates.enter.call("door")
    changed = waiting.then(len)
    gates.open.call("other").get()
    kill(own, 2)
    with pytest.raises(SupervisionError, match="killed by signal 9") as first:
        waiting.get(timeout=30)
    assert "other ranks have not answered yet" in "".join(first.value.__notes__)
    with pytest.raises(ActorTimeout, match="has not finished within 0 s"):
        waiting.get(timeout=0, return_exceptions=True)
    gates.slice(gpus=0).open.call_one("door").get()
    # Another rank fails that comes before the first one.
    kill(own, 1)
    gates.slice(gpus=3).open.call_one("door").get()
    results = waiting.get(timeout=30, return_exceptions=True)
    assert waiting.get(timeout=30, return_exceptions=True) is results
    with pytest.raises(SupervisionError) as again:
        waiting.get(timeout=30)
    assert again.value is first.value and again.value.results is results and again.value.__notes__ == []
    values = results.values()
    assert (values[0], values[2], values[3]) == ("door", first.value, "door")
    assert isinstance(values[1], SupervisionError) and values[1] is not first.value
    assert changed.exception(timeout=30) is first.value
    assert not waiting.cancel()


def test_a_call_can_be_cancelled_after_a_death_was_raised(own: ProcMesh) -> None:
    gates = own.spawn("gates", Coroutines)
    waiting = gates.enter.call("door")
    gates.open.call("other").get()
    kill(own, 2)
    error = waiting.exception(timeout=30)
    assert waiting.cancel() and not waiting.cancel()
    values = waiting.get(timeout=30, return_exceptions=True).values()
    assert values[2] is error is waiting.exception()
    assert all("cancelled by its caller" in str(value) for value in [*values[:2], values[3]])


def test_the_deadline_of_a_call_ends_the_wait_for_the_others_too(own: ProcMesh) -> None:
    gates = own.spawn("gates", Coroutines)
    kill(own, 2)
    with pytest.raises(SupervisionError):
        gates.slice(gpus=2).open.call_one("other").get()
    waiting = gates.enter.with_options(timeout=0.1).call("door")
    error = waiting.exception(timeout=30)
    assert isinstance(error, SupervisionError)
    values = waiting.get(timeout=30, return_exceptions=True).values()
    assert values[2] is error
    assert all(isinstance(value, ActorTimeout) for value in [*values[:2], values[3]])
    assert waiting.exception() is error


def test_a_rank_that_has_answered_may_die(own: ProcMesh) -> None:
    gates = own.spawn("gates", Coroutines)
    gates.slice(gpus=slice(1, 4)).open.call("door").get()
    waiting = gates.enter.call("door")
    gates.slice(gpus=2).open.call_one("other").get()  # behind the call
    kill(own, 2)
    # Once a call fails because of it, the death is known here.
    with pytest.raises(SupervisionError):
        gates.slice(gpus=2).open.call_one("other").get()
    with pytest.raises(ActorTimeout):
        waiting.get(timeout=0.02)
    gates.slice(gpus=0).open.call_one("door").get()
    assert waiting.get(timeout=30).values() == ["door"] * 4


def test_a_call_to_a_dying_actor(own: ProcMesh) -> None:
    one = own.slice(gpus=1).spawn("one", Gate)
    one.initialized.get()
    waiting = one.block.call_one()
    kill(own, 1, signal.SIGTERM)
    with pytest.raises(SupervisionError) as caught:
        waiting.get()
    assert caught.value.failure is not None
    assert caught.value.failure.signal == signal.SIGTERM


def test_other_ranks_continue_and_later_calls_fail_at_once(own: ProcMesh) -> None:
    echo = own.spawn("echo", Echo)
    assert len(echo.echo.call(1).get()) == 4
    kill(own, 0)
    with pytest.raises(SupervisionError):
        echo.slice(gpus=0).echo.call_one(1).get()
    assert echo.slice(gpus=slice(1, 4)).echo.call(2).get().values() == [2, 2, 2]
    for _ in range(3):
        with pytest.raises(SupervisionError) as caught:
            echo.echo.call(3).get()
        assert caught.value.failure is not None
        assert caught.value.failure.signal == 9
    results = echo.echo.call(4).get(return_exceptions=True).values()
    assert results[1:] == [4, 4, 4]
    assert own.slice(gpus=3).spawn("more", Echo).echo.call_one(5).get() == 5


def test_an_exit_status_is_reported(own: ProcMesh) -> None:
    echo = own.spawn("echo", Echo)
    with pytest.raises(SupervisionError, match="exited with status 3") as caught:
        echo.slice(gpus=3).call.call_one(exit_now, 3).get()
    failure = caught.value.failure
    assert failure is not None
    assert (failure.exitcode, failure.signal, failure.rank) == (3, None, 3)


def test_a_reply_that_was_sent_before_the_end_counts(own: ProcMesh) -> None:
    echo = own.slice(gpus=0).spawn("echo", Echo)
    replies = [echo.echo.call_one(n) for n in range(200)]
    end = echo.call.call_one(exit_now, 0)
    with pytest.raises(SupervisionError):
        end.get()
    assert [reply.get() for reply in replies] == list(range(200))


def test_a_stream_ends_with_the_error_of_a_dead_rank(own: ProcMesh) -> None:
    gates = own.spawn("gates", Coroutines)
    stream = iter(gates.enter.stream("door"))
    kill(own, 1)
    with pytest.raises(SupervisionError):
        next(stream).get()
    for rank in (0, 2, 3):
        gates.slice(gpus=rank).open.call_one("door").get()
    assert [future.get() for future in stream] == ["door"] * 3


def test_a_caller_that_is_an_actor_is_notified(own: ProcMesh) -> None:
    gate = own.slice(gpus=0).spawn("gate", Gate)
    caller = own.slice(gpus=1).spawn("caller", Caller)
    waiting = caller.watch.call_one(gate)
    gate.initialized.get()
    kill(own, 0)
    assert waiting.get() == "SupervisionError 9"
    # An actor that calls it after its death is notified as well.
    assert caller.watch.call_one(gate).get() == "SupervisionError 9"


def test_a_broadcast_to_the_dead_is_no_error(own: ProcMesh) -> None:
    echo = own.spawn("echo", Echo)
    echo.echo.call(0).get()
    kill(own, 2)
    for n in range(50):
        echo.echo.broadcast(n)
    assert echo.slice(gpus=1).echo.call_one("alive").get() == "alive"


def test_choose_skips_dead_ranks(own: ProcMesh) -> None:
    echo = own.spawn("echo", Echo)
    echo.echo.call(0).get()
    for rank in (0, 1, 3):
        kill(own, rank)
        echo.slice(gpus=rank).echo.call_one(0).exception()
    assert [echo.echo.choose(n).get() for n in range(20)] == list(range(20))
    kill(own, 2)
    echo.slice(gpus=2).echo.call_one(0).exception()
    assert isinstance(echo.echo.choose(1).exception(), SupervisionError)


def test_meshes_of_a_dead_process_die_with_it(own: ProcMesh) -> None:
    caller = own.slice(gpus=2).spawn("caller", Caller)
    inner = Watch(caller.adopt.call_one(3).get())
    kill(own, 2)
    assert inner.wait() == []


def test_a_stopped_process_is_not_dead(own: ProcMesh) -> None:
    echo = own.spawn("echo", Echo)
    echo.echo.call(0).get()
    kill(own, 3, signal.SIGSTOP)
    waiting = echo.echo.call(1)
    assert echo.slice(gpus=0).echo.call_one(2).get() == 2
    assert not waiting.done()
    kill(own, 3, signal.SIGCONT)
    assert waiting.get().values() == [1] * 4


def test_the_fork_server_dies(own: ProcMesh) -> None:
    """Its workers die with it; every waiting call is notified, and the next spawn works."""
    gates = own.spawn("gates", Gate)
    gates.initialized.get()
    waiting = gates.block.call()
    workers = Watch(pid for pid in own.pids if pid is not None)
    fork_server = next(pid for pid in family() if workers.pids[0] in family(pid))
    os.kill(fork_server, signal.SIGKILL)
    with pytest.raises(MeshError):
        waiting.get()
    assert workers.wait() == []
    with this_host().spawn_procs(per_host={"gpus": 2}) as again:
        assert again.spawn("echo", Echo).echo.call(1).get().values() == [1, 1]


CONTROLLER = """
    import os, signal, sys, time
    from mesh_core import this_host
    from core_samples import Caller, Echo, Gate

    if __name__ == "__main__":
        procs = this_host().spawn_procs(per_host={"gpus": 3}, start=sys.argv[1])
        print(procs.spawn("echo", Echo).echo.call(1).get().values())
        caller = procs.slice(gpus=1).spawn("caller", Caller)
        print(len(caller.adopt.call_one(2).get()))
        gates = procs.spawn("gates", Gate)
        gates.initialized.get()
        gates.block.broadcast()
        if len(sys.argv) > 2:
            os.kill(procs.pids[0], signal.SIGSTOP)
        print("ready")
        gates.block.call().get()
"""


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("start", ["fork", pytest.param("exec", marks=pytest.mark.slow)])
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_workers_die_with_their_controller(script: Any, start: str, stopped: bool) -> None:
    """Whatever they are doing: blocked in an endpoint, in a nested call, or stopped by a signal."""
    run = script(CONTROLLER, start, *(["stop"] if stopped else []))
    assert [run.line() for _ in range(3)] == ["[1, 1, 1]", "2", "ready"]
    watch = run.watch()
    assert len(watch.pids) >= 6
    run.process.kill()
    assert watch.wait() == []


def test_workers_die_with_a_script_that_ends_without_stopping_them(script: Any) -> None:
    run = script(
        """
        from mesh_core import this_host
        from core_samples import Echo

        if __name__ == "__main__":
            procs = this_host().spawn_procs(per_host={"gpus": 3})
            print(procs.spawn("echo", Echo).echo.call(1).get().values())
            input()
        """
    )
    assert run.line() == "[1, 1, 1]"
    watch = run.watch()
    run.say("")
    _, err = run.finish()
    assert (run.process.returncode, err) == (0, "")
    assert watch.wait() == []


def test_workers_die_with_a_controller_that_crashes(script: Any) -> None:
    run = script(
        """
        import os
        from mesh_core import this_host
        from core_samples import Echo

        if __name__ == "__main__":
            procs = this_host().spawn_procs(per_host={"gpus": 3})
            print(procs.spawn("echo", Echo).echo.call(1).get().values())
            input()
            os._exit(7)
        """
    )
    assert run.line() == "[1, 1, 1]"
    watch = run.watch()
    run.say("")
    run.finish()
    assert run.process.returncode == 7
    assert watch.wait() == []
