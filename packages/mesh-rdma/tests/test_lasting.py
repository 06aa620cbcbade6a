"""Buffers that were sent and not kept: their memory is offered for as long as it exists."""

import collections
import gc
import pickle
import random
import subprocess
import sys
import threading
import time
import weakref

import pytest

from mesh_core import Actor, ActorError, endpoint, this_host
from mesh_rdma import BufferGone, InvalidTransfer, RDMABuffer, _here, empty
from mesh_rdma._buffer import _of_bytes, handle_of

pytestmark = pytest.mark.versions

OTHERS = ["empty", "array", "view", "temporary"]
KINDS = ["bytearray", "tensor", *OTHERS]
"""How the memory is kept, where the buffer that is sent is of all of it."""


def memory(kind, data):
    """Return what keeps the memory, and what a buffer is made of."""
    if kind == "bytearray":
        return (made := bytearray(data)), made
    if kind == "empty":
        made = empty(len(data))
        made[:] = data
        return made, made
    if kind in ("array", "view"):
        numpy = pytest.importorskip("numpy")
        made = numpy.frombuffer(data, numpy.uint8).copy()
        return made, made if kind == "array" else made[:][::1].view(numpy.int8)
    torch = pytest.importorskip("torch")
    made = torch.frombuffer(bytearray(data), dtype=torch.uint8).clone()
    return made, made if kind == "tensor" else made.view(torch.int8).flatten()


def sent(buffer):
    """The same buffer, as it arrives elsewhere."""
    return pickle.loads(pickle.dumps(buffer))


def counts():
    gc.collect()
    return _here.engine().counts()


class Store(Actor):
    """Makes buffers and returns them, and keeps the memory alone."""

    def __init__(self, kind: str) -> None:
        self.kept, self.offered = memory(kind, b"weights!" * 1000)

    @endpoint
    def offer(self) -> RDMABuffer:
        return RDMABuffer(self.offered)

    @endpoint
    def look(self) -> bytes:
        return (
            bytes(memoryview(self.kept)[:8])
            if not hasattr(self.kept, "numpy")
            else bytes(self.kept[:8].tolist())
        )

    @endpoint
    def let_go(self) -> tuple[int, int]:
        self.kept = self.offered = None
        return counts()

    @endpoint
    def drop(self, buffer: RDMABuffer) -> None:
        buffer.drop()
        buffer.drop()


class Reader(Actor):
    """Reads what it is given."""

    @endpoint
    async def read(self, buffer: RDMABuffer, transport: str) -> bytes:
        copy = bytearray(buffer.size())
        await buffer.read_into(copy, transport=transport)
        return bytes(copy[:8])

    @endpoint
    async def write(self, buffer: RDMABuffer, transport: str) -> None:
        await buffer.write_from(b"written!", transport=transport)


@pytest.fixture(scope="module")
def procs():
    with this_host().spawn_procs({"gpus": 2}) as procs:
        yield procs


@pytest.fixture(scope="module")
def reader(procs):
    return procs.slice(gpus=1).spawn("reader", Reader)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["bytearray", "tensor", *(pytest.param(kind, marks=pytest.mark.full) for kind in OTHERS)]
)
def test_a_buffer_that_an_endpoint_makes_and_returns(procs, reader, kind):
    memory(kind, b"weights!")  # skips here where numpy or PyTorch is not installed
    store = procs.slice(gpus=0).spawn(f"store_{kind}", Store, kind)
    for transport in ("shm", "tcp"):
        buffer = store.offer.call_one().get(timeout=60)
        assert reader.read.call_one(buffer, transport).get(timeout=60) == b"weights!"
        reader.write.call_one(buffer, transport).get(timeout=60)
        assert store.look.call_one().get(timeout=60) == b"written!"
        reader_was_given = buffer[:8]
        reader_was_given.write_from(b"weights!").get(timeout=60)
    # Dropped by its owner, with what came back: that buffer alone.
    other = store.offer.call_one().get(timeout=60)
    with pytest.raises(InvalidTransfer, match="only its owner can drop"):
        other.drop()
    store.drop.call_one(other).get(timeout=60)
    for transport in ("shm", "tcp"):
        with pytest.raises(BufferGone, match="was dropped by its owner"):
            other.read_into(bytearray(8000), transport=transport).get(timeout=60)
        assert reader.read.call_one(buffer, transport).get(timeout=60) == b"weights!"
    # Its memory ends, and the message says so.
    assert store.let_go.call_one().get(timeout=60) == (0, 0)
    for transport in ("shm", "tcp"):
        with pytest.raises(ActorError, match="the owner has let go of the buffer and of the array") as caught:
            reader.read.call_one(buffer, transport).get(timeout=60)
        assert isinstance(caught.value, BufferGone)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_buffers_that_were_sent_and_forgotten(kind):
    before = counts()
    kept, offered = memory(kind, bytes(4096))
    many = 10_000 if kind == "array" else 1000
    for _ in range(many):
        sent(RDMABuffer(offered))
    assert counts()[0] == before[0] + many
    del kept, offered
    assert counts() == before
    for _ in range(many):
        sent(RDMABuffer(memory(kind, bytes(64))[1]))
        assert _here.engine().counts()[0] <= before[0] + 5
    assert counts() == before
    assert _here.lasting.counts() == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_of_buffers_that_were_sent_and_dropped_while_their_memory_exists(kind):
    before = counts()
    kept, offered = memory(kind, bytes(4096))
    for n in range(200):
        buffer = RDMABuffer(offered)
        there = sent(buffer)
        (there if n % 2 else buffer).drop()
        del buffer
        with pytest.raises(BufferGone, match="was dropped by its owner"):
            there.read_into(bytearray(4096)).get(timeout=30)
    assert counts() == before
    # Those that were dropped by a buffer that came back are looked through at times.
    left, pinned = _here.lasting.counts()
    assert left <= 64 and pinned == 0
    del kept


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_that_was_not_sent_ends_with_its_object(kind):
    before = counts()
    kept, offered = memory(kind, b"x" * 100)
    buffer = RDMABuffer(offered)
    data = handle_of(buffer).encode()
    del buffer
    assert counts() == before
    with pytest.raises(BufferGone, match="has let go"):
        _of_bytes(data).read_into(bytearray(100)).get(timeout=30)
    del kept


@pytest.mark.parametrize("kind", KINDS)
def test_a_buffer_that_is_kept_keeps_its_memory_though_it_was_sent(kind):
    buffer = RDMABuffer(memory(kind, b"kept")[1])
    there = sent(buffer)
    for _ in range(3):
        gc.collect()
        RDMABuffer(bytearray(1))
    copy = bytearray(4)
    there.read_into(copy).get(timeout=30)
    assert copy == b"kept"
    del buffer
    gc.collect()
    with pytest.raises(BufferGone):
        there.read_into(copy).get(timeout=30)


def test_memory_cannot_be_resized_while_it_is_offered_to_others():
    """BUF-2: a view keeps it in place."""
    data = bytearray(8)
    there = sent(RDMABuffer(data))
    gc.collect()
    with pytest.raises(BufferError):
        data.append(1)
    there.drop()
    data.append(1)
    numpy = pytest.importorskip("numpy")
    array = numpy.zeros(8)
    there = sent(RDMABuffer(array))
    with pytest.raises(ValueError, match="resize"):
        array.resize(1 << 20)


def test_what_is_behind_views_of_views():
    numpy = pytest.importorskip("numpy")
    data = bytearray(b"0123456789")
    there = [
        sent(RDMABuffer(numpy.frombuffer(data, numpy.uint8)[2:4])),
        sent(RDMABuffer(memoryview(memoryview(data)[1:])[1:4])),
        sent(RDMABuffer(numpy.frombuffer(memoryview(data), "S2")[1:])),
    ]
    gc.collect()
    for buffer in there:
        copy = bytearray(2)
        buffer[:2].read_into(copy).get(timeout=30)
        assert copy == b"23"
    torch = pytest.importorskip("torch")
    tensor = torch.arange(8, dtype=torch.uint8)
    there.append(sent(RDMABuffer(tensor.numpy()[3:])))
    gc.collect()
    there[-1][:2].read_into(copy).get(timeout=30)
    assert copy == bytes([3, 4])
    del data, tensor
    gc.collect()
    for buffer in there:
        with pytest.raises(BufferGone):
            buffer[:2].read_into(copy).get(timeout=30)


AT_EXIT = """
import pickle, sys
import numpy
from mesh_rdma import RDMABuffer, empty
dates = numpy.array(["2026-11-28"] * 4, "datetime64[D]")
kept = [bytearray(8), numpy.zeros(8), dates, empty(8)]
there = [pickle.loads(pickle.dumps(RDMABuffer(each))) for each in (*kept, dates[1:])]
reads = [each.read_into(bytearray(each.size()), transport=sys.argv[1]) for each in there]
print("ends now", flush=True)
"""


@pytest.mark.python
@pytest.mark.slow
def test_the_interpreter_may_end_while_memory_is_offered(transport):
    pytest.importorskip("numpy")
    done = subprocess.run(
        [sys.executable, "-c", AT_EXIT, transport], capture_output=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"ends now\n", b"")


def test_a_tensor_with_other_data_has_other_memory():
    torch = pytest.importorskip("torch")
    parameter = torch.nn.Parameter(torch.ones(4))
    there = sent(RDMABuffer(parameter.detach()))
    copy = torch.zeros(4)
    there.read_into(copy).get(timeout=30)
    assert copy.sum() == 4
    parameter.data = torch.zeros(4)
    with pytest.raises(BufferGone, match="keep one of them"):
        there.read_into(copy).get(timeout=30)


def test_a_tensor_that_only_autograd_refers_to_is_still_there():
    torch = pytest.importorskip("torch")
    weight = torch.ones(4, requires_grad=True)
    square = weight.detach().clone()
    there, result = sent(RDMABuffer(square)), (weight * square).sum()
    del square
    gc.collect()
    copy = torch.zeros(4)
    there.read_into(copy).get(timeout=30)
    assert copy.sum() == 4
    result.backward()
    del result
    with pytest.raises(BufferGone):
        there.read_into(copy).get(timeout=30)


def test_objects_in_cycles_end_when_garbage_is_collected():
    numpy = pytest.importorskip("numpy")
    gc.disable()
    try:
        cycle = [numpy.ones(100)]
        cycle.append(cycle)
        there = sent(RDMABuffer(cycle[0]))
        del cycle
        there.read_into(bytearray(800)).get(timeout=30)
        gc.collect()
        with pytest.raises(BufferGone):
            there.read_into(bytearray(800)).get(timeout=30)
    finally:
        gc.enable()


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_memory_that_ends_under_a_transfer_is_freed_after_it(other, kind, transport):
    """EXP-2: a reader gets all of it or an error, and nobody writes to memory that is another's by now."""
    size = 8 << 20
    for turn in range(6):
        kept, offered = memory(kind, bytes([turn + 1]) * size)
        there = sent(RDMABuffer(offered))
        other.tell(
            "read" if turn % 2 else "rewrite",
            there,
            **({"transport": transport} if turn % 2 else {"times": 3}),
        )
        time.sleep(0.002 * turn)
        del kept, offered
        # At once used for something else, if it were free.
        noise = [memory(kind, b"\xee" * size) for _ in range(2)]
        try:
            said = other.hear()
        except BufferGone:
            pass
        else:
            assert said is None or said == bytes([turn + 1]) * size
        for each, _ in noise:
            assert bytes(memoryview(each if not hasattr(each, "numpy") else each.numpy())) == b"\xee" * size


@pytest.mark.full
@pytest.mark.slow
def test_memory_waits_for_a_reader_that_is_stopped(other):
    """BUF-1, EXP-2: its end waits for the reader, who does not see what comes after it."""
    numpy = pytest.importorskip("numpy")
    size = 64 << 20
    for turn in range(100):
        array = numpy.full(size, 7, numpy.uint8)
        there = sent(RDMABuffer(array))
        gone = weakref.ref(array)
        other.tell("read", there, transport="shm")
        # Until one is met in the middle of its read, which takes some milliseconds.
        time.sleep(0.004 * (turn % 25))
        other.halt()

        kept = [array]
        del array
        freeing = threading.Thread(target=kept.clear)
        freeing.start()
        freeing.join(0.1)
        waited = freeing.is_alive()
        other.go_on()
        freeing.join(60)
        assert not freeing.is_alive() and gone() is None
        try:
            assert other.hear() == b"\x07" * size
        except BufferGone:
            pass
        if waited:
            return
    pytest.fail("the reader was never in the middle of a read")


@pytest.mark.slow
def test_a_fork_does_not_wait_for_transfers(other):
    """What it has inherited ends there without anybody's answer."""
    pytest.importorskip("numpy")
    status, said = other.fork_with_lasting()
    assert (status, said) == (0, "ended")


@pytest.mark.full
@pytest.mark.slow
def test_memory_that_ends_at_any_time_while_many_read_it(in_threads):
    """EXP-2, BUF-1, BUF-2: no read sees other bytes, nothing hangs, and nothing is left."""
    until, offered, others = time.monotonic() + 5, collections.deque(maxlen=8), []

    def own(chance):
        while time.monotonic() < until:
            size, fill = chance.choice([64, 4096, 300_000, 4 << 20]), bytes([chance.randrange(1, 256)])
            kept, data = memory(chance.choice(KINDS), fill * size)
            if chance.random() < 0.2:
                # For the garbage collector.
                cycle = [kept]
                cycle.append(cycle)
                del cycle
            offered.append((pickle.dumps(RDMABuffer(data)), fill, size))
            time.sleep(chance.random() * 0.004)
            if chance.random() < 0.2:
                pickle.loads(offered[-1][0]).drop()
            if chance.random() < 0.05:
                gc.collect()
            del kept, data

    def read(chance):
        while time.monotonic() < until:
            if not offered:
                continue
            data, fill, size = chance.choice(list(offered))
            copy = bytearray(size)
            try:
                pickle.loads(data).read_into(copy, transport=chance.choice(["shm", "tcp"])).get(timeout=60)
            except BufferGone:
                continue
            if copy != fill * size:
                others.append((size, fill, copy[:8]))

    before = counts()
    in_threads(lambda n: (own if n < 3 else read)(random.Random(n)), 7)
    assert not others
    assert counts() == before and _here.lasting.counts() == (0, 0)
