"""broadcast: contents, whoever the ranks are, and what becomes of it where something dies, is dropped, late or given up."""

import hashlib
import os
import random
import shutil
import signal
import subprocess
import threading
import time

import pytest

from mesh_core import Actor, SupervisionError, endpoint, set_fault_handler, this_host
from mesh_rdma import InvalidTransfer, PartsFailed, RDMABuffer, RDMATimeout, broadcast

pytestmark = pytest.mark.slow

MIB = 1 << 20
RANKS = 4


class Rank(Actor):
    """Has memory."""

    def __init__(self) -> None:
        self.kept: list[tuple[bytearray, RDMABuffer]] = []

    @endpoint
    def offer(self, size: int, fill: bytes = b"\0") -> RDMABuffer:
        """Memory of that size, and nothing else any more."""
        memory = bytearray(fill) * size
        self.kept = [(memory, RDMABuffer(memory))]
        return self.kept[0][1]

    @endpoint
    def offer_view(self, size: int, start: int, step: int) -> RDMABuffer:
        """Part of larger memory, or every second byte of it."""
        memory = bytearray(start + size * step)
        view = memoryview(memory)[start : start + size * step : step]
        self.kept = [(memory, RDMABuffer(view))]
        return self.kept[0][1]

    @endpoint
    def look(self) -> str:
        return hashlib.sha256(self.kept[0][0]).hexdigest()

    @endpoint
    def bytes(self) -> bytes:
        return bytes(self.kept[0][0])

    @endpoint
    def drop(self) -> None:
        self.kept[0][1].drop()

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def halt(self) -> None:
        """Stand still, until somebody lets it go on."""
        os.kill(os.getpid(), signal.SIGSTOP)

    @endpoint
    def lead(self, source: RDMABuffer, others: object, into: list[RDMABuffer]) -> None:
        """Begin a broadcast, and do not wait for it."""
        self.leading = broadcast(source, others, into, timeout=None, transport="tcp")  # type: ignore[arg-type]

    @endpoint
    async def pass_on(self, others: object, into: list[RDMABuffer]) -> None:
        """Broadcast what is here."""
        await broadcast(self.kept[0][1], others, into)  # type: ignore[arg-type]


def of(data):
    return hashlib.sha256(data).hexdigest()


def made(size, seed):
    """Bytes that are nowhere the same as a few pieces further on; quickly."""
    some = random.Random(seed).randbytes(1_000_003).replace(b"\0", b"?")
    return (some * (size // len(some) + 1))[:size]


def wait_until(true, what):
    ends = time.monotonic() + 30
    while not true():
        assert time.monotonic() < ends, what


@pytest.fixture(scope="module")
def procs():
    with this_host().spawn_procs({"ranks": RANKS}) as procs:
        yield procs


@pytest.fixture(scope="module")
def ranks(procs):
    return procs.spawn("ranks", Rank)


@pytest.fixture
def mortal():
    """Ranks that a test may kill; their deaths are no failures of the script's."""
    before = set_fault_handler(lambda failure: True)
    with this_host().spawn_procs({"ranks": RANKS}) as procs:
        yield procs.spawn("mortals", Rank)
    set_fault_handler(before)


def offered(ranks, size):
    return ranks.offer.call(size).get(timeout=30)


def has_begun(buffer):
    """Whether the first byte, which is never 0 in these tests, has come."""
    first = bytearray(1)

    def look():
        buffer.read_into(first).get(timeout=30)
        return first[0] != 0

    return look


class Stalled:
    """A broadcast by tcp of a source that stands still in the middle of it."""

    def __init__(self, other, ranks, **options):
        self.data = b"!" + made(32 * MIB, 1)
        self.source = other.offer("data", self.data)
        # A busy machine may let it end before its source stands still.
        for _ in range(30):
            self.into = offered(ranks, len(self.data))
            self.future = broadcast(self.source, ranks, self.into, transport="tcp", **options)
            wait_until(has_begun(self.into.get(0)), "nothing has come")
            other.halt()
            # More than what may be on its way.
            late = bytearray(1)
            self.into.get(0).read_into(late, offset=20 * MIB).get(timeout=30)
            if late == b"\0":
                return
            other.go_on()
            self.future.get(timeout=30)
        raise AssertionError("it was always over before the source stood still")


@pytest.mark.parametrize("size", [0, 1, 4096, 4 * MIB - 1, 9 * MIB + 17, 64 * MIB])
def test_all_ranks_get_the_bytes(ranks, size):
    data = made(size, size)
    into = offered(ranks, size)
    broadcast(data, ranks, into).get(timeout=30)
    assert set(ranks.look.call().get(timeout=30).values()) == {of(data)}


def test_any_number_of_ranks_and_any_place_in_memory(ranks, transport):
    rng = random.Random(11)
    for count in range(1, RANKS + 1):
        size = rng.randrange(6 * MIB)
        start, step = rng.randrange(5000), 1
        some = ranks.slice(ranks=slice(0, count))
        data = rng.randbytes(size + 2 * start)
        into = some.offer_view.call(size, start, step).get(timeout=30)
        source = RDMABuffer(data)[start : start + size]
        broadcast(source, some, into, transport=transport).get(timeout=30)
        expected = bytes(start) + data[start : start + size]
        assert set(some.look.call().get(timeout=30).values()) == {of(expected)}


def test_strided_memory_is_filled(ranks):
    data = made(50_000, 3)
    into = ranks.offer_view.call(len(data), 3, 2).get(timeout=30)
    broadcast(data, ranks, into).get(timeout=30)
    for each in ranks.bytes.call().get(timeout=30).values():
        assert each[3::2] == data and not any(each[4::2])


@pytest.mark.skipif(shutil.which("ss") is None, reason="ss (of iproute2) is not installed")
def test_the_source_sends_the_bytes_once_however_many_ranks_there_are(other, ranks):
    """TRE-1."""

    def sent():
        said = subprocess.run(["ss", "-tinpOH"], capture_output=True, text=True, check=True).stdout
        ours = [line for line in said.splitlines() if f"pid={other.process.pid}," in line]
        fields = [each.partition(":") for line in ours for each in line.split()]
        # What the kernel sends again, for its own reasons, is not the broadcast's doing.
        once = {"bytes_sent": 1, "bytes_retrans": -1}
        return sum(once[name] * int(value) for name, _, value in fields if name in once)

    size = 24 * MIB
    data = made(size, 24)
    source, into = other.offer("data", data), offered(ranks, size)
    before = sent()
    broadcast(source, ranks, into, transport="tcp").get(timeout=30)
    assert set(ranks.look.call().get(timeout=30).values()) == {of(data)}
    assert size <= sent() - before < 1.1 * size


def test_an_actor_passes_on_what_it_has(ranks):
    data = made(5 * MIB, 9)
    into = offered(ranks, len(data))
    into.get(0).write_from(data).get(timeout=30)
    # Rank 0 is source and rank at once: it has the bytes already.
    ranks.slice(ranks=0).pass_on.call_one(ranks, into.values()).get(timeout=30)
    assert set(ranks.look.call().get(timeout=30).values()) == {of(data)}


def test_several_broadcasts_at_once(ranks):
    data = [random.Random(n).randbytes(MIB) for n in range(8)]
    into = offered(ranks, 8 * MIB)
    futures = [
        broadcast(each, ranks, [whole[n * MIB : (n + 1) * MIB] for whole in into.values()])
        for n, each in enumerate(data)
    ]
    for future in futures:
        future.get(timeout=30)
    assert set(ranks.look.call().get(timeout=30).values()) == {of(b"".join(data))}


def test_wrong_arguments_are_refused_where_they_are_given(ranks):
    into = offered(ranks, 10)
    buffers = into.values()
    for wrong, said in (
        (buffers[:-1], "for each of the 4 ranks, got 3"),
        ([*buffers[:-1], b"x"], "must be RDMABuffers, got bytes"),
        ([*buffers[:-1], buffers[0]], "ranks 0 and 3 must be different"),
        ([*buffers[:-1], buffers[3][1:]], "rank 3 must have the source's 10 bytes, got 9"),
        ([*buffers[:-1], RDMABuffer(bytes(10))], "rank 3 must be writable"),
    ):
        with pytest.raises(InvalidTransfer, match=said):
            broadcast(bytes(10), ranks, wrong)
    with pytest.raises(ValueError, match="positive"):
        broadcast(bytes(10), ranks, into, timeout=0)
    with pytest.raises(InvalidTransfer, match=r"buffer 3 is memory of .*, which is none of the processes of"):
        broadcast(bytes(10), ranks, [*buffers[:-1], RDMABuffer(bytearray(10))]).get(timeout=30)


def test_memory_is_filled_by_one_rank_only(ranks):
    """TRE-3."""
    whole = offered(ranks, 9 * MIB).values()
    overlapping = [whole[0][: 8 * MIB], whole[0][MIB:], whole[2][MIB:], whole[3][MIB:]]
    for _ in range(30):
        # A busy machine may fill one part before the other is begun, which is allowed.
        error = broadcast(b"1" * 8 * MIB, ranks, overlapping).exception(timeout=30)
        if error is not None:
            break
    assert isinstance(error, PartsFailed)
    assert "twice by this one" in str(error)
    assert len(error.failures) == 1
    with pytest.raises(PartsFailed, match=r"rank 1: .*overlap") as caught:
        broadcast(whole[1][MIB:], ranks, [each[: 8 * MIB] for each in whole]).get(timeout=30)
    assert set(caught.value.failures) == {1}


@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_a_rank_killed_in_the_middle_takes_no_other_with_it(other, mortal, rank):
    """TRE-4, TRE-2. Rank 0 passes the bytes on to all others."""
    stalled = Stalled(other, mortal)
    os.kill(mortal.slice(ranks=rank).pid.call_one().get(timeout=30), signal.SIGKILL)
    other.go_on()
    with pytest.raises(PartsFailed, match=f"the other 3 have all bytes: rank {rank}: .*SIGKILL") as caught:
        stalled.future.get(timeout=30)
    assert set(caught.value.failures) == {rank}
    for living in set(range(RANKS)) - {rank}:
        assert mortal.slice(ranks=living).look.call_one().get(timeout=30) == of(stalled.data)


def test_a_rank_killed_before_it_begins_takes_no_other_with_it(mortal):
    data = made(9 * MIB, 5)
    into = offered(mortal, len(data))
    os.kill(mortal.slice(ranks=0).pid.call_one().get(timeout=30), signal.SIGKILL)
    with pytest.raises(PartsFailed) as caught:
        broadcast(data, mortal, into).get(timeout=30)
    assert set(caught.value.failures) == {0}
    for living in range(1, RANKS):
        assert mortal.slice(ranks=living).look.call_one().get(timeout=30) == of(data)


@pytest.mark.parametrize("moment", range(3))
def test_a_rank_killed_at_any_moment(mortal, moment):
    rng = random.Random(moment)
    data = made(32 * MIB, moment)
    rank = rng.randrange(RANKS)
    into = offered(mortal, len(data))
    pid = mortal.slice(ranks=rank).pid.call_one().get(timeout=30)
    future = broadcast(data, mortal, into)
    if moment % 3:
        watched = into.get(rank if moment % 3 == 1 else (rank + 1) % RANKS)
        wait_until(lambda: future.done() or has_begun(watched)(), "nothing has come")
    os.kill(pid, signal.SIGKILL)
    error = future.exception(timeout=30)
    if error is not None:
        assert isinstance(error, PartsFailed), error
        assert set(error.failures) == {rank}, error
    for living in set(range(RANKS)) - {rank}:
        assert mortal.slice(ranks=living).look.call_one().get(timeout=30) == of(data)


def test_a_source_killed_in_the_middle_is_reported_at_once(other, ranks):
    stalled = Stalled(other, ranks, timeout=None)
    other.kill()
    with pytest.raises(
        PartsFailed, match=r"no rank has all bytes: rank 0: .*the source, pid .* has ended"
    ) as caught:
        stalled.future.get(timeout=30)
    assert set(caught.value.failures) == set(range(RANKS))


def test_memory_dropped_in_the_middle_is_read_no_more(other, ranks):
    stalled = Stalled(other, ranks)
    ranks.slice(ranks=0).drop.call_one().get(timeout=30)
    other.go_on()
    # It keeps its memory until it has all bytes; the others get theirs elsewhere.
    stalled.future.get(timeout=30)
    assert set(ranks.look.call().get(timeout=30).values()) == {of(stalled.data)}


def test_a_deadline_names_who_is_late(other, ranks):
    stalled = Stalled(other, ranks, timeout=1.0)
    with pytest.raises(
        RDMATimeout, match=r"within 1.0 s; 4 have not got all bytes: rank 0 \(pid \d+ on host"
    ):
        stalled.future.get(timeout=30)
    other.go_on()


def test_what_was_given_up_can_be_begun_again(other, ranks):
    """TRE-3: not before the last read of the old one has ended."""
    stalled = Stalled(other, ranks)
    assert stalled.future.cancel()
    data = made(len(stalled.data), 77)
    again(data, ranks, stalled.into)
    other.go_on()
    assert set(ranks.look.call().get(timeout=30).values()) == {of(data)}


def again(data, ranks, into):
    """Broadcast, as soon as the ranks have heard of the end of what was before."""
    ends = time.monotonic() + 30
    while True:
        try:
            return broadcast(data, ranks, into).get(timeout=30)
        except PartsFailed as error:
            if "another broadcast" not in str(error) or time.monotonic() > ends:
                raise


def test_ranks_give_up_when_the_leader_dies(other, ranks):
    """TRE-4."""
    size = 32 * MIB
    source, into = other.offer("data", b"!" * size), offered(ranks, size)
    before = set_fault_handler(lambda failure: True)
    with this_host().spawn_procs() as procs:
        leader = procs.spawn("leader", Rank)
        pid = leader.pid.call_one().get(timeout=30)
        leader.lead.call_one(source, ranks, into.values()).get(timeout=30)
        wait_until(has_begun(into.get(0)), "nothing has come")
        other.halt()
        os.kill(pid, signal.SIGKILL)
    set_fault_handler(before)
    data = made(size, 78)
    again(data, ranks, into)
    other.go_on()
    assert set(ranks.look.call().get(timeout=30).values()) == {of(data)}


def test_a_thread_waits_for_it_as_for_any_future(ranks):
    into, told = offered(ranks, 10), threading.Event()
    future = broadcast(b"0123456789", ranks, into)
    future.add_done_callback(lambda _: told.set())
    assert told.wait(30) and future.get(timeout=0) is None
    assert issubclass(PartsFailed, ConnectionError) and not issubclass(PartsFailed, SupervisionError)
