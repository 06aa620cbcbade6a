"""Look at a running program: snapshots, events and stacks, also of stuck processes."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_processes import Watch
from core_samples import Broken, Caller, Coroutines, Echo, Gate

from mesh_core import (
    Actor,
    MeshError,
    MeshFailure,
    ProcMesh,
    Promise,
    SupervisionError,
    endpoint,
    gather,
    inspect,
    this_host,
    this_proc,
)
from mesh_core.inspect import ActorState, Event, Events, ProcState, Snapshot

pytestmark = [pytest.mark.usefixtures("runtime", "fault_tolerant"), pytest.mark.python]

LONG_S = 600


class Turnstile(Actor):
    """Handles one message for each byte in a file."""

    def __init__(self, turns: str) -> None:
        self.turns = os.open(turns, os.O_RDWR)

    @endpoint
    def enter(self) -> None:
        os.read(self.turns, 1)

    @endpoint
    async def enter_async(self) -> None:
        await asyncio.to_thread(os.read, self.turns, 1)


class Stuck(Actor):
    """Gets stuck in many ways."""

    @endpoint
    def sleep(self) -> None:
        time.sleep(LONG_S)

    @endpoint
    def wait(self) -> None:
        threading.Event().wait()

    @endpoint
    def hold_the_lock(self, flag: str) -> None:
        """Sleep in C while holding the interpreter's lock, so that nothing in this process runs Python."""
        sleep = ctypes.PyDLL(None).sleep
        with open(flag, "w") as file:  # noqa: PTH123 - it says that the endpoint has begun
            file.write("begun")
        sleep(LONG_S)

    @endpoint
    def spin(self) -> None:
        while True:
            self.deeper()

    def deeper(self) -> int:
        return sum(range(100))


class StuckLoop(Actor):
    """Blocks the event loop of its process."""

    @endpoint
    async def block(self) -> None:
        time.sleep(LONG_S)  # noqa: ASYNC251 - it is to block the loop

    @endpoint
    async def ping(self) -> str:
        return "pong"


class Looker(Actor):
    """Looks from inside an actor."""

    @endpoint
    def procs(self) -> list[tuple[str, str, str]]:
        return [(proc.name, proc.state, proc.owner) for proc in inspect.snapshot().procs]

    @endpoint
    def stack_of(self, mesh: Any, name: str) -> str:
        return str(inspect.stacks(mesh).item().of(name))

    @endpoint
    def follow(self) -> None:
        inspect.events()

    @endpoint
    def fail_somehow(self) -> None:
        from mesh_core._common.current import current

        current().hooks.failed(MeshFailure(mesh_name="elsewhere", rank=1), handled=True, by="looker")


@pytest.fixture
def own(runtime: None, fault_tolerant: None) -> Iterator[ProcMesh]:
    """Return four processes that a test may break; stuck ones are killed instead of waited for."""
    procs = this_host().spawn_procs(per_host={"gpus": 4}, name="mortal")
    procs.initialized.get()
    yield procs
    watch = Watch(pid for pid in procs.pids if pid is not None)
    for pid in watch.pids:
        os.kill(pid, signal.SIGKILL)
    assert watch.wait() == []
    procs.stop().get()


def until(found: Callable[[Snapshot], Any], limit: float = 20.0) -> Any:
    """Take snapshots until one fulfils a condition."""
    end = time.monotonic() + limit
    while not (value := found(snap := inspect.snapshot())):
        assert time.monotonic() < end, f"not seen within {limit} s:\n{snap}"
    return value


def actor(snap: Snapshot, name: str, rank: int = 0) -> ActorState:
    return next(one for one in snap.actors if (one.name, one.rank) == (name, rank))


def proc(snap: Snapshot, name: str) -> ProcState:
    return next(one for one in snap.procs if one.name == name)


def busy(name: str, rank: int = 0) -> Callable[[Snapshot], bool]:
    def found(snap: Snapshot) -> bool:
        return any(one.name == name and one.rank == rank and one.running for one in snap.actors)

    return found


# Snapshots.


def test_snapshot_shows_the_whole_job(procs: ProcMesh, echo: Any) -> None:
    for _ in range(3):
        echo.echo.call(1).get()
    echo.slice(hosts=1, gpus=0).fail.call_one(ValueError("x")).exception()
    snap = inspect.snapshot()
    assert [host.name for host in snap.hosts] == [this_host()._name]
    assert snap.hosts[0].memory > snap.hosts[0].memory_free > 0
    assert [one.name for one in snap.procs] == ["controller", *(f"shared[{n}]" for n in range(4))]
    assert [one.pid for one in snap.procs] == [os.getpid(), *procs.pids]
    third = snap.procs[3]
    assert (third.point, third.owner, third.state, third.mesh) == (
        {"hosts": 1, "gpus": 0},
        "controller",
        "running",
        "shared",
    )
    assert third.rss and third.pss and third.rss > third.pss and third.threads
    seen = actor(snap, "echo", 2)
    assert (seen.class_name, seen.point, seen.proc, seen.owner) == (
        "Echo",
        {"hosts": 1, "gpus": 0},
        "shared[2]",
        "controller",
    )
    assert (seen.state, seen.handled, seen.failed, seen.queue) == ("idle", 4, 1, 0)
    assert seen.received == 4 and seen.received_bytes > 0
    assert 0 < seen.mean <= seen.longest < 20
    assert actor(snap, "echo", 0).handled == 3


def test_snapshot_is_json(procs: ProcMesh, echo: Any) -> None:
    echo.echo.call(1).get()
    told = json.loads(json.dumps(inspect.snapshot().as_dict()))
    names = [one["name"] for host in told["hosts"] for one in host["procs"]]
    assert names[0] == "controller"
    assert told["hosts"][0]["procs"][1]["actors"][0]["name"] == "echo"


def test_queues_are_counted(own: ProcMesh) -> None:
    gate = own.slice(gpus=0).spawn("gate", Gate)
    gate.block.broadcast()
    until(busy("gate"))
    for _ in range(5):
        gate.block.broadcast()
    seen = until(lambda snap: actor(snap, "gate").queue == 5 and actor(snap, "gate"))
    assert seen.queue_bytes > 0
    assert (seen.received, seen.handled, seen.state) == (6, 0, "busy")
    assert seen.running[0].endpoint == "block"
    assert seen.running[0].caller == "controller"


@pytest.mark.parametrize("method", ["enter", "enter_async"])
def test_messages_taken_but_not_started_are_counted(own: ProcMesh, method: str, tmp_path: Path) -> None:
    """The actor takes many messages at once and handles them one after another."""
    fifo = tmp_path / "turns"
    os.mkfifo(fifo)
    turnstile = own.slice(gpus=0).spawn("turnstile", Turnstile, str(fifo))
    neighbour = own.slice(gpus=0).spawn("neighbour", Echo)
    enter = getattr(turnstile, method)

    def waiting(count: int) -> bool:
        seen = until(lambda snap: actor(snap, "turnstile").queue == count and actor(snap, "turnstile"))
        assert (seen.queue_bytes > 0) == (count > 0)
        return len(seen.running) == 1

    with fifo.open("r+b", buffering=0) as turns:
        calls = [enter.call_one() for _ in range(4)]
        assert waiting(3)
        turns.write(b"+")
        calls[0].get()
        # The other three were taken together, and one of them was started.
        assert waiting(2)
        calls[2].cancel()
        # The event loop, which carries out cancellations, has reached this one.
        for _ in range(2):
            neighbour.echo_async.call_one(1).get()
        turns.write(b"+")
        calls[1].get()
        # The cancelled one was skipped.
        assert waiting(0)
        turns.write(b"+")
        calls[3].get()


def test_all_concurrent_endpoints_are_shown(own: ProcMesh) -> None:
    doors = own.slice(gpus=1).spawn("doors", Coroutines)
    waiting = [doors.enter.call_one(n) for n in range(3)]
    seen = until(lambda snap: len(actor(snap, "doors").running) == 3 and actor(snap, "doors"))
    assert {one.endpoint for one in seen.running} == {"enter"}
    for n in range(3):
        doors.open.call_one(n).get()
    assert [one.get() for one in waiting] == [0, 1, 2]
    after = actor(inspect.snapshot(), "doors")
    assert (after.running, after.handled) == ((), 6)


def test_a_broadcast_that_raises_counts_as_handled(own: ProcMesh) -> None:
    echo = own.slice(gpus=0).spawn("echo", Echo)
    echo.fail.broadcast(ValueError("nobody hears"))
    assert isinstance(echo.echo.call_one(1).exception(), SupervisionError)
    seen = actor(inspect.snapshot(), "echo")
    assert (seen.handled, seen.failed, seen.running) == (1, 1, ())


def test_a_cancelled_call_is_over(own: ProcMesh) -> None:
    doors = own.slice(gpus=0).spawn("doors", Coroutines)
    held = doors.hold.call_one()
    doors.holding.call_one().get()
    assert held.cancel()
    assert doors.cancelled.call_one().get()
    until(lambda snap: not actor(snap, "doors").running)


def test_an_actor_under_construction_is_starting(own: ProcMesh, tmp_path: Any) -> None:
    path = tmp_path / "go"
    os.mkfifo(path)
    own.slice(gpus=0).spawn("slow", SlowToStart, str(path))
    until(lambda snap: any(one.state == "starting" and one.class_name for one in snap.actors))
    path.write_text("go")
    until(lambda snap: actor(snap, "slow").state == "idle")


class SlowToStart(Actor):
    def __init__(self, path: str) -> None:
        with open(path) as file:  # noqa: PTH123
            file.read()

    @endpoint
    def ping(self) -> None:
        pass


def test_a_stopped_process_is_shown_as_stopped_and_delays_nothing(own: ProcMesh) -> None:
    pid = own.pids[3]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    # The kernel stops it with some delay; it may answer once more.
    snap = until(lambda snap: proc(snap, "mortal[3]").state == "stopped" and snap)
    assert proc(inspect.snapshot(timeout=30), "mortal[3]").state == "stopped"
    assert proc(snap, "mortal[2]").state == "running"
    assert "stopped" in repr(snap)
    assert "SIGCONT" in inspect.stacks(own, timeout=30).values()[3].error
    os.kill(pid, signal.SIGCONT)
    until(lambda snap: proc(snap, "mortal[3]").state == "running")


def test_a_mesh_belongs_to_the_actor_that_spawned_it(own: ProcMesh) -> None:
    caller = own.slice(gpus=2).spawn("caller", Caller)
    caller.adopt.call_one(2).get()
    snap = inspect.snapshot()
    inner = [one for one in snap.procs if one.owner == "mortal[2]"]
    assert [one.point for one in inner] == [{"inner": 0}, {"inner": 1}]
    assert {one.owner for one in snap.actors if one.name == "inner"} == {"mortal[2]"}


def test_from_inside_an_actor(own: ProcMesh) -> None:
    looker = own.slice(gpus=0).spawn("looker", Looker)
    mine = [one for one in looker.procs.call_one().get() if one[0].startswith(("controller", "mortal"))]
    assert mine == [
        ("controller", "running", ""),
        *((f"mortal[{n}]", "running", "controller") for n in range(4)),
    ]
    gate = own.slice(gpus=1).spawn("gate", Gate)
    gate.block.broadcast()
    until(busy("gate"))
    assert "in block" in looker.stack_of.call_one(gate, "gate").get()
    with pytest.raises(MeshError, match="works only in the script"):
        looker.follow.call_one().get()


def test_failures_are_kept(own: ProcMesh) -> None:
    pid = own.pids[1]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    seen = until(lambda snap: [one for one in snap.failures if one.pid == pid and one.kind == "proc_died"])
    assert [(one.kind, one.proc, one.signal) for one in seen] == [("proc_died", "mortal[1]", 9)]
    assert str(seen[0]) in repr(inspect.snapshot())
    assert "mortal[1]" not in [one.name for one in inspect.snapshot().procs]


def test_a_table_stays_short(procs: ProcMesh) -> None:
    from dataclasses import replace

    snap = inspect.snapshot()
    worker = snap.procs[1]
    many = [
        replace(worker, name=f"shared[{n}]", state="silent" if n == 4_000 else "running")
        for n in range(5_000)
    ]
    crowd = replace(snap, hosts=(replace(snap.hosts[0], procs=tuple(many)),))
    lines = repr(crowd).splitlines()
    assert len(lines) < 80
    assert any("shared[4000]" in line and "silent" in line for line in lines)
    assert any("more processes" in line for line in lines)


# Stacks.


def test_stuck_threads_are_shown_while_others_answer(own: ProcMesh, tmp_path: Any) -> None:
    """GAU-1, WTS-2: a process answers though its interpreter is held up."""
    stuck = own.spawn("stuck", Stuck)
    loops = own.spawn("loops", StuckLoop)
    echo = own.spawn("echo", Echo)
    echo.echo.call(0).get()
    assert loops.ping.call().get().values() == ["pong"] * 4
    flag = tmp_path / "held"
    stuck.slice(gpus=0).sleep.broadcast()
    loops.slice(gpus=1).block.broadcast()
    stuck.slice(gpus=2).hold_the_lock.broadcast(str(flag))
    for wanted in (busy("stuck", 0), busy("loops", 1), busy("stuck", 2)):
        until(wanted)
    end = time.monotonic() + 20
    while not flag.exists() or not flag.read_text():
        assert time.monotonic() < end
    # Others answer: those beside a stuck thread, and other processes.
    assert echo.slice(gpus=0).echo.call_one("beside").get(timeout=20) == "beside"
    assert echo.slice(gpus=3).echo.call_one("else").get(timeout=20) == "else"
    found = inspect.stacks(own).values()
    assert [one.error for one in found] == [""] * 4
    assert [one.pid for one in found] == own.pids
    sleeping = found[0].of("stuck")
    assert [frame.function for frame in sleeping.own] == ["sleep"]
    assert sleeping.own[0].file == __file__
    assert sleeping.running[0].startswith("stuck.sleep for ")
    blocked = found[1].of("loops")
    assert blocked.own[0].function == "block"
    assert blocked.running[0].startswith("loops.block for ")
    assert found[2].of("stuck").own[0].function == "hold_the_lock"
    assert not found[3].of("stuck").own
    assert "waits for messages" in str(found[3])
    # They are unchanged: nothing was interrupted.
    snap = inspect.snapshot()
    for name, rank in (("stuck", 0), ("loops", 1), ("stuck", 2)):
        assert actor(snap, name, rank).handled <= 1
        assert actor(snap, name, rank).running
    assert inspect.waits(timeout=20).silent == ()
    assert echo.slice(gpus=3).echo.call_one("again").get(timeout=20) == "again"


@pytest.mark.slow
def test_stacks_of_a_running_thread(own: ProcMesh) -> None:
    """Try many times, because its frames change while they are read."""
    one = own.slice(gpus=0)
    stuck = one.spawn("stuck", Stuck)
    stuck.spin.broadcast()
    until(busy("stuck"))
    for _ in range(200):
        frames = inspect.stacks(one).item().of("stuck").own
        assert frames[-1].function == "spin"
        assert {frame.function for frame in frames} <= {"spin", "deeper"}
    assert proc(inspect.snapshot(), "mortal[0]").state == "running"


@pytest.mark.full
@pytest.mark.slow
def test_stacks_of_a_spinning_event_loop(own: ProcMesh) -> None:
    """Its frames change while they are read, and only the runtime can report them."""
    one = own.slice(gpus=0)
    spinning = one.spawn("spinning", SpinningLoop)
    busy_too = one.spawn("stuck", Stuck)
    busy_too.spin.broadcast()
    until(busy("stuck"))
    spinning.spin.broadcast()
    until(busy("spinning"))
    for _ in range(20):
        found = inspect.stacks(one, timeout=20).item()
        assert found.error == ""
        assert found.of("spinning").frames
        assert found.of("loop").frames
        assert found.of("stuck").frames
    assert proc(inspect.snapshot(), "mortal[0]").state == "running"
    assert own.slice(gpus=1).spawn("echo", Echo).echo.call_one(1).get() == 1


class SpinningLoop(Actor):
    @endpoint
    async def spin(self) -> None:
        while True:
            await self.deeper(10)

    async def deeper(self, depth: int) -> int:
        return depth and await self.deeper(depth - 1)


def test_stacks_of_a_slice(own: ProcMesh) -> None:
    echo = own.spawn("echo", Echo)
    echo.echo.call(0).get()
    part = inspect.stacks(echo.slice(gpus=slice(1, 3)))
    assert part.sizes == {"gpus": 2}
    assert [one.proc for one in part.values()] == ["mortal[1]", "mortal[2]"]
    with pytest.raises(KeyError, match=r"no thread 'nobody'; it has .*'echo'"):
        part.get(0).of("nobody")


def test_only_processes_have_stacks() -> None:
    for wrong in (this_host(), 3):
        with pytest.raises(TypeError, match="a mesh of processes or actors"):
            inspect.stacks(wrong)


def test_a_dead_process_is_reported(own: ProcMesh) -> None:
    pid = own.pids[0]
    assert pid is not None
    watch = Watch([pid])
    os.kill(pid, signal.SIGKILL)
    assert watch.wait() == []
    found = inspect.stacks(own, timeout=10).values()
    assert "has ended" in found[0].error
    assert found[1].error == ""


def test_the_stacks_of_this_process() -> None:
    here = inspect.stacks(this_proc()).item()
    assert here.pid == os.getpid()
    mine = next(thread for thread in here.threads if thread.ident == threading.get_ident())
    assert "test_the_stacks_of_this_process" in [frame.function for frame in mine.frames]


def test_a_fresh_interpreter_can_be_asked_too() -> None:
    with this_host().spawn_procs(start="exec") as procs:
        procs.spawn("echo", Echo).echo.call_one(1).get()
        assert inspect.stacks(procs).item().of("echo").frames


# Events.


@pytest.fixture
def happening() -> Iterator[Events]:
    with inspect.events() as events:
        yield events


def next_of(events: Events, kind: str, limit: float = 20.0) -> Event:
    end = time.monotonic() + limit
    while (event := events.get(max(0.0, end - time.monotonic()))) is not None:
        if event.kind == kind:
            return event
    raise AssertionError(f"no {kind} within {limit} s")


def test_a_life_in_events(happening: Events) -> None:
    with this_host().spawn_procs(per_host={"gpus": 2}, name="seen") as procs:
        spawned = next_of(happening, "procs_spawned")
        assert (spawned.proc, spawned.count) == ("seen", 2)
        assert {next_of(happening, "proc_up").proc for _ in range(2)} == {"seen[0]", "seen[1]"}
        echo = procs.slice(gpus=1).spawn("echo", Echo)
        created = next_of(happening, "actor_created")
        assert (created.actor, created.class_name, created.proc, created.rank) == (
            "echo",
            "Echo",
            "seen[1]",
            0,
        )
        echo.stop().get()
        assert next_of(happening, "actor_stopped").actor == "echo"
        broken = procs.slice(gpus=0).spawn("broken", Broken, "no")
        assert next_of(happening, "actor_failed").actor == "broken"
        broken.initialized.exception()
        pid = procs.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        died = next_of(happening, "proc_died")
        assert (died.proc, died.pid, died.signal) == ("seen[0]", pid, 9)
        assert "signal 9" in str(died)
    stopped = next_of(happening, "proc_stopped")
    assert (stopped.proc, stopped.exitcode) == ("seen[1]", 0)


def test_processes_spawned_by_actors_send_events(happening: Events, own: ProcMesh) -> None:
    caller = own.slice(gpus=0).spawn("caller", Caller)
    caller.nest.call_one(1).get()
    while True:
        event = next_of(happening, "actor_created")
        if event.actor == "inner":
            break
    assert event.class_name == "Echo"
    assert next_of(happening, "actor_stopped")


def test_failures_that_were_handled(happening: Events, own: ProcMesh) -> None:
    from mesh_core._common.current import current

    failure = MeshFailure(mesh_name="trainers", rank=3, pid=77, signal=9)
    current().hooks.failed(failure, handled=True, by="root")
    event = next_of(happening, "failure_handled")
    assert event.failure is failure
    assert (event.actor, event.rank, event.text) == ("trainers", 3, "by root")
    assert "killed by signal 9" in event.as_dict()["failure"]
    assert event in inspect.snapshot().failures
    own.slice(gpus=0).spawn("looker", Looker).fail_somehow.call_one().get()
    event = next_of(happening, "failure_handled")
    assert (event.actor, event.rank) == ("elsewhere", 1)
    assert "rank 1 of mesh 'elsewhere'" in event.text


def test_a_slow_reader_misses_events_and_blocks_nobody(happening: Events) -> None:
    from mesh_core._common.current import current

    hooks = current().hooks
    failure = MeshFailure(mesh_name="m")
    for _ in range(3000):
        hooks.failed(failure, handled=False)
    seen = 0
    while happening.get(0) is not None:
        seen += 1
    assert (seen, happening.missed) == (2048, 3000 - 2048)


def test_past_events_are_available_on_request(own: ProcMesh) -> None:
    with inspect.events(past=True) as events:
        assert next_of(events, "procs_spawned")
        assert next_of(events, "proc_up")


def test_no_events_are_sent_without_followers(own: ProcMesh) -> None:
    with inspect.events():
        pass
    own.spawn("echo", Echo).echo.call(1).get()
    with inspect.events(past=True) as events:
        while (event := events.get(0)) is not None:
            assert not (event.kind == "actor_created" and event.proc.startswith("mortal"))


def test_several_readers_each_see_everything(own: ProcMesh) -> None:
    with inspect.events() as one, inspect.events() as two:
        one.close()
        own.slice(gpus=0).spawn("echo", Echo)
        assert next_of(two, "actor_created").actor == "echo"
        assert one.get(0) is None


def test_async_for(own: ProcMesh) -> None:
    async def follow() -> list[str]:
        seen = []
        with inspect.events() as events:
            asyncio.get_running_loop().call_soon(lambda: own.spawn("echo", Echo))
            async for event in events:
                seen.append(event.proc)
                if len(seen) == 4:
                    return sorted(seen)
        raise AssertionError("it ended early")

    assert asyncio.run(follow()) == [f"mortal[{n}]" for n in range(4)]


def test_readers_end_with_the_runtime(script: Any) -> None:
    run = script(
        """
        import threading
        from mesh_core import inspect, shutdown, this_host

        if __name__ == "__main__":
            procs = this_host().spawn_procs()
            procs.initialized.get()
            events = inspect.events()
            reader = threading.Thread(target=lambda: print(sorted(event.kind for event in events)))
            reader.start()
            del procs
            shutdown()
            reader.join()
            print("over")
        """
    )
    assert run.line() == "['proc_stopped']"
    assert run.line() == "over"
    assert run.finish()[1] == ""


def test_ctrl_c_ends_a_wait_for_events(script: Any) -> None:
    run = script(
        """
        from mesh_core import inspect

        if __name__ == "__main__":
            events = inspect.events()
            try:
                print("waiting")
                for _ in events:
                    pass
            except KeyboardInterrupt:
                print("interrupted")
        """
    )
    assert run.line() == "waiting"
    run.process.send_signal(signal.SIGINT)
    assert run.line() == "interrupted"
    run.finish()
    assert run.process.returncode == 0


# Promises.


class Expecting(Actor):
    """Waits for a promise."""

    def __init__(self) -> None:
        self.promise = Promise[int]("batch")

    @endpoint
    async def wait(self) -> int:
        return await self.promise.future


def awaited(name: str = "controller") -> list[str]:
    proc = next(proc for proc in inspect.snapshot(timeout=30.0).procs if proc.name == name)
    assert all(promise.seconds >= 0 for promise in proc.promises)
    return [promise.name for promise in proc.promises]


def test_a_promise_is_shown_while_somebody_waits_for_it() -> None:
    promise, other = Promise[int]("weights"), Promise[int]("other")
    assert awaited() == []
    waiting = threading.Thread(target=promise.future.get)
    waiting.start()
    while not awaited():
        pass
    snapshot = inspect.snapshot()
    assert [one.name for one in snapshot.procs[0].promises] == ["weights"]
    assert "promise 'weights'" in str(snapshot)
    both = gather(promise.future, other.future)
    assert awaited() == ["weights", "other"]
    promise.set_result(1)
    other.set_result(1)
    waiting.join()
    assert both.get() == [1, 1]
    assert awaited() == []


def test_promises_of_a_worker_are_shown() -> None:
    with this_host().spawn_procs(name="expecting") as procs:
        actor = procs.spawn("actor", Expecting)
        waiting = actor.wait.call_one()
        while not awaited("expecting[0]"):
            pass
        assert awaited("expecting[0]") == ["batch"]
        waiting.cancel()
        while awaited("expecting[0]"):
            pass


def test_only_pending_promises_are_shown() -> None:
    """WTS-1: a wait that nobody waits for any more is not an edge."""
    first = Promise[int]("first")
    gathered = gather(first.future)
    for n in range(500):
        Promise[int](f"p{n}").set_result(n)
    last = Promise[int]("last")
    both = gather(last.future)
    assert awaited() == ["first", "last"]
    both.cancel()
    gathered.cancel()
    assert awaited() == []
