"""The transports of this process."""

from __future__ import annotations

from dataclasses import dataclass

from mesh_rdma._here import engine


@dataclass(frozen=True)
class TransportCapabilities:
    """What a transport can do."""

    copies: bool
    """Reads and writes."""
    atomics: bool
    """``fetch_add`` and ``compare_and_swap``."""
    remote: bool
    """Reaches processes of other hosts."""
    one_sided: bool
    """Costs the owner's processor nothing."""


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
    """Return the transports that mesh-rdma knows, each tried in this process.

    >>> from mesh_rdma import transports
    >>> [each.name for each in transports()]
    ['shm', 'tcp']
    """
    return [
        TransportStatus(name, TransportCapabilities(*capabilities), reason)
        for name, *capabilities, reason in engine().transports()
    ]
