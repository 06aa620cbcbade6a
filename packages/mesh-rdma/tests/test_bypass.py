"""What moves large parts of mesh-core's messages, without a mesh: the contract's own suite."""

import pytest

from mesh_core.plugins import BYPASSES, PluginManager
from mesh_core.testing import BypassPluginConformance

pytestmark = pytest.mark.slow


class TestBypass(BypassPluginConformance):
    """By the transports of two processes of one host."""

    plugin = PluginManager().get(BYPASSES, "rdma")
    distribution = "mesh-rdma"
