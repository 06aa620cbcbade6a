"""The transport `ibverbs` on pyverbs, the Python bindings of rdma-core: for sites that have those, and the other end of the native one.

Both speak the same handles and the same handshake (`_wire.py`), and share nothing else.
"""

from __future__ import annotations

from mesh_rdma._pyverbs._transport import IBVERBS

__all__ = ["IBVERBS"]
