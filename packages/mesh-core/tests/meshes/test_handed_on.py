"""Ports of calls that are passed on, and holders of them that die."""

from __future__ import annotations

import copy
import os
import pickle
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from port_samples import Responder, nothing_left

from mesh_core import (
    ActorError,
    Channel,
    MeshError,
    MeshFailure,
    Port,
    ProcMesh,
    SupervisionError,
    endpoint,
    set_fault_handler,
    this_host,
)

pytestmark = pytest.mark.usefixtures("runtime")

SOON = 30.0


class Clerk(Responder):
    """Passes ports on."""

    @endpoint(explicit_response_port=True)
    def pass_to(self, port: Port[int], *others: Any) -> None:
        """Give the port to others and drop it."""
        for other in others:
            other.adopt.call_one(port).get()

    @endpoint(explicit_response_port=True)
    def share_with(self, port: Port[int], other: Any) -> None:
        """Give the port to another and keep it."""
        self.kept.append(port)
        other.adopt.call_one(port).get()

    @endpoint(explicit_response_port=True)
    def cast_to(self, port: Port[int], others: Any) -> None:
        others.adopt.broadcast(port)

    @endpoint
    def pass_all_kept_to(self, other: Any) -> None:
        """All in one message."""
        kept, self.kept = self.kept, []
        other.adopt_all.call_one(kept).get()

    @endpoint
    def adopt_all(self, ports: list[Port[int]]) -> None:
        self.kept += ports

    @endpoint
    def drop_one(self) -> None:
        self.kept.pop()

    @endpoint(explicit_response_port=True)
    def delegate_to(self, port: Port[int], other: Any) -> None:
        other.answer_at.broadcast(port, 9)

    @endpoint
    def answer_at(self, port: Port[int], value: int) -> None:
        port.send(value)

    @endpoint(explicit_response_port=True)
    def store(self, port: Port[int], other: Any) -> None:
        """Also give the port away by hand."""
        self.stored = pickle.dumps(port)
        other.adopt.call_one(port).get()

    @endpoint
    def answer_stored(self, value: int) -> None:
        pickle.loads(self.stored).send(value)

    @endpoint
    def pass_kept_to(self, other: Any) -> None:
        other.adopt.call_one(self.kept.pop()).get()

    @endpoint
    def ask(self, clerk: Any, *others: Any) -> str:
        """Call, and report the outcome."""
        try:
            return str(clerk.pass_to.call_one(*others).get(timeout=SOON))
        except MeshError as error:
            return f"{type(error).__name__}: {error}"

    @endpoint
    def ask_cast(self, clerk: Any, others: Any) -> str:
        try:
            return str(clerk.cast_to.call_one(others).get(timeout=SOON))
        except MeshError as error:
            return f"{type(error).__name__}: {error}"

    @endpoint
    def ask_newcomer(self, clerk: Any, host: Any) -> int:
        """Pass the port to an actor that is still being constructed, and have it answer."""
        with host.spawn_procs() as procs:
            newcomer: Any = procs.spawn("newcomer", Clerk)
            return clerk.delegate_to.call_one(newcomer).get(timeout=SOON)

    @endpoint
    def nothing(self) -> None:
        """A barrier."""


@pytest.fixture
def told() -> Iterator[list[MeshFailure]]:
    """What the script's fault handler was told; the deaths are intended here."""
    told: list[MeshFailure] = []
    before = set_fault_handler(told.append)
    yield told
    set_fault_handler(before)


@pytest.fixture
def each(runtime: None, told: list[MeshFailure]) -> Iterator[list[ProcMesh]]:
    """Processes, each a mesh, of which some will not survive the test."""
    made = [this_host().spawn_procs() for _ in range(4)]
    yield made
    for procs in made:
        procs.stop().get()


@pytest.fixture
def clerks(each: list[ProcMesh]) -> list[Any]:
    clerks: list[Any] = [procs.spawn(f"clerk-{n}", Clerk) for n, procs in enumerate(each)]
    for clerk in clerks:
        clerk.initialized.get()
    return clerks


@pytest.fixture(autouse=True)
def no_ports_left(runtime: None) -> Iterator[None]:
    yield from nothing_left()


def slay(procs: ProcMesh) -> int:
    pid = procs.pids[0]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.mark.slow
def test_the_process_that_was_given_the_port_dies(each: list[ProcMesh], clerks: list[Any]) -> None:
    """PRT-3: the caller knows who holds its port."""
    future = clerks[0].pass_to.call_one(clerks[1])
    clerks[0].nothing.call_one().get()
    pid = slay(each[1])
    with pytest.raises(SupervisionError, match="'clerk-0' on rank 0 passed the port") as caught:
        future.get(timeout=SOON)
    failure = caught.value.failure
    assert failure is not None
    assert (failure.mesh_name, failure.pid, failure.signal) == ("clerk-1", pid, signal.SIGKILL)
    assert "call again" in str(caught.value)
    assert f"pid {pid}: killed by signal 9" in str(caught.value)


def test_the_caller_is_an_actor(each: list[ProcMesh], clerks: list[Any]) -> None:
    asked = clerks[2].ask.call_one(clerks[0], clerks[1])
    while not clerks[1].counts.call_one().get()["ports"]:
        pass
    slay(each[1])
    said = asked.get(timeout=SOON)
    assert said.startswith("SupervisionError: ")
    assert "clerk-1" in said
    assert clerks[2].counts.call_one().get()["calls"] == 0


def test_one_of_two_that_hold_it_dies(each: list[ProcMesh], clerks: list[Any]) -> None:
    future = clerks[0].pass_to.call_one(clerks[1], clerks[2])
    clerks[0].nothing.call_one().get()
    slay(each[1])
    with pytest.raises(SupervisionError):
        clerks[1].nothing.call_one().get(timeout=SOON)
    assert not future.done()
    assert clerks[2].answer_kept.call_one(5).get() == "sent"
    assert future.get(timeout=SOON) == 5


def test_both_that_hold_it_die(each: list[ProcMesh], clerks: list[Any]) -> None:
    future = clerks[0].pass_to.call_one(clerks[1], clerks[2])
    clerks[0].nothing.call_one().get()
    slay(each[1])
    slay(each[2])
    assert isinstance(future.exception(timeout=SOON), SupervisionError)


def test_a_process_that_passed_it_on_and_kept_it_can_answer(each: list[ProcMesh], clerks: list[Any]) -> None:
    future = clerks[0].share_with.call_one(clerks[1])
    clerks[0].nothing.call_one().get()
    slay(each[1])
    with pytest.raises(SupervisionError):
        clerks[1].nothing.call_one().get(timeout=SOON)
    assert not future.done()
    assert clerks[0].answer_kept.call_one(6).get() == "sent"
    assert future.get(timeout=SOON) == 6


def test_a_holder_drops_it_after_the_death(each: list[ProcMesh], clerks: list[Any]) -> None:
    future = clerks[0].share_with.call_one(clerks[1])
    clerks[0].nothing.call_one().get()
    slay(each[1])
    with pytest.raises(SupervisionError):
        clerks[1].nothing.call_one().get(timeout=SOON)
    clerks[0].drop_kept.call_one().get()
    assert isinstance(future.exception(timeout=SOON), SupervisionError)


def test_it_goes_through_many_hands(each: list[ProcMesh], clerks: list[Any]) -> None:
    future = clerks[0].pass_to.call_one(clerks[1])
    clerks[0].nothing.call_one().get()
    clerks[1].pass_kept_to.call_one(clerks[2]).get()
    clerks[2].pass_kept_to.call_one(clerks[3]).get()
    # They have dropped it, so their ends lose nothing.
    slay(each[1])
    slay(each[2])
    for dead in clerks[1:3]:
        with pytest.raises(SupervisionError):
            dead.nothing.call_one().get(timeout=SOON)
    assert not future.done()
    slay(each[3])
    with pytest.raises(SupervisionError, match="clerk-3"):
        future.get(timeout=SOON)


def test_it_comes_back_and_is_handed_on_again(each: list[ProcMesh], clerks: list[Any]) -> None:
    future = clerks[0].pass_to.call_one(clerks[1])
    clerks[0].nothing.call_one().get()
    clerks[1].pass_kept_to.call_one(clerks[0]).get()
    slay(each[1])
    with pytest.raises(SupervisionError):
        clerks[1].nothing.call_one().get(timeout=SOON)
    assert not future.done()
    assert clerks[0].answer_kept.call_one(4).get() == "sent"
    assert future.get(timeout=SOON) == 4


def test_it_is_passed_to_a_process_that_has_already_died(each: list[ProcMesh], clerks: list[Any]) -> None:
    slay(each[1])
    with pytest.raises(SupervisionError):
        clerks[1].nothing.call_one().get(timeout=SOON)
    # Nobody waits for a cast, so nobody is told that it did not arrive.
    with pytest.raises(SupervisionError, match="clerk-1"):
        clerks[0].cast_to.call_one(clerks[1]).get(timeout=SOON)


def test_its_holder_is_stopped(each: list[ProcMesh], clerks: list[Any]) -> None:
    future = clerks[0].pass_to.call_one(clerks[1])
    clerks[0].nothing.call_one().get()
    each[1].stop().get()
    with pytest.raises(ActorError, match="everyone who was passed it dropped the port"):
        future.get(timeout=SOON)


def test_the_holders_of_a_stored_port_are_not_known(each: list[ProcMesh], clerks: list[Any]) -> None:
    future = clerks[0].store.call_one(clerks[1])
    clerks[0].nothing.call_one().get()
    slay(each[1])
    with pytest.raises(SupervisionError):
        clerks[1].nothing.call_one().get(timeout=SOON)
    assert not future.done()
    clerks[0].answer_stored.call_one(7).get()
    assert future.get(timeout=SOON) == 7


def test_a_stream_whose_holder_dies(each: list[ProcMesh], clerks: list[Any]) -> None:
    stream = clerks[0].pass_to.stream(clerks[1])
    clerks[0].nothing.call_one().get()
    assert clerks[1].answer_kept.call_one(1, 2).get() == "sent"
    results = iter(stream)
    assert [next(results).get(timeout=SOON) for _ in range(2)] == [1, 2]
    slay(each[1])
    with pytest.raises(SupervisionError, match="clerk-1"):
        next(results).get(timeout=SOON)
    assert list(results) == []


def test_one_of_many_calls_is_abandoned(each: list[ProcMesh], clerks: list[Any]) -> None:
    with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
        pair: Any = procs.spawn("pair", Clerk)
        future = pair.pass_to.call(clerks[1])
        pair.nothing.call().get()
        slay(each[1])
        outcomes = future.get(timeout=SOON, return_exceptions=True).values()
        assert [type(outcome) for outcome in outcomes] == [SupervisionError] * 2
        assert "'pair' on rank 1" in str(outcomes[1])


def test_an_answer_that_is_late_is_refused(each: list[ProcMesh], clerks: list[Any]) -> None:
    future = clerks[0].pass_to.call_one(clerks[1])
    clerks[0].nothing.call_one().get()
    assert clerks[1].answer_kept.call_one(5).get() == "sent"
    assert future.get(timeout=SOON) == 5
    slay(each[1])
    with pytest.raises(SupervisionError):
        clerks[1].nothing.call_one().get(timeout=SOON)
    assert future.get() == 5, "once"


def test_all_holders_drop_it(each: list[ProcMesh], clerks: list[Any]) -> None:
    """PRT-3: the caller is told that nobody holds its port any more."""
    future = clerks[0].pass_to.call_one(clerks[1], clerks[2])
    clerks[0].nothing.call_one().get()
    clerks[1].drop_kept.call_one().get()
    assert not future.done()
    clerks[2].drop_kept.call_one().get()
    with pytest.raises(ActorError, match="everyone who was passed it dropped the port"):
        future.get(timeout=SOON)
    stream = clerks[0].pass_to.stream(clerks[1])
    clerks[0].nothing.call_one().get()
    assert clerks[1].answer_kept.call_one(1).get() == "sent"
    clerks[1].drop_kept.call_one().get()
    assert [result.get(timeout=SOON) for result in stream] == [1]


def test_the_same_port_came_twice_and_goes_on_in_one_message(each: list[ProcMesh], clerks: list[Any]) -> None:
    future = clerks[0].pass_to.call_one(clerks[1], clerks[1])
    clerks[0].nothing.call_one().get()
    clerks[1].pass_all_kept_to.call_one(clerks[2]).get()
    clerks[2].drop_one.call_one().get()
    assert not future.done()
    clerks[2].drop_one.call_one().get()
    assert isinstance(future.exception(timeout=SOON), ActorError)


def test_copies_of_a_port_are_that_port(runtime: None) -> None:
    port, receiver = Channel[int].open()
    assert copy.copy(port) is port
    assert copy.deepcopy([port])[0] is port
    receiver.close()
