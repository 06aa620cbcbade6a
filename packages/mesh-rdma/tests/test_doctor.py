"""`mesh doctor` tries the transports."""

from mesh_core.testing import DoctorCheckConformance
from mesh_rdma._doctor import RDMA


class TestCheck(DoctorCheckConformance):
    plugin = RDMA
    distribution = "mesh-rdma"


def test_says_for_each_transport_what_it_does():
    said = [finding.detail for finding in RDMA.create()()]
    assert [each for each in said if each.startswith(("shm:", "tcp:"))] == [
        "shm: reads and writes, without the owner's processor",
        "tcp: reads and writes, atomic operations",
    ]
