"""What the package offers to Mesh."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from mesh_core.plugins import ProbeResult, hookimpl
from mesh_rdma import Transport, TransportCapabilities, TransportPlugin


def _probe() -> ProbeResult[TransportCapabilities]:
    """Looked for, not imported: an agent takes a second to make, and is made when somebody transfers."""
    if find_spec("nixl_cu12") is None:
        return ProbeResult.no("NIXL is not installed", remedy="pip install --no-deps nixl-cu12")
    can = TransportCapabilities(copies=True, atomics=False, remote=False, one_sided=False)
    return ProbeResult.yes(can)


def _create() -> Transport:
    from mesh_nixl._transport import NixlTransport

    return NixlTransport()


NIXL = TransportPlugin(
    name="nixl", api_version=1, create=_create, probe=_probe, summary="NVIDIA's NIXL, over UCX"
)


@hookimpl
def mesh_register_transports() -> Iterable[TransportPlugin]:
    """Offer it."""
    yield NIXL
