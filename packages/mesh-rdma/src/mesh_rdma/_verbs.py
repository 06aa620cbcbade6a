"""Which engine is behind the transport `ibverbs` in this process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh_rdma._contract import TransportPlugin

VARIABLE = "MESH_RDMA_VERBS"
LIBRARY = "MESH_RDMA_VERBS_LIBRARY"


def library() -> str | None:
    """Return the path of another library than the system's libibverbs.so.1, which only tests name: one that has more."""
    return os.environ.get(LIBRARY) or None


def stand_in() -> TransportPlugin | None:
    """Return the engine that was asked for in place of the native one, if one was; it has the same name."""
    told = os.environ.get(VARIABLE, "")
    if told in {"", "native"}:
        return None
    if told != "pyverbs":
        from mesh_core import SettingsError

        raise SettingsError(
            f"{VARIABLE} must be 'native' or 'pyverbs', got {told!r}",
            setting="rdma_verbs",
            source=VARIABLE,
            value=told,
        )
    from mesh_rdma._pyverbs import IBVERBS

    return IBVERBS
