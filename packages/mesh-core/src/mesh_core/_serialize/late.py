"""Values of a message that are not there yet when it is read."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

from mesh_core._common.errors import MeshError


class NotYet(MeshError):
    """Raised by a function that rebuilds an object, where the object cannot be made yet: on an event loop, which must not block.

    An actor whose coroutine the message is for awaits ``arrival`` and reads the message again; other actors of its process go on.
    On a thread without a running event loop the function should wait instead. Where a message cannot be read again later,
    as with the arguments of a constructor, its sender gets this error: have the text say so.

    >>> from mesh_core import Promise
    >>> from mesh_core.extensions import NotYet
    >>> parcel = Promise("a parcel")
    >>> def rebuild():
    ...     if not parcel.future.done():
    ...         raise NotYet("a parcel can be an argument of endpoints only", parcel.future)
    ...     return parcel.future.get()
    >>> parcel.set_result("socks")
    True
    >>> rebuild()
    'socks'
    """

    def __init__(self, message: str, arrival: Awaitable[Any] | None = None) -> None:
        super().__init__(message)
        self.arrival = arrival

    def __reduce__(self) -> Any:
        return NotYet, (str(self),)


def arrival_of(error: BaseException) -> Awaitable[Any] | None:
    """What is to be awaited before a message can be read that has raised this, if that is all there is to it."""
    return error.arrival if isinstance(error, NotYet) else None
