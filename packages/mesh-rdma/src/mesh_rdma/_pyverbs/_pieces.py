"""Transfers, cut into what one operation of a device moves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from mesh_rdma._contract import Copy
from mesh_rdma._errors import HandleRefused
from mesh_rdma._pyverbs._library import address_of
from mesh_rdma._pyverbs._wire import Section

CHUNK = 1 << 20
"""The most that one operation moves: between two of them the caller may give up."""
STAGED = 64 * 1024
"""Shorter pieces go through memory that is registered already: to register theirs takes longer than to copy them."""


@dataclass
class Piece:
    """What one operation moves."""

    copy: Copy
    section: Section
    at: int
    """Where in the export, counted from its first byte."""
    length: int
    parts: list[memoryview] = field(default_factory=list)
    """The memory here that is to be copied to or from the stage; none if the device reads or writes it itself."""
    address: int = 0
    """Where the device reads or writes, if it does so itself."""
    registered: Any = None
    """The registration that allows it to."""
    is_last: bool = False
    """No later piece uses that registration."""


def sectioned(copies: Sequence[Copy]) -> list[tuple[Copy, Section]]:
    """Return each copy with what its handle says; raise what the owner would refuse."""
    known: dict[bytes, Section] = {}
    found: list[tuple[Copy, Section]] = []
    for copy in copies:
        section = known.get(copy.section)
        if section is None:
            section = known[copy.section] = Section.decode(copy.section)
        if copy.offset + copy.nbytes > section.length or (copy.write and not section.writable):
            raise HandleRefused("the handle names more than the owner offers by the transport ibverbs")
        found.append((copy, section))
    return found


def cut(copy: Copy, section: Section, register: Callable[[memoryview], Any]) -> Iterator[Piece]:
    """Cut one copy. `register` returns what lets the device use memory, or none if it may not: that is staged then."""
    at = copy.offset
    short: list[memoryview] = []
    gathered = 0
    for view in copy.memory:
        registered = register(view) if view.nbytes >= STAGED else None
        if registered is None:
            for start in range(0, view.nbytes, STAGED):
                part = view[start : start + STAGED]
                if gathered + part.nbytes > STAGED:
                    yield Piece(copy, section, at, gathered, short)
                    at, short, gathered = at + gathered, [], 0
                short.append(part)
                gathered += part.nbytes
            continue
        if short:
            yield Piece(copy, section, at, gathered, short)
            at, short, gathered = at + gathered, [], 0
        base = address_of(view)
        for start in range(0, view.nbytes, CHUNK):
            length = min(CHUNK, view.nbytes - start)
            is_last = start + length == view.nbytes
            yield Piece(copy, section, at, length, [], base + start, registered, is_last)
            at += length
    if short:
        yield Piece(copy, section, at, gathered, short)
