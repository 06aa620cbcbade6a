"""The native transport `ibverbs`, on devices: run by `test_soft_roce.py` in a virtual machine that has two."""

import asyncio
import contextlib
import gc
import os
import random
import socket
import struct
import subprocess
import threading
import weakref
from pathlib import Path

import pytest

from mesh_rdma import (
    BufferGone,
    HandleRefused,
    InvalidTransfer,
    RDMAAction,
    RDMABuffer,
    RDMATimeout,
    TransportUnavailable,
    explain,
    get_rdma_backend,
    is_ibverbs_available,
    transports,
)
from mesh_rdma._native_transports import IBVERBS
from mesh_rdma.testing import TransportConformance
from soft_roce.records import asked_since, queue_pairs, resources, used_since
from soft_roce.transfers import MIB, NAME, STAGE, knock, read, write

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("SOFT_ROCE" not in os.environ, reason="there are no RDMA devices"),
]


class TestConformance(TransportConformance):
    plugin = IBVERBS
    distribution = "mesh-rdma"


def section_at(buffer):
    """Where in the bytes of its handle this transport's part is."""
    make, (data,) = buffer.__reduce__()
    return make, data, data.index(b"\x07ibverbs") + 10


def forged(buffer, *changes):
    """A buffer whose handle somebody has changed: each change is a place in the section, a layout and a value."""
    make, data, at = section_at(buffer)
    changed = bytearray(data)
    for place, layout, value in changes:
        struct.pack_into(layout, changed, at + place, value)
    return make(bytes(changed))


def wide(buffer, length):
    """Longer by all that its handle says."""
    _, _, at = section_at(buffer)
    return forged(buffer, (65 - at, "<Q", length), (81 - at, "<Q", length), (44, "<Q", length))


def many_reads(buffer, into, **options):
    """A transfer that takes much longer than what a test does meanwhile: 16 GiB, of little memory."""
    action = RDMAAction()
    for _ in range(16 * 1024 * MIB // buffer.size()):
        action.read_remote(into, buffer)
    return action.submit(transport=NAME, **options)


def test_it_is_there_and_preferred_to_tcp(shared):
    assert is_ibverbs_available()
    assert get_rdma_backend() == NAME
    (found,) = [each for each in transports() if each.name == NAME]
    assert found.available
    assert not found.capabilities.pieces
    assert explain(shared.offer("data", b"x")).candidates == ("shm", NAME, "tcp")


@pytest.mark.parametrize("size", [STAGE - 1, STAGE, STAGE + 1, MIB + 5, 9 * MIB + 3])
def test_short_and_long_ones_read_and_write_the_same(shared, size):
    data = random.Random(size).randbytes(size)
    buffer = shared.offer("data", data)
    assert read(buffer) == data
    start = size // 3
    assert read(buffer[start:]) == data[start:]
    write(buffer[1:], data[:-1])
    assert shared.look("data") == data[:1] + data[:-1]


def test_offsets_and_lengths_at_random(shared):
    chance = random.Random(11)
    data = bytearray(chance.randbytes(300_000))
    buffer = shared.offer("data", bytes(data))
    for _ in range(60):
        start = chance.randrange(len(data))
        length = chance.choice([0, 1, chance.randrange(100), chance.randrange(len(data))]) % (
            len(data) - start + 1
        )
        if chance.random() < 0.5:
            copy = bytearray(length + 2)
            part = memoryview(copy)[1 : length + 1]
            buffer.read_into(part, offset=start, transport=NAME).get(timeout=60)
            assert copy == b"\0" + data[start : start + length] + b"\0"
        else:
            data[start : start + length] = chance.randbytes(length)
            write(buffer, memoryview(data)[start : start + length], offset=start)
    assert shared.look("data") == data


def test_scattered_memory_of_the_reader(shared):
    data = random.Random(12).randbytes(100_000)
    buffer = shared.offer("data", data)
    here = bytearray(300_000)
    buffer.read_into(memoryview(here)[::3], transport=NAME).get(timeout=60)
    assert here[::3] == data
    assert not any(here[1::3]) and not any(here[2::3])


def test_memory_that_is_offered_here_is_read_into(shared):
    """The device knows it twice then."""
    data = random.Random(13).randbytes(MIB)
    mine = bytearray(MIB)
    kept = RDMABuffer(mine)
    assert read(shared.offer("data", data)) == data
    shared.offer("data", data).read_into(mine, transport=NAME).get(timeout=60)
    assert mine == data
    assert read(kept) == data


def test_a_wrong_key_is_refused_and_the_next_transfer_is_well(shared):
    buffer = shared.offer("data", b"secret")
    for rail in range(2):
        wrong = forged(buffer, (61 + 28 * rail + 24, "<I", 0x1234567), (1, "<B", 1 | rail << 1))
        with pytest.raises(HandleRefused):
            read(wrong)
        with pytest.raises(HandleRefused):
            write(wrong, b"x")
        assert read(buffer) == b"secret"
    assert shared.look("data") == b"secret"


def test_the_device_keeps_to_what_is_offered(shared):
    """VRB-2."""
    buffer = shared.offer("data", bytes(4096))
    far = wide(buffer, 1 << 20)
    for offset, length in ((4095, 2), (8192, 100), (0, 1 << 20)):
        with pytest.raises(HandleRefused):
            far.read_into(bytearray(length), offset=offset, transport=NAME).get(timeout=60)
        with pytest.raises(HandleRefused):
            write(far, bytes(length), offset=offset)
    (address,) = struct.unpack_from("<Q", section_at(buffer)[1], section_at(buffer)[2] + 36)
    with pytest.raises(HandleRefused):
        read(forged(buffer, (36, "<Q", address - 8)))
    assert read(buffer) == bytes(4096)


def test_the_device_writes_no_read_only_memory(shared):
    buffer = shared.offer("data", b"secret", readonly=True)
    _, _, at = section_at(buffer)
    allowed = forged(buffer, (4 - at, "<B", 1), (1, "<B", 1))
    with pytest.raises(HandleRefused):
        write(allowed, b"x")
    assert shared.look("data") == b"secret"
    assert read(buffer) == b"secret"


def test_a_handle_with_another_token_or_generation_is_not_used(shared):
    buffer = shared.offer("data", b"secret")
    _, _, at = section_at(buffer)
    with pytest.raises(HandleRefused):
        read(forged(buffer, (41 - at, "<Q", 7)))
    with pytest.raises(BufferGone):
        read(forged(buffer, (61 - at, "<I", 0x7000_0000)))
    with pytest.raises(HandleRefused):
        read(forged(buffer, (60 - 4, "<I", 0x7000_0000)))
    assert read(buffer) == b"secret"


def test_damaged_parts_of_handles_are_refused(shared):
    buffer = shared.offer("data", b"secret")
    for change in ((0, "<B", 2), (1, "<B", 8), (60, "<B", 0), (61 + 18, "<B", 7), (61 + 19, "<B", 9)):
        with pytest.raises(InvalidTransfer, match="damaged"):
            read(forged(buffer, change))


def test_without_the_key_there_is_no_queue_pair(shared):
    buffer = shared.offer("data", b"secret")
    with pytest.raises((BufferGone, HandleRefused)):
        read(forged(buffer, (20, "<Q", 7)))
    _, data, at = section_at(buffer)
    (port,) = struct.unpack_from("<H", data, at + 2)
    where = (str(socket.inet_ntoa(data[at + 16 : at + 20])), port)
    realm = data[5:21]
    silent = knock(where, b"MXV1", realm)
    assert read(buffer) == b"secret"
    for stream in silent:
        stream.close()


def test_atomic_operations_by_name(shared, in_threads):
    buffer = shared.offer("data", bytes(24))
    assert explain(buffer, atomics=True).candidates == ("tcp",)
    assert explain(buffer, atomics=True, transport=NAME).candidates == (NAME,)
    add = buffer.fetch_add
    assert add(5, offset=8, transport=NAME).get(timeout=60) == 0
    assert add(-1, offset=8, transport=NAME).get(timeout=60) == 5
    swap = buffer.compare_and_swap
    assert swap(4, 9, offset=8, transport=NAME).get(timeout=60) == 4
    assert swap(4, 1, offset=8, transport=NAME).get(timeout=60) == 9
    assert shared.look("data") == bytes(8) + (9).to_bytes(8, "little") + bytes(8)
    found = []
    in_threads(lambda _: found.extend(add(1, transport=NAME).get(timeout=60) for _ in range(25)), 4)
    assert sorted(found) == list(range(100))
    action = RDMAAction()
    for _ in range(50):
        action.fetch_add(buffer, 2, offset=16)
    assert sorted(action.submit(transport=NAME).get(timeout=60)) == list(range(0, 100, 2))
    far = wide(buffer, 64)
    with pytest.raises(HandleRefused):
        far.fetch_add(1, offset=24, transport=NAME).get(timeout=60)


def test_a_thousand_registrations_leave_nothing(shared):
    assert read(shared.offer("data", b"x")) == b"x"
    before = resources("mr")
    buffers = shared.offer_many(1000, 4096)
    made = resources("mr") - before
    # On each of the two devices.
    assert len(made) == 2000
    copies = [bytearray(4096) for _ in buffers]
    action = RDMAAction()
    for copy, buffer in zip(copies, buffers, strict=True):
        action.read_remote(copy, buffer)
    action.submit(timeout=50, transport=NAME).get(timeout=60)
    assert copies == [n.to_bytes(4, "little") * 1024 for n in range(1000)]
    for n in range(1000):
        shared.drop(f"many-{n}")
    assert not resources("mr") - before
    with pytest.raises(BufferGone):
        read(buffers[500])


def test_nothing_stays_registered_for_a_transfer_that_is_over(shared):
    buffer = shared.offer("data", bytes(2 * MIB))
    read(buffer)
    before = resources("mr")
    for _ in range(5):
        read(buffer)
    gc.collect()
    assert not resources("mr") - before


def test_both_devices_share_a_long_transfer(shared):
    data = random.Random(14).randbytes(8 * MIB)
    buffer = shared.offer("data", data)
    asked = {}
    # Each moves a megabyte at least, in packets of a kilobyte, by queue pairs that the transfer before has made. On a busy
    # machine one device may have moved everything before the other one's thread runs.
    while any(asked.get(device, 0) < 1024 for device in ("rxe0", "rxe1")):
        before = queue_pairs()
        assert read(buffer) == data
        asked = asked_since(before)


def test_the_device_nearest_to_the_memory_is_used_for_short_ones(shared):
    buffer = shared.offer("data", bytes(1000))
    # Whichever is nearest, connecting makes a queue pair of the first device.
    read(buffer)
    for nearest, device in enumerate(("rxe0", "rxe1")):
        before = queue_pairs()
        assert read(forged(buffer, (1, "<B", 1 | nearest << 1))) == bytes(1000)
        assert used_since(before) == {device}


@contextlib.contextmanager
def down(*devices):
    """These have lost their cable."""
    ports = [Path("/sys/class/infiniband") / device / "ports/1" for device in devices]
    interfaces = [(port / "gid_attrs/ndevs/0").read_text().strip() for port in ports]
    for interface in interfaces:
        subprocess.run(["ip", "link", "set", interface, "down"], check=True)
    try:
        yield
    finally:
        for interface, port in zip(interfaces, ports, strict=True):
            subprocess.run(["ip", "link", "set", interface, "up"], check=True)
            while "ACTIVE" not in (port / "state").read_text():
                os.sched_yield()


def test_one_device_takes_over_for_the_other(shared):
    data = random.Random(15).randbytes(6 * MIB)
    buffer = shared.offer("data", data)
    assert read(buffer) == data
    with down("rxe1"):
        assert read(buffer, timeout=50) == data


def test_another_transport_takes_over_for_all_devices(apart):
    """Where memory is not shared: the devices, and then the loopback interface."""
    data = random.Random(16).randbytes(MIB)
    buffer = apart.offer("data", data)
    copy = bytearray(MIB)
    buffer.read_into(copy, timeout=50).get(timeout=60)
    assert explain(buffer).candidates == (NAME, "tcp")
    with down("rxe0", "rxe1"):
        copy = bytearray(MIB)
        buffer.read_into(copy, timeout=50).get(timeout=60)
        assert copy == data
        # Devices that have failed are passed over for some seconds. On a busy machine those may be over by now.
        while explain(buffer).candidates != ("tcp",):
            buffer.read_into(copy, timeout=50).get(timeout=60)


def test_a_transfer_ends_with_its_owner(other):
    buffer = other.offer("data", b"\1" * (16 * MIB))
    copy = bytearray(16 * MIB)
    future = many_reads(buffer, copy, timeout=50)
    while not copy[0]:
        pass
    other.kill()
    with pytest.raises(BufferGone, match="ended"):
        future.get(timeout=60)


def test_a_killed_owner_that_was_never_reached_is_noticed(other):
    buffer = other.offer("data", bytes(100))
    other.kill()
    with pytest.raises(BufferGone, match="ended"):
        read(buffer)


def test_an_owner_that_is_another_program_by_now_is_not_read(other):
    buffer = other.offer("data", bytes(100))
    assert read(buffer) == bytes(100)
    other.replace()
    fresh = other.offer("data", b"\1" * 100)
    with pytest.raises(BufferGone):
        read(buffer)
    assert read(fresh) == b"\1" * 100


def test_queue_pairs_end_with_their_reader(shared, other):
    data = bytes(range(250)) * 1000
    before = resources("qp")
    buffer = shared.offer("data", data)
    assert other.read(buffer, transport=NAME) == data
    assert resources("qp") - before
    # In the middle of a transfer.
    other.tell("read", buffer, transport=NAME)
    other.kill()
    # Each takes a look at what there is: the owner's thread ends it as soon as it hears of it.
    while resources("qp") - before:
        shared.look_up()
    assert read(buffer) == data


class Held(bytearray):
    """Memory that can be seen to be let go."""


def test_a_late_transfer_has_let_go_of_the_memory_and_the_next_is_well(shared):
    buffer = shared.offer("data", b"\1" * (16 * MIB))
    copy = bytearray(16 * MIB)
    with pytest.raises(RDMATimeout):
        many_reads(buffer, copy, timeout=0.05).get(timeout=60)
    # What the device still wrote would be seen.
    copy[:] = bytes(len(copy))
    assert read(buffer[:100_000]) == b"\1" * 100_000
    assert copy == bytes(len(copy))


def test_a_cancelled_transfer_ends_and_the_next_is_well(shared):
    buffer = shared.offer("data", b"\1" * (16 * MIB))
    copy = Held(16 * MIB)
    there, told = weakref.ref(copy), threading.Event()
    weakref.finalize(copy, told.set)
    future = many_reads(buffer, copy)
    while not copy[0]:
        pass
    assert future.cancel()
    with pytest.raises(asyncio.CancelledError):
        future.get(timeout=60)
    del copy
    for _ in range(3000):
        RDMABuffer(bytearray(1))
        if told.wait(0.01):
            break
    assert there() is None
    assert read(buffer[:100]) == b"\1" * 100


def test_dropped_under_a_transfer_memory_stays_until_it_ends(shared):
    for turn in range(2):
        data = bytes([turn + 1]) * (2 * MIB)
        buffer = shared.offer("data", data)
        copies = [bytearray(len(data)) for _ in range(2)]
        reads = [buffer.read_into(copy, transport=NAME) for copy in copies]
        shared.forget("data")
        shared.offer("noise", b"\xee" * len(data))
        for copy, future in zip(copies, reads, strict=True):
            try:
                future.get(timeout=60)
            except BufferGone:
                assert b"\xee" not in copy
            else:
                assert copy == data


def test_memory_that_cannot_be_locked_is_left_to_other_transports(shared):
    limited = type(shared)(
        "prlimit", "--memlock=3145728", "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"
    )
    try:
        data = bytes(range(256)) * (4 * MIB // 256)
        buffer = shared.offer("data", data)
        with pytest.raises(TransportUnavailable, match="locked memory"):
            limited.read(buffer, transport=NAME)
        # Nothing of it is remembered: what is less is still transferred.
        assert limited.read(buffer[:MIB], transport=NAME) == data[:MIB]
        assert limited.read(buffer) == data
        assert explain(limited.offer("small", b"x")).candidates == ("shm", NAME, "tcp")
        large = explain(limited.offer("large", data))
        assert large.candidates == ("shm", "tcp")
        assert "the owner does not offer it: cannot register" in large.passed[NAME]
        assert "ulimit -l" in large.passed[NAME]
    finally:
        limited.end()


def test_many_threads_and_processes(shared, in_threads):
    data = random.Random(17).randbytes(200_000)
    buffer = shared.offer("data", data)

    def work(seed):
        chance = random.Random(seed)
        start = chance.randrange(len(data))
        part = buffer[start : start + chance.randrange(1, 100_000)]
        assert read(part) == data[start : start + part.size()]

    in_threads(work, 64)
    others = [type(shared)() for _ in range(2)]
    try:
        for other in others:
            other.tell("read", buffer, transport=NAME)
        assert [other.hear() for other in others] == [data] * 2
    finally:
        for other in others:
            other.end()


def test_a_fork_of_an_owner_takes_nothing_with_it_and_does_not_stand_in_for_it(other):
    """FRK-1."""
    buffer = other.offer("data", b"parent")
    assert read(buffer) == b"parent"
    status, said = other.fork()
    assert (status, "fork" in said) == (0, True), said
    assert read(buffer) == b"parent"
    other.leave_a_fork()
    assert read(buffer) == b"parent"
    other.kill()
    with pytest.raises(BufferGone):
        read(buffer)


@pytest.fixture
def apart(shared):
    """An owner whose memory is not shared."""
    made = type(shared)("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    yield made
    made.end()
