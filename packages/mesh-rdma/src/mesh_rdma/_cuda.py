"""Which CUDA driver library is opened. Nothing is opened or imported for it here."""

from __future__ import annotations

import os

VARIABLE = "MESH_RDMA_CUDA_LIBRARY"
REMEDY = (
    "install NVIDIA's driver, 470 or later (in a container, run it with the NVIDIA Container Toolkit: docker run --gpus all), and "
    "look whether nvidia-smi lists the GPU"
)


def library() -> str | None:
    """Return the path of a library to use instead of the system's libcuda.so.1, which only tests set: the stand-in."""
    return os.environ.get(VARIABLE) or None
