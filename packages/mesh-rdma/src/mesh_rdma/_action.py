"""Several operations in one."""

from __future__ import annotations

from typing import Any

from mesh_core import Future
from mesh_rdma._buffer import WORD, RDMABuffer, handle_of, place
from mesh_rdma._futures import of_operation
from mesh_rdma._here import engine
from mesh_rdma._memory import memory_of, writable_memory_of
from mesh_rdma._native import Handle, Memory

_COPIES = frozenset({"read", "write"})


class RDMAAction:
    """Reads, writes and atomic operations that are submitted together, which is much faster than one by one.

    They are carried out in any order, also several at once, so that none of them may depend on another.

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

    __slots__ = ("_asked", "_buffers")

    def __init__(self) -> None:
        self._asked: list[tuple[str, Handle, Memory | None, int, int, int]] = []
        self._buffers: list[RDMABuffer] = []

    def __len__(self) -> int:
        return len(self._asked)

    def _handle(self, buffer: RDMABuffer) -> Handle:
        handle = handle_of(buffer)
        self._buffers.append(buffer)
        return handle

    def read_remote(self, dst: Any, src: RDMABuffer, *, offset: int = 0) -> RDMAAction:
        """Fill ``dst``, memory of this process, from the buffer ``src``. Returns the action itself."""
        self._asked.append(("read", self._handle(src), writable_memory_of(dst), place(offset), 0, 0))
        return self

    def write_remote(self, dst: RDMABuffer, src: Any, *, offset: int = 0) -> RDMAAction:
        """Copy all of ``src``, memory of this process, into the buffer ``dst``. Returns the action itself."""
        self._asked.append(("write", self._handle(dst), memory_of(src), place(offset), 0, 0))
        return self

    def fetch_add(self, buffer: RDMABuffer, value: int, *, offset: int = 0) -> RDMAAction:
        """Add, as :meth:`RDMABuffer.fetch_add`. Returns the action itself."""
        self._asked.append(("fetch_add", self._handle(buffer), None, place(offset), value % WORD, 0))
        return self

    def compare_and_swap(
        self, buffer: RDMABuffer, expected: int, desired: int, *, offset: int = 0
    ) -> RDMAAction:
        """Replace, as :meth:`RDMABuffer.compare_and_swap`. Returns the action itself."""
        numbers = (expected % WORD, desired % WORD)
        self._asked.append(("compare_and_swap", self._handle(buffer), None, place(offset), *numbers))
        return self

    def submit(self, *, timeout: float | None = 60, transport: str | None = None) -> Future[list[int | None]]:
        """Start all of them; the result is what each has found, in the order in which they were added, ``None`` for copies.

        If one fails the future raises its error, and others may have been carried out. The action can be submitted again.
        """
        asked = list(self._asked)

        def take(found: list[int]) -> list[int | None]:
            return [None if each[0] in _COPIES else value for each, value in zip(asked, found, strict=True)]

        return of_operation(
            engine().submit(asked, timeout, transport), "an RDMAAction", take, list(self._buffers)
        )
