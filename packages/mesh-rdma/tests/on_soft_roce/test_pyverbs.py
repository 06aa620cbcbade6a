"""The engine on pyverbs, at both ends."""

import gc
import os
import random
import signal
import struct
import time

import pytest

from mesh_rdma import (
    BufferGone,
    HandleRefused,
    RDMAAction,
    RDMATimeout,
    TransportUnavailable,
    explain,
    transports,
)
from mesh_rdma._pyverbs import IBVERBS
from mesh_rdma._pyverbs._wire import HELLO, MAGIC, Section
from mesh_rdma.testing import TransportConformance
from soft_roce.records import queue_pairs, used_since
from soft_roce.transfers import MIB, NAME, knock, read


class TestConformance(TransportConformance):
    plugin = IBVERBS
    distribution = "mesh-rdma"

    def test_memory_in_pieces(self):
        """Here it may be in pieces. There it may not: that is left to other transports."""
        data = random.Random(3).randbytes(600)
        buffer = self.owner.offer("a", data)
        here = bytearray(1200)
        buffer.read_into(memoryview(here)[::2], transport=NAME).get(timeout=60)
        assert here[::2] == data
        assert here[1::2] == bytes(600)
        buffer.write_from(memoryview(bytes(range(240)) * 5)[::2], transport=NAME).get(timeout=60)
        assert self.owner.look("a") == bytes(range(0, 240, 2)) * 5
        there = explain(self.owner.offer("a", data, step=3))
        assert there.candidates == ("shm", "tcp")
        assert there.passed[NAME].startswith("the owner does not offer it: ")


def many_reads(buffer, timeout):
    """A transfer that takes much longer than what a test does meanwhile: 16 GiB, of little memory."""
    copy = bytearray(buffer.size())
    action = RDMAAction()
    for _ in range(16 * 1024 * MIB // buffer.size()):
        action.read_remote(copy, buffer)
    return copy, action.submit(timeout=timeout, transport=NAME)


def section_of(buffer):
    """What the handle says for this transport, and where it says so."""
    make, (data,) = buffer.__reduce__()
    at = data.index(b"\x07ibverbs") + 8
    (length,) = struct.unpack_from("<H", data, at)
    return make, data, at + 2, Section.decode(data[at + 2 : at + 2 + length])


def forged(buffer, change):
    """A buffer whose handle somebody has changed: `change` is given the bytes of the section."""
    make, data, at, _ = section_of(buffer)
    section = bytearray(data[at:])
    change(section)
    return make(data[:at] + bytes(section))


def setting(at, layout, value):
    return lambda section: struct.pack_into(layout, section, at, value)


def test_it_is_there_and_preferred_to_tcp(shared):
    (found,) = [each for each in transports() if each.name == NAME]
    assert found.available and found.capabilities == IBVERBS.probe().capabilities
    assert explain(shared.offer("data", b"x")).candidates == ("shm", NAME, "tcp")


def test_a_wrong_key_is_refused_and_the_next_transfer_is_well(shared):
    buffer = shared.offer("data", b"secret")
    for wrong_key in (0, 1, 0x1234567, 0xFFFFFFFF):
        wrong = buffer
        for rail in range(2):
            wrong = forged(wrong, setting(61 + 28 * rail + 24, "<I", wrong_key))
        with pytest.raises(HandleRefused):
            read(wrong)
        with pytest.raises(HandleRefused):
            wrong.write_from(b"x", transport=NAME).get(timeout=60)
        assert read(buffer) == b"secret"
    assert shared.look("data") == b"secret"


def test_the_device_keeps_to_what_is_offered(shared):
    buffer = shared.offer("data", bytes(4096))
    make, data, at, section = section_of(buffer)
    # All three say how long it is: the memory, the buffer, and the section.
    wide = bytearray(data)
    struct.pack_into("<Q", wide, 65, 1 << 20)
    struct.pack_into("<Q", wide, 81, 1 << 20)
    struct.pack_into("<Q", wide, at + 44, 1 << 20)
    wide = make(bytes(wide))
    for offset, length in ((4095, 2), (4096, 1), (8192, 100), ((1 << 20) - 8, 8)):
        with pytest.raises(HandleRefused):
            wide.read_into(bytearray(length), offset=offset, transport=NAME).get(timeout=60)
        with pytest.raises(HandleRefused):
            wide.write_from(bytes(length), offset=offset, transport=NAME).get(timeout=60)
    before = forged(buffer, setting(36, "<Q", section.at - 8))
    with pytest.raises(HandleRefused):
        read(before)
    assert read(buffer) == bytes(4096)


def test_the_device_writes_no_read_only_memory(shared):
    buffer = shared.offer("data", b"secret", readonly=True)
    make, data, at, _ = section_of(buffer)
    changed = bytearray(data)
    changed[4] |= 1
    changed[at + 1] |= 1
    with pytest.raises(HandleRefused):
        make(bytes(changed)).write_from(b"x", transport=NAME).get(timeout=60)
    assert shared.look("data") == b"secret"
    assert read(buffer) == b"secret"


def test_without_the_key_there_is_no_queue_pair(shared):
    """PYV-2: strangers take no place from others."""
    buffer = shared.offer("data", b"secret")
    with pytest.raises(BufferGone):
        read(forged(buffer, setting(20, "<Q", 7)))
    section = section_of(buffer)[3]
    where = (str(section.address.ipv4_mapped), section.port)
    realm = buffer.__reduce__()[1][0][5:21]
    assert len(MAGIC + bytes(16) + realm) == HELLO
    silent = knock(where, MAGIC, realm)
    assert read(buffer) == b"secret"
    for stream in silent:
        stream.close()


def test_another_incarnation_of_the_owner_gives_no_queue_pair(shared):
    buffer = shared.offer("data", b"mine")
    make, data, _, _ = section_of(buffer)
    changed = bytearray(data)
    changed[5:21] = bytes(16)
    with pytest.raises(TransportUnavailable):
        read(make(bytes(changed)))


def test_a_thousand_registrations(shared):
    buffers = shared.offer_many(1000, 4096)
    copies = [bytearray(4096) for _ in buffers]
    action = RDMAAction()
    for copy, buffer in zip(copies, buffers, strict=True):
        action.read_remote(copy, buffer)
    action.submit(timeout=50, transport=NAME).get(timeout=60)
    assert copies == [n.to_bytes(4, "little") * 1024 for n in range(1000)]
    del buffers, buffer, action
    gc.collect()


def test_a_transfer_ends_by_its_deadline_and_the_next_is_well(shared):
    """PYV-3: the device has nothing of a transfer that is over."""
    buffer = shared.offer("data", b"\1" * (16 * MIB))
    copy, future = many_reads(buffer, timeout=0.05)
    with pytest.raises(RDMATimeout):
        future.get(timeout=60)
    # What the device still wrote would be seen.
    copy[:] = bytes(len(copy))
    assert read(buffer[:100]) == b"\1" * 100
    assert copy == bytes(len(copy))


def test_memory_that_cannot_be_locked_goes_through_memory_that_is(shared):
    limited = type(shared)(
        "prlimit", "--memlock=3145728", "setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock"
    )
    try:
        data = bytes(range(256)) * (4 * MIB // 256)
        assert limited.read(shared.offer("data", data), transport=NAME) == data
        assert explain(limited.offer("small", b"x")).candidates == ("shm", NAME, "tcp")
        why = explain(limited.offer("large", data)).passed[NAME]
        assert why.startswith("the owner does not offer it: ")
        assert "locked memory" in why
    finally:
        limited.end()


# To start a process takes seconds here: these three have one that they use one after the other.


@pytest.fixture(scope="module")
def second(shared):
    made = type(shared)()
    yield made
    made.end()


def test_the_device_nearest_to_the_memory_is_used(second):
    buffer = second.offer("data", bytes(100_000))
    assert len(section_of(buffer)[3].rails) == 2
    before = queue_pairs()
    # Nobody has read from it yet: a queue pair that is kept is used whatever is nearest.
    assert read(forged(buffer, setting(1, "<B", 1 | 1 << 1))) == bytes(100_000)
    assert used_since(before) == {"rxe1"}


def test_a_fork_of_an_owner_takes_nothing_with_it(second):
    buffer = second.offer("data", b"parent")
    assert read(buffer) == b"parent"
    status, said = second.fork()
    assert (status, said.startswith("RDMAError")) == (0, True), said
    assert read(buffer) == b"parent"


def test_a_transfer_ends_with_its_owner_though_a_fork_of_that_lives(second):
    """PYV-1: the connection tells of the end."""
    buffer = second.offer("data", b"\1" * (16 * MIB))
    fork = second.leave_a_fork()
    try:
        copy, future = many_reads(buffer, timeout=50)
        while not copy[0] and not future.done():
            time.sleep(0)
        second.kill()
        with pytest.raises(BufferGone):
            future.get(timeout=60)
        with pytest.raises(BufferGone):
            read(buffer[:10])
        os.kill(fork, 0)  # is there
    finally:
        os.kill(fork, signal.SIGKILL)
