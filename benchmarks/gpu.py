"""Memory of a GPU of another process, read and written, beside plain copies by the driver. Needs a GPU.

    python benchmarks/gpu.py

Each row is measured in turn with the driver's own copy of as many bytes in one process, which is the ceiling: device to device, or from the GPU to
pinned memory. Contents are checked. Neither PyTorch nor CuPy is needed.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from mesh_rdma import RDMABuffer, explain
from mesh_rdma._gpu import CudaError, GpuMemory, call, current, driver, missing
from mesh_rdma.testing._ends import Process
from mesh_rdma.testing._owner import pattern

REHEARSAL = "MESH_GPU_REHEARSAL" in os.environ
SIZES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20} | ({} if REHEARSAL else {"256 MiB": 256 << 20})
ROUNDS = 2 if REHEARSAL else 7


def median(work: Callable[[], object], size: int) -> float:
    """Return seconds for one, of as many as take some milliseconds."""
    work()
    turns = 2 if REHEARSAL else max(1, min(200, (8 << 20) // size))
    took = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        for _ in range(turns):
            work()
        took.append((time.perf_counter() - begun) / turns)
    return statistics.median(took)


class Pinned:
    """Memory of the processor that the GPU reaches by itself, as an object with a buffer."""

    def __init__(self, size: int) -> None:
        self._at = ctypes.c_void_p()
        with current(0):
            call(driver().cuMemHostAlloc, ctypes.byref(self._at), ctypes.c_size_t(size), 0)
        self.bytes = memoryview((ctypes.c_char * size).from_address(self._at.value or 0)).cast("B")

    @property
    def address(self) -> int:
        """Where it is."""
        return self._at.value or 0


def plain(to: int, source: int, size: int) -> Callable[[], None]:
    """Copy by the driver alone, and wait."""

    def copy() -> None:
        with current(0):
            arguments = (ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size), None)
            call(driver().cuMemcpyAsync, *arguments)
            call(driver().cuStreamSynchronize, None)

    return copy


def read(buffer: RDMABuffer, target: Any, transport: str) -> Callable[[], None]:
    """Read all of a buffer, and wait."""

    def copy() -> None:
        buffer.read_into(target, transport=transport).get(timeout=60)

    return copy


def main() -> None:
    """Print the table."""
    if reason := missing():
        sys.exit(reason)
    owner = Process("gpu")
    try:
        print("| read | size | mesh | driver alone | of its rate |\n| --- | --- | ---: | ---: | ---: |")
        for name, size in SIZES.items():
            buffer = owner.offer_pattern("a", 1, size)
            if "cuda" not in explain(buffer).candidates:
                raise CudaError(f"the memory is not mapped: {explain(buffer)}")
            source, on_gpu, pinned = GpuMemory(pattern(1, size)), GpuMemory(size), Pinned(size)
            rows: tuple[tuple[str, str, object, int], ...] = (
                ("cuda, GPU to GPU", "cuda", on_gpu[:], on_gpu.address),
                ("cuda, GPU to pinned memory", "cuda", pinned.bytes, pinned.address),
                ("tcp, GPU to pinned memory", "tcp", pinned.bytes, pinned.address),
                ("tcp, GPU to GPU", "tcp", on_gpu[:], on_gpu.address),
            )
            told = []
            for what, transport, target, address in rows:
                mesh = median(read(buffer, target, transport), size)
                alone = median(plain(address, source.address, size), size)
                if on_gpu.look() not in (bytes(size), pattern(1, size)):
                    raise CudaError(f"{what} has copied other bytes")
                print(
                    f"| {what} | {name} | {mesh * 1e6:,.1f} µs | {alone * 1e6:,.1f} µs | {alone / mesh:.2f} |",
                    flush=True,
                )
                told.append(f"{what} {alone / mesh:.2f}")
            print(f"in short: {name}, of the driver's rate: {', '.join(told)}")
            assert bytes(pinned.bytes) == on_gpu.look() == pattern(1, size)
            owner.forget("a")
    finally:
        owner.end()


if __name__ == "__main__":
    main()
