"""The two engines of `ibverbs` against each other: this process has one of them, and the owners of memory have the other."""

import os

import pytest

from mesh_rdma._native_transports import IBVERBS as NATIVE
from mesh_rdma._pyverbs import IBVERBS as PYVERBS
from mesh_rdma.testing import TransportConformance

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("SOFT_ROCE" not in os.environ, reason="there are no RDMA devices"),
]

HERE = os.environ.get("MESH_RDMA_VERBS") or "native"


class TestConformance(TransportConformance):
    plugin = {"native": NATIVE, "pyverbs": PYVERBS}[HERE]
    distribution = "mesh-rdma"
    owners = {"native": "pyverbs", "pyverbs": "native"}[HERE]
