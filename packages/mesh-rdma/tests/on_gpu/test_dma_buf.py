"""Names by which RDMA devices are given memory of a GPU: whether this driver and this GPU make them."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from mesh_rdma._gpu import CudaError, GpuMemory, call, current, driver

DMA_BUF, DMA_BUF_SUPPORTED = 1, 124
PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.fixture(autouse=True)
def is_supported() -> None:
    """The driver is asked, where it can be."""
    asks = getattr(driver(), "cuDeviceGetAttribute", None)
    if asks is not None:
        told = ctypes.c_int()
        code = asks(ctypes.byref(told), DMA_BUF_SUPPORTED, 0)
        if code == 0 and not told.value:
            pytest.skip("this GPU's driver makes no dma-bufs: they need NVIDIA's open kernel modules")


@contextmanager
def named(address: int, size: int) -> Iterator[int]:
    """A descriptor for these bytes."""
    made = ctypes.c_int(-1)
    with current(0):
        where, length = ctypes.c_uint64(address), ctypes.c_size_t(size)
        call(
            driver().cuMemGetHandleForAddressRange,
            ctypes.byref(made),
            where,
            length,
            DMA_BUF,
            ctypes.c_ulonglong(0),
        )
    try:
        yield made.value
    finally:
        os.close(made.value)


def test_whole_pages_have_a_name() -> None:
    memory = GpuMemory(4 * MIB)
    with named(memory.address, 4 * MIB) as descriptor:
        assert os.fstat(descriptor)
    with named(memory.address + MIB, MIB) as descriptor:
        assert os.fstat(descriptor)


def test_the_pages_around_a_few_bytes_have_a_name() -> None:
    """As buffers are registered: from the page of the first byte to that of the last."""
    memory = GpuMemory(4 * MIB)
    first = (memory.address + MIB + 5) // PAGE * PAGE
    with named(first, PAGE) as descriptor:
        assert os.fstat(descriptor)


def test_what_is_beyond_an_allocation_has_none() -> None:
    memory = GpuMemory(2 * MIB)
    with pytest.raises(CudaError), named(memory.address, 1 << 40):
        pass
