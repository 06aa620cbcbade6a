"""The conformance suite over kinds of memory: of a GPU there, here, and at both ends, by each transport that carries it."""

import os

import pytest

from mesh_rdma._cuda import VARIABLE
from mesh_rdma._native_transports import CUDA, SHM, TCP
from mesh_rdma.testing import TransportConformance, TransportStress

# The first is complete. On the stand-in the others repeat it one test in four, each with another of them; a GPU has all.
repeated = pytest.mark.sampled(4 if VARIABLE in os.environ else 1)


class TestMapped(TransportConformance):
    """CUDA IPC, into memory of the processor."""

    plugin = CUDA
    distribution = "mesh-rdma"
    memory_there = "gpu"


@repeated
class TestMappedBetweenGpus(TransportConformance):
    """CUDA IPC, from memory of a GPU to memory of a GPU."""

    plugin = CUDA
    distribution = "mesh-rdma"
    memory_there = "gpu"
    memory_here = "gpu"


@repeated
class TestStagedByItsOwner(TransportConformance):
    """Over TCP: the owner's threads copy it through pinned memory."""

    plugin = TCP
    distribution = "mesh-rdma"
    memory_there = "gpu"


@repeated
class TestStagedAtBothEnds(TransportConformance):
    plugin = TCP
    distribution = "mesh-rdma"
    memory_there = "gpu"
    memory_here = "gpu"


@repeated
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
