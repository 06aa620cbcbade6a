"""Memory of a GPU that the devices reach by themselves: the stand-in for CUDA's driver names it by what stands for a dma-buf.

Soft-RoCE's driver takes no dma-bufs. `tools/cuda_stand_in/ibverbs.c` stands between: it maps what the dma-buf names, and
registers the mapping. All the rest is the kernel's.
"""

import os
import random
import struct
from pathlib import Path

import pytest

from mesh_rdma import BufferGone, HandleRefused, TransportUnavailable, explain, get_rdma_backend
from mesh_rdma._native_transports import IBVERBS
from mesh_rdma.testing import GpuMemory, TransportConformance
from mesh_rdma.testing._ends import Process, forged
from mesh_rdma.testing._owner import pattern
from soft_roce.fork_server import Copy
from soft_roce.records import asked_since, queue_pairs, resources
from soft_roce.transfers import MIB, NAME, STAGE, read, write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "SOFT_ROCE_DMA_BUF" not in os.environ, reason="there are no RDMA devices with memory of a GPU"
    ),
]

PAGE = 4096


class TestConformance(TransportConformance):
    plugin = IBVERBS
    distribution = "mesh-rdma"
    memory_there = "gpu"


@pytest.fixture
def start():
    """Start an owner of memory of a GPU, of this kind."""
    made = []

    def start(program="gpu"):
        class Started(Process):
            @staticmethod
            def _start():
                return Copy(Path(os.environ["SOFT_ROCE_SERVERS"], "gpu"), program)

        made.append(Started("gpu"))
        return made[-1]

    yield start
    for each in made:
        each.end()


@pytest.fixture
def owner(start):
    return start()


def wide(buffer, length):
    """Longer by all that its handle says."""

    def change(data):
        for at in (65, 81, data.index(b"\x07ibverbs") + 10 + 44):
            struct.pack_into("<Q", data, at, length)

    return forged(buffer, change)


def test_it_comes_before_what_its_owner_would_copy(owner):
    chosen = explain(owner.offer("a", b"on a GPU"))
    assert chosen.candidates == ("cuda", NAME, "tcp")
    assert chosen.passed["shm"] == "it does not transfer GPU memory"
    assert get_rdma_backend() == NAME


@pytest.mark.parametrize("size", [1, PAGE, STAGE - 1, STAGE + 1, MIB + 5, 9 * MIB + 3])
def test_it_is_read_and_written_by_the_devices(owner, size):
    data = random.Random(size).randbytes(size)
    buffer = owner.offer("a", data)
    assert read(buffer) == data
    start = size // 3
    assert read(buffer[start:]) == data[start:]
    write(buffer[start:], data[: size - start])
    assert owner.look("a") == data[:start] + data[: size - start]
    before = queue_pairs()
    assert read(buffer) == data[:start] + data[: size - start]
    assert sum(asked_since(before).values()) >= size // 1024


@pytest.mark.parametrize(
    ("first", "end"),
    [(0, 10), (1, 9000), (PAGE, 2 * PAGE), (PAGE - 1, PAGE + 1), (5000, 70_001), (99_990, 100_000)],
)
def test_a_range_inside_of_an_allocation_and_nothing_beside_it(owner, first, end):
    """VRB-2: CUDA names whole pages, and the device is told of the range."""
    data = pattern(4, 100_000)
    owner.offer("all", data)
    buffer = owner.offer_part("a", "all", slice(first, end))
    assert read(buffer) == data[first:end]
    write(buffer, bytes(end - first))
    assert owner.look("all") == data[:first] + bytes(end - first) + data[end:]
    for offset, length in ((end - first, 1), (0, end - first + 1)):
        with pytest.raises(HandleRefused):
            read(wide(buffer, 1 << 20)[offset : offset + length])
        with pytest.raises(HandleRefused):
            write(wide(buffer, 1 << 20), bytes(length), offset=offset)
    assert owner.look("all") == data[:first] + bytes(end - first) + data[end:]


def test_several_handles_of_one_allocation(owner):
    data = pattern(5, 50_000)
    whole = owner.offer("all", data)
    parts = [owner.offer_part(f"part {n}", "all", slice(n * 10_000, (n + 1) * 10_000)) for n in range(5)]
    again = owner.offer_part("again", "all", slice(None))
    for n, part in enumerate(parts):
        write(part, bytes([n]) * 10_000)
    wanted = b"".join(bytes([n]) * 10_000 for n in range(5))
    assert read(whole) == read(again) == wanted
    owner.close("part 1")
    with pytest.raises(BufferGone):
        read(parts[1])
    assert read(parts[0]) + read(parts[2]) == wanted[:10_000] + wanted[20_000:30_000]
    assert read(again) == wanted


def test_what_is_offered_for_reading_is_not_written(owner):
    buffer = owner.offer("a", b"secret", readonly=True)
    at = buffer.__reduce__()[1][0].index(b"\x07ibverbs") + 10

    def allow(data):
        data[4] = data[at + 1] = 1

    with pytest.raises(HandleRefused):
        write(forged(buffer, allow), b"x")
    assert owner.look("a") == read(buffer) == b"secret"


def test_freed_memory_is_known_to_no_device(owner):
    assert read(owner.offer("first", b"x")) == b"x"
    before, descriptors = resources("mr"), owner.descriptors()
    buffer = owner.offer_pattern("a", 6, MIB)
    # Of each of the two devices.
    assert len(resources("mr") - before) == 2
    # The stand-in has one for an allocation. What has named it to the devices is closed.
    assert owner.descriptors() == descriptors + 1
    assert read(buffer) == pattern(6, MIB)
    owner.close("a")
    assert not resources("mr") - before
    owner.forget("a")
    # It may have the place of the freed, which the owner lets go where it next calls into the engine.
    owner.offer_pattern("b", 7, MIB)
    while owner.descriptors() > descriptors + 1:
        owner.offer_pattern("b", 7, MIB)
    with pytest.raises(BufferGone):
        read(buffer)
    with pytest.raises(BufferGone):
        write(buffer, b"x")
    assert owner.has("b", 7, MIB)


def test_from_a_gpu_to_a_gpu(owner):
    """Memory of a GPU at the reader goes through pinned memory there."""
    data = pattern(8, 3 * MIB + 1)
    buffer = owner.offer("a", data)
    here = GpuMemory(len(data))
    buffer.read_into(here[:], transport=NAME).get(timeout=60)
    assert here.look() == data
    here[:] = data[::-1]
    buffer.write_from(here[:], transport=NAME).get(timeout=60)
    assert owner.look("a") == data[::-1]


def test_it_has_no_atomic_operations(owner):
    buffer = owner.offer("a", bytes(8))
    chosen = explain(buffer, atomics=True, transport=NAME)
    assert chosen.candidates == ()
    assert chosen.passed[NAME] == "memory of a GPU has no atomic operations"
    with pytest.raises(TransportUnavailable, match="no atomic operations"):
        buffer.fetch_add(1, transport=NAME).get(timeout=60)


def test_memory_in_pieces_is_left_to_others(owner):
    data = pattern(9, 3000)
    buffer = owner.offer("a", data, step=3)
    chosen = explain(buffer)
    assert chosen.candidates == ("cuda", "tcp")
    assert chosen.passed[NAME] == "the owner does not offer it: only memory in one piece is offered"
    assert read(buffer, transport="tcp") == data[::3]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("gpu_of_a_plain_device", "cannot register 8 bytes with the RDMA device rxe0"),
        ("gpu_of_an_old_driver", "CUDA cannot name memory to other devices"),
    ],
)
def test_where_it_is_refused_its_owner_copies_it_and_the_reader_is_told_why(start, program, why):
    """The real driver of the device takes no dma-bufs."""
    owner = start(program)
    buffer = owner.offer("a", b"on a GPU")
    chosen = explain(buffer)
    assert chosen.candidates == ("cuda", "tcp")
    assert why in chosen.passed[NAME]
    with pytest.raises(TransportUnavailable, match=why):
        read(buffer)
    assert read(buffer, transport="tcp") == b"on a GPU"
