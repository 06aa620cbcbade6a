"""Memory that other processes read and write."""

from __future__ import annotations

from typing import Any

from mesh_core import Future
from mesh_rdma._errors import BufferGone, InvalidTransfer
from mesh_rdma._futures import done, first, nothing, of_operation
from mesh_rdma._here import drop, engine, joined, lasting, look
from mesh_rdma._memory import memory_of, writable_memory_of
from mesh_rdma._native import Export, Handle

WORD = 1 << 64
"""What atomic operations wrap around at."""


class RDMABuffer:
    """Memory of a process that every process with this buffer can read and write, without involving the owner's Python.

    Its pickle has a few hundred bytes: send it to an actor, through a queue, or in a file. Any process that has it may use the memory.

    >>> from mesh_rdma import RDMABuffer
    >>> data = bytearray(b"0123456789")
    >>> buffer = RDMABuffer(data)
    >>> part = bytearray(3)
    >>> buffer.read_into(part, offset=2).get(timeout=30)
    >>> bytes(part)
    b'234'
    >>> buffer[8:].write_from(b"XY").get(timeout=30)
    >>> data
    bytearray(b'01234567XY')

    The memory is offered until :meth:`drop`. Otherwise it is offered for as long as the owner's buffer or a slice of it exists, and, once
    it has been sent, for as long as the memory itself does: the tensor's storage, the array or the bytes. From then on buffers elsewhere
    raise :class:`BufferGone`. Memory is not freed while somebody is reading or writing it.

    Args:
        data: a bytes-like object, an array of numpy or of another library with ``__array_interface__``, a torch tensor on a CPU or
            an NVIDIA GPU, or another array with ``__cuda_array_interface__``; contiguous or strided. Read-only memory can
            only be read. A tensor must not be resized meanwhile. Work that is queued on the stream of GPU memory is waited
            for; synchronise work of later before others read its results.
    """

    __slots__ = ("__weakref__", "_export", "_handle")

    _handle: Handle
    _export: Export | None

    def __init__(self, data: Any) -> None:
        lasting.look_at_times()
        self._export, self._handle = joined().export(memory_of(data))

    @classmethod
    def _make(cls, handle: Handle, export: Export | None) -> RDMABuffer:
        made = cls.__new__(cls)
        made._handle, made._export = handle, export  # noqa: SLF001 - of this class
        return made

    def size(self) -> int:
        """Return the number of bytes."""
        return self._handle.nbytes

    @property
    def writable(self) -> bool:
        """Whether it can be written to."""
        return self._handle.writable

    @property
    def owner(self) -> str:
        """The process that owns the memory, such as ``"pid 4242 on host b7"``."""
        return f"pid {self._handle.pid} on host {self._handle.host}"

    @property
    def backend(self) -> str | None:
        """The transport that reads and writes would use now; ``None`` if there is none. :func:`explain` says why."""
        candidates, _ = joined().explain(self._handle)
        return candidates[0] if candidates else None

    def __getitem__(self, part: slice) -> RDMABuffer:
        """Return a buffer of some of the bytes, ``buffer[start:stop]``. Whoever has it may use the whole memory all the same."""
        if not isinstance(part, slice):
            raise TypeError(
                f"a buffer is sliced, as in buffer[0:8], and not indexed, got {type(part).__name__}"
            )
        start, stop, step = part.indices(self._handle.nbytes)
        if step != 1:
            raise InvalidTransfer(f"the step of a slice of a buffer must be 1, got {step}")
        return RDMABuffer._make(self._handle.slice(start, max(stop - start, 0)), self._export)

    def read_into(
        self, dst: Any, *, offset: int = 0, timeout: float | None = 60, transport: str | None = None
    ) -> Future[None]:
        """Fill ``dst`` with the bytes from ``offset`` on.

        Do not touch ``dst`` until the future is done. For GPU memory, the transfer starts after the work that is
        queued on its current stream. Invalid arguments raise here; all other errors are raised by the future.

        Args:
            dst: writable memory of this process, of any kind that :class:`RDMABuffer` accepts. Its length determines how much is read.
            offset: where in the buffer to begin.
            timeout: seconds after which it fails with :class:`RDMATimeout`; ``None`` for none.
            transport: the name of the only one to be tried.
        """
        memory = writable_memory_of(dst)
        operation = engine().read(self._handle, memory, place(offset), timeout, transport)
        return done(None) if operation is None else of_operation(operation, "read_into", nothing, self)

    def write_from(
        self, src: Any, *, offset: int = 0, timeout: float | None = 60, transport: str | None = None
    ) -> Future[None]:
        """Copy all of ``src`` into the buffer, from ``offset`` on; otherwise as :meth:`read_into`.

        When the future is done, the bytes are in the owner's memory.
        """
        memory = memory_of(src)
        operation = engine().write(self._handle, memory, place(offset), timeout, transport)
        return done(None) if operation is None else of_operation(operation, "write_from", nothing, self)

    def fetch_add(
        self, value: int, *, offset: int = 0, timeout: float | None = 60, transport: str | None = None
    ) -> Future[int]:
        """Add ``value`` to the 8 bytes at ``offset``, and return the old value as an unsigned integer.

        They are an integer in the byte order of the machine, at an 8-byte-aligned address; the addition wraps around.
        Atomic operations of all processes are atomic with respect to each other, and to atomic instructions of the owner.

        >>> from mesh_rdma import RDMABuffer
        >>> counter = RDMABuffer(bytearray(8))
        >>> counter.fetch_add(5).get(timeout=30), counter.fetch_add(-1).get(timeout=30)
        (0, 5)
        """
        operation = engine().atomic(self._handle, (value % WORD, None), place(offset), timeout, transport)
        return of_operation(operation, "fetch_add", first, self)

    def compare_and_swap(
        self,
        expected: int,
        desired: int,
        *,
        offset: int = 0,
        timeout: float | None = 60,
        transport: str | None = None,
    ) -> Future[int]:
        """Replace the 8 bytes at ``offset`` with ``desired`` if they equal ``expected``; return the old value.

        It has succeeded if the old value equals ``expected``. See also :meth:`fetch_add`.

        >>> from mesh_rdma import RDMABuffer
        >>> lock = RDMABuffer(bytearray(8))
        >>> lock.compare_and_swap(0, 7).get(timeout=30), lock.compare_and_swap(0, 8).get(timeout=30)
        (0, 7)
        """
        numbers = (expected % WORD, desired % WORD)
        operation = engine().atomic(self._handle, numbers, place(offset), timeout, transport)
        return of_operation(operation, "compare_and_swap", first, self)

    def drop(self) -> Future[None]:
        """Stop offering the memory, including its slices. Only the owner's process can do this, with any buffer of the memory.

        Returns at once, with a future that is done. Transfers in progress complete, and keep the memory until then; all others
        raise :class:`BufferGone`. Dropping it again has no effect.
        """
        if self._export is not None:
            self._export.close()
            # Not left to the memory's owner as long as this buffer exists, nor after it was closed.
            lasting.forget(self._handle.key, is_kept=True)
        else:
            try:
                is_own = drop(self._handle)
            except BufferGone:
                return Future.of(None)
            if not is_own:
                raise InvalidTransfer(
                    f"only its owner can drop a buffer, {self.owner}; here, just forget it. Have the owner call drop()."
                )
        return Future.of(None)

    def __reduce__(self) -> Any:
        if self._export is not None:
            lasting.last(self._export)
        return _of_bytes, (self._handle.encode(),)

    def __repr__(self) -> str:
        return f"<RDMABuffer: {self.size()} bytes of {self.owner}>"


def _of_bytes(data: bytes) -> RDMABuffer:
    handle = Handle.decode(data)
    # It may be from another host.
    look()
    return RDMABuffer._make(handle, None)


def handle_of(buffer: RDMABuffer) -> Handle:
    """Return the engine's key of a buffer."""
    if not isinstance(buffer, RDMABuffer):
        raise InvalidTransfer(f"the remote memory must be an RDMABuffer, got {type(buffer).__name__}")
    return buffer._handle  # noqa: SLF001 - for the other modules of this package


def place(offset: int) -> int:
    """Return an offset, after checking it."""
    if offset < 0:
        raise InvalidTransfer(f"offset must not be negative, got {offset}")
    return offset
