"""Build the stand-in for CUDA's driver, which tests use on machines without a GPU. It is told by MESH_RDMA_CUDA_LIBRARY."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("stand_in.c")


def missing() -> str | None:
    """Return why it cannot be built here; none if it can."""
    return (
        None
        if shutil.which("cc")
        else "the stand-in for CUDA's driver needs a C compiler: apt-get install gcc"
    )


def build(folder: Path) -> Path:
    """Compile it into a folder, unless it is there, and return its path."""
    name = hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]
    library = folder / f"libcuda-stand-in-{name}.so"
    if not library.exists():
        made = folder / f"{name}.{os.getpid()}"
        options = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
        subprocess.run(["cc", *options, "-o", str(made), str(SOURCE)], check=True)
        made.rename(library)
    return library
