"""Contents: what is read is what the owner has, what is written is what it gets, by each transport."""

import pickle
import random

import pytest

from mesh_rdma import InvalidTransfer, RDMAAction, RDMABuffer, explain, transports

SIZES = [0, 1, 7, 8, 4095, 4096, 4097, 65_537, 300_000, 3_000_001]


@pytest.fixture(params=["shm", "tcp"], scope="module")
def transport(request):
    return request.param


@pytest.mark.parametrize("size", SIZES)
def test_reads_what_the_owner_has(shared, transport, size):
    data = random.Random(size).randbytes(size)
    buffer = shared.offer("data", data)
    assert buffer.size() == size
    copy = bytearray(size)
    buffer.read_into(copy, transport=transport).get(timeout=30)
    assert copy == data


@pytest.mark.parametrize("size", SIZES)
def test_writes_what_the_caller_has(shared, transport, size):
    data = random.Random(size).randbytes(size)
    buffer = shared.offer("data", bytes(size))
    buffer.write_from(data, transport=transport).get(timeout=30)
    assert shared.look("data") == data


def test_offsets_and_lengths_at_random(shared, transport):
    rng = random.Random(7)
    size = 1_500_000
    data = bytearray(rng.randbytes(size))
    buffer = shared.offer("data", bytes(data))
    for _ in range(60):
        start = rng.randrange(size)
        length = rng.choice([0, 1, rng.randrange(100), rng.randrange(size)]) % (size - start + 1)
        if rng.random() < 0.5:
            copy = bytearray(length + 2)
            view = memoryview(copy)[1 : length + 1]
            buffer.read_into(view, offset=start, transport=transport).get(timeout=30)
            assert copy == b"\0" + data[start : start + length] + b"\0"
        else:
            data[start : start + length] = rng.randbytes(length)
            piece = memoryview(data)[start : start + length]
            buffer.write_from(piece, offset=start, transport=transport).get(timeout=30)
    assert shared.look("data") == data


def test_slices_are_buffers_and_can_be_sent(shared, transport):
    buffer = shared.offer("data", bytes(range(100)))
    part = pickle.loads(pickle.dumps(buffer[10:60]))[5:]
    assert part.size() == 45
    assert shared.read(part, transport=transport) == bytes(range(15, 60))
    part[40:].write_from(b"xyz", transport=transport).get(timeout=30)
    assert shared.look("data", 55, 58) == b"xyz"


def test_slices_follow_python():
    buffer = RDMABuffer(bytearray(10))
    assert buffer[-3:].size() == 3
    assert buffer[5:2].size() == 0
    assert buffer[:100].size() == 10
    with pytest.raises(InvalidTransfer, match="step"):
        buffer[::2]
    with pytest.raises(TypeError, match="sliced"):
        buffer[3]


def test_wrong_arguments_are_refused_where_they_are_given(shared):
    buffer = shared.offer("data", bytes(100))
    for wrong in (
        lambda: buffer.read_into(bytearray(101)),
        lambda: buffer.read_into(bytearray(1), offset=100),
        lambda: buffer.read_into(bytearray(1), offset=-1),
        lambda: buffer.write_from(b"x", offset=2**64 - 1),
        lambda: buffer.read_into(b"read-only"),
        lambda: buffer.read_into("text"),
        lambda: buffer.fetch_add(1, offset=4),
        lambda: buffer.fetch_add(1, offset=96),
        lambda: buffer[4:].fetch_add(1),
        buffer.drop,
        lambda: RDMAAction().read_remote(bytearray(1), b"no buffer"),
        lambda: RDMABuffer(object()),
    ):
        with pytest.raises(InvalidTransfer):
            wrong()
    with pytest.raises(ValueError, match="positive"):
        buffer.read_into(bytearray(1), timeout=0)


def test_read_only_memory_is_only_read(shared, transport):
    buffer = shared.offer("const", b"constant", readonly=True)
    assert not buffer.writable
    assert shared.read(buffer, transport=transport) == b"constant"
    with pytest.raises(InvalidTransfer, match="read-only"):
        buffer.write_from(b"x", transport=transport)


def test_a_handle_is_small():
    assert len(pickle.dumps(RDMABuffer(bytearray(1 << 20)))) < 400


def test_the_owner_uses_its_own_buffer(transport):
    data = bytearray(b"mine")
    buffer = RDMABuffer(data)
    copy = bytearray(4)
    buffer.read_into(copy, transport=transport).get(timeout=30)
    buffer.write_from(b"your", transport=transport).get(timeout=30)
    assert (copy, data) == (b"mine", b"your")


def test_two_others_share_one_buffer(shared, other, transport):
    buffer = shared.offer("data", b"from one to the other")
    assert other.read(buffer, transport=transport) == b"from one to the other"


def test_a_batch_does_all_of_it(shared, transport):
    rng = random.Random(3)
    buffers = shared.offer_many(300, 400)
    copies = [bytearray(400) for _ in buffers]
    target = shared.offer("target", bytes(300 * 8))
    words = rng.randbytes(300 * 8)
    action = RDMAAction()
    for copy, buffer in zip(copies, buffers, strict=True):
        action.read_remote(copy, buffer)
    for n in range(300):
        action.write_remote(target, words[8 * n : 8 * n + 8], offset=8 * n)
    large = shared.offer("large", bytes(1 << 20))
    action.write_remote(large, b"\x01" * (1 << 20))
    assert len(action) == 601
    assert action.submit(transport=transport).get(timeout=30) == [None] * 601
    assert copies == [n.to_bytes(4, "little") * 100 for n in range(300)]
    assert shared.look("target") == words
    assert shared.look("large") == b"\x01" * (1 << 20)


def test_a_batch_mixes_owners_and_atomics(shared, other):
    here = bytearray((5).to_bytes(8, "little"))
    counter = shared.offer("counter", (10).to_bytes(8, "little"))
    far = other.offer("data", b"far")
    copy = bytearray(3)
    action = RDMAAction().fetch_add(RDMABuffer(here), 1).read_remote(copy, far)
    action.compare_and_swap(counter, 10, 11).compare_and_swap(counter[0:8], 99, 98)
    assert action.submit().get(timeout=30)[:2] == [5, None]
    assert (copy, int.from_bytes(here, "little")) == (b"far", 6)
    assert int.from_bytes(shared.look("counter"), "little") == 11
    assert RDMAAction().submit().get(timeout=30) == []


@pytest.mark.slow
def test_atomics_of_several_processes_lose_nothing(shared, other):
    """ATM-1."""
    counter = shared.offer("counter", bytes(8))
    other.tell("add", counter, 300)
    for _ in range(300):
        counter.fetch_add(1).get(timeout=30)
    other.hear()
    assert counter.fetch_add(-1).get(timeout=30) == 600
    assert counter.compare_and_swap(599, 2**64 - 1).get(timeout=30) == 599
    assert counter.fetch_add(1).get(timeout=30) == 2**64 - 1
    assert shared.look("counter") == bytes(8)


def test_atomics_have_no_shm(shared):
    counter = shared.offer("counter", bytes(8))
    with pytest.raises(
        ConnectionError, match=r"'shm' does not reach the buffer's owner, .*: it has no atomic operations$"
    ):
        counter.fetch_add(1, transport="shm").get(timeout=30)


def test_an_unknown_transport_is_said_to_be(shared):
    buffer = shared.offer("data", b"x")
    for name, error in (
        ("carrier-pigeon", r"no transport is called 'carrier-pigeon'; there are .*shm, .*tcp"),
        ("tpc", r"no transport is called 'tpc'; did you mean 'tcp'\?"),
    ):
        with pytest.raises(ConnectionError, match=error):
            buffer.read_into(bytearray(1), transport=name).get(timeout=30)


def test_threads_read_and_write_at_once(shared, transport, in_threads):
    size = 50_000
    buffers = [shared.offer(f"t{n}", bytes([n]) * size) for n in range(8)]

    def work(n):
        for turn in range(20):
            copy = bytearray(size)
            buffers[n].read_into(copy, transport=transport).get(timeout=30)
            assert copy == bytes([(n + turn) % 256]) * size
            fresh = bytes([(n + turn + 1) % 256]) * size
            buffers[n].write_from(fresh, transport=transport).get(timeout=30)

    in_threads(work, 8)


def test_choice_is_explained(shared):
    buffer = shared.offer("data", b"x")
    said = explain(buffer)
    assert said.candidates == ("shm", "tcp")
    assert str(explain(buffer, transport="tcp")).startswith("tcp; not shm: the transport 'tcp' was asked for")
    assert buffer.backend == "shm"
    assert buffer.owner.startswith(f"pid {shared.process.pid} on host ")
    assert {"shm", "tcp"} <= {each.name for each in transports() if each.available}
