"""The conformance suite over kinds of memory: of a GPU there, here, and at both ends, by each transport that carries it."""

from mesh_rdma._native_transports import CUDA, SHM, TCP
from mesh_rdma.testing import TransportConformance, TransportStress


class TestMapped(TransportConformance):
    """CUDA IPC, into memory of the processor."""

    plugin = CUDA
    distribution = "mesh-rdma"
    memory_there = "gpu"


class TestMappedBetweenGpus(TransportConformance):
    """CUDA IPC, from memory of a GPU to memory of a GPU."""

    plugin = CUDA
    distribution = "mesh-rdma"
    memory_there = "gpu"
    memory_here = "gpu"


class TestStagedByItsOwner(TransportConformance):
    """Over TCP: the owner's threads copy it through pinned memory."""

    plugin = TCP
    distribution = "mesh-rdma"
    memory_there = "gpu"


class TestStagedAtBothEnds(TransportConformance):
    plugin = TCP
    distribution = "mesh-rdma"
    memory_there = "gpu"
    memory_here = "gpu"


class TestStagedByItsReader(TransportConformance):
    """Memory of the processor there, copied by the kernel into pinned memory here, and from that to the GPU."""

    plugin = SHM
    distribution = "mesh-rdma"
    memory_here = "gpu"


class TestMappedStress(TransportStress):
    """Long, much, and ends at any moment; on the stand-in in whole runs only."""

    plugin = CUDA
    distribution = "mesh-rdma"
    memory_there = "gpu"
