"""The transports of this process."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_rdma._contract import TransportCapabilities
from mesh_rdma._here import joined

_ONE_PIECE = frozenset({"ibverbs"})
"""Native ones that offer memory in one piece only."""


@dataclass(frozen=True)
class TransportStatus:
    """The state of a transport in this process."""

    name: str
    capabilities: TransportCapabilities
    reason: str | None
    """Why it does not work here; ``None`` if it does."""

    @property
    def available(self) -> bool:
        """Whether it works here."""
        return self.reason is None


def transports() -> list[TransportStatus]:
    """Return the installed transports, with whether each works in this process.

    >>> from mesh_rdma import transports
    >>> [each.name for each in transports() if each.name in ("shm", "tcp")]
    ['shm', 'tcp']
    """
    return [
        TransportStatus(
            name, TransportCapabilities(copies, atomics, remote, one_sided, name not in _ONE_PIECE), reason
        )
        for name, copies, atomics, remote, one_sided, reason in joined().transports()
    ]


def is_ibverbs_available() -> bool:
    """Return whether this process can transfer by RDMA devices, over InfiniBand or RoCE. :func:`transports` says why not.

    >>> from mesh_rdma import is_ibverbs_available
    >>> is_ibverbs_available() in {True, False}
    True
    """
    return any(each.name == "ibverbs" and each.available for each in transports())


def get_rdma_backend() -> str:
    """Return the best transport between hosts that this process has: ``"ibverbs"``, else another one, else ``"none"``.

    The transport of a buffer depends on both ends: see :attr:`RDMABuffer.backend`.

    >>> from mesh_rdma import get_rdma_backend, transports
    >>> get_rdma_backend() in {"none", *(each.name for each in transports())}
    True
    """
    reach = [each for each in transports() if each.available and each.capabilities.remote]
    # Those that leave the owner's processor alone first, as in the choice of an owner.
    reach.sort(key=lambda each: not each.capabilities.one_sided)
    return reach[0].name if reach else "none"
