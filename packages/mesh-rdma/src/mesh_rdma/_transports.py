"""The transports of this process."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_rdma._contract import TransportCapabilities
from mesh_rdma._here import engine


@dataclass(frozen=True)
class TransportStatus:
    """A transport, as it stands in this process."""

    name: str
    capabilities: TransportCapabilities
    reason: str | None
    """Why it does not work here; ``None`` if it does."""

    @property
    def available(self) -> bool:
        """Whether it works here."""
        return self.reason is None


def transports() -> list[TransportStatus]:
    """Return the transports that are installed, each tried in this process.

    >>> from mesh_rdma import transports
    >>> [each.name for each in transports() if each.name in ("shm", "tcp")]
    ['shm', 'tcp']
    """
    return [
        TransportStatus(name, TransportCapabilities(*capabilities), reason)
        for name, *capabilities, reason in engine().transports()
    ]
