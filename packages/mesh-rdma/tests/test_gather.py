"""gather: what it makes of pieces, and what becomes of it where one cannot be read."""

import gc
import random

import pytest

from mesh_core import Extent, ValueMesh
from mesh_rdma import InvalidTransfer, PartsFailed, RDMABuffer, RDMATimeout, gather

MIB = 1 << 20


def test_pieces_of_several_processes_lie_behind_each_other(shared, other, transport):
    rng = random.Random(2)
    sizes = [0, 1, 5 * MIB + 3, *(rng.randrange(40_000) for _ in range(20))]
    data = [rng.randbytes(size) for size in sizes]
    owners = [shared, other]
    mine = bytearray(data[1])
    buffers = [
        RDMABuffer(mine) if n == 1 else owners[n % 2].offer(f"piece-{n}", each) for n, each in enumerate(data)
    ]
    found = gather(buffers, transport=transport).get(timeout=30)
    assert found == b"".join(data)
    into = bytearray(sum(sizes))
    named = ValueMesh.of(Extent.of(ranks=len(buffers)), buffers)
    assert gather(named, into, transport=transport).get(timeout=30) is into
    assert into == found


def test_nothing_is_gathered_from_nobody():
    assert bytes(gather([]).get(timeout=30)) == b""
    assert bytes(gather([RDMABuffer(b"")]).get(timeout=30)) == b""


def test_strided_memory_takes_pieces(shared):
    into = bytearray(12)
    buffers = [shared.offer("a", b"abc"), shared.offer("b", b"def")]
    gather(buffers, memoryview(into)[::2]).get(timeout=30)
    assert into[::2] == b"abcdef" and not any(into[1::2])


def test_it_names_the_pieces_that_are_gone(shared, other):
    buffers = [shared.offer("a", b"abc"), other.offer("b", b"def"), shared.offer("c", b"ghi")]
    other.kill()
    with pytest.raises(
        PartsFailed, match=r"piece 1 of 3, memory of pid \d+ on host .*, cannot be gathered"
    ) as caught:
        gather(buffers).get(timeout=30)
    assert set(caught.value.failures) == {1}
    shared.drop("c")
    with pytest.raises(PartsFailed, match=r"one of the pieces 0, 2 of 3.*dropped by its owner"):
        gather([buffers[0], RDMABuffer(b"x"), buffers[2]]).get(timeout=30)


@pytest.mark.slow
def test_the_owners_death_in_the_middle_is_reported_at_once(shared, other):
    buffers = [shared.offer("a", b"abc"), other.offer("b", bytes(8 * MIB))]
    # So that the connection stands.
    other_first = bytearray(1)
    buffers[1].read_into(other_first, transport="tcp").get(timeout=30)
    other.halt()
    future = gather(buffers, timeout=None, transport="tcp")
    assert not future.done()
    other.kill()
    with pytest.raises(PartsFailed, match=r"piece 1 of 2.*has ended"):
        future.get(timeout=30)


@pytest.mark.slow
def test_one_that_is_late_or_given_up_leaves_the_memory_alone(other):
    buffer = other.offer("a", b"!" * MIB)
    into = bytearray(MIB)
    other.halt()
    with pytest.raises(RDMATimeout):
        gather([buffer], into, timeout=0.3, transport="tcp").get(timeout=30)
    assert not any(into)
    given_up = gather([buffer], into, timeout=None, transport="tcp")
    assert given_up.cancel()
    other.go_on()
    gather([buffer], into).get(timeout=30)
    assert into == b"!" * MIB
    del given_up
    gc.collect()


def test_wrong_arguments_are_refused_where_they_are_given():
    piece = RDMABuffer(b"abc")
    with pytest.raises(InvalidTransfer, match="must have the 6 bytes of all buffers together, got 5"):
        gather([piece, piece], bytearray(5))
    with pytest.raises(InvalidTransfer, match="read-only"):
        gather([piece], b"xyz")
    with pytest.raises(InvalidTransfer, match="must be RDMABuffers, got bytes as number 1"):
        gather([piece, b"xyz"])
    with pytest.raises(ValueError, match="positive"):
        gather([piece], timeout=0)
