"""The contract of a transport of another package, and the kind of plugin that registers it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from mesh_core.plugins import Plugin, PluginKind


@dataclass(frozen=True)
class TransportCapabilities:
    """What a transport can do."""

    copies: bool
    """Reads and writes."""
    atomics: bool
    """``fetch_add`` and ``compare_and_swap``."""
    remote: bool
    """Reaches processes of other hosts."""
    one_sided: bool
    """Does not use the owner's processor."""
    pieces: bool = True
    """Offers memory in several pieces, such as that of strided arrays. Readers and writers may always have theirs in pieces."""


class Watch(Protocol):
    """What ends a transfer early."""

    def check(self) -> None:
        """Raise if the transfer has been cancelled or is late. Call it between pieces, and let the error propagate."""

    @property
    def left(self) -> float | None:
        """Seconds to the deadline; ``None`` if there is none."""


@dataclass(frozen=True, eq=False)
class Exported:
    """Memory that this process offers."""

    key: int
    """Its number; no other export of this process ever has the same."""
    memory: tuple[memoryview, ...]
    """Its pieces, in the order of their bytes; read-only if others must not write."""
    writable: bool
    realm: bytes = b""
    """This process, as its handles name it: 16 random bytes, which differ in another incarnation."""
    token: bytes = b""
    """The token in handles of this memory: 16 random bytes."""

    @property
    def nbytes(self) -> int:
        """The total length of all pieces."""
        return sum(piece.nbytes for piece in self.memory)


@dataclass(frozen=True, eq=False)
class Copy:
    """One read or write."""

    write: bool
    """To the owner; otherwise from it."""
    section: bytes
    """What :meth:`Transport.offer` has returned there for this memory. The handle that contained it may be forged."""
    offset: int
    """Where to begin, counted from the first byte that was offered. The owner checks it."""
    memory: tuple[memoryview, ...]
    """The memory here, in pieces; read-only for a write."""
    realm: bytes = b""
    """The owner, as the handle names it."""
    token: bytes = b""
    """The token of the handle; the owner compares it with that of the export."""

    @property
    def nbytes(self) -> int:
        """The number of bytes to copy."""
        return sum(piece.nbytes for piece in self.memory)


class Peer(ABC):
    """A connection to an owner. Used by several threads at once; closed when it is garbage-collected."""

    @abstractmethod
    def run(self, copies: Sequence[Copy], watch: Watch) -> None:
        """Execute all copies, in any order, and block until they are done. Keep no view of the memory when this returns or raises.

        Raise :class:`BufferGone` if the memory is no longer offered or its owner has ended, :class:`HandleRefused` if the owner
        refuses, and anything else if another transport may work: it is then tried with all copies from the beginning.
        """

    def alive(self) -> bool:
        """Return whether the owner is alive, as far as is known without waiting."""
        return True


class Transport(ABC):
    """A way to reach memory of other processes: one object per process, used by several threads at once.

    Subclass it, return it from the ``create`` of a :class:`TransportPlugin`, and subclass
    :class:`mesh_rdma.testing.TransportConformance`, which checks the rest of the contract.
    """

    @abstractmethod
    def offer(self, export: Exported) -> bytes:
        """Return the bytes that others need to reach this memory: at most some hundred, they travel in each handle.

        Raise an error if this transport cannot offer it; others may.
        """

    @abstractmethod
    def withdraw(self, export: Exported) -> None:
        """Make the memory unreachable; after this returns, nobody can reach it. Called once for each export that was offered."""

    @abstractmethod
    def reach(self, section: bytes, owner: str, watch: Watch) -> Peer:
        """Connect to the owner whose ``offer`` returned ``section``; ``owner`` is for messages. Errors as in :meth:`Peer.run`."""


@dataclass(frozen=True)
class NativeTransport:
    """A transport that is built into mesh-rdma's engine."""

    name: str


@dataclass(frozen=True, kw_only=True)
class TransportPlugin(Plugin[TransportCapabilities]):
    """A transport; ``create`` is called once in each process that uses transfers. Its probe says what it can do there."""

    create: Callable[[], Transport | NativeTransport]


TRANSPORTS: Final = PluginKind(
    word="transport",
    group="mesh.transports",
    hook="mesh_register_transports",
    descriptor=TransportPlugin,
    api_version=1,
    capabilities=TransportCapabilities,
    owner="mesh-rdma",
)
"""The kind of plugin that transports are."""
