"""The kinds of memory that the suite offers, and reads into."""

from __future__ import annotations

from typing import Any

HOST, GPU = "host", "gpu"


def make(kind: str, data: bytes | int) -> Any:
    """Return writable memory of so many bytes, or these; ``memory[:]`` is what transfers take."""
    if kind == GPU:
        from mesh_rdma._gpu import GpuMemory

        return GpuMemory(data)
    return HostMemory(data)


class HostMemory(bytearray):
    """Bytes of the processor, whose slices are views."""

    def __getitem__(self, part: Any) -> Any:
        return memoryview(self)[part]


def look(memory: Any) -> bytes:
    """Return the bytes as they are."""
    return bytes(memory) if isinstance(memory, bytearray) else bytes(memory.look())


def is_free(memory: Any) -> bool:
    """Whether nobody refers to it: only then can a bytearray be resized."""
    if not isinstance(memory, bytearray):
        return not memory.is_lent()
    try:
        # In this order its bytes stay at their addresses, where what is late may still write.
        last = memory.pop()
    except BufferError:
        return False
    memory.append(last)
    return True
