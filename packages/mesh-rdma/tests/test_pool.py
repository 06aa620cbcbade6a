"""Memory of `empty`: others map it, and it is like any other in all else."""

import gc
import os
import random
import re
from pathlib import Path

import pytest

from mesh_rdma import BufferGone, InvalidTransfer, RDMAAction, empty
from mesh_rdma._here import engine


def mappings():
    """How many arenas are mapped here, of whatever process."""
    return sum(
        bool(re.search("memfd:mesh-pool-", line)) for line in Path("/proc/self/maps").read_text().splitlines()
    )


@pytest.mark.slow
def test_what_is_written_there_others_read(shared, transport):
    for size in (1, 63, 4096, 4097, 3 << 20, 20 << 20):
        data = random.Random(size).randbytes(size)
        buffer = shared.offer_empty("data", data)
        copy = bytearray(size)
        buffer.read_into(copy, transport=transport).get(timeout=30)
        assert copy == data
        start = size // 3
        part = bytearray(size - start)
        buffer[start:].read_into(part, transport=transport).get(timeout=30)
        assert part == data[start:]


def test_what_others_write_is_there(shared, transport):
    for size in (1, 100, 9 << 20):
        data = random.Random(size).randbytes(size)
        buffer = shared.offer_empty("data", bytes(size + 10))
        buffer.write_from(data, offset=7, transport=transport).get(timeout=30)
        assert shared.look("data") == bytes(7) + data + bytes(3)


def test_many_of_both_kinds_in_one_action(shared):
    mapped = [shared.offer_empty(f"mapped-{n}", b"%06d" % n) for n in range(100)]
    plain = [shared.offer(f"plain-{n}", b"%06d" % -n) for n in range(100)]
    copies = [bytearray(6) for _ in range(200)]
    action = RDMAAction()
    for copy, buffer in zip(
        copies, [each for pair in zip(mapped, plain, strict=True) for each in pair], strict=True
    ):
        action.read_remote(copy, buffer)
    action.submit(transport="shm").get(timeout=30)
    assert [bytes(copy) for copy in copies] == [
        b"%06d" % (n // 2 if n % 2 == 0 else -(n // 2)) for n in range(200)
    ]


def test_all_views_of_a_piece_share_one_mapping(other):
    before = mappings()
    for n in range(50):
        buffer = other.offer_empty(f"part-{n}", b"%02d" % n)
        copy = bytearray(2)
        buffer.read_into(copy, transport="shm").get(timeout=30)
        assert copy == b"%02d" % n
    assert mappings() == before + 1


def test_a_dropped_one_is_gone_and_what_comes_in_its_place_is_another(shared):
    old = shared.offer_empty("data", b"old")
    assert shared.read(old, transport="shm") == b"old"
    copy = bytearray(3)
    old.read_into(copy, transport="shm").get(timeout=30)
    shared.forget("data")
    new = shared.offer_empty("data", b"new")
    new.read_into(copy, transport="shm").get(timeout=30)
    assert copy == b"new"
    with pytest.raises(BufferGone):
        old.read_into(copy, transport="shm").get(timeout=30)


def test_a_mapping_is_of_no_use_when_its_owner_has_ended(other):
    """MAP-1."""
    buffer = other.offer_empty("data", bytes(16))
    buffer.write_from(b"x", transport="shm").get(timeout=30)
    other.kill()
    with pytest.raises(BufferGone):
        buffer.read_into(bytearray(16), transport="shm").get(timeout=30)
    with pytest.raises(BufferGone):
        buffer.write_from(bytes(16), transport="shm").get(timeout=30)


@pytest.mark.slow
def test_a_mapping_is_of_no_use_when_its_owner_is_another_program(other):
    """MAP-1, where another program has its pid."""
    buffer = other.offer_empty("data", bytes(16))
    buffer.write_from(b"x", transport="shm").get(timeout=30)
    other.replace()
    assert other.look_up() == "here"
    with pytest.raises(BufferGone):
        buffer.read_into(bytearray(16), transport="shm").get(timeout=30)


def test_read_only_views_are_not_written_to(shared):
    buffer = shared.offer_empty("data", b"secret", readonly=True)
    copy = bytearray(6)
    buffer.read_into(copy, transport="shm").get(timeout=30)
    assert copy == b"secret"
    with pytest.raises(InvalidTransfer):
        buffer.write_from(b"x")


@pytest.mark.slow
def test_what_is_freed_is_given_back_and_used_again():
    kept = empty(1)
    before = engine().arenas()
    pieces = [empty(size) for size in (10, 5000, 1 << 20, 7)]
    assert engine().arenas() == before
    large = empty(100 << 20)
    assert engine().arenas() == before + 1
    large[::4096] = bytes(len(large[::4096]))
    del large, pieces
    gc.collect()
    assert engine().arenas() == before
    del kept


def test_pieces_do_not_overlap():
    dice = random.Random(5)
    pieces: dict[int, memoryview] = {}
    for n in range(600):
        if pieces and dice.random() < 0.45:
            del pieces[dice.choice(list(pieces))]
        size = dice.choice((0, 1, 63, 64, 65, 4095, 4096, 4097, 70_000))
        piece = empty(size)
        piece[:] = n.to_bytes(4, "little")[:1] * size
        pieces[n] = piece
        assert len(piece) == size
        for other, held in pieces.items():
            assert held[:1] == held[-1:] == other.to_bytes(4, "little")[:1] * min(len(held), 1)


def test_a_forked_child_frees_nothing_of_its_parents():
    piece = empty(1 << 16)
    piece[:] = b"x" * len(piece)
    pid = os.fork()
    if pid == 0:
        del piece
        gc.collect()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert piece.tobytes() == b"x" * (1 << 16)


def test_wrong_sizes_are_refused():
    with pytest.raises(InvalidTransfer, match="negative"):
        empty(-1)
    with pytest.raises(InvalidTransfer, match="more than a process can have"):
        empty((1 << 64) - 1)
