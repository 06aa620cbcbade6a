"""What the processes of a broadcast say to each other."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_core.extensions import Proc
from mesh_rdma._buffer import RDMABuffer

Key = tuple[str, int]
"""A rank of a broadcast: the broadcast's id, and the number of the rank in it."""


@dataclass(frozen=True)
class Lost:
    """It did not succeed."""

    why: str
    is_gone: bool = True
    """Whether others would meet the same."""


@dataclass(frozen=True)
class Parent:
    """Whom to read from."""

    rank: int
    buffer: RDMABuffer
    proc: Proc | None
    """Whom to ask how many bytes are there; ``None`` if all are."""


@dataclass(frozen=True)
class Who:
    """Ask a process which it is. Answer: its realm, and its :class:`Proc`."""


@dataclass(frozen=True)
class Run:
    """Have a process fill memory of its own. Answer, at the end: ``None`` or :class:`Lost`."""

    key: Key
    target: RDMABuffer
    source: RDMABuffer
    parent: Parent
    transport: str | None


@dataclass(frozen=True)
class More:
    """Ask a parent for more bytes than ``than``. Answer, as soon as there are: how many there are, or :class:`Lost`."""

    key: Key
    than: int


@dataclass(frozen=True)
class Orphan:
    """Ask the leader for another parent. Answer: a :class:`Parent`, or :class:`Lost`."""

    key: Key
    parent: int
    lost: Lost


@dataclass(frozen=True)
class Linger:
    """Be told when the broadcast is over; or, as the answer fails, of the leader's end. Answer: ``None``."""

    broadcast: str


@dataclass(frozen=True)
class Lead:
    """Have this very process lead a broadcast. Answer, at the end: ``None``."""

    broadcast: str
