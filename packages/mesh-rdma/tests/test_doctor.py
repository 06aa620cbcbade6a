"""`mesh doctor` tries the transports."""

from pathlib import Path

import pytest

from mesh_core.testing import DoctorCheckConformance
from mesh_rdma._doctor import RDMA


class TestCheck(DoctorCheckConformance):
    plugin = RDMA
    distribution = "mesh-rdma"


def test_says_for_each_transport_what_it_does():
    said = [finding.detail for finding in RDMA.create()()]
    assert said[:2] == [
        "shm: reads and writes, without the owner's processor",
        "tcp: reads and writes, atomic operations",
    ]


@pytest.mark.skipif(Path("/sys/class/infiniband").exists(), reason="the kernel has InfiniBand")
def test_a_machine_without_rdma_devices_is_well():
    (said,) = (each for each in RDMA.create()() if each.detail.startswith("ibverbs"))
    assert said.status == "ok"
    assert "no RDMA device" in said.detail
