"""The transport `ibverbs` on pyverbs, the Python bindings of rdma-core: for sites that have those, and the other end of the native one.

Both speak the same handles and the same handshake (`_wire.py`), and share nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

from mesh_core.plugins import hookimpl
from mesh_rdma._contract import TransportPlugin
from mesh_rdma._pyverbs._transport import IBVERBS, NOT_ASKED_FOR
from mesh_rdma._verbs import stand_in

__all__ = ["IBVERBS"]


@hookimpl
def mesh_register_transports() -> Iterable[TransportPlugin]:
    """Offer it; where it was not asked for, its probe says how to."""
    yield stand_in() or NOT_ASKED_FOR
