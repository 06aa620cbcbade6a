"""Ports and channels: order, reach, ends, and what senders are told of them."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from core_processes import Watch
from port_samples import Listener, Poster, nothing_left

from mesh_core import (
    ActorError,
    ActorTimeout,
    Channel,
    ChannelClosed,
    MeshError,
    Port,
    ProcMesh,
    SupervisionError,
    Undeliverable,
    this_host,
    this_proc,
)

pytestmark = pytest.mark.usefixtures("runtime")

SOON = 30.0


@pytest.fixture
def posters(procs: ProcMesh) -> Iterator[Any]:
    mesh = procs.spawn("posters", Poster)
    yield mesh
    mesh.stop().get()


@pytest.fixture(autouse=True)
def no_ports_left(runtime: None) -> Iterator[None]:
    yield from nothing_left()


# Within one process.


def test_values_arrive_in_order() -> None:
    port, receiver = Channel[int].open()
    for n in range(100):
        port.send(n)
    assert len(receiver) == 100
    assert [receiver.recv().get(timeout=SOON) for _ in range(100)] == list(range(100))


def test_a_receive_that_waits_is_completed_by_a_thread() -> None:
    port, receiver = Channel[str].open()
    future = receiver.recv()
    assert not future.done()
    thread = threading.Thread(target=port.send, args=("hello",))
    thread.start()
    assert future.get(timeout=SOON) == "hello"
    assert future.get() == "hello"
    thread.join()


def test_receives_are_served_in_the_order_in_which_they_were_made() -> None:
    port, receiver = Channel[int].open()
    futures = [receiver.recv() for _ in range(5)]
    for n in range(5):
        port.send(n)
    assert [future.get(timeout=SOON) for future in reversed(futures)] == [4, 3, 2, 1, 0]


def test_a_timeout_loses_nothing() -> None:
    port, receiver = Channel[int].open()
    future = receiver.recv()
    with pytest.raises(ActorTimeout, match="has not arrived within 0 s; the channel stays open"):
        future.get(timeout=0)
    port.send(1)
    assert future.get(timeout=SOON) == 1


def test_a_future_that_was_given_up_loses_nothing() -> None:
    port, receiver = Channel[int].open()
    with pytest.raises(ActorTimeout):
        receiver.recv().get(timeout=0)
    dropped = receiver.recv()
    port.send(1)
    port.send(2)
    del dropped
    gc.collect()
    assert [receiver.recv().get(timeout=SOON) for _ in range(2)] == [1, 2]


def test_values_that_were_not_looked_at_keep_their_order() -> None:
    port, receiver = Channel[int].open()
    futures = [receiver.recv() for _ in range(3)]
    for n in range(4):
        port.send(n)
    del futures[0], futures[1], futures[0]
    gc.collect()
    assert [receiver.recv().get(timeout=SOON) for _ in range(4)] == [0, 1, 2, 3]


def test_a_cancelled_receive_takes_nothing() -> None:
    port, receiver = Channel[int].open()
    future = receiver.recv()
    assert future.cancel()
    assert not future.cancel()
    port.send(1)
    assert receiver.recv().get(timeout=SOON) == 1
    with pytest.raises(asyncio.CancelledError):
        future.get()


def test_cancelling_too_late_leaves_the_value() -> None:
    port, receiver = Channel[int].open()
    future = receiver.recv()
    port.send(1)
    assert not future.cancel()
    assert future.get(timeout=SOON) == 1


def test_in_an_event_loop() -> None:
    async def main() -> list[int]:
        port, receiver = Channel[int].open()
        thread = threading.Thread(target=lambda: [port.send(n) for n in range(3)])
        thread.start()
        got = [await receiver.recv()]
        async for value in receiver:
            got.append(value)
            if len(got) == 3:
                break
        thread.join()
        return got

    assert asyncio.run(main()) == [0, 1, 2]


def test_a_cancelled_task_takes_nothing() -> None:
    async def main() -> int:
        port, receiver = Channel[int].open()
        task = asyncio.ensure_future(receiver.recv().as_asyncio())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        gc.collect()
        port.send(5)
        return await receiver.recv()

    assert asyncio.run(main()) == 5


def test_many_cancelled_waits_lose_nothing() -> None:
    port, receiver = Channel[int].open()
    count = 2000
    thread = threading.Thread(target=lambda: [port.send(n) for n in range(count)])
    thread.start()
    got: list[int] = []
    while len(got) < count:
        future = receiver.recv()
        # Whether or not the value arrives just now, it is received here or by the next one.
        if not future.cancel():
            got.append(future.get())
        del future
        if len(got) < count:
            got.append(receiver.recv().get(timeout=SOON))
    thread.join()
    assert got == list(range(count))


def test_exceptions_are_raised_by_the_receive() -> None:
    port, receiver = Channel[int].open()
    port.exception(KeyError("seven"))
    port.send(1)
    with pytest.raises(KeyError) as caught:
        receiver.recv().get(timeout=SOON)
    assert isinstance(caught.value, ActorError)
    assert receiver.recv().get(timeout=SOON) == 1


def test_large_values_arrive_writable() -> None:
    port, receiver = Channel[bytearray].open()
    port.send(bytearray(b"x" * 300_000))
    value = receiver.recv().get(timeout=SOON)
    value[0] = 1
    assert len(value) == 300_000


def test_what_cannot_be_pickled_is_refused_and_nothing_is_sent() -> None:
    port, receiver = Channel[Any].open(once=True)
    with pytest.raises(TypeError, match="the value"):
        port.send(threading.Lock())
    port.send(1)
    assert receiver.recv().get(timeout=SOON) == 1


# Ends.


def test_a_port_for_one_value() -> None:
    port, receiver = Channel[int].open(once=True)
    port.send(1)
    with pytest.raises(Undeliverable, match="takes one message, and has had it"):
        port.send(2)
    assert list(receiver) == [1]
    with pytest.raises(ChannelClosed):
        receiver.recv().get(timeout=SOON)


def test_copies_of_a_port_for_one_value() -> None:
    port, receiver = Channel[int].open(once=True)
    copy: Port[int] = pickle.loads(pickle.dumps(port))
    copy.send(1)
    with pytest.raises(Undeliverable):
        port.send(2)
    assert receiver.recv().get(timeout=SOON) == 1


def test_a_closed_receiver() -> None:
    port, receiver = Channel[int].open()
    port.send(1)
    waiting = [receiver.recv(), receiver.recv()]
    receiver.close()
    receiver.close()
    assert waiting[0].get(timeout=SOON) == 1
    with pytest.raises(ChannelClosed, match="is closed"):
        waiting[1].get(timeout=SOON)
    with pytest.raises(EOFError):
        receiver.recv().get(timeout=SOON)
    with pytest.raises(Undeliverable, match="receiver is closed"):
        port.send(2)
    with pytest.raises(Undeliverable):
        port.exception(ValueError())
    assert "closed" in repr(port)
    assert "closed" in repr(receiver)


def test_what_was_not_received_is_refused_at_the_end() -> None:
    port, receiver = Channel[int].open()
    port.send(1)
    receiver.close()
    with pytest.raises(Undeliverable, match="before it came to a message"):
        port.send(2)
    with pytest.raises(ChannelClosed):
        receiver.recv().get(timeout=SOON)


def test_closing_ends_iterations() -> None:
    port, receiver = Channel[int].open()
    port.send(1)
    iteration = iter(receiver)
    assert next(iteration) == 1
    waiter = threading.Thread(target=lambda: ended.extend(iteration))
    ended: list[int] = []
    waiter.start()
    receiver.close()
    waiter.join(SOON)
    assert not waiter.is_alive()
    assert ended == []

    async def none() -> list[int]:
        return [value async for value in receiver]

    assert asyncio.run(none()) == []


def test_with_closes() -> None:
    port, receiver = Channel[int].open()
    with receiver:
        port.send(1)
        assert receiver.recv().get(timeout=SOON) == 1
    with pytest.raises(Undeliverable):
        port.send(2)


def test_a_receiver_that_nobody_holds_is_closed() -> None:
    port, receiver = Channel[int].open()
    future = receiver.recv()
    del receiver
    gc.collect()
    port.send(1)  # the future still waits there
    assert future.get(timeout=SOON) == 1
    del future
    gc.collect()
    with pytest.raises(Undeliverable):
        port.send(2)


def test_a_receiver_stays_where_it_is(posters: Any) -> None:
    _port, receiver = Channel[int].open()
    with pytest.raises(TypeError, match="send the Port"):
        posters.post.call(receiver)


def test_the_port_of_a_channel_is_closed_at_the_other_end() -> None:
    port, _receiver = Channel[int].open()
    with pytest.raises(TypeError, match=r"PortReceiver\.close"):
        port.close()


# Between processes.


def test_from_every_process(posters: Any) -> None:
    port, receiver = Channel[Any].open()
    posters.post_rank.broadcast(port, "hello")
    got = [receiver.recv().get(timeout=SOON) for _ in range(4)]
    assert sorted(got) == [(rank, "hello") for rank in range(4)]


def test_each_senders_order_is_kept(posters: Any) -> None:
    port, receiver = Channel[Any].open()
    for n in range(50):
        posters.post_rank.broadcast(port, n)
    got = [receiver.recv().get(timeout=SOON) for _ in range(200)]
    for rank in range(4):
        assert [n for sender, n in got if sender == rank] == list(range(50))


def test_through_three_actors(procs: ProcMesh, posters: Any) -> None:
    port, receiver = Channel[Any].open()
    flat = posters.flatten("all")
    route = [flat.slice(all=1), flat.slice(all=2), flat.slice(all=3)]
    flat.slice(all=0).pass_on.call_one(route, port, ()).get(timeout=SOON)
    assert receiver.recv().get(timeout=SOON) == (0, 0, 0, "end")


def test_a_port_inside_a_value_that_is_sent_to_a_port(posters: Any) -> None:
    outer, inbox = Channel[Any].open()
    inner, answers = Channel[Any].open(once=True)
    outer.send({"reply to": inner})
    posters.slice(hosts=0, gpus=0).post.call_one(inbox.recv().get()["reply to"], "answer").get()
    assert answers.recv().get(timeout=SOON) == "answer"


def test_actors_receive_too(procs: ProcMesh, posters: Any) -> None:
    listener = procs.slice(hosts=0, gpus=0).spawn("listener", Listener)
    poster = posters.slice(hosts=1, gpus=1)
    port = listener.listen.call_one().get(timeout=SOON)
    port.send("from the script")
    poster.post.call_one(port, "from an actor", b"x" * 200_000).get()
    assert listener.receive.call_one(2).get(timeout=SOON) == ["from the script", "from an actor"]
    assert len(listener.receive_async.call_one(1).get(timeout=SOON)[0]) == 200_000
    assert listener.ask.call_one(poster, "inside").get(timeout=SOON) == "inside"
    listener.stop().get()


def test_to_an_actor_of_this_process() -> None:
    listener: Any = this_proc().spawn("listener", Listener)
    port = listener.listen.call_one().get(timeout=SOON)
    port.send(1)
    assert listener.receive.call_one(1).get(timeout=SOON) == [1]
    listener.stop().get()
    # The actor's last reference is dropped in its own thread.
    del listener


def test_exceptions_say_who_sent_them(posters: Any) -> None:
    port, receiver = Channel[int].open()
    posters.slice(hosts=1, gpus=0).fail.call_one(port, ValueError("bad")).get()
    with pytest.raises(ValueError, match="bad") as caught:
        receiver.recv().get(timeout=SOON)
    assert isinstance(caught.value, ActorError)
    assert (caught.value.actor, caught.value.rank) == ("posters", 2)


def test_a_sender_elsewhere_hears_that_the_receiver_is_closed(posters: Any) -> None:
    port, receiver = Channel[int].open()
    one = posters.slice(hosts=0, gpus=1)
    one.keep.call_one(port).get()
    assert one.try_kept.call_one(1).get() == "sent"
    assert receiver.recv().get(timeout=SOON) == 1
    receiver.close()
    # Lost in flight; its refusal arrives before the next call does.
    one.try_kept.call_one(2).get()
    assert "receiver is closed" in one.try_kept.call_one(3).get()
    one.drop.call_one().get()


def test_a_sender_elsewhere_hears_that_the_receiver_is_forgotten(posters: Any) -> None:
    port, receiver = Channel[int].open()
    one = posters.slice(hosts=0, gpus=1)
    one.keep.call_one(port).get()
    del receiver
    gc.collect()
    one.try_kept.call_one(1).get()
    assert "closed" in one.try_kept.call_one(2).get()
    one.drop.call_one().get()


def test_workers_know_of_each_other(procs: ProcMesh, posters: Any) -> None:
    listener: Any = procs.slice(hosts=0, gpus=0).spawn("listener", Listener)
    poster = posters.slice(hosts=1, gpus=1)
    poster.keep.call_one(listener.listen.call_one().get()).get()
    assert poster.try_kept.call_one(1).get() == "sent"
    assert listener.receive.call_one(1).get(timeout=SOON) == [1]
    listener.forget.call_one().get()
    poster.try_kept.call_one(2).get()
    listener.nothing.call_one().get()
    assert "closed" in poster.try_kept.call_one(3).get()
    poster.drop.call_one().get()
    listener.stop().get()


@pytest.fixture
def mortal(runtime: None) -> Iterator[ProcMesh]:
    with this_host().spawn_procs(per_host={"gpus": 2}, name="mortal") as procs:
        procs.initialized.get()
        yield procs


def test_the_receivers_process_dies(mortal: ProcMesh, posters: Any) -> None:
    listener = mortal.slice(gpus=1).spawn("listener", Listener)
    port = listener.listen.call_one().get(timeout=SOON)
    poster = posters.slice(hosts=0, gpus=0)
    poster.keep.call_one(port).get()
    assert poster.try_kept.call_one(1).get() == "sent"
    pid = mortal.pids[1]
    assert pid is not None
    watch = Watch([pid])
    os.kill(pid, signal.SIGKILL)
    assert watch.wait() == []
    with pytest.raises(SupervisionError):  # the notice of the death has arrived here
        listener.nothing.call_one().get(timeout=SOON)
    with pytest.raises(Undeliverable, match="process that received there has ended"):
        port.send(2)
    # The worker was told at the same time, because it had sent there before.
    assert "has ended" in poster.try_kept.call_one(2).get()
    # A process that had not is told in answer to its first value.
    other = posters.slice(hosts=0, gpus=1)
    other.keep.call_one(port).get()
    other.try_kept.call_one(3).get()
    assert "has ended" in other.try_kept.call_one(4).get()
    poster.drop.call_one().get()
    other.drop.call_one().get()


def test_the_receivers_process_is_stopped(posters: Any) -> None:
    with this_host().spawn_procs(per_host={"gpus": 1}) as procs:
        port = procs.spawn("listener", Listener).listen.call_one().get(timeout=SOON)
    with pytest.raises(Undeliverable):
        port.send(1)


def test_the_senders_process_dies(mortal: ProcMesh) -> None:
    """What it sent before arrives."""
    port, receiver = Channel[Any].open()
    # The script may learn of the death while it waits for something else.
    poster = mortal.slice(gpus=0).spawn("poster", Poster, supervise=lambda failure: True)
    poster.post.call_one(port, 1, 2).get()
    pid = mortal.pids[0]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert [receiver.recv().get(timeout=SOON) for _ in range(2)] == [1, 2]


def test_ports_leave_nothing_in_workers(posters: Any) -> None:
    port, receiver = Channel[Any].open()
    posters.post.call(port, b"x" * 200_000).get()
    for _ in range(4):
        receiver.recv().get(timeout=SOON)
    after = posters.counts.call().get().values()
    assert [each["ports"] for each in after] == [0] * 4
    assert [each["calls"] for each in after] == [0] * 4


def test_after_a_shutdown_of_a_worker_mesh_the_controller_still_receives(posters: Any) -> None:
    port, receiver = Channel[int].open()
    with this_host().spawn_procs(per_host={"gpus": 1}) as procs:
        procs.spawn("poster", Poster).post.call_one(port, 1).get()
    assert receiver.recv().get(timeout=SOON) == 1


# Ranks.


def test_ranked(posters: Any) -> None:
    port, receiver = Channel[str].open_ranked()
    posters.post.broadcast(port, "hello")
    got = [receiver.recv().get(timeout=SOON) for _ in range(4)]
    assert {dict(point or {})["gpus"] + 2 * dict(point or {})["hosts"] for point, _ in got} == set(range(4))
    assert {value for _, value in got} == {"hello"}
    port.send("script")
    assert receiver.recv().get(timeout=SOON) == (None, "script")


def test_the_place_is_that_in_the_slice(posters: Any) -> None:
    port, receiver = Channel[int].open_ranked()
    posters.slice(hosts=1).post_async.broadcast(port, 0)
    places = sorted(receiver.recv().get(timeout=SOON)[0].rank for _ in range(2))  # type: ignore[union-attr]
    assert places == [0, 1]


def test_an_unranked_port_carries_no_place(posters: Any) -> None:
    port, receiver = Channel[int].open()
    posters.slice(hosts=0, gpus=0).post.call_one(port, 7).get()
    assert receiver.ranked().recv().get(timeout=SOON) == (None, 7)


# Shutdown.


def test_shutdown_ends_what_waits(script: Any) -> None:
    run = script(
        """
        from mesh_core import Channel, MeshError, shutdown
        port, receiver = Channel.open()
        waiting = receiver.recv()
        shutdown()
        for what in (lambda: waiting.get(timeout=20), lambda: port.send(1), lambda: receiver.recv().get(timeout=20)):
            try:
                print(what())
            except MeshError as error:
                print(error)
        port, receiver = Channel.open()
        port.send("anew")
        print(receiver.recv().get())
        """
    )
    out, err = run.finish()
    assert err == ""
    lines = out.splitlines()
    assert len(lines) == 4
    assert all("shut down" in line for line in lines[:3])
    assert lines[3] == "anew"


def test_a_fork_of_a_receiver_is_refused_and_harms_nothing(script: Any) -> None:
    run = script(
        """
        import os
        from mesh_core import Channel, MeshError
        port, receiver = Channel.open()
        pid = os.fork()
        if pid == 0:
            try:
                port.send("from the fork")
            except MeshError as error:
                print("refused", flush=True)
            del receiver
            os._exit(0)
        os.waitpid(pid, 0)
        port.send("from the parent")
        print(receiver.recv().get(timeout=20))
        """
    )
    out, err = run.finish()
    assert err == ""
    assert out.splitlines() == ["refused", "from the parent"]


def test_a_flood_arrives_completely(posters: Any) -> None:
    port, receiver = Channel[int].open()
    posters.slice(hosts=0, gpus=0).post.broadcast(port, *range(5000))
    assert [receiver.recv().get(timeout=SOON) for _ in range(5000)] == list(range(5000))


def test_the_error_is_one_of_mesh() -> None:
    assert issubclass(ChannelClosed, MeshError)
