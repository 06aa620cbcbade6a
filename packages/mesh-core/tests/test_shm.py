"""Large data between processes: through shared memory, without surprises, and given back."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from core_samples import Coroutines, Echo, scribble

from mesh_core import ProcMesh, configured, shutdown, this_host
from mesh_core._process import current

pytestmark = [pytest.mark.usefixtures("runtime"), pytest.mark.beside]

MIB = 1 << 20


@pytest.fixture
def one(echo: Any) -> Any:
    return echo.slice(hosts=0, gpus=0)


def slabs(pid: int | str = "self") -> int:
    """How many pieces of shared memory a process has open."""
    count = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            count += "memfd:mesh-slab" in str(entry.readlink())
        except OSError:
            continue
    return count


def owned() -> int:
    """Bytes of shared memory that this process owns, in use or kept for the next message."""
    return int(current().runtime.counts()["shm_bytes"])


def remote_owned() -> int:
    """The same, asked of a worker."""
    return owned()


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, MIB, 8 * MIB + 1, 33 * MIB])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_data_arrives_whole(one: Any, kind: Any, size: int) -> None:
    data = kind(os.urandom(1000) * (size // 1000 + 1))[:size]
    back = one.echo.call_one(data).get()
    assert type(back) is kind
    assert back == data


def test_large_data_goes_through_shared_memory(one: Any) -> None:
    before = owned()
    assert one.echo.call_one(bytearray(70 * MIB)).get() == bytearray(70 * MIB)
    assert owned() - before >= 70 * MIB


def test_small_data_does_not() -> None:
    with this_host().spawn_procs() as procs:
        echo = procs.spawn("echo", Echo)
        echo.echo.call_one(b"x" * 10_000).get()
        assert slabs(procs.pids[0] or 0) == 0


def test_a_result_is_writable_and_outlives_its_message(one: Any) -> None:
    numpy = pytest.importorskip("numpy")
    arrays = [one.echo.call_one(numpy.full(MIB, n, dtype="uint8")).get() for n in range(8)]
    gc.collect()
    for _ in range(50):
        one.echo.call_one(numpy.full(MIB, 200, dtype="uint8")).get()
    for n, array in enumerate(arrays):
        assert (array == n).all()
        array[:] += 100
        assert (array == n + 100).all()


def test_a_result_outlives_its_process() -> None:
    numpy = pytest.importorskip("numpy")
    with this_host().spawn_procs() as procs:
        array = procs.spawn("echo", Echo).echo.call_one(numpy.arange(MIB)).get()
    assert array.sum() == MIB * (MIB - 1) // 2
    array[:] = 1
    assert array.sum() == MIB


def test_what_is_sent_to_many_is_private_to_each(echo: Any) -> None:
    numpy = pytest.importorskip("numpy")
    data = numpy.zeros(2 * MIB, dtype="uint8")
    for _ in range(3):
        assert echo.call.call(scribble, data).get().values() == [0] * 4
    assert not data.any()


def test_what_is_sent_to_one_is_its_own(one: Any) -> None:
    numpy = pytest.importorskip("numpy")
    data = numpy.zeros(2 * MIB, dtype="uint8")
    for _ in range(3):
        assert one.call.call_one(scribble, data).get() == 0
    assert not data.any()


def test_the_sender_may_change_its_data_after_the_call(one: Any) -> None:
    numpy = pytest.importorskip("numpy")
    data = numpy.zeros(4 * MIB, dtype="uint8")
    futures = []
    for n in range(8):
        data[:] = n
        futures.append(one.echo.call_one(data))
    data[:] = 99
    assert [int(future.get()[-1]) for future in futures] == list(range(8))


def test_an_object_that_occurs_twice_is_one_on_arrival(one: Any) -> None:
    numpy = pytest.importorskip("numpy")
    data = numpy.zeros(MIB, dtype="uint8")
    first, second = one.echo.call_one([data, data]).get()
    assert first is second


def test_a_view_sends_only_its_elements(one: Any) -> None:
    torch = pytest.importorskip("torch")
    before = owned()
    base = torch.arange(40 * MIB, dtype=torch.uint8)
    back = one.echo.call_one(base[MIB : MIB + 100_000]).get()
    assert back.untyped_storage().nbytes() == 100_000
    assert (back == base[MIB : MIB + 100_000]).all()
    assert owned() - before < 20 * MIB


def test_tensors(one: Any) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.randn(1024, 1024)
    back = one.echo.call_one({"weights": tensor, "bias": tensor[0]}).get()
    assert (back["weights"] == tensor).all() and (back["bias"] == tensor[0]).all()
    back["weights"].add_(1)
    assert not (back["weights"] == tensor).any()


# Memory comes back.


def test_round_trips_need_no_more_memory_with_time(one: Any) -> None:
    data = bytearray(4 * MIB)
    for _ in range(10):
        one.echo.call_one(data).get()
    here, there = owned(), one.call.call_one(remote_owned).get()
    for _ in range(200):
        one.echo.call_one(data).get()
    assert (owned(), one.call.call_one(remote_owned).get()) == (here, there)


def test_casts_need_no_more_memory_with_time(echo: Any) -> None:
    data = bytearray(4 * MIB)
    for _ in range(5):
        echo.echo.call(data).get().values()
    here = owned()
    for _ in range(50):
        echo.echo.call(data).get().values()
    assert owned() == here


def test_a_reply_that_nobody_reads_gives_its_memory_back(one: Any) -> None:
    def ask() -> None:
        future = one.call.call_one(bytearray, 4 * MIB)
        one.echo.call_one(0).get()
        del future

    for _ in range(5):
        ask()
    there = one.call.call_one(remote_owned).get()
    for _ in range(60):
        ask()
    assert one.call.call_one(remote_owned).get() == there


def test_a_reply_to_a_cancelled_call_gives_its_memory_back(procs: ProcMesh, one: Any) -> None:
    def ask() -> None:
        future = one.call.call_one(bytearray, 4 * MIB)
        future.cancel()
        one.echo.call_one(0).get()

    for _ in range(5):
        ask()
    there = one.call.call_one(remote_owned).get()
    for _ in range(60):
        ask()
    assert one.call.call_one(remote_owned).get() == there


def test_a_message_to_an_actor_that_is_gone_gives_its_memory_back(procs: ProcMesh) -> None:
    mesh = procs.slice(hosts=0, gpus=1).spawn("gone", Coroutines)
    mesh.stop().get()
    data = bytearray(4 * MIB)

    def ask() -> None:
        assert mesh.note.call_one(data).exception() is not None

    for _ in range(5):
        ask()
    here = owned()
    for _ in range(60):
        ask()
    assert owned() == here


def test_what_a_dead_receiver_held_comes_back() -> None:
    data = bytearray(8 * MIB)
    sizes = []
    for _ in range(6):
        with this_host().spawn_procs() as procs:
            echo = procs.spawn("echo", Echo)
            echo.echo.call_one(data).get()
            waiting = [echo.call.call_one(hold, data) for _ in range(3)]
            os.kill(procs.pids[0] or 0, 9)
            for future in waiting:
                future.exception()
            sizes.append(owned())
    # Later rounds use what the dead of earlier ones had.
    assert sizes[-1] == sizes[2]


def hold(data: Any) -> None:
    import threading

    threading.Event().wait()


# A small budget.


@pytest.fixture
def cramped() -> Iterator[ProcMesh]:
    """Processes of a runtime that may use next to no shared memory."""
    shutdown()
    gc.collect()
    with configured(shm_budget=1), this_host().spawn_procs(per_host={"gpus": 2}) as procs:
        yield procs
    shutdown()
    this_host().spawn_procs().stop().get()


@pytest.mark.slow
def test_without_room_in_shared_memory_data_arrives_all_the_same(cramped: ProcMesh) -> None:
    echo = cramped.spawn("echo", Echo)
    data = bytes(range(256)) * (MIB // 64)
    assert echo.echo.call(data).get().values() == [data, data]
    assert owned() == 0
    assert echo.call.call(remote_owned).get().values() == [0, 0]
    back = echo.slice(gpus=0).echo.call_one(bytearray(data)).get()
    back[0] = 77
    assert back[1:] == data[1:]


@pytest.mark.slow
def test_the_threshold_can_be_set(script: Any) -> None:
    run = script(
        """
        import os
        from mesh_core import configure, this_host
        from core_samples import Echo
        from test_shm import owned

        if __name__ == "__main__":
            configure(shm_threshold=1 << 30)
            with this_host().spawn_procs() as procs:
                echo = procs.spawn("echo", Echo)
                print(len(echo.echo.call_one(bytearray(1 << 22)).get()), owned())
        """
    )
    assert run.finish()[0].split() == [str(1 << 22), "0"]
