"""Whether UCX is switched on, and where its library may be. Nothing is opened or imported for it here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAME = "libucp.so.0"
REMEDY = (
    "switch it on with MESH_RDMA_UCX=1 where only those you trust reach this machine's ports; pip install libucx-cu12, or "
    "your system's package (Debian: libucx0), or name a libucp.so.0 with MESH_RDMA_UCX_LIBRARY"
)


def places() -> list[str] | None:
    """Return where to look for libucp, in this order; ``None`` where UCX is switched off."""
    if os.environ.get("MESH_RDMA_UCX", "").lower() not in ("1", "on", "true", "yes"):
        return None
    if named := os.environ.get("MESH_RDMA_UCX_LIBRARY"):
        # A folder, or the library itself.
        return [str(Path(named) / NAME) if Path(named).is_dir() else named]
    wheels = (Path(folder or ".") / "libucx" / "lib" / NAME for folder in sys.path)
    found = [str(path) for path in wheels if path.exists()]
    # By its name alone the system's loader finds it.
    found.append(NAME)
    others = [Path(each) / "lib" / NAME for each in (os.environ.get("HPCX_UCX_DIR"), "/opt/hpcx/ucx") if each]
    return found + [str(path) for path in others if path.exists()]
