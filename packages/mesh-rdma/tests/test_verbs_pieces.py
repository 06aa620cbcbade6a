"""Transfers of the transport `ibverbs`, cut into operations. No device is needed."""

import dataclasses
from ipaddress import IPv6Address

import pytest

from mesh_rdma._contract import Copy
from mesh_rdma._errors import HandleRefused
from mesh_rdma._pyverbs._pieces import CHUNK, STAGED, cut, sectioned
from mesh_rdma._pyverbs._wire import Link, Rail, Section

RAIL = Rail(b"\x01" * 16, 1, Link.ETHERNET, 3, 100_000, 7)
SECTION = Section(True, 0, 4000, IPv6Address("::1"), b"\x09" * 16, 0x1000, 4096, 3, 4, (RAIL,))


def copy(offset, *sizes, write=False, section=SECTION):
    return Copy(write, section.encode(), offset, tuple(memoryview(bytearray(size)) for size in sizes))


def pieces(*sizes, registers=True):
    """The length of each piece, the number of its parts in the stage, and whether it is the last of a registration."""
    seen = []

    def register(view):
        seen.append(view.nbytes)
        return view if registers else None

    found = list(cut(copy(100, *sizes), SECTION, register))
    at = 100
    for piece in found:
        assert piece.at == at
        at += piece.length
    assert at == 100 + sum(sizes)
    assert seen == [size for size in sizes if size >= STAGED], "only long memory is registered"
    return [(piece.length, len(piece.parts), piece.is_last) for piece in found]


def test_sizes_are_these():
    assert (CHUNK, STAGED) == (1024 * 1024, 64 * 1024)


def test_memory_is_registered_from_a_size_on():
    assert pieces(STAGED) == [(STAGED, 0, True)]
    assert pieces(STAGED - 1) == [(STAGED - 1, 1, False)]


def test_an_operation_moves_no_more_than_a_chunk():
    assert pieces(CHUNK) == [(CHUNK, 0, True)]
    assert pieces(CHUNK + 1) == [(CHUNK, 0, False), (1, 0, True)]


def test_short_parts_share_the_stage_until_it_is_full():
    half = STAGED // 2
    assert pieces(half, half) == [(STAGED, 2, False)]
    assert pieces(half, half, 1) == [(STAGED, 2, False), (1, 1, False)]
    assert pieces(half, half + 1) == [(half, 1, False), (half + 1, 1, False)]
    assert pieces(1, STAGED, 1) == [(1, 1, False), (STAGED, 0, True), (1, 1, False)]


def test_memory_that_cannot_be_registered_goes_through_the_stage():
    assert pieces(2 * STAGED, registers=False) == [(STAGED, 1, False)] * 2
    assert pieces(STAGED + 1, registers=False) == [(STAGED, 1, False), (1, 1, False)]


def test_a_copy_ends_where_the_memory_ends():
    """What the owner would refuse is refused here."""
    whole, rest = copy(0, 4096), copy(4000, 96)
    assert [(each, section) for each, section in sectioned([whole, rest])] == [
        (whole, SECTION),
        (rest, SECTION),
    ]
    for wrong in (copy(0, 4097), copy(4000, 97), copy(4096, 1)):
        with pytest.raises(HandleRefused, match="more than the owner offers"):
            sectioned([wrong])


def test_memory_that_is_only_read_is_not_written_to():
    readable = dataclasses.replace(SECTION, writable=False)
    assert len(sectioned([copy(0, 1, write=True), copy(0, 1, section=readable)])) == 2
    with pytest.raises(HandleRefused, match="more than the owner offers"):
        sectioned([copy(0, 1, write=True, section=readable)])
