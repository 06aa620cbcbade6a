"""Several operations in one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from mesh_core import Future
from mesh_rdma._buffer import WORD, RDMABuffer, handle_of, place
from mesh_rdma._errors import RDMAError
from mesh_rdma._futures import each, of_operation
from mesh_rdma._here import engine
from mesh_rdma._memory import memory_of, writable_memory_of
from mesh_rdma._native import Action, Operation


class RDMAAction:
    """Reads, writes and atomic operations that are submitted as one batch, which is much faster than one at a time.

    They are executed in any order, possibly concurrently, so they must not depend on each other.

    >>> from mesh_rdma import RDMAAction, RDMABuffer
    >>> tensors = [bytearray(b"aa"), bytearray(b"bb")]
    >>> buffers = [RDMABuffer(each) for each in tensors]
    >>> copies = [bytearray(2), bytearray(2)]
    >>> action = RDMAAction()
    >>> for copy, buffer in zip(copies, buffers):
    ...     _ = action.read_remote(copy, buffer)
    >>> action.submit().get(timeout=30)
    [None, None]
    >>> copies
    [bytearray(b'aa'), bytearray(b'bb')]
    """

    __slots__ = ("_action",)

    def __init__(self) -> None:
        self._action = Action()

    def __len__(self) -> int:
        return len(self._action)

    def read_remote(self, dst: Any, src: RDMABuffer, *, offset: int = 0) -> RDMAAction:
        """Fill ``dst``, memory of this process, from the buffer ``src``. Returns the action itself."""
        self._action.read(handle_of(src), writable_memory_of(dst), place(offset), src)
        return self

    def write_remote(self, dst: RDMABuffer, src: Any, *, offset: int = 0) -> RDMAAction:
        """Copy all of ``src``, memory of this process, into the buffer ``dst``. Returns the action itself."""
        self._action.write(handle_of(dst), memory_of(src), place(offset), dst)
        return self

    def fetch_add(self, buffer: RDMABuffer, value: int, *, offset: int = 0) -> RDMAAction:
        """Add, as :meth:`RDMABuffer.fetch_add`. Returns the action itself."""
        self._action.fetch_add(handle_of(buffer), value % WORD, place(offset), buffer)
        return self

    def compare_and_swap(
        self, buffer: RDMABuffer, expected: int, desired: int, *, offset: int = 0
    ) -> RDMAAction:
        """Replace, as :meth:`RDMABuffer.compare_and_swap`. Returns the action itself."""
        numbers = (expected % WORD, desired % WORD)
        self._action.compare_and_swap(handle_of(buffer), numbers, place(offset), buffer)
        return self

    def submit(self, *, timeout: float | None = 60, transport: str | None = None) -> Future[list[int | None]]:
        """Start all operations. The result is a list with the result of each, in the order in which they were added; ``None`` for copies.

        If one fails, the future raises its error; others may have been executed. The action can be submitted again.
        """
        operation = self._begin(timeout, transport)
        return of_operation(operation, "an RDMAAction", each, self._action)

    def _begin(self, timeout: float | None, transport: str | None) -> Operation:
        return engine().submit(self._action, timeout, transport)


def carry_out(actions: Iterable[RDMAAction], timeout: float | None, meanwhile: Callable[[], None]) -> None:
    """Carry out actions beside ``meanwhile``, and return or raise when the last byte was moved, whatever is raised.

    A future would not do: a cancelled one is done before its bytes are.
    """
    begun: list[Operation] = []
    try:
        for action in actions:
            # Not in one expression: what has begun before an operation that cannot begin must be known.
            begun.append(action._begin(timeout, None))  # noqa: SLF001, PERF401
        meanwhile()
        for operation in begun:
            operation.result()
    finally:
        for operation in begun:
            operation.cancel()
        for operation in begun:
            try:
                operation.result()
            except RDMAError:
                # The first error is raised.
                pass
