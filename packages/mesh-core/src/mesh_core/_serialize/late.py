"""Values in a message that are not available yet when it is loaded."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MeshError

if TYPE_CHECKING:
    from mesh_core._native import Message


class NotYet(MeshError):
    """Raised by a function that rebuilds an object if it is not available yet, on an event loop, which must not block.

    If the message is for an actor's coroutine, the actor awaits ``arrival`` and loads the message again; meanwhile other
    actors of its process continue.
    The same holds for the arguments of its constructor. On a thread without a running event loop the function should wait instead. If a
    message cannot be loaded again, such as one to an extension, its sender gets this error: have the text say so.

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
    """Return what to await before a message that raised this error can be loaded; ``None`` for other errors."""
    return error.arrival if isinstance(error, NotYet) else None


async def load_again(message: Message, error: BaseException) -> Any:
    """Load a message again once what it contains has arrived; raise ``error`` if it does not wait for anything."""
    from mesh_core._serialize import loads

    while True:
        arrival = arrival_of(error)
        if arrival is None or not isinstance(error, MeshError):
            raise error
        data, buffers = error._loaded_from or (message.raw()[0], [])
        await arrival
        try:
            return loads(data, buffers)
        except MeshError as again:
            error = again
