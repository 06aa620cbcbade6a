"""Memory of a GPU without PyTorch, for tests and `mesh doctor`: by CUDA's driver, or by what stands in for it."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import weakref
from typing import Any

from mesh_rdma._cuda import VARIABLE


class CudaError(RuntimeError):
    """The driver has refused a call."""


@functools.cache
def driver() -> ctypes.CDLL:
    """Return the library that this process's engine uses too, with CUDA started."""
    library = ctypes.CDLL(os.environ.get(VARIABLE) or "libcuda.so.1")
    call(library.cuInit, 0)
    return library


def missing() -> str | None:
    """Return why there is no GPU memory here; ``None`` if there is."""
    try:
        driver()
    except (OSError, CudaError) as error:
        return f"there is no GPU to be used here: {error}"
    return None


def call(function: Any, *arguments: Any) -> None:
    """Call it, and raise if it fails."""
    code = function(*arguments)
    if code:
        raise CudaError(f"{function.__name__} has failed with error {code}")


class current:  # noqa: N801 - used as a function is
    """The primary context of a GPU, current on this thread in the block."""

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu

    def __enter__(self) -> None:
        call(driver().cuCtxPushCurrent_v2, _context(self._gpu))

    def __exit__(self, *_: object) -> None:
        call(driver().cuCtxPopCurrent_v2, ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _context(gpu: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    call(driver().cuDevicePrimaryCtxRetain, ctypes.byref(context), gpu)
    return context


class GpuMemory:
    """Bytes in memory of a GPU. Slices are arrays by ``__cuda_array_interface__``, as those of CuPy are.

    >>> from mesh_rdma.testing import GpuMemory, missing_gpu
    >>> if missing_gpu() is None:
    ...     memory = GpuMemory(b"on a GPU")
    ...     assert memory.look() == b"on a GPU"
    """

    def __init__(self, data: bytes | int, gpu: int = 0, *, pooled: bool = False) -> None:
        """Allocate so many bytes, or these. ``pooled`` memory is of a pool, which other processes cannot map."""
        self._gpu, self._pid = gpu, os.getpid()
        self._size = data if isinstance(data, int) else len(data)
        self._at = ctypes.c_uint64()
        self._views: weakref.WeakSet[GpuArray] = weakref.WeakSet()
        with current(gpu):
            room = ctypes.c_size_t(max(self._size, 1))
            if pooled:
                call(driver().cuMemAllocAsync, ctypes.byref(self._at), room, None)
                call(driver().cuStreamSynchronize, None)
            else:
                call(driver().cuMemAlloc_v2, ctypes.byref(self._at), room)
        self[:] = bytes(self._size) if isinstance(data, int) else data

    @property
    def address(self) -> int:
        """Its address."""
        return self._at.value

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> GpuArray:
        """Return an array of some of the bytes."""
        made = GpuArray(self, range(self._size)[part])
        self._views.add(made)
        return made

    def __setitem__(self, part: slice, data: Any) -> None:
        """Overwrite some of the bytes."""
        start, stop, step = part.indices(self._size)
        if step != 1 or stop - start != len(data):
            raise ValueError(f"{stop - start} bytes in steps of 1 are overwritten, got {len(data)} bytes")
        if data:
            with current(self._gpu):
                size = ctypes.c_size_t(len(data))
                call(driver().cuMemcpyHtoD_v2, ctypes.c_uint64(self.address + start), bytes(data), size)

    def look(self) -> bytes:
        """Return a copy of the bytes."""
        copy = ctypes.create_string_buffer(self._size)
        if self._size:
            with current(self._gpu):
                size = ctypes.c_size_t(self._size)
                call(driver().cuMemcpyDtoH_v2, copy, ctypes.c_uint64(self.address), size)
        return copy.raw

    def is_lent(self) -> bool:
        """Return whether an array of it is in use, for example by a transfer."""
        return len(self._views) > 0

    def __del__(self) -> None:
        # Nothing of CUDA may be called in a forked copy.
        if self._at.value and os.getpid() == self._pid and not _is_ending():
            with current(self._gpu):
                call(driver().cuMemFree_v2, self._at)


def _is_ending() -> bool:
    """Return whether the interpreter is ending: the driver frees everything by itself then."""
    return not threading.main_thread().is_alive()


class GpuArray:
    """Some of these bytes, in equal steps."""

    def __init__(self, memory: GpuMemory, places: range) -> None:
        self.memory, self._places = memory, places
        self.readonly = False
        self.stream: int | None = None

    def __len__(self) -> int:
        return len(self._places)

    def toreadonly(self) -> GpuArray:
        """Return read-only flags, if it must not be written to."""
        self.readonly = True
        return self

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": (len(self._places),),
            "typestr": "|u1",
            "data": (self.memory.address + self._places.start, self.readonly),
            "strides": (self._places.step,),
            "stream": self.stream,
            "version": 3,
        }
