"""Memory reached by UCX."""

from mesh_rdma._native_transports import UCX
from mesh_rdma.testing import TransportConformance


class TestUcx(TransportConformance):
    plugin = UCX
    distribution = "mesh-rdma"
