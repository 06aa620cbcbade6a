"""Why a transport is used, and others are not."""

from __future__ import annotations

from mesh_rdma._buffer import RDMABuffer, handle_of
from mesh_rdma._explanation import Explanation
from mesh_rdma._here import joined


def explain(buffer: RDMABuffer, *, atomics: bool = False, transport: str | None = None) -> Explanation:
    """Return which transport reads and writes of a buffer, or its atomic operations, would use now, and why.

    >>> from mesh_rdma import RDMABuffer, explain
    >>> buffer = RDMABuffer(bytearray(8))
    >>> explain(buffer).candidates
    ('shm', 'tcp')
    >>> explain(buffer, atomics=True).passed["shm"]
    'it has no atomic operations'
    """
    candidates, passed = joined().explain(handle_of(buffer), atomics, transport)
    return Explanation(tuple(candidates), dict(passed))
