"""Which driver of CUDA is opened. Nothing is opened or imported for it here."""

from __future__ import annotations

import os

VARIABLE = "MESH_RDMA_CUDA_LIBRARY"
REMEDY = (
    "install NVIDIA's driver, 470 or later (in a container, run it with the NVIDIA Container Toolkit: docker run --gpus all), and "
    "look whether nvidia-smi lists the GPU"
)


def library() -> str | None:
    """Return the path of another library than the system's libcuda.so.1, which only tests name: the stand-in for it."""
    return os.environ.get(VARIABLE) or None
