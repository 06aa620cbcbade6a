"""Large parts of mesh-core's messages between hosts, by the transports of this package."""

from __future__ import annotations

import os
from collections.abc import Iterable

from mesh_core.plugins import BypassPlugin, hookimpl

VARIABLE = "MESH_RDMA_MESSAGES"
"""With ``any``, messages may use every transport, including those that do not encrypt between hosts."""


def _create() -> object:
    from mesh_rdma._here import joined
    from mesh_rdma._native import bypass_of

    return bypass_of(joined(), os.environ.get(VARIABLE, "").lower() == "any")


@hookimpl
def mesh_register_bypasses() -> Iterable[BypassPlugin]:
    """The plugin of this package."""
    summary = "large parts of messages between hosts, by the best transport of the two processes"
    yield BypassPlugin(name="rdma", api_version=1, create=_create, summary=summary)
