"""Has processes carry each operator of the global view out both as DTensor does and as they have kept it, and compare: for `bootstrap=`.

With a variable of their own in `env=` they would need a fork server of their own, which would import PyTorch once more.
"""

from __future__ import annotations

import os


def take() -> None:
    """Tell this process, before it joins a mesh."""
    os.environ["MESH_TENSOR_BOTH_ROADS"] = "1"
