"""Machines without RDMA devices, which most are: the transport `ibverbs` says why, and costs nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from mesh_rdma import RDMABuffer, TransportUnavailable, get_rdma_backend, is_ibverbs_available, transports
from mesh_rdma._native_transports import IBVERBS

pytestmark = pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="the kernel has InfiniBand")

LIBRARIES = """
from pathlib import Path
from mesh_rdma import RDMABuffer
buffer = RDMABuffer(bytearray(8))
buffer.read_into(bytearray(8)).get(timeout=30)
print("ibverbs" in Path("/proc/self/maps").read_text())
"""


def test_it_says_why_and_what_to_do():
    assert not is_ibverbs_available()
    assert get_rdma_backend() != "ibverbs"
    (found,) = (each for each in transports() if each.name == "ibverbs")
    assert "no RDMA device" in found.reason
    able = IBVERBS.probe()
    assert able.reason == found.reason
    assert "ibverbs-providers" in able.remedy


def test_asked_for_by_name_it_is_an_error():
    buffer = RDMABuffer(bytearray(8))
    with pytest.raises(
        TransportUnavailable,
        match=r"'ibverbs' does not reach the buffer's owner, .*: the kernel has no RDMA device",
    ):
        buffer.read_into(bytearray(8), transport="ibverbs").get(timeout=30)


def test_the_library_is_not_opened():
    done = subprocess.run([sys.executable, "-c", LIBRARIES], capture_output=True, text=True, timeout=30)
    assert (done.stdout, done.stderr) == ("False\n", "")
