"""Errors of transfers."""

from __future__ import annotations

import errno
import sys
from collections.abc import Mapping

from mesh_core import MeshError


class RDMAError(MeshError):
    """Base class of the errors of transfers.

    >>> from mesh_rdma import RDMABuffer, RDMAError
    >>> buffer = RDMABuffer(bytearray(8))
    >>> _ = buffer.drop()
    >>> try:
    ...     buffer.read_into(bytearray(8)).get(timeout=30)
    ... except RDMAError as error:
    ...     print(type(error).__name__, "-", error)
    BufferGone - the buffer was dropped by its owner
    """


class InvalidTransfer(RDMAError, ValueError):
    """Invalid arguments: out of bounds, unaligned, read-only, memory that cannot be transferred, or not a handle."""


class BufferGone(RDMAError, ConnectionError):
    """The memory is no longer offered: dropped, or gone itself, or its owner has ended or was restarted. The message says which."""


class HandleRefused(RDMAError, PermissionError):
    """The owner does not recognise the handle, or the access goes beyond what the owner offers."""


class RDMATimeout(RDMAError, TimeoutError):
    """The transfer did not finish within its ``timeout``. The destination may have been written in part."""


class TransportUnavailable(RDMAError, ConnectionError):
    """No transport that both ends have can reach the owner; the message gives the reason for each."""


class OutcomeUnknown(RDMAError, ConnectionError):
    """The connection was lost after an atomic operation had been sent: whether it was executed is unknown."""


class VersionUnavailable(RDMAError, LookupError):
    """A publication does not have the requested version; the message lists those that it has."""


class PublicationGone(RDMAError, ConnectionError):
    """The owner of a publication has closed it, or has ended."""


class PartsFailed(RDMAError, ConnectionError):
    """Some ranks of a broadcast, or some pieces of a gather, have failed.

    >>> from mesh_rdma import PartsFailed, RDMABuffer, gather
    >>> pieces = [RDMABuffer(bytearray(b"one"))]
    >>> _ = pieces[0].drop()
    >>> try:
    ...     gather(pieces).get(timeout=30)
    ... except PartsFailed as error:
    ...     print(error.failures)
    {0: 'the buffer was dropped by its owner'}
    """

    def __init__(self, message: str = "", *, failures: Mapping[int, str] | None = None) -> None:
        super().__init__(message)
        self.failures: dict[int, str] = dict(failures or {})
        """The reasons, by the number of the rank or piece. All other ranks of a broadcast have all bytes; of a gather, whose pieces are read
        in one batch for each owner, these are the pieces of the batch that failed first."""


KINDS: dict[str, type[RDMAError]] = {
    "invalid": InvalidTransfer,
    "gone": BufferGone,
    "refused": HandleRefused,
    "timed_out": RDMATimeout,
    "cancelled": RDMAError,
    "transport": TransportUnavailable,
    "unknown": OutcomeUnknown,
    "no_transport": TransportUnavailable,
    "forked": RDMAError,
}
"""By the engine's names."""


def of_native(kind: str, message: str) -> RDMAError:
    """Make the exception for an error of the engine. If a transport of another package has raised one, that is its cause."""
    error = KINDS.get(kind, RDMAError)(message)
    if (
        kind in ("transport", "no_transport")
        and (outside := sys.modules.get("mesh_rdma._outside")) is not None
    ):
        error.__cause__ = outside.cause_of(message)
    return error


def advice(error: BaseException) -> str:
    """Return a remedy if there are no more descriptors; an empty text for other errors."""
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return ". Raise the limit of open files of this process (ulimit -n), or close some."
    return ""
