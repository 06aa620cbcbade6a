"""Endpoints that answer through a port, streams of any length, `send` and `as_endpoint`."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from core_samples import Coroutines, Echo
from port_samples import Opener, Responder, Summand, counts, nothing_left

from mesh_core import (
    Actor,
    ActorError,
    ActorTimeout,
    Channel,
    ProcMesh,
    SupervisionError,
    as_endpoint,
    endpoint,
    send,
    this_host,
    this_proc,
)
from mesh_core._common.codes import Request

pytestmark = pytest.mark.usefixtures("runtime")

SOON = 30.0


@pytest.fixture
def responders(procs: ProcMesh) -> Iterator[Any]:
    mesh: Any = procs.spawn("responders", Responder)
    mesh.initialized.get()
    yield mesh
    mesh.stop().get()


@pytest.fixture
def summands(procs: ProcMesh) -> Iterator[Any]:
    mesh: Any = procs.spawn("summands", Summand)
    mesh.initialized.get()
    yield mesh
    mesh.stop().get()


@pytest.fixture
def one(responders: Any) -> Any:
    return responders.slice(hosts=0, gpus=0)


@pytest.fixture(autouse=True)
def no_ports_left(runtime: None) -> Iterator[None]:
    yield from nothing_left()


# Calls.


def test_the_port_answers(responders: Any, one: Any) -> None:
    assert one.answer.call_one(1).get(timeout=SOON) == 2
    assert one.answer_async.call_one(1).get(timeout=SOON) == 2
    assert responders.answer.call(2).get(timeout=SOON).values() == [3] * 4
    assert responders.answer.choose(3).get(timeout=SOON) == 4
    responders.answer.broadcast(1)
    assert one.from_a_thread.call_one(9).get(timeout=SOON) == 9


def test_the_callers_signature_has_no_port(one: Any) -> None:
    with pytest.raises(TypeError, match=r"answer\(value\) takes at most 1"):
        one.answer.call_one(1, 2)
    with pytest.raises(TypeError, match="missing required argument 'value'"):
        one.answer.call_one()


def test_a_real_object_is_given_a_port_by_hand() -> None:
    port, receiver = Channel[int].open(once=True)
    Responder().answer(port, 1)
    assert receiver.recv().get(timeout=SOON) == 2


def test_later(one: Any) -> None:
    future = one.keep.call_one()
    assert one.answer.call_one(0).get(timeout=SOON) == 1
    assert not future.done()
    assert one.answer_kept.call_one(5).get() == "sent"
    assert future.get(timeout=SOON) == 5


def test_the_first_answer_counts_and_a_second_is_refused(one: Any) -> None:
    future = one.keep.call_one()
    assert "has been answered already" in one.answer_kept.call_one(5, 6).get()
    assert future.get(timeout=SOON) == 5
    # It ends an endpoint that keeps answering, and nobody needs to be told.
    assert one.often.call_one(3).get(timeout=SOON) == 0


def test_an_exception_by_the_port(responders: Any, one: Any) -> None:
    with pytest.raises(KeyError) as caught:
        one.fail.call_one(KeyError("x")).get(timeout=SOON)
    assert isinstance(caught.value, ActorError)
    assert (caught.value.actor, caught.value.rank) == ("responders", 0)
    outcomes = responders.fail.call(ValueError("y")).get(timeout=SOON, return_exceptions=True).values()
    assert all(isinstance(outcome, ValueError) for outcome in outcomes)


@pytest.mark.parametrize("name", ["raises", "raises_async"])
def test_an_exception_of_the_endpoint(one: Any, name: str) -> None:
    with pytest.raises(KeyError, match="oops") as caught:
        getattr(one, name).call_one(KeyError("oops")).get(timeout=SOON)
    assert isinstance(caught.value, ActorError)


def test_an_exception_after_the_answer_is_logged_there(one: Any, script: Any) -> None:
    assert one.sends_then_raises.call_one(ValueError("too late")).get(timeout=SOON) == 1
    run = script(
        """
        from mesh_core import this_host
        from port_samples import Responder
        with this_host().spawn_procs() as procs:
            one = procs.spawn("one", Responder)
            print(one.sends_then_raises.call_one(ValueError("too late")).get(timeout=20))
            one.answer.call_one(1).get()
        """
    )
    out, err = run.finish()
    assert out == "1\n"
    assert "too late" in err


def test_a_dropped_port_is_an_error_and_not_a_hang(responders: Any, one: Any) -> None:
    with pytest.raises(ActorError, match="dropped the port of this call without an answer") as caught:
        responders.slice(hosts=1, gpus=0).ignore.call_one().get(timeout=SOON)
    assert (caught.value.actor, caught.value.rank) == ("responders", 2)
    future = one.keep.call_one()
    one.drop_kept.call_one().get()
    assert isinstance(future.exception(timeout=SOON), ActorError)


def test_a_stopped_actor_drops_its_ports(procs: ProcMesh) -> None:
    mesh = procs.slice(hosts=0, gpus=0).spawn("brief", Responder)
    future = mesh.keep.call_one()
    mesh.stop().get()
    assert isinstance(future.exception(timeout=SOON), ActorError)


def test_handed_to_another_actor(responders: Any, one: Any) -> None:
    other = responders.slice(hosts=1, gpus=1)
    future = one.hand_to.call_one(other)
    one.answer.call_one(1).get()
    assert not future.done()
    assert other.answer_kept.call_one(8).get() == "sent"
    assert future.get(timeout=SOON) == 8
    other.drop_kept.call_one().get()


def test_the_caller_gives_up(one: Any) -> None:
    future = one.keep.call_one()
    assert future.cancel()
    # If it has not begun it is skipped; if it has, its answer is refused.
    one.drop_kept.call_one().get()
    waiting = one.keep.call_one()
    with pytest.raises(ActorTimeout):
        waiting.get(timeout=0)
    one.answer.call_one(1).get()  # by now the port is kept
    assert waiting.cancel()
    one.answer_kept.call_one(1).get()
    assert "no longer waits" in one.answer_kept.call_one(1).get()
    one.drop_kept.call_one().get()


def test_the_process_dies_before_it_answers(runtime: None) -> None:
    with this_host().spawn_procs(per_host={"gpus": 1}) as procs:
        mesh: Any = procs.spawn("mortal", Responder)
        future = mesh.keep.call_one()
        mesh.answer.call_one(1).get()
        pid = procs.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SupervisionError):
            future.get(timeout=SOON)


def test_in_this_process() -> None:
    mesh: Any = this_proc().spawn("here", Responder)
    assert mesh.answer.call_one(1).get(timeout=SOON) == 2
    assert [each.get() for each in mesh.often.stream(2)] == [0, 1]
    mesh.stop().get()


def test_ports_leave_nothing_in_workers(responders: Any) -> None:
    responders.answer.call(1).get()
    responders.ignore.call().exception()
    list(responders.often.stream(3))
    after = responders.counts.call().get().values()
    assert [each["ports"] for each in after] == [0] * 4


# Streams.


def test_a_stream_has_as_many_results_as_are_sent(responders: Any, one: Any) -> None:
    assert [future.get(timeout=SOON) for future in one.often.stream(4)] == [0, 1, 2, 3]
    assert list(one.often.stream(0)) == []
    assert (
        sorted(future.get(timeout=SOON) for future in responders.often.stream(3))
        == [0] * 4 + [1] * 4 + [2] * 4
    )


def test_an_async_stream_of_any_length(responders: Any) -> None:
    async def main() -> list[int]:
        return sorted([await future async for future in responders.often.stream(2)])

    assert asyncio.run(main()) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_stream_goes_on_until_its_port_is_closed(one: Any) -> None:
    stream = one.keep.stream()
    results = iter(stream)
    assert one.answer_kept.call_one(1, 2, 3).get() == "sent"
    assert [next(results).get() for _ in range(3)] == [1, 2, 3]
    one.close_kept.call_one().get()
    assert list(results) == []
    one.drop_kept.call_one().get()


def test_an_error_ends_a_ranks_part_of_a_stream(responders: Any) -> None:
    outcomes = [future.exception(timeout=SOON) for future in responders.fail.stream(ValueError("x"))]
    assert len(outcomes) == 4
    assert all(isinstance(outcome, ValueError) for outcome in outcomes)
    results = [
        future.exception(timeout=SOON) for future in responders.sends_then_raises.stream(KeyError("x"))
    ]
    assert sum(result is None for result in results) == 4
    assert sum(isinstance(result, KeyError) for result in results) == 4


def test_a_stream_whose_process_dies(runtime: None) -> None:
    with this_host().spawn_procs(per_host={"gpus": 1}) as procs:
        mesh: Any = procs.spawn("mortal", Responder)
        stream = mesh.keep.stream()
        mesh.answer_kept.call_one(1).get()
        results = iter(stream)
        assert next(results).get() == 1
        pid = procs.pids[0]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SupervisionError):
            next(results).get(timeout=SOON)
        assert list(results) == []


def test_leaving_a_stream_early_leaks_nothing_and_notifies_its_sender(one: Any) -> None:
    before = counts()["calls"]
    stream = one.keep.stream()
    one.answer_kept.call_one(1).get()
    for future in stream:
        assert future.get() == 1
        break
    del stream, future
    assert counts()["calls"] == before
    one.answer_kept.call_one(2).get()
    assert "no longer waits" in one.answer_kept.call_one(3).get()
    one.drop_kept.call_one().get()


def test_a_cancelled_stream_ends(one: Any) -> None:
    stream = one.keep.stream()
    one.answer.call_one(1).get()
    assert stream.cancel()
    assert list(stream) == []
    one.drop_kept.call_one().get()


def test_a_streams_deadline(one: Any) -> None:
    stream = one.keep.with_options(timeout=0.05).stream()
    with pytest.raises(ActorTimeout):
        next(iter(stream)).get()
    stream.cancel()
    one.drop_kept.call_one().get()


def test_leaving_an_ordinary_stream_early_leaks_nothing(procs: ProcMesh) -> None:
    gates = procs.spawn("gates", Coroutines)
    gates.initialized.get()
    before = counts()["calls"]
    for future in gates.enter.stream("door"):
        gates.slice(hosts=0, gpus=0).open.call_one("door").get()
        assert future.get(timeout=SOON) == "door"
        break
    del future
    assert counts()["calls"] == before
    gates.open.call("door").get()
    gates.stop().get()


def test_a_cancelled_ordinary_stream(procs: ProcMesh) -> None:
    gates = procs.spawn("gates", Coroutines)
    stream = gates.hold.stream()
    gates.holding.call().get()
    assert stream.cancel()
    assert gates.cancelled.call().get(timeout=SOON).values() == [True] * 4
    assert all(future.exception(timeout=SOON) is not None for future in stream)
    gates.stop().get()


# send.


def test_send_answers_to_a_port(procs: ProcMesh, summands: Any) -> None:
    port, receiver = Channel[int].open_ranked()
    send(summands.rank, (10,), port=port)
    assert sorted((point.rank, n) for point, n in [receiver.recv().get(timeout=SOON) for _ in range(4)]) == [
        (0, 0), (1, 10), (2, 20), (3, 30),
    ]  # fmt: skip
    send(summands.rank_async, (), {"factor": 2}, port, 3)
    assert receiver.recv().get(timeout=SOON)[1] == 0  # alone, it is rank 0 of the called slice
    send(summands.raises_at, ([0],), port=port, selection="choose")
    with pytest.raises(ValueError, match="rank 0 has no result"):
        receiver.recv().get(timeout=SOON)


def test_answers_carry_their_place_to_any_port(summands: Any) -> None:
    port, receiver = Channel[int].open()
    send(summands.rank, port=port)
    got = [receiver.ranked().recv().get(timeout=SOON) for _ in range(4)]
    assert sorted((point.rank, value) for point, value in got if point is not None) == [
        (n, n) for n in range(4)
    ]


def test_send_to_somebody_elses_port(procs: ProcMesh, responders: Any, summands: Any) -> None:
    """One actor's answer is the answer of another actor's call."""

    future = responders.slice(hosts=0, gpus=0).keep.call_one()
    port, receiver = Channel[int].open(once=True)
    send(responders.answer, (1,), port=port, selection=2)
    assert receiver.recv().get(timeout=SOON) == 2
    future.cancel()
    responders.drop_kept.call().get()


def test_send_to_endpoints_that_answer_by_a_port(responders: Any) -> None:
    port, receiver = Channel[int].open()
    send(responders.often, (3,), port=port, selection=0)
    assert [receiver.recv().get(timeout=SOON) for _ in range(3)] == [0, 1, 2]
    for raising in (responders.raises, responders.raises_async):
        send(raising, (KeyError("oops"),), port=port, selection=1)
        with pytest.raises(KeyError, match="oops"):
            receiver.recv().get(timeout=SOON)


def test_answers_for_a_receiver_that_is_gone_are_dropped(summands: Any, script: Any) -> None:
    run = script(
        """
        from mesh_core import Channel, send, this_host
        from port_samples import Summand
        with this_host().spawn_procs() as procs:
            one = procs.spawn("one", Summand)
            port, receiver = Channel.open()
            receiver.close()
            for _ in range(3):
                send(one.rank, port=port)
                send(one.raises_at, ([0],), port=port)
                one.nothing.call_one().get()
            print(one.rank.call_one(1).get())
        """
    )
    assert run.finish() == ("0\n", "")


def test_send_without_a_port(procs: ProcMesh) -> None:
    notes = procs.slice(hosts=0, gpus=0).spawn("notes", Coroutines)
    send(notes.note, ("one",))
    send(notes.note, ("two",), selection=0)
    assert notes.notes.call_one().get() == ["one", "two"]
    notes.stop().get()


def test_bad_sends(summands: Any) -> None:
    with pytest.raises(TypeError, match="takes at most 1"):
        send(summands.rank, (1, 2))
    with pytest.raises(ValueError, match="between 0 and 3"):
        send(summands.rank, (1,), selection=4)
    with pytest.raises(ValueError, match="'all', 'choose' or a rank"):
        send(summands.rank, (1,), selection="some")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="must be given an endpoint"):
        send(print, (1,))  # type: ignore[arg-type]


# as_endpoint.


def test_a_plain_method(summands: Any) -> None:
    plain = as_endpoint(summands.plain)
    assert plain.call(2, more=1).get(timeout=SOON).values() == [1, 3, 5, 7]
    assert as_endpoint(summands.slice(hosts=1, gpus=0).plain).call_one(5).get(timeout=SOON) == 0
    assert as_endpoint(summands.plain_async).call().get(timeout=SOON).values() == [0, 1, 2, 3]
    assert sorted(future.get() for future in plain.stream(1)) == [0, 1, 2, 3]
    assert plain.with_options(reduce="sum").call(1).get(timeout=SOON) == 6
    assert as_endpoint(summands.rank) is summands.rank


def test_a_plain_method_with_a_port(summands: Any) -> None:
    one = summands.slice(hosts=0, gpus=0)
    assert as_endpoint(one.plain_port, explicit_response_port=True).call_one("x").get(timeout=SOON) == "x"
    port, receiver = Channel[Any].open()
    send(as_endpoint(summands.plain), (1,), port=port, selection=1)
    assert receiver.recv().get(timeout=SOON) == 0


def test_a_plain_method_of_an_actor_of_coroutines(procs: ProcMesh) -> None:
    mesh = procs.slice(hosts=0, gpus=0).spawn("opener", Opener)
    assert as_endpoint(mesh.coroutine).call_one().get(timeout=SOON) == "awaited"
    assert as_endpoint(mesh.on_the_loop).call_one().get(timeout=SOON) == "called"
    mesh.stop().get()


def test_a_reference_knows_plain_methods(procs: ProcMesh, echo: Any, summands: Any) -> None:
    assert echo.slice(hosts=0, gpus=0).call.call_one(call_plain, summands).get(timeout=SOON) == [0, 3, 6, 9]


def call_plain(mesh: Any) -> Any:
    return as_endpoint(mesh.plain).call(3).get(timeout=SOON).values()


def test_errors_about_plain_methods(summands: Any) -> None:
    with pytest.raises(TypeError, match=r"plain\(factor, more=0\) missing required argument 'factor'"):
        as_endpoint(summands.plain).call()
    with pytest.raises(AttributeError, match="not an endpoint: mark it @endpoint, or call it by as_endpoint"):
        summands.plain.call(1)
    with pytest.raises(TypeError, match="as_endpoint"):
        summands.plain(1)
    with pytest.raises(TypeError, match=r"such as mesh\.fit"):
        as_endpoint(print)
    with pytest.raises(AttributeError, match="has no endpoint"):
        _ = summands._private
    assert "plain method Summand.plain" in repr(summands.plain)


# Misuse.


def test_marks_are_not_taken_for_endpoints(procs: ProcMesh, echo: Any) -> None:
    one = echo.slice(hosts=0, gpus=0)
    runtime = one._process.runtime

    target = one._location.target(one._procs_id, one._view)
    for name in (
        ".",
        "!",
        ">",
        "+",
        ".echo",
        ">none",
        "+none",
        ".__init__",
        "._private",
        ">>>",
        "?echo",
        "=echo",
    ):
        call = runtime.sender(target, one._actor_id, name, Request.CALL).call(((), {}))
        assert call.wait(SOON)
        assert call.outcomes()[0].is_error, name
    assert one.echo.call_one(1).get() == 1


def test_concurrent_endpoints_answer_by_ports_too(procs: ProcMesh) -> None:
    mesh = procs.slice(hosts=0, gpus=0).spawn("both", concurrent_class())
    waiting = mesh.wait.call_one()
    mesh.go.call_one().get()
    assert waiting.get(timeout=SOON) == "went"
    mesh.stop().get()


def concurrent_class() -> type[Any]:
    class Both(Actor):
        def __init__(self) -> None:
            self.event = asyncio.Event()

        @endpoint(explicit_response_port=True, concurrent=True)
        async def wait(self, port: Any) -> None:
            await self.event.wait()
            port.send("went")

        @endpoint(concurrent=True)
        async def go(self) -> None:
            self.event.set()

    return Both


def test_ordinary_calls_are_unaffected(echo: Any) -> None:
    """The ordinary path is unchanged."""
    assert echo.echo.call(1).get().values() == [1] * 4
    assert isinstance(Echo().echo(1), int)
