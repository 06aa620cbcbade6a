"""References to values that stay where they were made."""

from __future__ import annotations

import asyncio
import copy
import gc
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_processes import Script
from core_refs import BUDGET, KIB, SIZE, Party, kept

from mesh_core import (
    ActorError,
    Channel,
    Endpoint,
    MeshError,
    Pool,
    ProcMesh,
    Queue,
    Ref,
    RefLost,
    RefStoreFull,
    SerializationError,
    SupervisionError,
    configured,
    put,
    put_async,
    send,
    this_host,
)

pytestmark = pytest.mark.usefixtures("runtime", "fault_tolerant")

SOON = 30.0


@pytest.fixture(scope="module")
def keepers(runtime: None) -> Iterator[ProcMesh]:
    """Three processes that may keep one MiB each."""
    with configured(ref_budget=BUDGET), this_host().spawn_procs({"gpus": 3}, name="keepers") as procs:
        procs.initialized.get()
        yield procs


@pytest.fixture
def parties(keepers: ProcMesh) -> Iterator[Any]:
    """An actor in each; none of them keeps anything after the test."""
    mesh = keepers.spawn("parties", Party)
    yield mesh
    mesh.stop().get()
    gc.collect()
    after = keepers.spawn("after", Party)
    assert after.drained.call().get(timeout=SOON).values() == [(0, 0)] * 3
    after.stop().get()


@pytest.fixture
def mortal() -> Iterator[Any]:
    """An actor in a process of its own, to be killed."""
    with configured(ref_budget=BUDGET), this_host().spawn_procs(name="mortal") as procs:
        yield procs.spawn("mortal", Party)


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """After a test, the script keeps nothing that it did not keep before."""
    before = kept()
    yield
    gc.collect()
    # What an actor that was stopped had is dropped in its process, which then says so.
    until = time.monotonic() + SOON
    while kept() != before and time.monotonic() < until:
        threading.Event().wait(0.01)
    assert kept() == before


def at(parties: Any, index: int) -> Any:
    return parties.slice(gpus=index)


# One process.


def test_a_value_is_kept_until_its_last_reference_is_gone() -> None:
    before = kept()[0]
    ref = put(bytearray(b"x") * SIZE)
    again = copy.deepcopy(ref)
    assert again is ref
    assert kept()[0] == before + 1
    assert ref.get() == bytearray(b"x") * SIZE
    assert ref.nbytes >= SIZE
    del ref
    assert kept()[0] == before + 1
    del again
    assert kept()[0] == before


def test_a_copy_is_kept_and_each_get_makes_a_new_object() -> None:
    numpy = pytest.importorskip("numpy")
    data = numpy.arange(50_000)
    ref = put(data)
    data[:] = 0
    first, second = ref.get(), ref.get()
    assert first.sum() == numpy.arange(50_000).sum()
    first[:] = 7
    assert second.sum() == numpy.arange(50_000).sum() == ref.get().sum()
    assert (first == 7).all()


def test_a_view_keeps_the_value_after_the_reference_is_gone() -> None:
    """REF-1, for a view."""
    numpy = pytest.importorskip("numpy")
    ref = put(numpy.full(100_000, 5, dtype="uint8"))
    array = ref.get()
    part = array[10:20]
    del ref, array
    assert kept()[0] == 1
    # Other values would take its memory if it were free.
    others = [put(numpy.full(100_000, n, dtype="uint8")) for n in range(20)]
    assert (part == 5).all()
    del part, others
    gc.collect()
    assert kept()[0] == 0


def test_small_values_travel_with_their_references() -> None:
    before = kept()
    ref = put({"a": 1})
    assert kept() == before
    assert ref.get() == {"a": 1}
    assert "carried along" in repr(ref)
    assert not ref.is_lost


@pytest.mark.parametrize("value", [None, 3, "x" * 300_000, b"y" * 300_000, [bytearray(90_000)] * 3, ()])
def test_any_value_comes_back(value: Any) -> None:
    assert put(value).get() == value


def test_an_object_that_occurs_twice_is_one_again() -> None:
    data = bytearray(SIZE)
    first, second = put([data, data]).get()
    assert first is second


def test_equal_references_are_those_to_one_value() -> None:
    ref = put(bytearray(SIZE))
    other = put(bytearray(SIZE))
    assert ref == copy.copy(ref)
    assert ref != other
    assert ref != 1
    assert len({ref, copy.copy(ref), other}) == 2
    small, like = put(1), put(1)
    assert small == copy.copy(small)
    assert small != like


def test_repr_shows_where_it_is_kept_and_its_size() -> None:
    assert repr(put(bytearray(3 << 20))).startswith("<Ref of 3.0 MiB, in the script, host ")


def test_a_reference_cannot_be_pickled_by_hand() -> None:
    ref = put(bytearray(SIZE))
    with pytest.raises(TypeError, match="outside of a message"):
        pickle.dumps(ref)


def test_what_cannot_be_pickled_is_refused_and_leaves_nothing() -> None:
    before = kept()
    with pytest.raises(SerializationError, match="the value"):
        put([bytearray(SIZE), threading.Lock()])
    assert kept() == before
    gc.collect()


def test_values_may_have_references_in_them() -> None:
    inner = put(bytearray(b"i") * SIZE)
    outer: Ref[dict[str, Any]] = put({"inner": inner, "beside": bytearray(SIZE)})
    del inner
    assert kept()[0] == 2
    found = outer.get()["inner"]
    del outer
    gc.collect()
    # It was in the value that was opened, and is needed no longer than that.
    assert found.get() == bytearray(b"i") * SIZE
    del found
    gc.collect()
    assert kept()[0] == 0


def test_coroutines_await_references() -> None:
    async def main() -> int:
        ref = await put_async(bytearray([2]) * SIZE)
        return sum(await ref)

    assert asyncio.run(main()) == 2 * SIZE


# Arguments.


@pytest.mark.parametrize("size", [10, SIZE])
@pytest.mark.parametrize("name", ["kinds", "kinds_async"])
def test_a_reference_arrives_as_the_value_unless_it_is_in_a_container(
    parties: Any, name: str, size: int
) -> None:
    ref = put(bytearray(size))
    kinds: Endpoint[Any, list[str]] = getattr(at(parties, 0), name)
    assert kinds.call_one(ref, [ref], ref).get() == ["bytearray", "list", "bytearray"]
    assert kinds.call_one(1, a=ref, b={"r": ref}).get() == ["int", "bytearray", "dict"]
    assert getattr(parties, name).call(ref).get().values() == [["bytearray"]] * 3


def test_constructors_are_given_values_too(keepers: ProcMesh) -> None:
    mesh = keepers.spawn("made", Party, put(bytearray(SIZE)))
    assert mesh.kind_of_first.call().get().values() == ["bytearray"] * 3
    mesh.stop().get()


def test_writes_of_a_receiver_are_private(parties: Any) -> None:
    ref = put(bytearray(SIZE))
    assert parties.scribble.call(ref).get().values() == [99] * 3
    assert ref.get()[0] == 0


def test_pools_and_sends_give_values(parties: Any) -> None:
    ref = put(bytearray([1]) * SIZE)
    with Pool(parties) as pool:
        assert list(pool.map(parties.sum, [ref, ref, ref])) == [SIZE] * 3
    port, receiver = Channel[int].open()
    send(parties.sum, (ref,), port=port)
    assert [receiver.recv().get(timeout=SOON) for _ in range(3)] == [SIZE] * 3


# Holders.


def test_the_last_holder_frees_it_whatever_the_order(parties: Any) -> None:
    """REF-1, for objects: the value is kept while anybody holds a reference, and no longer."""
    first, second, third = (at(parties, n) for n in range(3))
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        ref = first.put.call_one().get()
        first.hold.call_one("r", [ref]).get()
        second.hold.call_one("r", [ref]).get()
        second.pass_on.call_one("r", third).get()
        del ref
        gc.collect()
        for n in order:
            assert first.kept.call_one().get()[0] == 1
            at(parties, n).drop.call_one("r").get()
        assert first.drained.call_one().get(timeout=SOON) == (0, 0)


def test_a_reference_that_comes_home_is_counted_once(parties: Any) -> None:
    first, second = at(parties, 0), at(parties, 1)
    ref = first.put.call_one().get()
    for name in "abc":
        second.hold.call_one(name, [ref, [ref]]).get()
        first.hold.call_one(name, [ref]).get()
    del ref
    for name in "abc":
        assert first.value_of.call_one(name).get() == SIZE
        first.drop.call_one(name).get()
        assert second.value_of.call_one(name).get() == SIZE
        second.drop.call_one(name).get()
    assert first.drained.call_one().get(timeout=SOON) == (0, 0)


def test_replies_that_nobody_looks_at_hold_nothing_for_long(parties: Any) -> None:
    first = at(parties, 0)
    futures = [first.put.call_one() for _ in range(5)]
    del futures
    gc.collect()
    assert first.drained.call_one().get(timeout=SOON) == (0, 0)


def test_a_view_elsewhere_keeps_the_value(parties: Any) -> None:
    numpy = pytest.importorskip("numpy")
    first, second = at(parties, 0), at(parties, 1)
    del numpy
    second.hold_value.call_one("v", [first.put.call_one(SIZE, 4).get()]).get()
    gc.collect()
    assert first.kept.call_one().get()[0] in (0, 1)
    assert second.sum_of_held.call_one("v").get() == 4 * SIZE
    second.drop.call_one("v").get()
    assert first.drained.call_one().get(timeout=SOON) == (0, 0)


def test_a_killed_holder_holds_nothing(parties: Any, mortal: Any) -> None:
    """REF-1, for a holder that dies."""
    first = at(parties, 0)
    mortal.hold.call_one("r", [first.put.call_one().get()]).get()
    gc.collect()
    assert first.kept.call_one().get()[0] == 1
    with pytest.raises(SupervisionError):
        mortal.die.call_one().get(timeout=SOON)
    assert first.drained.call_one().get(timeout=SOON) == (0, 0)


def test_messages_to_a_dead_actor_are_given_back(parties: Any) -> None:
    first = at(parties, 0)
    gone = at(parties, 1)
    ref = first.put.call_one().get()
    gone.stop().get()
    with pytest.raises(MeshError):
        gone.hold.call_one("r", [ref]).get(timeout=SOON)
    gone.hold.broadcast("r", [ref])
    del ref
    gc.collect()
    assert first.drained.call_one().get(timeout=SOON) == (0, 0)


def test_messages_that_wait_for_a_dying_actor_are_given_back(parties: Any, mortal: Any) -> None:
    """REF-1, for a message in flight."""
    first = at(parties, 0)
    told, gates = Channel[Any].open()
    pid = mortal.pid.call_one().get()
    blocked = mortal.wait_for.call_one(told)
    gates.recv().get(timeout=SOON)
    waiting = mortal.hold.call_one("r", [first.put.call_one().get()])
    gc.collect()
    assert first.kept.call_one().get()[0] == 1
    os.kill(pid, signal.SIGKILL)
    blocked.exception(timeout=SOON)
    waiting.exception(timeout=SOON)
    assert first.drained.call_one().get(timeout=SOON) == (0, 0)


def test_messages_to_a_dead_process_are_given_back(parties: Any, mortal: Any) -> None:
    first = at(parties, 0)
    with pytest.raises(SupervisionError):
        mortal.die.call_one().get(timeout=SOON)
    with pytest.raises(MeshError):
        mortal.hold.call_one("r", [first.put.call_one().get()]).get(timeout=SOON)
    gc.collect()
    assert first.drained.call_one().get(timeout=SOON) == (0, 0)


def test_values_in_values_are_held_with_them(parties: Any) -> None:
    """REF-1, for a kept value."""
    first, second, third = (at(parties, n) for n in range(3))
    inner = first.put.call_one(SIZE, 6).get()
    outer = second.put_nested.call_one([inner]).get()
    del inner
    gc.collect()
    third.hold.call_one("o", [outer]).get()
    found = outer.get()["refs"]
    third.hold.call_one("i", found).get()
    del outer, found
    gc.collect()
    third.drop.call_one("o").get()
    assert third.value_of.call_one("i").get() == 6 * SIZE
    third.drop.call_one("i").get()
    assert first.drained.call_one().get(timeout=SOON) == (0, 0)
    assert second.drained.call_one().get(timeout=SOON) == (0, 0)


# Owners that end.


def test_the_end_of_its_owner_is_reported_at_once(parties: Any, mortal: Any) -> None:
    """REF-4: every holder is told, and what was mapped stays readable."""
    ref = mortal.put.call_one().get()
    view = ref.get()
    at(parties, 0).hold.call_one("r", [ref]).get()
    at(parties, 1).hold.call_one("r", [ref]).get()
    with pytest.raises(SupervisionError):
        mortal.die.call_one().get(timeout=SOON)
    with pytest.raises(RefLost, match=r"signal 9|SIGKILL|killed") as raised:
        ref.get(timeout=SOON)
    assert raised.value.failure is not None
    assert ref.is_lost
    assert "lost" in repr(ref)
    assert sum(view) == SIZE
    with pytest.raises(ActorError, match="is lost") as told:
        at(parties, 0).value_of.call_one("r").get(timeout=SOON)
    assert isinstance(told.value, RefLost)
    with pytest.raises(RefLost):
        at(parties, 1).await_value.call_one("r").get(timeout=SOON)
    assert at(parties, 1).is_lost.call_one("r").get()
    with pytest.raises(RefLost):
        at(parties, 2).kinds.call_one(ref).get(timeout=SOON)


def test_a_reference_to_a_value_that_was_already_lost_says_so(parties: Any, mortal: Any) -> None:
    ref = mortal.put.call_one().get()
    with pytest.raises(SupervisionError):
        mortal.die.call_one().get(timeout=SOON)
    at(parties, 0).hold.call_one("r", [ref]).get()
    with pytest.raises(RefLost):
        at(parties, 0).value_of.call_one("r").get(timeout=SOON)


def test_an_owner_that_was_stopped_is_no_failure() -> None:
    with this_host().spawn_procs() as procs:
        ref: Ref[Any] = procs.spawn("closing", Party).put.call_one().get()
    with pytest.raises(RefLost, match="was stopped") as raised:
        ref.get(timeout=SOON)
    assert raised.value.failure is None


# Room.


def test_a_value_larger_than_all_room_is_refused_at_once(parties: Any) -> None:
    with pytest.raises(RefStoreFull, match="put it in parts"):
        at(parties, 0).put.call_one(2 * BUDGET).get(timeout=SOON)


def test_a_put_waits_for_room_and_goes_on(parties: Any) -> None:
    """REF-3: those that find no room wait, in order of arrival."""
    first = at(parties, 0)
    held = first.put.call_one(BUDGET // 2).get()
    told, begun = Channel[None].open()
    waiting = first.put_later.call_one(BUDGET - 16 * KIB, told)
    begun.recv().get(timeout=SOON)
    small = first.put_later.call_one(16 * KIB, told)
    begun.recv().get(timeout=SOON)
    assert not waiting.done()
    assert not small.done()  # in order of arrival
    del held
    gc.collect()
    assert sum(waiting.get(timeout=SOON).get()) == 0
    del waiting
    gc.collect()
    assert small.get(timeout=SOON).nbytes > 16 * KIB


def test_a_put_that_waits_too_long_or_is_cancelled_leaves_the_room_to_others(parties: Any) -> None:
    first = at(parties, 0)
    held = first.put.call_one(BUDGET - 16 * KIB).get()
    with pytest.raises(RefStoreFull, match=r"within 0\.01 s"):
        first.put_in_time.call_one(BUDGET // 2, 0.01).get(timeout=SOON)
    told, begun = Channel[None].open()
    waiting = first.put_later.call_one(BUDGET // 2, told)
    begun.recv().get(timeout=SOON)
    waiting.cancel()
    del held
    gc.collect()
    assert first.put_in_time.call_one(BUDGET - 16 * KIB, SOON).get(timeout=SOON).nbytes > 0


def test_a_put_that_would_block_the_event_loop_is_refused(parties: Any) -> None:
    first = at(parties, 0)
    held = first.put.call_one(BUDGET // 2).get()
    with pytest.raises(RefStoreFull, match="put_async"):
        first.put_on_loop.call_one(BUDGET - 16 * KIB).get(timeout=SOON)
    assert first.put_on_loop.call_one(BUDGET // 4).get(timeout=SOON).nbytes > 0
    assert held.nbytes > 0


@pytest.mark.slow
def test_ctrl_c_ends_the_wait_for_room(script: Callable[..., Script]) -> None:
    run = script(
        """
        import os, signal, threading
        from mesh_core import configure, put, RefStoreFull
        from mesh_core._common.current import current

        configure(ref_budget=1 << 20)
        held = put(bytearray(900_000))
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            put(bytearray(900_000))
        except KeyboardInterrupt:
            print("interrupted")
        del held
        ref = put(bytearray(1_000_000), timeout=5)
        print(current().runtime.counts()["kept"])
        """
    )
    assert run.finish()[0].split("\n")[:-1] == ["interrupted", "1"]


@pytest.mark.slow
def test_room_that_comes_at_the_last_moment_is_used_or_given_back(script: Callable[..., Script]) -> None:
    run = script(
        """
        import random, threading
        from mesh_core import configure, put, RefStoreFull
        from mesh_core._common.current import current

        configure(ref_budget=1 << 20)

        def work(seed):
            chance = random.Random(seed)
            for _ in range(60):
                try:
                    put(bytearray(chance.randrange(50, 500) << 10), timeout=chance.choice([0.0005, 0.001, 0.01, None]))
                except RefStoreFull:
                    pass
                except Exception as error:
                    print(repr(error))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        ref = put(bytearray(1_000_000), timeout=5)
        print(current().runtime.counts()["kept"])
        """
    )
    assert run.finish()[0].split("\n")[:-1] == ["1"]


# Results that are kept.


def test_results_stay_where_they_were_made(parties: Any) -> None:
    kept_results = parties.make.with_options(keep=True).call().get()
    assert [type(each) for each in kept_results.values()] == [Ref] * 3
    assert [f"rank {n} of 'keepers'" in repr(each) for n, each in enumerate(kept_results.values())] == [
        True
    ] * 3
    assert parties.kept.call().get().values() == [(1, 104 * KIB)] * 3
    assert [sum(each.get()) for each in kept_results.values()] == [3 * SIZE] * 3
    # Sent on, without coming here.
    assert at(parties, 1).sum.call_one(kept_results.values()[0]).get() == 3 * SIZE


def test_every_adverb_keeps(parties: Any) -> None:
    first = at(parties, 0)
    assert isinstance(first.make.with_options(keep=True).call_one().get(), Ref)
    assert isinstance(first.make_async.with_options(keep=True).call_one().get(), Ref)
    assert isinstance(parties.make.with_options(keep=True).choose().get(), Ref)
    assert [type(each.get()) for each in parties.make.with_options(keep=True).stream()] == [Ref] * 3
    items = [each.get() for each in first.items.with_options(keep=True).stream(3)]
    assert [sum(each.get()) for each in items] == [0, SIZE, 2 * SIZE]
    items = [each.get() for each in first.items_async.with_options(keep=True).stream(2)]
    assert [sum(each.get()) for each in items] == [0, SIZE]
    again = first.make.with_options(keep=True, timeout=30).with_options(block=False)
    assert isinstance(again.call_one().get(), Ref)
    assert isinstance(again.with_options(keep=False).call_one().get(), bytearray)
    largest = parties.make.with_options(keep=True).with_options(keep=False, reduce=max)
    assert isinstance(largest.call().get(), bytearray)
    with pytest.raises(ValueError, match="nothing was made"):
        first.fail.with_options(keep=True).call_one().get()


def test_what_cannot_be_kept_is_refused(parties: Any) -> None:
    with pytest.raises(ValueError, match="answers by its port"):
        parties.answer.with_options(keep=True)
    with pytest.raises(ValueError, match="not both"):
        parties.make.with_options(keep=True, reduce="sum")
    with pytest.raises(ValueError, match="not both"):
        parties.make.with_options(keep=True).with_options(reduce="sum")
    with pytest.raises(TypeError, match="True or False"):
        parties.make.with_options(keep=1)


# Queues.


@pytest.mark.slow
def test_queues_hold_what_their_items_refer_to(parties: Any) -> None:
    first, second = at(parties, 0), at(parties, 1)
    with Queue[Any](max_items=10) as queue:
        first.put_into.call_one(queue, 4).get(timeout=SOON)
        gc.collect()
        assert first.kept.call_one().get()[0] == 4
        assert second.take_from.call_one(queue, None).get(timeout=SOON) == 0
        second.take_from.call_one(queue, 60.0).get(timeout=SOON)
        assert second.look_at_item.call_one().get() == SIZE
        assert first.kept.call_one().get()[0] == 3
        assert second.ack.call_one(queue).get() == 1
        item = queue.take().get(timeout=SOON)
        assert sum(item["ref"].get()) == 2 * SIZE
        del item
        gc.collect()
    assert first.drained.call_one().get(timeout=SOON) == (0, 0)


@pytest.mark.slow
def test_a_lost_taker_loses_no_reference(parties: Any, mortal: Any) -> None:
    first = at(parties, 0)
    with Queue[Any](max_items=10) as queue:
        first.put_into.call_one(queue, 2).get(timeout=SOON)
        assert mortal.take_from.call_one(queue, 600.0).get(timeout=SOON) == 0
        with pytest.raises(SupervisionError):
            mortal.die.call_one().get(timeout=SOON)
        numbers = {}
        for _ in range(2):
            item = queue.take(timeout=SOON).get()
            numbers[item["number"]] = sum(item["ref"].get())
            del item
        assert numbers == {0: 0, 1: SIZE}
        gc.collect()
        assert first.drained.call_one().get(timeout=SOON) == (0, 0)


# Forks, exits, random schedules.


@pytest.mark.slow
def test_a_forked_copy_frees_nothing(script: Callable[..., Script]) -> None:
    run = script(
        """
        import gc, os
        from mesh_core import MeshError, put
        from mesh_core._common.current import current

        ref = put(bytearray(b"z") * 200_000)
        view = ref.get()
        pid = os.fork()
        if pid == 0:
            try:
                ref.get()
            except MeshError as error:
                print("refused" if "fork" in str(error) else error, flush=True)
            try:
                put(bytearray(200_000))
            except MeshError as error:
                print("refused" if "fork" in str(error) else error, flush=True)
            del ref, view
            gc.collect()
            os._exit(0)
        os.waitpid(pid, 0)
        print(ref.get() == bytearray(b"z") * 200_000, current().runtime.counts()["kept"])
        """
    )
    assert run.finish()[0].split("\n")[:-1] == ["refused", "refused", "True 1"]


@pytest.mark.slow
def test_the_interpreter_ends_with_live_references(script: Callable[..., Script]) -> None:
    run = script(
        """
        from core_refs import Party
        from mesh_core import put, this_host

        if __name__ == "__main__":
            procs = this_host().spawn_procs()
            party = procs.spawn("party", Party)
            here, there = put(bytearray(200_000)), party.put.call_one().get()
            party.hold.call_one("h", [here]).get()
            view = there.get()
            print(len(view))
        """
    )
    assert run.finish()[0].split("\n")[:-1] == ["102400"]


@pytest.mark.sampled(3, full=True)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_after_any_schedule_nothing_is_kept(parties: Any, seed: int) -> None:  # noqa: C901
    chance = random.Random(seed)
    with configured(ref_budget=BUDGET), this_host().spawn_procs({"gpus": 2}, name="extra") as extra:
        others = extra.spawn("others", Party)
        places = [at(parties, n) for n in range(3)] + [others.slice(gpus=n) for n in range(2)]
        held: list[tuple[int, str]] = []
        mine: list[Ref[Any]] = []
        futures = []
        for step in range(150):
            alive = len(places) if step <= 110 else len(places) - 1
            n, do = chance.randrange(alive), chance.randrange(7)
            name = f"n{step}"
            if do == 0 and len(mine) < 8:
                mine.append(places[n].put.call_one(chance.randrange(5, 90) * KIB).get(timeout=SOON))
            elif do == 1 and mine:
                futures.append(places[n].hold.call_one(name, [chance.choice(mine)]))
                held.append((n, name))
            elif do == 2 and held:
                m, name = chance.choice(held)
                futures.append(places[m].pass_on.call_one(name, places[(m + 1) % len(places)]))
                held.append(((m + 1) % len(places), name))
                futures[-1].exception(timeout=SOON)
            elif do == 3 and mine:
                mine.pop(chance.randrange(len(mine)))
            elif do == 4 and held:
                m, name = held.pop(chance.randrange(len(held)))
                if (m, name) not in held:
                    futures.append(places[m].drop.call_one(name))
            elif do == 5 and mine:
                futures.append(places[n].kinds.call_one(chance.choice(mine), a=[chance.choice(mine)]))
            elif do == 6 and mine:
                places[n].hold.broadcast(name, [chance.choice(mine)])
                held.append((n, name))
            if step == 110:
                os.kill(extra.pids[1] or 0, signal.SIGKILL)
        for future in futures:
            future.exception(timeout=SOON)
        held.clear()
        mine.clear()
        futures.clear()
        del future
        gc.collect()
        for each in places[:3]:
            each.stop().get()
        others.slice(gpus=0).stop().get()
        del others, places, each
        gc.collect()
    # The fixture waits until nothing is kept in the remaining three.
