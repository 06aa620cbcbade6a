"""Actors: spawning them, calling them with every adverb, order, and their context."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest
from core_samples import Caller, Coroutines, Echo, Mixed, Where

from mesh_core import (
    Actor,
    ActorError,
    ActorMesh,
    MeshError,
    ProcMesh,
    ValueMesh,
    context,
    endpoint,
    this_host,
    this_proc,
)

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.python]


# The adverbs.


def test_call_returns_a_value_of_every_rank_in_order(echo: Any) -> None:
    result = echo.call.call(os.getpid).get()
    assert isinstance(result, ValueMesh)
    assert result.sizes == {"hosts": 2, "gpus": 2}
    assert len(set(result.values())) == 4
    assert os.getpid() not in result.values()


def test_values_come_from_the_rank_they_stand_for(procs: ProcMesh, echo: Any) -> None:
    assert echo.call.call(os.getpid).get().values() == procs.pids


def test_call_of_a_slice_asks_that_slice_alone(procs: ProcMesh, echo: Any) -> None:
    assert echo.slice(gpus=1).call.call(os.getpid).get().values() == procs.pids[1::2]
    assert echo.slice(hosts=1).call.call(os.getpid).get().sizes == {"gpus": 2}


def test_call_one(procs: ProcMesh, echo: Any) -> None:
    one = echo.slice(hosts=1, gpus=0)
    assert one.echo.call_one("x").get() == "x"
    assert one.call.call_one(os.getpid).get() == procs.pids[2]


def test_a_call_of_one_actor_is_a_mesh_of_one(echo: Any) -> None:
    result = echo.slice(hosts=0, gpus=0).echo.call(5).get()
    assert result.values() == [5]
    assert result.item() == 5


def test_choose_asks_one_and_in_time_everyone(procs: ProcMesh, echo: Any) -> None:
    seen = {echo.call.choose(os.getpid).get() for _ in range(200)}
    assert seen == set(procs.pids)


def test_choose_avoids_the_busy(procs: ProcMesh) -> None:
    """It picks the less busy of two random ones, so that waiting messages are spread evenly."""
    pair = procs.slice(hosts=0).spawn("pair", Coroutines)
    waiting = [pair.enter.choose("door") for _ in range(200)]
    pair.open.call("door").get()
    for future in waiting:
        future.get()
    counts = [sum(1 for entry in seen if entry[0] == "in") for seen in pair.notes.call().get().values()]
    assert sum(counts) == 200
    # Every second pick evens out a lead. By chance alone the two would differ by 14 on average.
    assert abs(counts[0] - counts[1]) <= 12
    pair.stop().get()


def test_broadcast_reaches_everyone_and_returns_no_result(procs: ProcMesh) -> None:
    mesh = procs.spawn("mixed", Mixed)
    assert mesh.note.broadcast("one").done()
    assert mesh.notes.call().get().values() == [["one"]] * 4
    mesh.stop().get()


def test_stream_yields_every_result_once(procs: ProcMesh, echo: Any) -> None:
    futures = list(echo.call.stream(os.getpid))
    assert len(futures) == 4
    assert {future.get() for future in futures} == set(procs.pids)


def test_stream_yields_the_first_before_the_last_has_answered(procs: ProcMesh) -> None:
    mesh = procs.spawn("coroutines", Coroutines)
    results = iter(mesh.enter.stream("door"))
    open_first = mesh.slice(hosts=1, gpus=1).open.call_one("door")
    assert next(results).get() == "door"
    assert not any(future.done() for future in [next(results)])
    assert "in" in dict(open_first.get())
    mesh.open.call("door").get()
    mesh.stop().get()


def test_async_stream(procs: ProcMesh, echo: Any) -> None:
    async def collect() -> set[int]:
        return {await future async for future in echo.call.stream(os.getpid)}

    assert asyncio.run(collect()) == set(procs.pids)


def test_a_stream_raises_the_error_of_a_rank_at_that_rank(procs: ProcMesh) -> None:
    class Odd(Actor):
        @endpoint
        def odd(self) -> int:
            rank = context().actor_instance.rank.rank
            if rank % 2 == 0:
                raise ValueError(rank)
            return rank

    mesh = procs.spawn("odd", Odd)
    good, bad = [], []
    for future in mesh.odd.stream():
        try:
            good.append(future.get())
        except ValueError as error:
            bad.append(error.args[0])
    assert (sorted(good), sorted(bad)) == ([1, 3], [0, 2])
    mesh.stop().get()


def test_keyword_arguments_are_sent(echo: Any) -> None:
    one = echo.slice(hosts=0, gpus=0)
    assert one.keywords.call_one(1, c=3).get() == (1, 2, (), 3, {})
    assert one.keywords.call_one(1, 5, 6, 7, c=3, d=4).get() == (1, 5, (6, 7), 3, {"d": 4})


def test_the_first_error_is_raised_and_carries_all_results(procs: ProcMesh) -> None:
    class Third(Actor):
        @endpoint
        def go(self) -> int:
            rank = context().actor_instance.rank.rank
            if rank == 2:
                raise KeyError("two")
            return rank

    mesh = procs.spawn("third", Third)
    with pytest.raises(KeyError) as caught:
        mesh.go.call().get()
    error: Any = caught.value
    assert isinstance(error, ActorError)
    assert (error.actor, error.rank, dict(error.point)) == ("third", 2, {"hosts": 1, "gpus": 0})
    assert error.pid == procs.pids[2]
    assert error.host == procs._location.name_of(2)
    assert "KeyError: 'two'" in error.remote_traceback
    results = mesh.go.call().get(return_exceptions=True)
    assert results.values()[:2] == [0, 1]
    assert isinstance(results.get(2), KeyError)
    assert error.results.get(3) == 3
    mesh.stop().get()


# Order.


def test_one_senders_messages_arrive_in_the_order_sent(procs: ProcMesh) -> None:
    mesh = procs.spawn("mixed", Mixed)
    one = mesh.slice(hosts=0, gpus=1)
    for n in range(300):
        (mesh.note if n % 3 else one.note).broadcast(n)
        if n % 7 == 0:
            one.note_async.broadcast(n)
    seen = one.notes.call_one().get()
    assert seen == sorted(seen)
    assert len(seen) == 300 + 43
    others = mesh.slice(hosts=1).notes.call().get().values()
    assert others == [[n for n in range(300) if n % 3]] * 2
    mesh.stop().get()


def test_coroutines_are_not_overtaken_either(procs: ProcMesh) -> None:
    """STG-1: a message that awaits something is not overtaken by the next."""
    mesh = procs.spawn("coroutines", Coroutines)
    one = mesh.slice(hosts=0, gpus=0)
    for n in range(200):
        (one if n % 2 else mesh).note.broadcast(n)
    assert one.notes.call_one().get() == list(range(200))
    mesh.stop().get()


def test_large_and_small_messages_keep_their_order(procs: ProcMesh) -> None:
    mesh = procs.slice(hosts=0, gpus=0).spawn("mixed", Mixed)
    for n in range(20):
        mesh.note.broadcast(bytes([n]) * (1 if n % 2 else 1_000_000))
    assert [value[0] for value in mesh.notes.call_one().get()] == list(range(20))
    mesh.stop().get()


# Endpoints.


def test_sync_and_async_endpoints_mix_and_exclude_each_other(procs: ProcMesh) -> None:
    """STG-1: one at a time, in the order of arrival, whichever executor runs it."""
    mesh = procs.slice(hosts=0, gpus=0).spawn("mixed", Mixed)
    futures = [(mesh.note_async if n % 2 else mesh.note).call_one(n) for n in range(100)]
    threads = [future.get() for future in futures]
    assert mesh.notes.call_one().get() == list(range(100))
    # The sync ones share the actor's thread, the async ones the process's loop.
    assert len(set(threads[0::2])) == len(set(threads[1::2])) == 1
    assert threads[0] != threads[1]
    mesh.stop().get()


def test_concurrent_endpoints_overlap(procs: ProcMesh) -> None:
    mesh = procs.slice(hosts=0, gpus=0).spawn("coroutines", Coroutines)
    waiting = [mesh.enter.call_one(key) for key in "abc"]
    # All three are running at once: none has returned, and `open` was let in as well.
    assert mesh.open.call_one("none").get() == [("in", "a"), ("in", "b"), ("in", "c")]
    for key in "cab":
        mesh.open.call_one(key).get()
        assert waiting["abc".index(key)].get() == key
    mesh.stop().get()


def test_an_endpoint_on_the_object_itself_is_the_plain_method() -> None:
    assert Echo().echo(3) == 3
    assert asyncio.run(Echo().echo_async(4)) == 4


def test_endpoints_are_inherited_and_can_be_overridden(procs: ProcMesh) -> None:
    class Loud(Echo):
        @endpoint
        def echo(self, value: Any) -> Any:
            return super().echo(value) * 2

    mesh = procs.slice(hosts=0, gpus=0).spawn("loud", Loud)
    assert mesh.echo.call_one("ha").get() == "haha"
    assert mesh.echo_async.call_one("ha").get() == "ha"
    mesh.stop().get()


def test_messages_wait_for_the_constructor(procs: ProcMesh) -> None:
    class Slow(Actor):
        def __init__(self, gate: Any) -> None:
            self.opened = gate.enter.call_one("go").get()

        @endpoint
        def seen(self) -> str:
            return self.opened

    gate = procs.slice(hosts=1, gpus=1).spawn("gate", Coroutines)
    slow = procs.slice(hosts=0).spawn("slow", Slow, gate)
    early = slow.seen.call()
    assert not slow.initialized.done()
    gate.open.call_one("go").get()
    assert early.get().values() == ["go", "go"]
    assert slow.initialized.get() is None
    slow.stop().get()
    gate.stop().get()


def test_an_async_actors_constructor_runs_once_a_rank(procs: ProcMesh) -> None:
    async def main() -> list[Any]:
        mesh = await procs.spawn("coroutines", Coroutines)
        result = await mesh.notes.call()
        await mesh.stop()
        return result.values()

    assert asyncio.run(main()) == [[]] * 4


def test_many_calls_at_once_from_threads(echo: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(lambda n: echo.echo.call(n).get().values(), n) for n in range(100)]
        assert [job.result() for job in jobs] == [[n] * 4 for n in range(100)]


def test_many_calls_at_once_from_coroutines(echo: Any) -> None:
    async def main() -> list[Any]:
        return await asyncio.gather(*(echo.echo.call(n).as_asyncio() for n in range(100)))

    assert [mesh.values() for mesh in asyncio.run(main())] == [[n] * 4 for n in range(100)]


# References.


def test_actors_call_actors(procs: ProcMesh, echo: Any) -> None:
    caller = procs.spawn("caller", Caller)
    assert caller.ask.call(echo, "x").get().values() == [["x"] * 4] * 4
    assert caller.ask.call(echo.slice(gpus=0), "x").get().values() == [["x"] * 2] * 4
    assert caller.ask_async.call(echo, 7).get().values() == [[7] * 4] * 4
    caller.stop().get()


def test_a_reference_comes_back_as_a_reference(echo: Any) -> None:
    back = echo.slice(hosts=0, gpus=0).echo.call_one(echo).get()
    assert isinstance(back, ActorMesh)
    assert back.echo.call(1).get().values() == [1] * 4
    with pytest.raises(MeshError, match="came from another process"):
        back.initialized  # noqa: B018


def test_an_actor_of_the_script_is_called_from_a_worker(procs: ProcMesh) -> None:
    here = this_proc().spawn("here", Echo)
    caller = procs.slice(hosts=0, gpus=0).spawn("caller", Caller)
    assert caller.ask_one.call_one(here, "home").get() == "home"
    assert here.call.call_one(os.getpid).get() == os.getpid()
    here.stop().get()
    caller.stop().get()


def test_an_actor_finds_its_own_process(procs: ProcMesh) -> None:
    caller = procs.spawn("caller", Caller)
    assert caller.neighbours.call(3).get().values() == [(3, pid) for pid in procs.pids]
    caller.stop().get()


def test_an_actor_spawns_processes_of_its_own(procs: ProcMesh) -> None:
    caller = procs.slice(hosts=0).spawn("caller", Caller)
    nested = caller.nest.call(2).get().values()
    pids = [pid for inner, _ in nested for pid in inner]
    assert len(set(pids)) == 4
    assert not set(pids) & {os.getpid(), *procs.pids}
    caller.stop().get()


def test_this_host_spawns_on_this_machine() -> None:
    assert len(this_host()) == 1
    with this_host().spawn_procs() as procs:
        assert procs.spawn("echo", Echo).echo.call_one(1).get() == 1


# Where code runs.


def test_an_actor_knows_its_place(procs: ProcMesh) -> None:
    mesh = procs.spawn("where", Where)
    places = mesh.place.call().get().values()
    assert [place["rank"] for place in places] == [0, 1, 2, 3]
    assert [place["birth"] for place in places] == [0, 1, 2, 3]
    assert [place["coords"] for place in places][2] == {"hosts": 1, "gpus": 0}
    assert [place["message_rank"] for place in places] == [0, 1, 2, 3]
    assert {place["name"] for place in places} == {"where"}
    assert {place["class"] for place in places} == {"Where"}
    assert [place["proc"] for place in places] == [f"shared[{rank}]" for rank in range(4)]
    assert [place["proc"] for place in places] == [place["proc_name"] for place in places]
    assert {place["proc_len"] for place in places} == {1}
    assert [place["pid"] for place in places] == procs.pids
    assert places[3]["logger"] == "mesh.Where.where.3"
    mesh.stop().get()


def test_the_messages_rank_is_the_place_in_the_slice(procs: ProcMesh) -> None:
    mesh = procs.spawn("where", Where)
    places = mesh.slice(gpus=1).place.call().get().values()
    assert [place["rank"] for place in places] == [1, 3]
    assert [place["message_rank"] for place in places] == [0, 1]
    assert [place["current_rank"] for place in places] == [0, 1]
    assert [place["message_coords"] for place in places] == [{"hosts": 0}, {"hosts": 1}]
    assert places[0]["current_size"] == {"hosts": 2}
    one = mesh.slice(hosts=1, gpus=1).place.call_one().get()
    assert (one["rank"], one["message_rank"], one["current_size"]) == (3, 0, {})
    assert mesh.flatten("all").place.call().get().get(2)["current_size"] == {"all": 4}
    mesh.stop().get()


def test_the_instances_rank_is_the_place_in_the_mesh_it_was_spawned_as(procs: ProcMesh) -> None:
    mesh = procs.slice(hosts=1).spawn("where", Where)
    assert [place["rank"] for place in mesh.place.call().get().values()] == [0, 1]
    assert mesh.place.call().get().get(1)["coords"] == {"gpus": 1}
    mesh.stop().get()


def test_a_coroutines_context_is_its_own(procs: ProcMesh) -> None:
    mesh = procs.spawn("where", Where)
    whole, part = mesh.rank_after_a_while.call(), mesh.slice(gpus=1).rank_after_a_while.call()
    assert whole.get().values() == [(n, n) for n in range(4)]
    assert part.get().values() == [(0, 0), (1, 1)]
    mesh.stop().get()


def test_a_script_has_no_context() -> None:
    with pytest.raises(MeshError, match="no actor runs here"):
        context()
    assert this_proc().name == "controller"
    assert this_proc().pids == [os.getpid()]


# Stopping.


def test_stop_lets_earlier_messages_finish(procs: ProcMesh) -> None:
    mesh = procs.spawn("mixed", Mixed)
    calls = [mesh.note.call(n) for n in range(50)]
    mesh.stop().get()
    for call in calls:
        assert len(call.get()) == 4


def test_cleanup_runs_at_the_stop(procs: ProcMesh, tmp_path: Any) -> None:
    class Tidy(Actor):
        def __init__(self, path: str) -> None:
            self.path = path

        @endpoint
        def ping(self) -> None: ...

        def __cleanup__(self, exc: Any) -> None:
            from pathlib import Path

            Path(f"{self.path}/{context().actor_instance.rank.rank}").write_text(repr(exc))

    mesh = procs.spawn("tidy", Tidy, str(tmp_path))
    mesh.stop().get()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2", "3"]
    assert (tmp_path / "2").read_text() == "None"


def test_stopping_a_part_leaves_the_others(procs: ProcMesh) -> None:
    mesh = procs.spawn("mixed", Mixed)
    mesh.slice(hosts=0).stop().get()
    assert mesh.slice(hosts=1).note.call(1).get().sizes == {"gpus": 2}
    mesh.stop().get()
