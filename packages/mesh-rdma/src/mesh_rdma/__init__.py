"""Memory that other processes read and write without the owner's Python: RDMABuffer and its transports.

>>> from mesh_rdma import RDMABuffer
>>> weights = bytearray(b"some weights")
>>> buffer = RDMABuffer(weights)  # a few hundred bytes when pickled: send it to any process of this host or job
>>> copy = bytearray(buffer.size())
>>> buffer.read_into(copy).get(timeout=30)
>>> copy
bytearray(b'some weights')
>>> _ = buffer.drop()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_rdma._action import RDMAAction
    from mesh_rdma._buffer import RDMABuffer
    from mesh_rdma._contract import (
        TRANSPORTS,
        Copy,
        Exported,
        Peer,
        Transport,
        TransportCapabilities,
        TransportPlugin,
        Watch,
    )
    from mesh_rdma._errors import (
        BufferGone,
        HandleRefused,
        InvalidTransfer,
        OutcomeUnknown,
        PartsFailed,
        PublicationGone,
        RDMAError,
        RDMATimeout,
        TransportUnavailable,
        VersionUnavailable,
    )
    from mesh_rdma._explain import explain
    from mesh_rdma._explanation import Explanation
    from mesh_rdma._pool import empty
    from mesh_rdma._publication._layout import Piece
    from mesh_rdma._publication._publication import Publication
    from mesh_rdma._publication._reader import PublicationReader
    from mesh_rdma._publication._server import ReaderFailure
    from mesh_rdma._publication._weights import Weights
    from mesh_rdma._transports import TransportStatus, get_rdma_backend, is_ibverbs_available, transports
    from mesh_rdma._trees._broadcast import broadcast
    from mesh_rdma._trees._gather import gather

__all__ = [
    "TRANSPORTS",
    "BufferGone",
    "Copy",
    "Explanation",
    "Exported",
    "HandleRefused",
    "InvalidTransfer",
    "OutcomeUnknown",
    "PartsFailed",
    "Peer",
    "Piece",
    "Publication",
    "PublicationGone",
    "PublicationReader",
    "RDMAAction",
    "RDMABuffer",
    "RDMAError",
    "RDMATimeout",
    "ReaderFailure",
    "Transport",
    "TransportCapabilities",
    "TransportPlugin",
    "TransportStatus",
    "TransportUnavailable",
    "VersionUnavailable",
    "Watch",
    "Weights",
    "__version__",
    "broadcast",
    "empty",
    "explain",
    "gather",
    "get_rdma_backend",
    "is_ibverbs_available",
    "transports",
]

# Imported when they are first named: most of the time goes into the native half, and into dataclasses.
_LATER = {
    "Piece": "mesh_rdma._publication._layout",
    "Publication": "mesh_rdma._publication._publication",
    "PublicationReader": "mesh_rdma._publication._reader",
    "ReaderFailure": "mesh_rdma._publication._server",
    "Weights": "mesh_rdma._publication._weights",
    "PublicationGone": "mesh_rdma._errors",
    "VersionUnavailable": "mesh_rdma._errors",
    "BufferGone": "mesh_rdma._errors",
    "Explanation": "mesh_rdma._explanation",
    "HandleRefused": "mesh_rdma._errors",
    "InvalidTransfer": "mesh_rdma._errors",
    "OutcomeUnknown": "mesh_rdma._errors",
    "PartsFailed": "mesh_rdma._errors",
    "RDMAAction": "mesh_rdma._action",
    "RDMABuffer": "mesh_rdma._buffer",
    "RDMAError": "mesh_rdma._errors",
    "RDMATimeout": "mesh_rdma._errors",
    "TRANSPORTS": "mesh_rdma._contract",
    "Copy": "mesh_rdma._contract",
    "Exported": "mesh_rdma._contract",
    "Peer": "mesh_rdma._contract",
    "Transport": "mesh_rdma._contract",
    "TransportPlugin": "mesh_rdma._contract",
    "Watch": "mesh_rdma._contract",
    "TransportCapabilities": "mesh_rdma._contract",
    "TransportStatus": "mesh_rdma._transports",
    "TransportUnavailable": "mesh_rdma._errors",
    "broadcast": "mesh_rdma._trees._broadcast",
    "empty": "mesh_rdma._pool",
    "explain": "mesh_rdma._explain",
    "gather": "mesh_rdma._trees._gather",
    "get_rdma_backend": "mesh_rdma._transports",
    "is_ibverbs_available": "mesh_rdma._transports",
    "transports": "mesh_rdma._transports",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("mesh-rdma")
    elif name in _LATER:
        import importlib

        value = getattr(importlib.import_module(_LATER[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
