"""What a GPU does only when something is wrong, or by chance: told to the stand-in for CUDA's driver."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mesh_rdma import RDMABuffer, RDMAError, RDMATimeout, TransportUnavailable, explain
from mesh_rdma._cuda import VARIABLE
from mesh_rdma._gpu import GpuMemory, driver
from mesh_rdma.testing._owner import pattern

MIB = 1 << 20
OUT_OF_MEMORY, PEER_ACCESS, DEVICE_LOST = 2, 217, 719

OFFERS = """
import pickle, sys
from mesh_rdma import RDMABuffer
from mesh_rdma._gpu import GpuMemory
memory = GpuMemory(b"on a GPU" * 1000)
buffer = RDMABuffer(memory[:])
sys.stdout.buffer.write(pickle.dumps(buffer)); sys.stdout.buffer.flush()
sys.stdin.read()
"""


@contextlib.contextmanager
def offering(**environment: str) -> Iterator[RDMABuffer]:
    """Memory of a process with that environment."""
    command = [sys.executable, "-c", OFFERS]
    made = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, **environment}
    )
    with made as process:
        assert process.stdout is not None
        assert process.stdin is not None
        yield pickle.load(process.stdout)
        process.stdin.close()


@contextlib.contextmanager
def failing(function: str, code: int, after: int = 0) -> Iterator[None]:
    """Calls of a function fail in this process, after so many that do not."""
    driver().standInFail(function.encode(), code, after)
    try:
        yield
    finally:
        driver().standInFail(function.encode(), 0, 0)


def counts() -> list[int]:
    """How many mappings of other processes' memory, streams, events and pinned slots there are."""
    found = (ctypes.c_int * 4)()
    driver().standInCounts(found)
    return list(found)


def read(buffer: RDMABuffer, **options: Any) -> bytes:
    copy = bytearray(buffer.size())
    buffer.read_into(copy, timeout=30, **options).get(timeout=60)
    return bytes(copy)


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("cuIpcOpenMemHandle_v2", PEER_ACCESS),
        ("cuIpcOpenMemHandle_v2", OUT_OF_MEMORY),
        ("cuMemcpyAsync", DEVICE_LOST),
        ("cuEventRecord", DEVICE_LOST),
    ],
)
def test_what_cannot_be_mapped_or_copied_here_comes_by_another_transport(another, function, code):
    buffer = another.offer("a", b"by tcp")
    with failing(function, code):
        assert read(buffer) == b"by tcp"
        chosen = explain(buffer)
        assert chosen.candidates == ("tcp",)
        assert "CUDA cannot" in chosen.passed["cuda"]
        with pytest.raises(TransportUnavailable, match="CUDA cannot"):
            read(buffer, transport="cuda")
    # What has failed is tried again, where nothing else is to be had.
    assert read(buffer, transport="cuda") == b"by tcp"


def test_pieces_that_the_device_does_not_take_together_are_copied_one_by_one(owner):
    data = pattern(1, 9000)
    buffer = owner.offer("a", data, step=3)
    with failing("cuMemcpy2DAsync_v2", 1):
        assert read(buffer, transport="cuda") == data[::3]


def test_without_pinned_memory_it_is_staged_all_the_same():
    with offering(MESH_CUDA_STAND_IN_FAIL=f"cuMemHostAlloc={OUT_OF_MEMORY}") as buffer:
        assert read(buffer, transport="tcp") == b"on a GPU" * 1000


def test_an_owner_whose_gpu_fails_says_so():
    with offering(MESH_CUDA_STAND_IN_FAIL=f"cuMemcpyAsync={DEVICE_LOST}") as buffer:
        with pytest.raises(TransportUnavailable, match="the driver of the owner's GPU has refused"):
            read(buffer, transport="tcp")
        # This process's GPU is another matter.
        assert read(buffer) == b"on a GPU" * 1000


def test_an_owner_whose_driver_shares_nothing_is_asked_over_tcp():
    with offering(MESH_CUDA_STAND_IN_FAIL="cuIpcGetMemHandle=801") as buffer:
        chosen = explain(buffer)
        assert chosen.candidates == ("tcp",)
        assert "refuses to share it" in chosen.passed["cuda"]
        assert read(buffer) == b"on a GPU" * 1000


def test_a_gpu_that_this_process_does_not_see():
    with offering(MESH_CUDA_STAND_IN_DEVICES="5") as buffer:
        chosen = explain(buffer)
        assert chosen.candidates == ("tcp",)
        assert "does not see the GPU" in chosen.passed["cuda"]
        assert "GPU-d5d5d5d5-d5d5-d5d5-d5d5-d5d5d5d5d5d5" in chosen.passed["cuda"]
        assert read(buffer) == b"on a GPU" * 1000


def test_gpus_of_other_numbers_are_found_by_their_names():
    """Its first is this process's second."""
    with offering(MESH_CUDA_STAND_IN_DEVICES="1,0") as buffer:
        assert explain(buffer).candidates == ("cuda", "tcp")
        here = GpuMemory(8000, gpu=0)
        buffer.read_into(here[:], timeout=30, transport="cuda").get(timeout=60)
        assert here.look() == b"on a GPU" * 1000


def test_a_reader_without_a_driver_is_served_by_the_owner(owner):
    code = """
import pickle, sys
from mesh_rdma import explain
buffer = pickle.loads(bytes.fromhex(sys.argv[1]))
copy = bytearray(buffer.size())
buffer.read_into(copy, timeout=30).get(timeout=60)
print(bytes(copy).decode(), explain(buffer).candidates, explain(buffer).passed["cuda"])
"""
    buffer = owner.offer("a", b"on a GPU")
    environment = {**os.environ, VARIABLE: "/nonexistent/libcuda.so.1"}
    done = subprocess.run(
        [sys.executable, "-c", code, pickle.dumps(buffer).hex()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("on a GPU ('tcp',) cannot open CUDA's driver, /nonexistent/libcuda.so.1")


def test_queued_work_is_waited_for_before_memory_is_read():
    """What the stream of an array has still to do comes first; the stand-in holds it."""
    memory, there = GpuMemory(b"before"), bytearray(6)
    view = memory[:]
    view.stream = 1
    driver().standInHold(ctypes.c_void_p(1), 1)
    try:
        done = RDMABuffer(there).write_from(view, timeout=60)
        assert not done.done()
        memory[:] = b"after!"
    finally:
        driver().standInHold(ctypes.c_void_p(1), 0)
    done.get(timeout=60)
    assert there == b"after!"


def test_queued_work_that_does_not_end_ends_no_deadline():
    memory, there = GpuMemory(6), bytearray(b"before")
    view = memory[:]
    view.stream = 2
    driver().standInHold(ctypes.c_void_p(2), 1)
    try:
        with pytest.raises(RDMATimeout):
            RDMABuffer(there).read_into(view, timeout=0.2).get(timeout=60)
    finally:
        driver().standInHold(ctypes.c_void_p(2), 0)


def test_to_offer_memory_waits_for_its_stream():
    memory = GpuMemory(b"before")
    view = memory[:]
    view.stream = 1
    driver().standInHold(ctypes.c_void_p(1), 1)
    made: list[RDMABuffer] = []
    thread = threading.Thread(target=lambda: made.append(RDMABuffer(view)))
    thread.start()
    try:
        thread.join(0.2)
        assert not made
    finally:
        driver().standInHold(ctypes.c_void_p(1), 0)
    thread.join(30)
    assert made


def test_nothing_piles_up(owner):
    """Streams, events and pinned memory are used again; mappings of dropped memory are closed."""
    for turn in range(3):
        buffer = owner.offer("a", pattern(turn, 2 * MIB))
        for transport in ("cuda", "tcp"):
            here = GpuMemory(2 * MIB)
            buffer.read_into(here[:], timeout=30, transport=transport).get(timeout=60)
            assert here.look() == pattern(turn, 2 * MIB)
        if turn == 0:
            before = counts()
        owner.forget("a")
    pause = threading.Event()
    while counts()[0] > before[0]:
        pause.wait(0.01)
    assert [max(0, now - then) for now, then in zip(counts()[1:], before[1:], strict=True)] == [0, 0, 0]


def test_mappings_of_an_owner_that_has_ended_are_closed(another):
    buffer = another.offer("a", b"x")
    before = counts()[0]
    assert read(buffer, transport="cuda") == b"x"
    assert counts()[0] == before + 1
    another.kill()
    with pytest.raises(RDMAError):
        read(buffer)
    pause = threading.Event()
    while counts()[0] > before:
        pause.wait(0.01)
