"""What counts as a failure, who is notified of it, and what it does not affect."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from core_owners import (
    WITHIN,
    Bedlam,
    Guard,
    Leaf,
    Owner,
    Soft,
    SoftBedlam,
    SoftGuard,
    Told,
    slay,
    slay_pid,
    suspend,
)
from core_processes import Watch
from core_samples import Broken, Unpicklable

from mesh_core import (
    ActorError,
    ActorTimeout,
    MeshError,
    MeshFailure,
    ProcMesh,
    SupervisionError,
    Undeliverable,
    configured,
    endpoint,
    set_fault_handler,
    this_host,
)

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.fixture
def own(runtime: None) -> Iterator[ProcMesh]:
    """Four processes of its own for a test that may break them."""
    with this_host().spawn_procs(per_host={"gpus": 4}, name="mortal") as procs:
        procs.initialized.get()
        yield procs


@pytest.fixture
def told(runtime: None) -> Iterator[Told]:
    """The failures that reach the script's fault handler."""
    found = Told()
    set_fault_handler(found.put)
    yield found
    set_fault_handler(None)


def one(procs: ProcMesh, rank: int = 0) -> ProcMesh:
    return procs.slice(gpus=rank)


def fence(told: Told, procs: ProcMesh, rank: int = 0) -> list[MeshFailure]:
    """Every failure reported to the script before one that is caused now in this process."""
    last: Any = one(procs, rank).spawn("fence", Leaf)
    last.pid.call_one().get(WITHIN)
    last.fail.broadcast(ValueError("the fence"))
    before = []
    while (failure := told.next()).mesh_name != "fence":
        before.append(failure)
    return before


def lost(call: Callable[[], Any]) -> MeshFailure:
    """The failure that a call raises."""
    with pytest.raises(SupervisionError) as caught:
        call()
    assert caught.value.failure is not None
    return caught.value.failure


# What makes an actor fail, and what does not.


@pytest.mark.parametrize("cls", [Leaf, Soft])
@pytest.mark.parametrize(
    "error",
    [ValueError("no"), SystemExit(3), KeyboardInterrupt(), OSError(5, "io")],
    ids=lambda e: type(e).__name__,
)
def test_an_exception_in_a_call_goes_to_its_caller_only(
    own: ProcMesh, told: Told, cls: type[Any], error: BaseException
) -> None:
    actor: Any = one(own).spawn("actor", cls)
    raised = actor.fail.call_one(error).exception(WITHIN)
    assert isinstance(raised, ActorError)
    assert not isinstance(raised, SupervisionError)
    if isinstance(error, Exception):
        assert isinstance(raised, type(error))
    assert actor.pid.call_one().get(WITHIN) == own.pids[0]
    assert fence(told, own) == []


@pytest.mark.parametrize("cls", [Leaf, Soft])
@pytest.mark.parametrize(
    "error",
    [ValueError("no"), SystemExit(3), KeyboardInterrupt(), Unpicklable("x")],
    ids=lambda e: type(e).__name__,
)
def test_an_exception_in_a_broadcast_is_the_actors_failure(
    own: ProcMesh, told: Told, cls: type[Any], error: BaseException
) -> None:
    if isinstance(error, Unpicklable):
        error.lock = None  # type: ignore[assignment]  # it is to be sent first
    actors: Any = own.spawn("actors", cls)
    neighbour: Any = one(own, 1).spawn("neighbour", cls)
    actors.pid.call().get(WITHIN)
    actors.slice(gpus=1).fail.broadcast(error)
    failure = told.next()
    assert (failure.mesh_name, failure.rank, failure.pid) == ("actors", 1, own.pids[1])
    assert dict(failure.point or {}) == {"gpus": 1}
    assert (failure.exitcode, failure.signal, failure.chain) == (None, None, ())
    assert failure.host == this_host()._name
    assert isinstance(failure.exception, ActorError)
    if isinstance(error, Exception):
        assert isinstance(failure.exception, type(error))
    assert failure.since is not None
    assert abs(failure.since - time.time()) < WITHIN
    assert failure.mesh is not None
    assert failure.mesh.name == "actors"
    report = failure.report()
    for word in ("rank 1 (gpus=1) of mesh 'actors' failed", str(own.pids[1]), type(error).__name__, "since"):
        assert word in report
    # The failed actor answers every caller, at once and with the same error.
    for _ in range(3):
        assert lost(lambda: actors.slice(gpus=1).pid.call_one().get(WITHIN)).rank == 1
    # Neither the other ranks of its mesh nor its neighbours are affected.
    assert actors.slice(gpus=0).pid.call_one().get(WITHIN) == own.pids[0]
    assert actors.slice(gpus=slice(2, 4)).pid.call().get(WITHIN).values() == own.pids[2:]
    assert neighbour.pid.call_one().get(WITHIN) == own.pids[1]
    outcomes = actors.pid.call().get(WITHIN, return_exceptions=True).values()
    assert [type(each) for each in outcomes if isinstance(each, int)] == [int] * 3
    assert isinstance(outcomes[1], SupervisionError)
    assert fence(told, own, 1) == []


@pytest.mark.parametrize("times", range(3))
def test_an_actor_that_is_killed_answers_nothing_that_comes_later(
    own: ProcMesh, told: Told, times: int
) -> None:
    actor: Any = one(own).spawn("actor", Leaf)
    killed = actor.instance.call_one("kill", "enough")
    behind = [actor.pid.call_one() for _ in range(50)]
    killed.exception(WITHIN)
    for call in behind:
        assert "was killed: enough" in lost(lambda call=call: call.get(WITHIN)).report()  # type: ignore[misc]
    assert told.next().mesh_name == "actor"


def test_an_exception_in_a_constructor_goes_to_the_spawner(own: ProcMesh, told: Told) -> None:
    broken: Any = one(own).spawn("broken", Broken, "never was")
    with pytest.raises(ValueError, match="never was"):
        broken.initialized.get(WITHIN)
    with pytest.raises(ValueError, match="never was"):
        broken.ping.call_one().get(WITHIN)
    assert fence(told, own) == []


@pytest.mark.parametrize("how", ["kill", "exit", "abort"])
def test_a_processs_death_is_the_failure_of_its_actors(own: ProcMesh, told: Told, how: str) -> None:
    actors: Any = own.spawn("actors", Leaf)
    actors.pid.call().get(WITHIN)
    pid = own.pids[2]
    call = None
    if how == "kill":
        slay(own, 2)
    else:
        call = actors.slice(gpus=2).exit.call_one(7) if how == "exit" else None
        call = call or actors.slice(gpus=2).instance.call_one("abort", "for a test")
    failure = told.next()
    status = {"kill": (None, 9), "exit": (7, None), "abort": (1, None)}[how]
    assert (failure.mesh_name, failure.rank, failure.pid) == ("actors", 2, pid)
    assert (failure.exitcode, failure.signal) == status
    assert failure.exception is None
    if call is not None:
        assert lost(lambda: call.get(WITHIN)).pid == pid
    assert actors.slice(gpus=slice(0, 2)).pid.call().get(WITHIN).values() == own.pids[:2]
    assert fence(told, own) == []


def test_a_death_is_reported_once_for_each_mesh_of_actors(own: ProcMesh, told: Told) -> None:
    first: Any = own.spawn("first", Leaf)
    part: Any = own.slice(gpus=slice(1, 3)).spawn("part", Leaf)
    elsewhere: Any = own.slice(gpus=slice(2, 4)).spawn("elsewhere", Leaf)
    for mesh in (first, part, elsewhere):
        mesh.pid.call().get(WITHIN)
    slay(own, 1)
    found = sorted((told.next().mesh_name, told.next().mesh_name))
    assert found == ["first", "part"]
    assert fence(told, own) == []


def test_a_death_of_a_process_without_actors_is_its_meshs(own: ProcMesh, told: Told) -> None:
    slay(own, 3)
    failure = told.next()
    assert (failure.mesh_name, failure.rank, failure.mesh is not None) == ("mortal", 3, True)
    assert fence(told, own) == []


def test_a_stop_is_no_failure(own: ProcMesh, told: Told) -> None:
    actor: Any = one(own).spawn("actor", Leaf)
    other: Any = one(own, 1).spawn("other", Leaf)
    with this_host().spawn_procs(name="brief") as brief:
        brief.spawn("briefly", Leaf).pid.call_one().get(WITHIN)
    actor.stop().get(WITHIN)
    other.instance.call_one("stop", "enough").get(WITHIN)
    with pytest.raises(Undeliverable):
        actor.pid.call_one().get(WITHIN)
    with pytest.raises(Undeliverable):
        other.pid.call_one().get(WITHIN)
    assert fence(told, own) == fence(told, own, 1) == []


def test_a_suspended_process_is_not_dead(own: ProcMesh, told: Told) -> None:
    actors: Any = own.spawn("actors", Leaf)
    pids = actors.pid.call().get(WITHIN).values()
    suspend(pids[0])
    try:
        waiting = actors.slice(gpus=0).pid.call_one()
        with pytest.raises(ActorTimeout):
            waiting.get(0.3)
        assert fence(told, own, 1) == []
    finally:
        os.kill(pids[0], signal.SIGCONT)
    assert waiting.get(WITHIN) == pids[0]


@pytest.mark.parametrize("cls", [Bedlam, SoftBedlam])
@pytest.mark.parametrize("what", ["raise", "exit"])
def test_an_exception_in_cleanup_is_raised_only_by_the_stop(
    own: ProcMesh, told: Told, cls: type[Any], what: str
) -> None:
    neighbour: Any = one(own).spawn("neighbour", Leaf)
    actor: Any = one(own).spawn("actor", cls, what)
    actor.pid.call_one().get(WITHIN)
    assert isinstance(actor.stop().exception(WITHIN), ActorError)
    with pytest.raises(Undeliverable):
        actor.pid.call_one().get(WITHIN)
    assert neighbour.pid.call_one().get(WITHIN) == own.pids[0]
    assert fence(told, own) == []


@pytest.mark.parametrize("cls", [Bedlam, SoftBedlam])
@pytest.mark.parametrize("what", ["raise", "exit"])
def test_an_exception_in_the_cleanup_of_a_failed_actor_affects_nobody(
    own: ProcMesh, told: Told, cls: type[Any], what: str
) -> None:
    neighbour: Any = one(own).spawn("neighbour", Leaf)
    actor: Any = one(own).spawn("actor", cls, what)
    actor.pid.call_one().get(WITHIN)
    actor.fail.broadcast(ValueError("first"))
    assert isinstance(told.next().exception, ValueError)
    actor.stop().get(WITHIN)
    assert neighbour.pid.call_one().get(WITHIN) == own.pids[0]
    assert fence(told, own) == []


@pytest.fixture
def brief(runtime: None) -> Iterator[ProcMesh]:
    """A process that has half a second to stop."""
    with configured(stop_timeout=0.5), this_host().spawn_procs(name="brief") as procs:
        yield procs


@pytest.mark.parametrize("cls", [Bedlam, SoftBedlam])
def test_a_cleanup_that_hangs_has_a_deadline(brief: ProcMesh, told: Told, cls: type[Any]) -> None:
    actor: Any = brief.spawn("actor", cls, "hang")
    actor.pid.call_one().get(WITHIN)
    with pytest.raises(MeshError, match="__cleanup__ of actor 'actor'"):
        actor.stop().get(WITHIN)
    # A thread that hangs cannot be ended; the process ends nonetheless.
    brief.stop().get(WITHIN)


@pytest.mark.parametrize("cls", [Bedlam, SoftBedlam])
def test_a_failed_actor_whose_cleanup_hangs_can_be_stopped(
    brief: ProcMesh, told: Told, cls: type[Any]
) -> None:
    actor: Any = brief.spawn("actor", cls, "hang")
    actor.pid.call_one().get(WITHIN)
    actor.fail.broadcast(ValueError("first"))
    assert told.next().mesh_name == "actor"
    actor.stop().exception(WITHIN)


# Actors as owners.


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("cls", [Guard, SoftGuard])
@pytest.mark.parametrize("answer", ["handle", "truthy"])
def test_an_owner_that_handles_a_failure_is_the_last_one_notified(
    own: ProcMesh, told: Told, cls: type[Any], answer: str
) -> None:
    guard: Any = one(own).spawn("guard", cls, answer)
    mesh, pids = guard.hire.call_one(Leaf, 2).get(WITHIN)
    slay_pid(pids[1])
    (failure,) = guard.told.call_one(1).get(WITHIN)
    assert (failure.mesh_name, failure.rank, failure.pid, failure.signal) == ("hired", 1, pids[1], 9)
    assert failure.mesh.name == "hired"
    assert failure.chain == ()
    mesh.slice(n=0).fail.broadcast(KeyError("gone"))
    _, failure = guard.told.call_one(2).get(WITHIN)
    assert (failure.rank, failure.pid, failure.signal) == (0, pids[0], None)
    assert isinstance(failure.exception, KeyError)
    assert fence(told, own) == []
    # It still works like any other actor.
    assert guard.pid.call_one().get(WITHIN) == own.pids[0]


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("cls", [Guard, SoftGuard])
@pytest.mark.parametrize("answer", ["pass", "nothing"])
def test_an_owner_passes_a_failure_on_to_its_own_owner(
    own: ProcMesh, told: Told, cls: type[Any], answer: str
) -> None:
    guard: Any = one(own).spawn("guard", cls, answer)
    _, (pid,) = guard.hire.call_one(Leaf, 1).get(WITHIN)
    slay_pid(pid)
    failure = told.next()
    assert (failure.mesh_name, failure.pid, failure.signal) == ("hired", pid, 9)
    assert failure.chain == ("actor 'guard' in mortal[0]",)
    assert "arrived by: actor 'guard' in mortal[0]" in failure.report()
    assert guard.pid.call_one().get(WITHIN) == own.pids[0]
    assert fence(told, own) == []


@pytest.mark.sampled(3, full=True)
@pytest.mark.parametrize("cls", [Guard, SoftGuard])
@pytest.mark.parametrize("answer", ["raise", "exit", "cancel"])
def test_an_owner_whose_supervise_raises_has_failed_itself(
    own: ProcMesh, told: Told, cls: type[Any], answer: str
) -> None:
    neighbour: Any = one(own).spawn("neighbour", Leaf)
    guard: Any = one(own).spawn("guard", cls, answer)
    _mesh, pids = guard.hire.call_one(Leaf, 2).get(WITHIN)
    survivor = Watch(pids[1:])
    slay_pid(pids[0])
    failure = told.next()
    assert (failure.mesh_name, failure.pid, failure.signal) == ("guard", own.pids[0], None)
    if answer == "raise":
        assert isinstance(failure.exception, LookupError)
    assert str(pids[0]) in failure.report()
    assert "__supervise__" in failure.report() or "'guard'" in failure.report()
    # What it owned ended with it; its neighbours did not.
    assert survivor.wait() == []
    assert lost(lambda: guard.pid.call_one().get(WITHIN)).mesh_name == "guard"
    assert neighbour.pid.call_one().get(WITHIN) == own.pids[0]
    assert fence(told, own) == []


def test_an_owner_without_the_method_passes_everything_on(own: ProcMesh, told: Told) -> None:
    owner: Any = one(own).spawn("owner", Owner)
    _mesh, (pid,) = owner.hire.call_one(Leaf, 1).get(WITHIN)
    slay_pid(pid)
    failure = told.next()
    assert (failure.mesh_name, failure.chain) == ("hired", ("actor 'owner' in mortal[0]",))
    # Its next call raises: that is an ActorError for its caller only.
    error = owner.ask.call_one("pid").exception(WITHIN)
    assert isinstance(error, SupervisionError)
    assert isinstance(error, ActorError)
    assert error.failure is not None
    assert error.failure.pid == pid
    assert fence(told, own) == []


def test_a_call_by_other_code_in_the_owners_process_does_not_notify_the_owner(
    own: ProcMesh, told: Told
) -> None:
    owner: Any = one(own).spawn("owner", Owner)
    stranger: Any = one(own).spawn("stranger", Owner)
    mesh, (pid,) = owner.hire.call_one(Leaf, 1).get(WITHIN)
    # Its call is lost with the process, and raised only to it.
    assert lost(lambda: stranger.ask_other.call_one(mesh, "exit", 4).get(WITHIN)).pid == pid
    assert told.next().pid == pid
    assert fence(told, own) == []


def test_a_call_that_nobody_waits_for_does_not_notify_its_owner(own: ProcMesh, told: Told) -> None:
    owner: Any = one(own).spawn("owner", Owner)
    _, (pid,) = owner.hire.call_one(Leaf, 1).get(WITHIN)
    owner.ask_and_forget.call_one("exit", 4).get(WITHIN)
    assert told.next().pid == pid
    assert fence(told, own) == []


def test_three_levels_of_owners(own: ProcMesh, told: Told) -> None:
    top: Any = one(own, 0).spawn("top", Guard, "pass")
    (middle, _) = top.place.call_one(one(own, 1), Guard, "pass").get(WITHIN)
    (bottom, _) = middle.place.call_one(one(own, 2), Guard, "pass").get(WITHIN)
    _leaf, (pid,) = bottom.hire.call_one(Leaf, 1).get(WITHIN)
    slay_pid(pid)
    failure = told.next()
    places = ("actor 'placed' in mortal[2]", "actor 'placed' in mortal[1]", "actor 'top' in mortal[0]")
    assert failure.chain == places
    assert " -> ".join(places) in failure.report()
    for guard, depth in ((bottom, 0), (middle, 1), (top, 2)):
        (heard,) = guard.told.call_one(1).get(WITHIN)
        assert heard.chain == places[:depth]
        assert heard.pid == pid
    assert fence(told, own, 0) == []


def test_an_owner_in_the_middle_handles_a_failure(own: ProcMesh, told: Told) -> None:
    top: Any = one(own, 0).spawn("top", Guard, "pass")
    (middle, _) = top.place.call_one(one(own, 1), SoftGuard, "handle").get(WITHIN)
    (bottom, _) = middle.place.call_one(one(own, 2), Owner).get(WITHIN)
    leaf, _ = bottom.hire.call_one(Leaf, 1).get(WITHIN)
    leaf.fail.broadcast(ValueError("deep down"))
    (failure,) = middle.told.call_one(1).get(WITHIN)
    assert failure.mesh_name == "hired"
    assert isinstance(failure.exception, ValueError)
    assert failure.chain == ("actor 'placed' in mortal[2]",)
    assert fence(told, own, 1) == []
    assert top.told.call_one(0).get(WITHIN) == []


def test_a_plain_method_is_asked_between_two_messages_on_the_actors_thread(
    own: ProcMesh, told: Told, tmp_path: Path
) -> None:
    fifo = tmp_path / "go on"
    os.mkfifo(fifo)
    guard: Any = one(own).spawn("guard", Guard)
    _mesh, pids = guard.hire.call_one(Leaf, 1).get(WITHIN)
    guard.work_until.broadcast(str(fifo))
    later = guard.thread.call_one()
    with fifo.open("w") as go_on:
        slay_pid(pids[0])
        # The guard's process knows by now: the next failure there has arrived here.
        fence(told, own)
        assert not later.done()
        go_on.write("now")
    thread = later.get(WITHIN)
    guard.told.call_one(1).get(WITHIN)
    assert guard.asked_where.call_one().get(WITHIN) == [(thread, False)]
    assert fence(told, own) == []


def test_it_is_asked_there_too_while_the_loop_works_for_the_actor(own: ProcMesh, told: Told) -> None:
    guard: Any = one(own).spawn("guard", Guard)
    _mesh, pids = guard.hire.call_one(Leaf, 1).get(WITHIN)
    thread = guard.thread.call_one().get(WITHIN)
    # A coroutine, so that from here on the loop has the inbox.
    guard.told.call_one(0).get(WITHIN)
    heard = guard.told.call_one(1)
    slay_pid(pids[0])
    heard.get(WITHIN)
    assert guard.asked_where.call_one().get(WITHIN) == [(thread, False)]
    assert fence(told, own) == []


def test_the_error_of_a_failed_actor_shows_its_traceback_once(own: ProcMesh, told: Told) -> None:
    actor: Any = one(own).spawn("actor", Leaf)
    actor.instance.call_one("kill", "because").exception(WITHIN)
    told.next()
    with pytest.raises(RuntimeError) as caught:
        actor.pid.call_one().get(WITHIN)
    said = str(caught.value).splitlines()
    assert said[0].endswith(f"pid {own.pids[0]}: actor 'actor' in mortal[0] was killed: because")
    assert [line.split()[0] for line in said[1:]] == ["since:", "failure:"]
    failed: Any = one(own).spawn("failed", Leaf)
    failed.fail.broadcast(ValueError("so it is"))
    told.next()
    with pytest.raises(SupervisionError) as raised:
        failed.pid.call_one().get(WITHIN)
    said = str(raised.value).splitlines()
    assert said[0].endswith("raised ValueError: so it is")
    assert sum("ValueError" in line for line in said) == 2  # and below the traceback
    assert sum("Traceback" in line for line in said) == 1


def test_a_slow_supervise_holds_up_only_its_own_actor(own: ProcMesh, told: Told) -> None:
    neighbour: Any = one(own).spawn("neighbour", Soft)
    guard: Any = one(own).spawn("guard", Slow)
    _, pids = guard.hire.call_one(Leaf, 1).get(WITHIN)
    slay_pid(pids[0])
    guard.asked.call_one().get(WITHIN)
    assert neighbour.pid.call_one().get(WITHIN) == own.pids[0]
    guard.answer_now.call_one().get(WITHIN)
    assert told.next().pid == pids[0]


class Slow(Owner):
    """Answers when the test tells it to."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_about = asyncio.Event()
        self.answer = asyncio.Event()

    @endpoint(concurrent=True)
    async def asked(self) -> None:
        await self.asked_about.wait()

    @endpoint(concurrent=True)
    async def answer_now(self) -> None:
        self.answer.set()

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.asked_about.set()
        await self.answer.wait()
        return False


# Policies.


@pytest.mark.parametrize("on", ["procs", "actors"])
@pytest.mark.parametrize("answer", [True, False])
def test_a_policy_is_asked_before_the_script(own: ProcMesh, told: Told, on: str, answer: bool) -> None:
    asked = Told()

    def policy(failure: MeshFailure) -> bool:
        asked.put(failure)
        return answer

    procs = this_host().spawn_procs(name="ruled", supervise=policy if on == "procs" else None)
    actors: Any = procs.spawn("actors", Leaf, supervise=policy if on == "actors" else None)
    pid = actors.pid.call_one().get(WITHIN)
    slay_pid(pid)
    failure = asked.next()
    assert (failure.mesh_name, failure.pid) == ("ruled" if on == "procs" else "actors", pid)
    seen = [each.mesh_name for each in fence(told, own)]
    # Owners of actors are notified separately, even if the mesh of processes has its own policy.
    wanted = {"procs": ["actors"], "actors": []}[on] + ([] if answer else [failure.mesh_name])
    assert sorted(seen) == sorted(wanted)
    assert asked.empty()
    procs.stop().get(WITHIN)


def test_a_policy_that_raises_leaves_the_failure_unhandled(own: ProcMesh, told: Told) -> None:
    def policy(failure: MeshFailure) -> bool:
        raise SystemExit(3)

    for _ in range(2):
        actor: Any = one(own).spawn("actor", Leaf, supervise=policy)
        actor.fail.broadcast(ValueError("no"))
        assert told.next().mesh_name == "actor"


def test_a_failure_in_progress_when_its_mesh_is_stopped_is_not_reported(own: ProcMesh, told: Told) -> None:
    entered, leave = threading.Event(), threading.Event()

    def busy(failure: MeshFailure) -> bool:
        entered.set()
        return leave.wait(WITHIN)

    first: Any = one(own).spawn("first", Leaf, supervise=busy)
    second: Any = one(own).spawn("second", Leaf, supervise=lambda _: True)
    first.fail.broadcast(ValueError("no"))
    assert entered.wait(WITHIN)
    # This failure waits for the policy of the other one while its own mesh is stopped.
    second.fail.broadcast(ValueError("late"))
    second.stop().get(WITHIN)
    leave.set()
    assert fence(told, own) == []


def test_a_policy_may_be_a_coroutine(own: ProcMesh, told: Told) -> None:
    asked = Told()

    async def policy(failure: MeshFailure) -> bool:
        await asyncio.sleep(0)
        asked.put(failure)
        return True

    actor: Any = one(own).spawn("actor", Leaf, supervise=policy)
    actor.fail.broadcast(ValueError("no"))
    assert asked.next().mesh_name == "actor"
    assert fence(told, own) == []


def test_objects_that_are_not_policies_are_refused(own: ProcMesh) -> None:
    with pytest.raises(TypeError, match="supervise= must be"):
        own.spawn("actor", Leaf, supervise=["restart"])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"supervise= must be a function .* got 3"):
        this_host().spawn_procs(supervise=3)  # type: ignore[arg-type]


# The script's fault handler.


def test_a_fault_handler_is_replaced(own: ProcMesh) -> None:
    first, second = Told(), Told()
    assert set_fault_handler(first.put) is None
    actor: Any = own.spawn("actor", Leaf)
    actor.slice(gpus=0).fail.broadcast(ValueError("no"))
    assert first.next().rank == 0
    assert set_fault_handler(second.put) == first.put
    actor.slice(gpus=1).fail.broadcast(ValueError("no"))
    assert second.next().rank == 1
    assert set_fault_handler(None) == second.put
    assert first.empty()
    with pytest.raises(TypeError, match="a fault handler must be a function"):
        set_fault_handler(3)  # type: ignore[arg-type]


def test_a_fault_handler_may_be_a_coroutine(own: ProcMesh) -> None:
    told = Told()

    async def handler(failure: MeshFailure) -> None:
        await asyncio.sleep(0)
        told.put(failure)

    set_fault_handler(handler)
    try:
        slay(own, 1)
        assert told.next().rank == 1
        assert fence(told, own) == []
    finally:
        set_fault_handler(None)


def test_a_fault_handler_may_spawn_and_wait(own: ProcMesh) -> None:
    told = Told()

    def handler(failure: MeshFailure) -> None:
        again: Any = one(own, 2).spawn("again", Leaf)
        assert again.pid.call_one().get(WITHIN) == own.pids[2]
        told.put(failure)

    set_fault_handler(handler)
    try:
        slay(own, 1)
        assert told.next().rank == 1
    finally:
        set_fault_handler(None)


@pytest.mark.parametrize("error", [LookupError, SystemExit, KeyboardInterrupt])
def test_a_failure_whose_handler_raises_is_raised_by_calls(
    own: ProcMesh, error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    entered = threading.Semaphore(0)

    def handler(failure: MeshFailure) -> None:
        entered.release()
        raise error("no handler")

    gate: Any = one(own, 3).spawn("gate", Soft)
    actors: Any = own.spawn("actors", Leaf)
    actors.pid.call().get(WITHIN)
    waiting = gate.hold.call_one()
    set_fault_handler(handler)
    try:
        for rank in (0, 1):  # whatever the first has done, the second is noticed too
            actors.slice(gpus=rank).fail.broadcast(ValueError("no"))
            assert entered.acquire(timeout=WITHIN)
            failure = lost(lambda: waiting.get(WITHIN))
            assert (failure.mesh_name, failure.rank) == ("actors", rank)
    finally:
        set_fault_handler(None)
    assert not waiting.done()
    caplog.clear()  # the tracebacks in it hold the mesh
