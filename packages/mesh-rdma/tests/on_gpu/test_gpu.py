"""Memory of GPUs in buffers: what is told of it, what is refused, and what becomes of it."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys

import pytest

from mesh_core import Actor, endpoint, this_host
from mesh_rdma import (
    BufferGone,
    InvalidTransfer,
    RDMAAction,
    RDMABuffer,
    TransportUnavailable,
    broadcast,
    explain,
    gather,
    transports,
)
from mesh_rdma._gpu import GpuMemory
from mesh_rdma._native_transports import CUDA
from mesh_rdma.testing._ends import Process, forged
from mesh_rdma.testing._hostile import _section
from mesh_rdma.testing._owner import pattern

MIB = 1 << 20


def read(buffer, **options):
    copy = bytearray(buffer.size())
    buffer.read_into(copy, timeout=30, **options).get(timeout=60)
    return bytes(copy)


def test_it_is_mapped_and_else_staged_by_its_owner(owner):
    buffer = owner.offer("a", b"on a GPU")
    chosen = explain(buffer)
    assert chosen.candidates == ("cuda", "tcp")
    assert chosen.passed["shm"] == chosen.passed["ucx"] == "it does not transfer GPU memory"
    assert buffer.backend == "cuda"
    assert read(buffer) == read(buffer, transport="tcp") == b"on a GPU"


def test_an_owner_of_both_kinds_of_memory(owner):
    """One that was reached by one transport is reached by another for the other kind, also in one action."""
    host = Process()
    try:
        gpu, plain = owner.offer("a", b"gpu"), host.offer("a", b"plain")
        mine, both = RDMABuffer(bytearray(b"mine")), [bytearray(3), bytearray(5), bytearray(4)]
        on_gpu = GpuMemory(5)
        for _ in range(2):
            action = RDMAAction()
            for copy, buffer in zip(both, (gpu, plain, mine), strict=True):
                action.read_remote(copy, buffer)
            action.read_remote(on_gpu[:], plain)
            action.submit(timeout=30).get(timeout=60)
            assert both == [b"gpu", b"plain", b"mine"]
            assert on_gpu.look() == b"plain"
    finally:
        host.end()


def test_memory_of_this_process():
    memory, other = GpuMemory(pattern(1, 3 * MIB)), GpuMemory(3 * MIB)
    buffer = RDMABuffer(memory[:])
    assert read(buffer) == pattern(1, 3 * MIB)
    buffer.read_into(other[:], timeout=30).get(timeout=60)
    assert other.look() == pattern(1, 3 * MIB)
    buffer.write_from(bytes(3 * MIB), timeout=30).get(timeout=60)
    assert memory.look() == bytes(3 * MIB)


def test_strided_memory_at_both_ends(owner):
    data = pattern(2, 60_000)
    buffer = owner.offer("a", data, step=3)
    here = GpuMemory(40_000)
    for transport in ("cuda", "tcp"):
        here[:] = bytes(40_000)
        buffer.read_into(here[::2], timeout=30, transport=transport).get(timeout=60)
        assert here.look()[::2] == data[::3]
        assert not any(here.look()[1::2])
    buffer.write_from(here[1::2], timeout=30).get(timeout=60)
    assert owner.look("a")[::3] == bytes(20_000)
    assert owner.look("a")[1::3] == data[1::3]


def test_arrays_of_several_dimensions():
    class Matrix:
        """Rows 2 to 4 of 6, columns 1 to 3 of 5, of 2 bytes each."""

        def __init__(self, memory):
            self.memory = memory

        @property
        def __cuda_array_interface__(self):
            at = self.memory.address + 2 * 10 + 2
            return {"shape": (3, 3), "typestr": "<f2", "data": (at, False), "strides": (10, 2), "version": 2}

    memory = GpuMemory(bytes(range(60)))
    buffer = RDMABuffer(Matrix(memory))
    wanted = b"".join(bytes(range(10 * row + 2, 10 * row + 8)) for row in (2, 3, 4))
    assert read(buffer) == wanted


def test_memory_of_a_pool_is_staged_and_the_reason_is_told():
    """Of one that other processes cannot map."""
    code = """
import pickle, sys
from mesh_rdma import RDMABuffer
from mesh_rdma._gpu import GpuMemory
memory = GpuMemory(b"of a pool", pooled=True)
buffer = RDMABuffer(memory[:])
sys.stdout.buffer.write(pickle.dumps(buffer)); sys.stdout.buffer.flush()
sys.stdin.read()
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        buffer = pickle.load(process.stdout)
        chosen = explain(buffer)
        assert chosen.candidates == ("tcp",)
        assert "expandable_segments" in chosen.passed["cuda"]
        assert read(buffer) == b"of a pool"
        process.stdin.close()
    own = GpuMemory(b"of a pool", pooled=True)
    assert read(RDMABuffer(own[:]), transport="cuda") == b"of a pool"


def test_no_atomic_operations(owner):
    buffer = owner.offer("a", bytes(8))
    reason = "memory of a GPU has no atomic operations"
    assert set(explain(buffer, atomics=True).passed.values()) >= {reason}
    with pytest.raises(TransportUnavailable, match=reason):
        buffer.fetch_add(1, timeout=30).get(timeout=60)
    # Also where the handle was forged to hide what it is.
    hidden = forged(buffer, lambda handle: _rename(handle, "cuda", "cudx"))
    with pytest.raises(InvalidTransfer, match="in memory of the processor"):
        hidden.fetch_add(1, timeout=30).get(timeout=60)
    assert owner.look("a") == bytes(8)


def _rename(handle, name, other):
    start, _ = _section(bytes(handle), name)
    at = start - 2 - len(name)
    handle[at : at + len(name)] = other.encode()


def test_a_handle_that_hides_what_it_is_reaches_nothing_by_the_kernel(owner):
    """A forged part for shm leads to the owner's page, which says that the memory is not the processor's."""
    plain = Process()
    try:
        buffer = owner.offer("a", b"on a GPU")
        (data,) = buffer.__reduce__()[1]
        start, _ = _section(data, "cuda")
        place = data[start + 2 : start + 14]

        def change(handle):
            begin, end = _section(bytes(handle), "cuda")
            handle[begin - 3 - len("cuda") : end] = b"\x03shm" + len(place).to_bytes(2, "little") + place

        with pytest.raises(TransportUnavailable, match="memory of a GPU"):
            read(forged(buffer, change), transport="shm")
    finally:
        plain.end()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({"data": (4096, False)}, "there is none of this process"),
        ({"mask": object()}, "mask"),
        ({"typestr": "|O8"}, "Python objects"),
        ({"shape": (1 << 40,)}, "there is none of this process"),
    ],
    ids=["no memory", "mask", "objects", "longer than it is"],
)
def test_memory_that_is_not_on_a_gpu_is_refused(told, said):
    memory = GpuMemory(64)

    class Array:
        @property
        def __cuda_array_interface__(self):
            return {**memory[:].__cuda_array_interface__, "strides": None, **told}

    with pytest.raises(InvalidTransfer, match=said):
        RDMABuffer(Array())
    with pytest.raises(InvalidTransfer):
        RDMABuffer(bytearray(64)).read_into(Array(), timeout=30).get(timeout=60)


def test_read_only_arrays_are_only_read():
    memory = GpuMemory(b"constant")
    buffer = RDMABuffer(memory[:].toreadonly())
    assert not buffer.writable
    with pytest.raises(InvalidTransfer, match="writable"):
        RDMABuffer(bytearray(8)).read_into(memory[:].toreadonly())
    assert read(buffer) == b"constant"


def test_dropped_memory_is_freed_soon_though_it_is_mapped_elsewhere(another):
    """CUD-2: whoever has it mapped unmaps it first. The stand-in ends an owner that frees what is mapped."""
    for turn in range(3):
        buffer = another.offer("a", b"%d" % turn)
        assert read(buffer) == b"%d" % turn
        another.forget("a")
        with pytest.raises(BufferGone):
            read(buffer)
    memory = GpuMemory(b"mine")
    buffer = RDMABuffer(memory[:])
    assert another.read(buffer, "cuda") == b"mine"
    del buffer
    gc.collect()
    while memory.is_lent():
        RDMABuffer(bytearray(1)).drop()
    # It is freed by this.
    del memory
    assert another.process.poll() is None


def test_many_tensors_of_one_allocation():
    """They share a mapping, which outlasts each of them but the last."""
    with_many = Process("gpu")
    try:
        data = pattern(3, 200_000)
        whole = with_many.offer("a", data)
        parts = [whole[n * 1000 : (n + 1) * 1000] for n in range(200)]
        copies = [GpuMemory(1000) for _ in range(3)]
        action, here = RDMAAction(), [bytearray(1000) for _ in parts]
        for copy, part in zip(here, parts, strict=True):
            action.read_remote(copy, part)
        for n, copy in enumerate(copies):
            action.read_remote(copy[:], parts[n])
        action.submit(timeout=30).get(timeout=60)
        assert b"".join(here) == data
        assert b"".join(copy.look() for copy in copies) == data[:3000]
    finally:
        with_many.end()


class Rank(Actor):
    """Has memory on a GPU."""

    def __init__(self) -> None:
        self.memory = GpuMemory(3 * MIB + 5)
        self.buffer = RDMABuffer(self.memory[:])

    @endpoint
    def offer(self) -> RDMABuffer:
        return self.buffer

    @endpoint
    def fill(self, seed: int) -> None:
        self.memory[:] = pattern(seed, len(self.memory))

    @endpoint
    def has(self, seed: int) -> bool:
        return self.memory.look() == pattern(seed, len(self.memory))

    @endpoint
    def pid(self) -> int:
        return os.getpid()


@pytest.fixture(scope="module")
def ranks():
    with this_host().spawn_procs({"gpus": 3}) as procs:
        yield procs.spawn("ranks", Rank)


def test_broadcast_from_gpu_to_gpus(ranks):
    source = GpuMemory(pattern(4, 3 * MIB + 5))
    into = ranks.offer.call().get(timeout=60)
    broadcast(RDMABuffer(source[:]), ranks, into, timeout=60).get(timeout=90)
    assert all(ranks.has.call(4).get(timeout=60).values())


def test_broadcast_from_the_processor_to_gpus(ranks):
    source = bytearray(pattern(5, 3 * MIB + 5))
    into = ranks.offer.call().get(timeout=60)
    broadcast(RDMABuffer(source), ranks, into, timeout=60).get(timeout=90)
    assert all(ranks.has.call(5).get(timeout=60).values())


def test_gather_of_gpus_into_a_gpu(ranks):
    ranks.fill.call(6).get(timeout=60)
    pieces = list(ranks.offer.call().get(timeout=60).values())
    each = pieces[0].size()
    into = GpuMemory(each * len(pieces))
    gather(pieces, into=into[:], timeout=60).get(timeout=90)
    assert into.look() == pattern(6, each) * len(pieces)
    assert bytes(gather(pieces, timeout=60).get(timeout=90)) == pattern(6, each) * len(pieces)


def test_the_transport_is_listed_with_what_it_can_do():
    (found,) = (each for each in transports() if each.name == "cuda")
    assert found.available
    can = found.capabilities
    assert (can.copies, can.atomics, can.remote, can.one_sided, can.pieces) == (
        True,
        False,
        False,
        True,
        True,
    )
    assert CUDA.probe().capabilities == can
