"""Why a transport is used, and others are not."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_rdma._buffer import RDMABuffer, handle_of
from mesh_rdma._here import joined


@dataclass(frozen=True)
class Explanation:
    """The transports that would be tried for a buffer, in order, and why the others would not."""

    candidates: tuple[str, ...]
    """The transports that would be tried: the first is used, the next if that fails."""
    passed: dict[str, str]
    """The others, with the reason."""

    def __str__(self) -> str:
        chosen = ", then ".join(self.candidates) or "no transport"
        return "; ".join([chosen, *(f"not {name}: {reason}" for name, reason in self.passed.items())])


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
