"""Memory of many ranks into one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, overload

from mesh_core import Future, Promise
from mesh_rdma._buffer import RDMABuffer, handle_of
from mesh_rdma._errors import InvalidTransfer, PartsFailed, RDMAError, RDMATimeout
from mesh_rdma._here import engine
from mesh_rdma._memory import writable_memory_of
from mesh_rdma._native import Action, Operation
from mesh_rdma._pool import empty
from mesh_rdma._trees._broadcast import buffers_of

if TYPE_CHECKING:
    from typing import TypeVar

    from mesh_rdma._trees._broadcast import Buffers

    M = TypeVar("M")

_NAMED = 4


@overload
def gather(
    buffers: Buffers, into: None = None, *, timeout: float | None = 60, transport: str | None = None
) -> Future[memoryview]: ...
@overload
def gather(
    buffers: Buffers, into: M, *, timeout: float | None = 60, transport: str | None = None
) -> Future[M]: ...
def gather(
    buffers: Buffers, into: Any = None, *, timeout: float | None = 60, transport: str | None = None
) -> Future[Any]:
    """Read buffers of many ranks into memory of this process, one after another.

    Each owner's buffers are read in one batch, and all owners in parallel. Every byte crosses the network once, and
    goes directly to its place.

    >>> from mesh_rdma import RDMABuffer, gather
    >>> pieces = [RDMABuffer(bytearray(b"one ")), RDMABuffer(bytearray(b"two"))]
    >>> bytes(gather(pieces).get(timeout=30))
    b'one two'

    If pieces cannot be read the future raises :class:`PartsFailed`, which names them, when nothing is being written to the memory
    any more.

    Args:
        buffers: what to read, of any length each; such as the result of an endpoint that returns a buffer.
        into: writable memory, as long as all buffers together; by default new memory, as of :func:`empty`.
        timeout: seconds after which it fails with :class:`RDMATimeout`; ``None`` for none.
        transport: the name of the only one to be used.

    Returns:
        a future of ``into``, or of the new memory.
    """
    pieces = buffers_of(buffers, "what is gathered")
    total = sum(each.size() for each in pieces)
    target = empty(total) if into is None else into
    memory = writable_memory_of(target)
    if memory.nbytes != total:
        raise InvalidTransfer(
            f"'into' must have the {total} bytes of all buffers together, got {memory.nbytes}"
        )
    batches: dict[bytes, tuple[Action, list[int]]] = {}
    at = 0
    for n, each in enumerate(pieces):
        handle = handle_of(each)
        action, numbers = batches.setdefault(handle.realm, (Action(), []))
        action.read(handle, memory.part(at, each.size()), 0, each)
        numbers.append(n)
        at += each.size()
    promise: Promise[Any] = Promise(f"a gather of {total:,} bytes from {len(batches)} processes")
    gathering = _Gathering(promise, pieces, target)
    gathering.begin(
        [(engine().submit(action, timeout, transport), numbers) for action, numbers in batches.values()]
    )
    return promise.future


class _Gathering:
    """Batches under way."""

    def __init__(self, promise: Promise[Any], pieces: Any, target: Any) -> None:
        self._promise = promise
        self._pieces: list[RDMABuffer] = pieces
        self._target = target
        self._lock = threading.Lock()
        self._left: list[Operation] = []
        self._error: RDMAError | None = None
        self._failed: list[int] = []

    def begin(self, batches: list[tuple[Operation, list[int]]]) -> None:
        """Have the promise kept when all have ended."""
        self._left = [operation for operation, _ in batches]
        if not batches:
            self._promise.set_result(self._target)
            return
        self._promise.future.add_done_callback(lambda _: self._give_up())
        for operation, numbers in batches:
            self._follow(operation, numbers)

    def _follow(self, operation: Operation, numbers: list[int]) -> None:
        ended: Promise[None] = Promise("", finish=lambda _status: None)
        operation.finishes(ended.native_handle())
        ended.future.add_done_callback(lambda _: self._ended(operation, numbers))

    def _give_up(self) -> None:
        with self._lock:
            left = list(self._left)
        for operation in left:
            operation.cancel()

    def _ended(self, operation: Operation, numbers: list[int]) -> None:
        error: RDMAError | None = None
        try:
            operation.result()
        except RDMAError as raised:
            error = raised
        with self._lock:
            self._left.remove(operation)
            is_first = error is not None and self._error is None
            # Those that were given up for the first one's sake have not failed by themselves.
            if is_first:
                self._error, self._failed = error, numbers
            is_last = not self._left
        if is_first:
            self._give_up()
        if is_last:
            self._settle()

    def _settle(self) -> None:
        if self._error is None:
            self._promise.set_result(self._target)
        elif isinstance(self._error, RDMATimeout):
            self._promise.set_exception(self._error)
        else:
            self._promise.set_exception(self._told(self._error))

    def _told(self, error: RDMAError) -> PartsFailed:
        numbers = self._failed
        named = ", ".join(map(str, numbers[:_NAMED])) + (", ..." if len(numbers) > _NAMED else "")
        which = f"piece {named}" if len(numbers) == 1 else f"one of the pieces {named}"
        owner = self._pieces[numbers[0]].owner
        text = f"{which} of {len(self._pieces)}, memory of {owner}, cannot be gathered: {error}"
        made = PartsFailed(text, failures=dict.fromkeys(numbers, str(error)))
        made.__cause__ = error
        return made
