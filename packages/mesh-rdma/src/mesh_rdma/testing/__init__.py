"""The conformance suite that an author of a transport subclasses, and pytest runs.

>>> from mesh_core.plugins import PluginManager
>>> from mesh_rdma import TRANSPORTS
>>> from mesh_rdma.testing import TransportConformance
>>> class TestShm(TransportConformance):
...     plugin = PluginManager().get(TRANSPORTS, "shm")  # your descriptor
...     distribution = "mesh-rdma"
>>> TestShm().test_installed_under_its_name()
"""

from mesh_core.testing import rewrite_asserts
from mesh_rdma._gpu import GpuMemory
from mesh_rdma._gpu import missing as missing_gpu

rewrite_asserts(
    *(
        f"mesh_rdma.testing.{each}"
        for each in ("_ends", "_hostile", "_lifetimes", "_limits", "_memory", "_stress", "_suite")
    )
)

# Rewritten as they are imported.
from mesh_rdma.testing._stress import TransportStress  # noqa: E402
from mesh_rdma.testing._suite import TransportConformance  # noqa: E402

__all__ = ["GpuMemory", "TransportConformance", "TransportStress", "missing_gpu"]
