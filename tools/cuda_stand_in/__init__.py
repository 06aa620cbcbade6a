"""Build the stand-in for CUDA's driver, which tests use on machines without a GPU. It is told by MESH_RDMA_CUDA_LIBRARY.

Beside it libibverbs with devices that take its dma-bufs, told by MESH_RDMA_VERBS_LIBRARY.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("stand_in.c")
VERBS = Path(__file__).with_name("ibverbs.c")


def missing() -> str | None:
    """Return why it cannot be built here; none if it can."""
    return (
        None
        if shutil.which("cc")
        else "the stand-in for CUDA's driver needs a C compiler: apt-get install gcc"
    )


def build(folder: Path) -> Path:
    """Compile it into a folder, unless it is there, and return its path."""
    return _compiled(SOURCE, folder, "libcuda-stand-in")


def build_verbs(folder: Path) -> Path:
    """Compile libibverbs with dma-buf into a folder, unless it is there, and return its path."""
    # By this name the linker finds the real one where only the package without headers is installed.
    return _compiled(VERBS, folder, "libibverbs-dma-buf", "-l:libibverbs.so.1")


def _compiled(source: Path, folder: Path, kind: str, *linked: str) -> Path:
    name = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    library = folder / f"{kind}-{name}.so"
    if not library.exists():
        made = folder / f"{name}.{os.getpid()}"
        options = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
        subprocess.run(["cc", *options, "-o", str(made), str(source), *linked], check=True)
        made.rename(library)
    return library
