"""The file that a C pickler writes to: it collects part 0, and lifts large data out of it."""

from __future__ import annotations

from _pickle import PickleBuffer
from typing import Any

from mesh_core._native import Block, Blocks

# From this size on, the C pickler passes the payload of bytes and bytearrays to the file as the very object
# being pickled, right after a chunk that ends with its header (CPython's FRAME_SIZE_TARGET).
LIFTED_BYTES = 64 * 1024
# Smaller data of other kinds is cheaper to carry in the stream, unless there is much of it: see the native `Blocks`.
OUT_OF_BAND_BYTES = 16 * 1024

_PROTO = 0x80
_FRAME = 0x95
# Frames shorter than this are written without a frame header.
_FRAME_MIN = 4

# Opcodes that replace BINBYTES, BINBYTES8 and BYTEARRAY8, with the next out-of-band buffer as payload:
# push the type, push the buffer, make it a 1-tuple, call.
_BYTES_FROM_BUFFER = b"cbuiltins\nbytes\n\x97\x85R"
_BYTEARRAY_FROM_BUFFER = b"cbuiltins\nbytearray\n\x97\x85R"


class Stream:
    """Collects one message's stream and buffers, in the order in which the stream refers to them.

    The pickler needs only :meth:`write`, as its file, and :meth:`keep`, as its ``buffer_callback``. An object
    whose payload was lifted out is still memoised by the pickler, so a second occurrence refers to it.

    Data of tensors and arrays of ``alone`` bytes and more has a buffer of its own. If that is more than ``OUT_OF_BAND_BYTES``, the
    rest is laid side by side in blocks, which only the native layer sends.
    """

    __slots__ = ("_chunks", "_mark", "alone", "blocks", "buffers")

    _mark: PickleBuffer | None
    """Stands for a block, which cannot be read yet. Set with ``blocks``."""

    def __init__(self, alone: int) -> None:
        self._chunks: list[bytes] = []
        self.alone = alone
        self.blocks: Blocks | None = None
        """Takes the data of tensors and arrays, once there is some."""
        self.buffers: list[memoryview | Block] = []

    def write(self, chunk: bytes | bytearray | memoryview) -> int:
        """Take what the pickler flushes: a run of opcodes, or one large payload."""
        chunks = self._chunks
        size = len(chunk)
        if size >= LIFTED_BYTES and chunks and not isinstance(chunk, memoryview):
            header, replacement = _header_for(chunk)
            if _ends_with_bare(chunks[-1], header):
                chunks[-1] = chunks[-1][: -len(header)] + replacement
                self.buffers.append(memoryview(chunk))
                return size
        # A memoryview is of a string that may not outlive this call.
        chunks.append(chunk if type(chunk) is bytes else bytes(chunk))
        return size

    def keep(self, buffer: PickleBuffer) -> bool:
        """Take a buffer out of band, or return true to have the pickler write it into the stream."""
        if self.blocks is not None and buffer is self._mark:
            return False
        try:
            view = buffer.raw()
        except BufferError:
            return True  # not contiguous: the pickler raises an error that names it
        if view.nbytes < OUT_OF_BAND_BYTES:
            return True
        self.buffers.append(view)
        return False

    def begin_blocks(self) -> Blocks:
        """Return what takes the data of tensors and arrays from now on."""
        self._mark = None
        blocks = self.blocks = Blocks(self.alone)
        return blocks

    def reduce_block(self, block: Block) -> Any:
        """Send a block beside the stream, once. More will be laid into it while the rest of the message is pickled."""
        self.buffers.append(block)
        if self._mark is None:
            # Writable, or blocks would arrive as read-only.
            self._mark = PickleBuffer(bytearray())
        return memoryview, (self._mark,)

    def part0(self) -> bytes:
        """Return the stream."""
        chunks = self._chunks
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _header_for(payload: bytes | bytearray) -> tuple[bytes, bytes]:
    """Return the header that announces this payload, and the opcodes that replace both."""
    size = len(payload)
    if isinstance(payload, bytearray):
        return b"\x96" + size.to_bytes(8, "little"), _BYTEARRAY_FROM_BUFFER
    if size <= 0xFFFFFFFF:
        return b"B" + size.to_bytes(4, "little"), _BYTES_FROM_BUFFER
    return b"\x8e" + size.to_bytes(8, "little"), _BYTES_FROM_BUFFER


def _ends_with_bare(chunk: bytes, header: bytes) -> bool:
    """Return whether ``chunk`` ends with ``header`` outside of any frame, where only a header can be.

    Comparing bytes alone would not do: the last argument in an ordinary frame may happen to contain them.
    """
    at = 2 if chunk[0] == _PROTO else 0
    while at + 9 <= len(chunk) and chunk[at] == _FRAME:
        at += 9 + int.from_bytes(chunk[at + 1 : at + 9], "little")
    bare = len(chunk) - at
    return len(header) <= bare < len(header) + _FRAME_MIN and chunk.endswith(header)
