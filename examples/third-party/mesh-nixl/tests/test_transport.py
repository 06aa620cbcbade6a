"""The transport passes mesh-rdma's suite, from its installed package."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
from mesh_nixl import NIXL

from mesh_rdma import transports
from mesh_rdma.testing import TransportConformance

needs_nixl = pytest.mark.skipif(
    find_spec("nixl_cu12") is None, reason="NIXL is not installed: pip install --no-deps nixl-cu12"
)


@needs_nixl
@pytest.mark.slow
class TestNixl(TransportConformance):
    """The suite's forged handles hold NXL-1, its transfers that are given up NXL-2, and its memory that is dropped NXL-3."""

    plugin = NIXL
    distribution = "mesh-nixl"


USES_IT = """
import os, sys
from mesh_rdma import RDMABuffer
buffer = RDMABuffer(bytearray(b"hello"))
assert "nixl_cu12" not in sys.modules and "numpy" not in sys.modules
before = dict(os.environ)
copy = bytearray(5)
buffer.read_into(copy, transport="nixl", timeout=30).get(timeout=60)
assert "torch" not in sys.modules
print(copy.decode(), before == dict(os.environ))
"""


@needs_nixl
@pytest.mark.slow
def test_nixl_is_loaded_when_it_is_used_and_the_process_ends_well():
    done = subprocess.run(
        [sys.executable, "-c", USES_IT], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello True\n", "")


def test_without_nixl_the_probe_says_what_to_install(monkeypatch):
    monkeypatch.setattr("mesh_nixl._plugin.find_spec", lambda name: None)
    result = NIXL.probe()
    assert not result
    assert result.remedy == "pip install --no-deps nixl-cu12"


@needs_nixl
def test_it_is_one_of_the_transports():
    (found,) = (each for each in transports() if each.name == "nixl")
    assert found.available, found.reason
    can = found.capabilities
    assert (can.copies, can.atomics, can.remote, can.one_sided) == (True, False, False, False)
