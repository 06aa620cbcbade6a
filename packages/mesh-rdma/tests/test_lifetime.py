"""What becomes of transfers when memory is dropped, owners die or are replaced, and callers give up."""

import asyncio
import gc
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest

from mesh_core import gather
from mesh_rdma import (
    BufferGone,
    InvalidTransfer,
    RDMAAction,
    RDMABuffer,
    RDMAError,
    RDMATimeout,
    TransportUnavailable,
    _here,
    explain,
)

LARGE = 64 << 20


@pytest.fixture(params=["shm", "tcp"], scope="module")
def transport(request):
    return request.param


def test_a_dropped_buffer_is_gone(shared, transport):
    buffer = shared.offer("data", b"secret")
    assert shared.read(buffer, transport=transport) == b"secret"
    copy = bytearray(6)
    buffer.read_into(copy, transport=transport).get(timeout=30)
    shared.drop("data")
    shared.drop("data")
    copy = bytearray(6)
    with pytest.raises(BufferGone, match="dropped by its owner"):
        buffer.read_into(copy, transport=transport).get(timeout=30)
    with pytest.raises(BufferGone):
        buffer.write_from(b"public", transport=transport).get(timeout=30)
    with pytest.raises(BufferGone):
        buffer.fetch_add(1, offset=0) if buffer.size() >= 8 else buffer[1:2].read_into(
            bytearray(1), transport=transport
        ).get(timeout=30)
    assert (copy, shared.look("data")) == (bytes(6), b"secret")


def test_a_place_that_is_used_again_is_another_buffer(shared, transport):
    old = shared.offer("data", b"old")
    # The owner's object is replaced, and with it gone the place in its table is free for the next.
    for n in range(50):
        new = shared.offer("data", b"%03d" % n)
        assert shared.read(new, transport=transport) == b"%03d" % n
    with pytest.raises(BufferGone):
        old.read_into(bytearray(3), transport=transport).get(timeout=30)


def test_a_dropped_buffer_that_becomes_garbage_drops_no_other(shared, transport):
    shared.offer("data", b"first")
    shared.drop("data")
    # Made before the first is garbage, in the place that its drop has left.
    second = shared.offer("data", b"second")
    copy = bytearray(6)
    second.read_into(copy, transport=transport).get(timeout=30)
    assert copy == b"second"
    shared.forget("data")
    with pytest.raises(BufferGone):
        second.read_into(copy, transport=transport).get(timeout=30)


def test_garbage_at_the_owner_drops_it(shared, transport):
    buffer = shared.offer("data", b"x")
    shared.forget("data")
    with pytest.raises(BufferGone):
        buffer.read_into(bytearray(1), transport=transport).get(timeout=30)


def test_slices_keep_it_offered():
    class Kept(bytearray):
        pass

    data = Kept(b"0123")
    there = weakref.ref(data)
    part = RDMABuffer(data)[2:]
    del data
    gc.collect()
    copy = bytearray(2)
    part.read_into(copy).get(timeout=30)
    assert copy == b"23" and there() is not None
    del part
    gc.collect()
    assert there() is None


def test_an_operation_keeps_the_buffer_that_it_is_for():
    data = bytearray(8)
    future = RDMABuffer(data).fetch_add(1)
    gc.collect()
    assert future.get(timeout=30) == 0
    action = RDMAAction().fetch_add(RDMABuffer(data), 1)
    gc.collect()
    assert action.submit().get(timeout=30) == [1]


def test_memory_cannot_be_resized_while_it_is_offered():
    data = bytearray(8)
    buffer = RDMABuffer(data)
    with pytest.raises(BufferError):
        data.append(1)
    assert buffer.drop().get(0) is None
    del buffer
    data.append(1)


@pytest.mark.slow
def test_dropped_under_a_transfer_memory_stays_until_it_ends(other, transport):
    """Readers hold what they read: either all of it comes, or nothing and an error."""
    for turn in range(10):
        data = bytes([turn + 1]) * (8 << 20)
        buffer = other.offer("data", data)
        copies = [bytearray(len(data)) for _ in range(4)]
        reads = [buffer.read_into(copy, transport=transport) for copy in copies]
        other.forget("data")
        # At once used for something else, if it were free.
        other.offer("noise", b"\xee" * len(data))
        for copy, read in zip(copies, reads, strict=True):
            try:
                read.get(timeout=30)
            except BufferGone:
                assert b"\xee" not in copy
            else:
                assert copy == data


def test_a_killed_owner_is_noticed(other, transport):
    buffer = other.offer("data", bytes(100))
    assert buffer.read_into(bytearray(100), transport=transport).get(timeout=30) is None
    other.kill()
    with pytest.raises(BufferGone, match="ended"):
        buffer.read_into(bytearray(100), transport=transport).get(timeout=30)


def test_nothing_is_kept_of_an_owner_that_has_ended(other, transport):
    known = _here.engine().owners()
    buffer = other.offer("data", bytes(100))
    buffer.read_into(bytearray(100), transport=transport).get(timeout=30)
    assert _here.engine().owners() == known + 1
    other.kill()
    with pytest.raises(BufferGone):
        buffer.read_into(bytearray(100), transport=transport).get(timeout=30)
    assert _here.engine().owners() == known


def test_a_killed_owner_that_was_never_reached_is_noticed(other, transport):
    buffer = other.offer("data", bytes(100))
    other.kill()
    with pytest.raises(BufferGone):
        buffer.read_into(bytearray(100), transport=transport).get(timeout=30)


@pytest.mark.slow
def test_killed_in_the_middle(other, transport):
    buffer = other.offer("data", b"\x07" * LARGE)
    copies = [bytearray(LARGE) for _ in range(3)]
    reads = [buffer.read_into(copy, transport=transport) for copy in copies]
    other.kill()
    for copy, read in zip(copies, reads, strict=True):
        error = read.exception(timeout=30)
        if error is None:
            assert copy == b"\x07" * LARGE
        else:
            assert isinstance(error, BufferGone), repr(error)


@pytest.mark.slow
def test_another_program_in_the_same_process_is_not_read(other, transport):
    """WIT-1: the same pid and the same start time: only the witness page, and the door key, tell the difference."""
    buffer = other.offer("data", bytes(100))
    buffer.read_into(bytearray(100), transport=transport).get(timeout=30)
    other.replace()
    fresh = other.offer("data", b"\x01" * 100)
    copy = bytearray(100)
    with pytest.raises(BufferGone):
        buffer.read_into(copy, transport=transport).get(timeout=30)
    with pytest.raises(BufferGone):
        buffer.write_from(b"\x02" * 100, transport=transport).get(timeout=30)
    assert copy == bytes(100)
    assert other.read(fresh) == b"\x01" * 100


@pytest.mark.slow
def test_handles_of_a_replaced_program_never_reach_the_new_one(other, transport):
    buffer = other.offer("data", bytes(100))
    other.replace()
    other.offer("data", b"\x01" * 100)
    with pytest.raises(BufferGone):
        buffer.read_into(bytearray(100), transport=transport).get(timeout=30)


def test_forged_handles_are_refused(shared, transport):
    data = pickle.dumps(shared.offer("data", bytes(1000)))
    encoded = pickle.loads(data).__reduce__()[1][0]
    rebuild = pickle.loads(data).__reduce__()[0]

    def forged(at, new):
        return rebuild(encoded[:at] + new + encoded[at + len(new) :])

    def read(buffer, size=10):
        buffer.read_into(bytearray(size), transport=transport).get(timeout=30)

    read(forged(0, encoded[:4]))
    token, slot, generation, length, window = 41, 57, 61, 65, 81
    # Longer than what is offered, by both lengths that it has.
    longer = (2000).to_bytes(8, "little")
    assert encoded[length : length + 8] == (1000).to_bytes(8, "little")
    with pytest.raises(PermissionError):
        read(rebuild(encoded[:length] + longer + bytes(8) + longer + encoded[window + 8 :]), 2000)
    with pytest.raises(PermissionError):
        read(forged(token, b"\0" * 16))
    with pytest.raises(BufferGone):
        read(forged(slot, b"\xff\xff\xff\x7f"))
    with pytest.raises(BufferGone):
        read(forged(slot, b"\x00\xff\x00\x00"))
    with pytest.raises(BufferGone):
        read(forged(generation, b"\x00\x00\x00\x7f"))
    with pytest.raises(ConnectionError):
        read(forged(5, b"\0" * 16))  # another incarnation
    for nonsense in (b"", b"MXH", b"x" * 100, encoded + b"x", encoded[:-1]):
        with pytest.raises(InvalidTransfer, match="not a buffer's handle"):
            rebuild(nonsense)


def test_a_write_to_what_is_read_only_by_a_forged_handle(shared, transport):
    encoded = shared.offer("const", b"constant", readonly=True).__reduce__()[1][0]
    rebuild = shared.offer("data", b"x").__reduce__()[0]
    forged = rebuild(encoded[:4] + b"\x01" + encoded[5:])
    with pytest.raises(PermissionError):
        forged.write_from(b"changed!", transport=transport).get(timeout=30)
    assert shared.look("const") == b"constant"


def test_a_stopped_owner_is_read_by_shm_and_times_out_by_tcp(other):
    buffer = other.offer("data", b"here")
    copy = bytearray(4)
    buffer.read_into(copy, transport="tcp").get(timeout=30)
    other.halt()
    buffer.read_into(copy, transport="shm").get(timeout=30)
    assert copy == b"here"
    with pytest.raises(RDMATimeout, match="deadline"):
        buffer.read_into(copy, transport="tcp", timeout=0.05).get(timeout=30)
    other.go_on()
    buffer.read_into(copy, transport="tcp").get(timeout=30)


@pytest.mark.slow
def test_a_cancelled_transfer_ends_and_the_next_works(other):
    """OPR-1: the memory is let go once nobody touches it any more, and soon."""
    buffer = other.offer("data", bytes(100))
    buffer.read_into(bytearray(100), transport="tcp").get(timeout=30)
    other.halt()
    copy = bytearray(100)
    there = weakref.ref(memory := Held(copy))
    future = buffer.read_into(memory, transport="tcp")
    del memory
    assert future.cancel()
    with pytest.raises(asyncio.CancelledError):
        future.get(timeout=30)
    released(there)
    other.go_on()
    buffer.read_into(copy, transport="tcp").get(timeout=30)


class Held(bytearray):
    """Memory that can be seen to be let go."""


def released(there):
    """Wait until an object is gone: a transfer that was given up lets go of it as soon as it has ended."""
    told = threading.Event()
    if there() is not None:
        weakref.finalize(there(), told.set)
        for _ in range(3000):
            # What threads of the engine have let go is freed where Python next calls into it.
            RDMABuffer(bytearray(1))
            if told.wait(0.01):
                break
    assert there() is None


def test_futures_are_those_of_mesh_core(shared):
    buffers = [shared.offer(f"f{n}", bytes([n]) * 1_000_000) for n in range(3)]
    copies = [bytearray(1_000_000) for _ in buffers]
    reads = [buffer.read_into(copy) for buffer, copy in zip(buffers, copies, strict=True)]
    assert gather(*reads).get(timeout=30) == [None] * 3

    async def main():
        await buffers[1].read_into(copies[0])
        await buffers[2].read_into(memoryview(copies[1])[:10])

    asyncio.run(main())
    assert copies[0] == copies[1][:0] + bytes([1]) * 1_000_000
    assert copies[1][:10] == b"\x02" * 10


def test_a_fork_refuses_and_hurts_nobody(other):
    buffer = other.offer("data", b"still here")
    status, said = other.fork()
    assert status == 0
    assert "fork" in said
    assert other.read(buffer) == b"still here"
    copy = bytearray(10)
    buffer.read_into(copy, transport="shm").get(timeout=30)
    buffer.read_into(copy, transport="tcp").get(timeout=30)
    assert copy == b"still here"


AT_EXIT = """
import sys
from mesh_rdma import RDMABuffer
import pickle
theirs = pickle.load(sys.stdin.buffer)
copies = [bytearray(theirs.size()) for _ in range(4)]
reads = [theirs.read_into(copy, transport=sys.argv[1]) for copy in copies]
mine = RDMABuffer(bytearray(8))
print("ends now", flush=True)
"""


@pytest.mark.python
@pytest.mark.slow
def test_the_interpreter_may_end_under_transfers(shared, transport):
    handle = pickle.dumps(shared.offer("data", bytes(LARGE)))
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, transport], input=handle, capture_output=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ends now\n", b"")


@pytest.mark.slow
def test_no_descriptors_is_an_error_and_no_end(other):
    """Where this process has no descriptor left, a new owner cannot be reached; one that was reached still can."""
    known = other.offer("known", b"known")
    copy = bytearray(5)
    known.read_into(copy).get(timeout=30)
    known.read_into(copy, transport="tcp").get(timeout=30)
    fresh = type(other)()
    try:
        buffer = fresh.offer("data", b"fresh")
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
        taken = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
        try:
            while True:
                try:
                    taken.append(os.dup(0))
                except OSError:
                    break
            with pytest.raises(RDMAError, match="open"):
                buffer.read_into(copy).get(timeout=30)
            known.read_into(copy).get(timeout=30)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            for fd in taken:
                os.close(fd)
        assert copy == b"known"
    finally:
        fresh.end()


APART = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.mark.network
@pytest.mark.slow
def test_an_owner_in_another_pid_namespace_is_reached_by_tcp(other):
    """Its number means another process here, or none: nothing is concluded from that."""
    if shutil.which(APART[0]) is None or subprocess.run([*APART, "true"], capture_output=True).returncode:
        pytest.skip("this user cannot make pid namespaces")
    apart = type(other)(*APART)
    try:
        buffer = apart.offer("data", b"contained")
        copy = bytearray(9)
        buffer.read_into(copy).get(timeout=30)
        assert copy == b"contained"
        said = explain(buffer)
        assert said.candidates == ("tcp",)
        assert "another pid namespace" in said.passed["shm"]
        with pytest.raises(TransportUnavailable, match="another pid namespace"):
            buffer.read_into(copy, transport="shm").get(timeout=30)
        apart.kill()
        with pytest.raises(BufferGone):
            buffer.read_into(copy).get(timeout=30)
    finally:
        apart.end()


def test_nothing_stays_of_dropped_buffers():
    live, draining = _here.engine().counts()
    buffers = [RDMABuffer(bytearray(100)) for _ in range(100)]
    assert _here.engine().counts()[0] == live + 100
    del buffers
    gc.collect()
    assert _here.engine().counts() == (live, draining)


def test_a_reader_that_was_killed_keeps_nothing(other):
    """Its lease is found to be that of a dead process, and the memory is let go."""
    data = Held(b"\x05" * LARGE)
    there = weakref.ref(data)
    buffer = RDMABuffer(data)
    other.tell("read", buffer, transport="shm")
    while _here.engine().counts()[1] == 0 and other.process.poll() is None:
        other.process.send_signal(signal.SIGSTOP)
        buffer.drop()
        other.kill()
    del data, buffer
    gc.collect()
    released(there)
