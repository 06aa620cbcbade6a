"""The wait-for graph: who waits for whom, circles, and the errors of missed deadlines."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_owners import suspend
from core_pool import join_pool_thread
from core_waits import WITHIN, AsyncWaiter, Freer, Waiter, late_error, until_explained

from mesh_core import Channel, Pool, ProcMesh, Promise, Queue, inspect, this_host, wait
from mesh_core.inspect import Wait, Waits
from mesh_core.inspect._circles import circles

pytestmark = pytest.mark.usefixtures("runtime")


def until(shown: Callable[[Waits], Any]) -> Waits:
    """Look until a condition holds."""
    end = time.monotonic() + WITHIN
    while True:
        graph = inspect.waits()
        if shown(graph):
            return graph
        assert time.monotonic() < end, graph


def of(graph: Waits, waiter: str) -> list[Wait]:
    return [wait for wait in graph.waits if wait.waiter == waiter]


@pytest.fixture(scope="module")
def three(runtime: None) -> Iterator[ProcMesh]:
    with this_host().spawn_procs({"gpus": 3}, name="three") as procs:
        procs.initialized.get()
        with Queue[int]() as queue:  # starts a thread that stays
            queue.put(1)
        yield procs


@pytest.fixture
def freers(three: ProcMesh) -> Iterator[Any]:
    mesh = three.spawn("freers", Freer)
    mesh.free.call(False).get(WITHIN)
    yield mesh
    mesh.stop().get()


@pytest.fixture
def waiters(three: ProcMesh, freers: Any) -> Iterator[list[Any]]:
    mesh = three.spawn("w", Waiter)
    yield [mesh.slice(gpus=n) for n in range(3)]
    freers.free.call(True).get(WITHIN)
    mesh.stop().get(WITHIN)


@pytest.fixture
def coroutines(procs: ProcMesh) -> Iterator[list[Any]]:
    mesh = procs.spawn("c", AsyncWaiter)
    yield [mesh.slice(hosts=n // 2, gpus=n % 2) for n in range(4)]
    mesh.stop().get()


def test_nobody_waits(procs: ProcMesh) -> None:
    graph = inspect.waits()
    assert (graph.waits, graph.circles, graph.silent, graph.left_out) == ((), (), (), 0)
    assert str(graph).startswith("0 waits, 0 circles at ")


def test_calls_of_the_script_and_of_actors(waiters: list[Any], freers: Any) -> None:
    """WTS-1: whoever blocks has recorded for whom."""
    port, receiver = Channel[str].open()
    busy = waiters[2].block.call_one(port)
    assert receiver.recv().get(WITHIN) == "began"
    answer = waiters[0].ask.call_one(waiters[1], waiters[2])
    thread = threading.Thread(target=answer.exception)
    thread.start()
    # Processes are asked one after another, and an actor records its wait only after it has sent the call.
    graph = until(lambda graph: all(of(graph, waiter) for waiter in ("w[0]", "w[1]", "controller")))
    (first,), (second,) = of(graph, "w[0]"), of(graph, "w[1]")
    assert (first.kind, first.endpoint, first.whom, first.missing) == ("call", "ask", ("w[1]",), 1)
    assert (second.whom, second.proc) == (("w[2]",), "three[1]")
    assert first.seconds > 0
    assert str(second).endswith("for w[2].ask")
    assert [wait.whom for wait in of(graph, "controller")] == [("w[0]",)]
    assert graph.circles == ()
    assert f"  {second.waiter}, in ask, has waited" in str(graph)
    freers.free.call(True).get(WITHIN)
    thread.join()
    assert (busy.get(WITHIN), answer.get(WITHIN)) == (None, 2)


@pytest.mark.parametrize("length", [2, 3])
@pytest.mark.usefixtures("fault_tolerant")
def test_deadlock_is_found(procs: ProcMesh, length: int) -> None:
    with this_host().spawn_procs({"gpus": length}, name="own") as own:
        mesh = own.spawn("w", Waiter)
        check_circle([mesh.slice(gpus=n) for n in range(length)], length)
        # They would not be told of their end.
        for proc in inspect.snapshot().procs:
            if proc.mesh == "own" and proc.pid is not None:
                os.kill(proc.pid, signal.SIGKILL)


def check_circle(waiters: list[Any], length: int) -> None:
    around = [waiters[n % length] for n in range(length + 1)]
    answer = around[0].ask.call_one(*around[1:])
    graph = until(lambda graph: graph.circles and graph.circles[0].is_stuck)
    (circle,) = graph.circles
    assert {wait.waiter for wait in circle.waits} == {f"w[{n}]" for n in range(length)}
    assert all(
        wait.whom == (after.waiter,)
        for wait, after in zip(circle.waits, [*circle.waits[1:], circle.waits[0]], strict=True)
    )
    assert "a deadlock:\n" in str(graph)
    circle_text = r"w\[0\] has run ask for .* waited .* for w.ask; w\[1\] .*: a deadlock"
    until_explained(circle_text, lambda: late_error(answer))


def test_circle_of_concurrent_coroutines_is_not_stuck(coroutines: list[Any]) -> None:
    first, second, *_ = coroutines
    # First runs two at a time: one waits for second, and second waits for the other.
    answer = first.open_ask.call_one(second, first)
    graph = until(lambda graph: graph.circles and min(wait.seconds for wait in graph.circles[0].waits) > 0.2)
    assert not graph.circles[0].is_stuck
    first.end.call_one().get(WITHIN)
    assert answer.get(WITHIN) == 2
    assert inspect.waits().circles == ()


def test_circle_of_sequential_coroutines_is_stuck(coroutines: list[Any]) -> None:
    answer = coroutines[0].ask.call_one(coroutines[1], coroutines[0])
    until(lambda graph: graph.circles and graph.circles[0].is_stuck)
    assert answer.cancel()
    until(lambda graph: not graph.circles)


def test_ports_promises_and_queues(waiters: list[Any]) -> None:
    port, receiver = Channel[Any].open()
    with Queue[int](name="jobs") as queue:
        received = waiters[0].receive.call_one(port)
        other = receiver.recv().get(WITHIN)
        taken = waiters[1].take.call_one(queue, port)
        promised = waiters[2].promised.call_one(port)
        graph = until(lambda graph: all(of(graph, f"w[{n}]") for n in range(3)))
        said = {wait.waiter: (wait.kind, wait.text) for wait in graph.waits}
        assert said["w[0]"] == ("port", "for a value from a channel")
        assert said["w[1]"] == ("call", "for jobs.take")
        assert said["w[2]"] == ("promise", "for the weights")
        other.send(1)
        queue.put(2).get(WITHIN)
        assert (received.get(WITHIN), taken.get(WITHIN)) == (1, 2)
        promised.cancel()


def test_promise_of_the_script() -> None:
    promise = Promise[None]("the end")
    thread = threading.Thread(target=promise.future.get)
    thread.start()
    (wait,) = until(lambda graph: graph.waits).waits
    assert (wait.waiter, wait.kind, wait.text) == ("controller", "promise", "for the end")
    promise.set_result(None)
    thread.join()
    assert inspect.waits().waits == ()


def test_pool(waiters: list[Any], freers: Any) -> None:
    port, receiver = Channel[str].open()
    with Pool(waiters[0]) as pool:
        task = pool.submit(waiters[0].block, port)
        receiver.recv().get(WITHIN)
        thread = threading.Thread(target=task.exception)
        thread.start()
        graph = until(
            lambda graph: {"for w[0].block", "for w.block in a pool"} <= {wait.text for wait in graph.waits}
        )
        assert {wait.waiter for wait in graph.waits} == {"controller"}
        freers.free.call(True).get(WITHIN)
        thread.join()
    join_pool_thread()


def test_room_in_a_mailbox(waiters: list[Any]) -> None:
    port, receiver = Channel[str].open()
    blocked = waiters[1].block.call_one(port)
    receiver.recv().get(WITHIN)
    flood = waiters[0].flood.call_one(waiters[1], bytes(1 << 20))
    (wait,) = of(until(lambda graph: [one for one in of(graph, "w[0]") if one.kind == "room"]), "w[0]")
    assert (wait.endpoint, wait.whom, wait.text) == ("flood", ("w[1]",), "for room in the mailbox of w[1]")
    for future in (blocked, flood):
        future.cancel()


def test_from_an_actor(waiters: list[Any], freers: Any) -> None:
    port, receiver = Channel[str].open()
    busy = waiters[1].block.call_one(port)
    receiver.recv().get(WITHIN)
    thread = threading.Thread(target=busy.exception)
    thread.start()
    until(lambda graph: of(graph, "controller"))
    (said,) = [line for line in waiters[0].look.call_one().get(WITHIN) if line.endswith("w[1].block")]
    assert said.startswith("controller has waited ")
    freers.free.call(True).get(WITHIN)
    thread.join()


def test_stopped_process_is_named_and_delays_nothing(waiters: list[Any]) -> None:
    (pid,) = [proc.pid for proc in inspect.snapshot().procs if proc.name == "three[1]"]
    assert pid is not None
    # Otherwise one of its threads might still answer.
    suspend(pid)
    try:
        answer = waiters[0].ask.call_one(waiters[1])
        silent = ("three[1], which was stopped by a signal",)
        graph = until(lambda graph: of(graph, "w[0]") and graph.silent == silent)
        assert of(graph, "w[0]")[0].whom == ("w[1]",)
        assert "not known: three[1], which was stopped by a signal" in str(graph)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert answer.get(WITHIN) == 1


def test_number_of_reported_waits_is_limited(waiters: list[Any], freers: Any) -> None:
    """WTS-2."""
    port, receiver = Channel[str].open()
    busy = waiters[0].block.call_one(port)
    receiver.recv().get(WITHIN)
    futures = [waiters[0].ask.call_one() for _ in range(1200)]
    thread = threading.Thread(target=lambda: wait(futures))
    thread.start()
    graph = until(lambda graph: graph.left_out)
    assert len(graph.waits) + graph.left_out == 1200
    assert f"  … {1200 - 40:,} more" in str(graph)
    freers.free.call(True).get(WITHIN)
    thread.join()
    assert busy.get(WITHIN) is None


def test_error_of_a_missed_deadline_says_what_the_callee_does(
    waiters: list[Any], coroutines: list[Any]
) -> None:
    port, receiver = Channel[str].open()
    busy = waiters[1].block.call_one(port)
    receiver.recv().get(WITHIN)
    for caller in (waiters[0], coroutines[0]):
        late = caller.late
        until_explained(
            r"; w\[1\] has run block for ", lambda late=late: late.call_one(waiters[1], 1.0).get(WITHIN)
        )
    # Polling is not delayed.
    assert "has run" not in waiters[0].late.call_one(waiters[1], 0.05).get(WITHIN)
    busy.cancel()


def test_as_dict_is_plain() -> None:
    promise = Promise[None]("the end")
    thread = threading.Thread(target=promise.future.get)
    thread.start()
    told = until(lambda graph: graph.waits).as_dict()
    promise.set_result(None)
    thread.join()
    assert told["waits"][0]["text"] == "for the end"
    job = inspect.connect(os.getpid())
    assert job.waits().circles == ()


# The function circles().


def is_circle(graph: dict[int, list[int]], found: list[int]) -> bool:
    return all(
        after in graph.get(node, []) for node, after in zip(found, [*found[1:], found[0]], strict=True)
    )


@pytest.mark.parametrize("seed", range(50))
def test_circles_agrees_with_a_simple_search(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.randint(1, 9)
    graph = {n: rng.sample(range(size), rng.randint(0, min(3, size))) for n in range(size)}
    found = circles(graph)
    assert all(is_circle(graph, each) for each in found)
    nodes = [node for each in found for node in each]
    assert len(nodes) == len(set(nodes))
    # Something is left after removing nodes that lead nowhere, so there is a circle.
    left = dict(graph)
    while free := [node for node, after in left.items() if not any(one in left for one in after)]:
        for node in free:
            del left[node]
    assert bool(found) == bool(left)
