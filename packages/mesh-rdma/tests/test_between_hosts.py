"""tcp between hosts: as `mesh_rdma.testing` has it of every transport, and as it is told where it cannot be.

Hosts that are truly apart, and networks that fail, are in `tests/network/test_transfers.py`.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mesh_core import Credentials
from mesh_rdma import RDMABuffer, TransportUnavailable, explain

SUITE = Path(__file__).with_name("member_suite.py")


def own_address():
    """This machine's address on the way to others."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(("198.51.100.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("this machine has no address but that of its loopback interface")
        return asked.getsockname()[0]


@pytest.mark.full
@pytest.mark.slow
def test_the_suite_passes_encrypted(tmp_path):
    job = Credentials.new(tmp_path / "job")
    environment = {
        **os.environ, "MESH_TEST_ADDRESS": own_address(), "MESH_TEST_CREDENTIALS": str(job.host_path),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(SUITE)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None and int(passed[1]) > 15, done.stdout


def test_an_owner_elsewhere_without_credentials_is_out_of_reach():
    make, (handle,) = RDMABuffer(bytearray(5)).__reduce__()
    changed = bytearray(handle)
    # The network of its loopback interface is another, as in a container.
    changed[changed.index(b"\x03tcp") + 4 + 2 + 2] ^= 0xFF
    buffer = make(bytes(changed))
    why = explain(buffer, transport="tcp").passed["tcp"]
    assert why.startswith(
        "its owner is on another host or in another network namespace, and listens on its loopback"
    )
    assert "belongs to no job of several hosts" in why
    with pytest.raises(TransportUnavailable, match="belongs to no job of several hosts"):
        buffer.read_into(bytearray(5), transport="tcp").get(timeout=30)
