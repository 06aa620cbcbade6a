"""One memory to many ranks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from mesh_core import Future, Promise
from mesh_rdma._buffer import RDMABuffer, handle_of
from mesh_rdma._errors import InvalidTransfer

if TYPE_CHECKING:
    from mesh_core import ActorMesh, ProcMesh, ValueMesh

    Buffers = Iterable[RDMABuffer] | ValueMesh[RDMABuffer]


def buffers_of(given: Any, what: str) -> Sequence[RDMABuffer]:
    """Return the buffers of a mesh of values, or of any other collection."""
    values = getattr(given, "values", None)
    found = list(values() if callable(values) else given)
    for n, each in enumerate(found):
        if not isinstance(each, RDMABuffer):
            raise InvalidTransfer(f"{what} must be RDMABuffers, got {type(each).__name__} as number {n}")
    return found


def broadcast(
    source: Any,
    actors: ActorMesh[Any] | ProcMesh,
    into: Buffers,
    *,
    timeout: float | None = 60,
    transport: str | None = None,
) -> Future[None]:
    """Copy the bytes of ``source`` into memory of every rank.

    The ranks pass pieces on while the rest is still arriving: the source is read once or twice, however many ranks there are,
    and each host receives the bytes over the network once. Do not touch the memory of the source and the ranks until the future is done.

    A rank that dies, or whose memory is dropped, does not affect other ranks: those that read from it get the rest
    from another one. When they have it, the future raises :class:`PartsFailed`, which names the ranks that do not have all bytes. If
    the source is lost and no rank has all bytes, it is raised at once.

    >>> from mesh_core import Actor, endpoint, this_host
    >>> from mesh_rdma import RDMABuffer, broadcast
    >>> class Reader(Actor):
    ...     def __init__(self):
    ...         self.weights = bytearray(7)
    ...         self.buffer = RDMABuffer(self.weights)
    ...     @endpoint
    ...     def offer(self):
    ...         return self.buffer
    ...     @endpoint
    ...     def look(self):
    ...         return bytes(self.weights)
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     readers = procs.spawn("readers", Reader)
    ...     into = readers.offer.call().get(timeout=30)
    ...     broadcast(b"weights", readers, into).get(timeout=30)
    ...     readers.look.call().get(timeout=30).values()
    [b'weights', b'weights']

    Args:
        source: an :class:`RDMABuffer`, of whatever process, or memory of this one.
        actors: the ranks. Each process must have mesh-rdma; what passes the bytes on runs on its event loop of actors.
        into: for each rank a buffer of its own memory, as long as the source.
        timeout: seconds after which it fails with :class:`RDMATimeout`; ``None`` for none.
        transport: the name of the only one to be used.
    """
    targets = buffers_of(into, "'into'")
    if len(targets) != len(actors):
        raise InvalidTransfer(
            f"'into' must have a buffer for each of the {len(actors)} ranks, got {len(targets)}"
        )
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
    owned = not isinstance(source, RDMABuffer)
    offered = RDMABuffer(source) if owned else source
    try:
        _check(offered, targets)
        from mesh_rdma._trees._extension import here
        from mesh_rdma._trees._lead import Broadcast

        asked = Broadcast(os.urandom(8).hex(), offered, actors, targets, timeout, transport)
        promise: Promise[None] = Promise(asked.what)
        here().begin(asked, promise)
    except BaseException:
        if owned:
            offered.drop()
        raise
    if owned:
        promise.future.add_done_callback(lambda _: offered.drop())
    return promise.future


def _check(source: RDMABuffer, targets: Sequence[RDMABuffer]) -> None:
    seen: dict[bytes, int] = {}
    for rank, each in enumerate(targets):
        if each.size() != source.size():
            raise InvalidTransfer(
                f"the buffer of rank {rank} must have the source's {source.size()} bytes, got {each.size()}. "
                "Take a slice of the longer one."
            )
        if not each.writable:
            raise InvalidTransfer(f"the buffer of rank {rank} must be writable, got one of read-only memory")
        other = seen.setdefault(handle_of(each).encode(), rank)
        if other != rank:
            raise InvalidTransfer(
                f"the buffers of ranks {other} and {rank} must be different memory, got the same"
            )
