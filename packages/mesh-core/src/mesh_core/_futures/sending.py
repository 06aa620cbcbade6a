"""The result of sending a message that has no reply: awaiting it applies back-pressure."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

from mesh_core._common.errors import MeshError

if TYPE_CHECKING:
    from mesh_core._native import Deferral
    from mesh_core._process.process import Process


class Sending:
    """A message that is sent once its receivers have room; returned by ``broadcast``, ``send`` and ``Port.send``.

    Awaiting it waits until the message has left, so a coroutine sends no faster than its receivers handle messages. You may
    ignore it: the message is sent anyway. In another process it is ``None``. On a plain thread, sending blocks until then, so the message has left when it
    returns.

    >>> import asyncio
    >>> from mesh_core import Actor, endpoint, this_host
    >>> class Log(Actor):
    ...     def __init__(self):
    ...         self.size = 0
    ...     @endpoint
    ...     def write(self, data: bytes) -> None:
    ...         self.size += len(data)
    ...     @endpoint
    ...     def written(self) -> int:
    ...         return self.size
    >>> async def produce(log):
    ...     for _ in range(1_000):
    ...         await log.write.broadcast(bytes(1_000))
    ...     return await log.written.call_one()
    >>> with this_host().spawn_procs() as procs:
    ...     asyncio.run(produce(procs.spawn("log", Log)))
    1000000
    """

    __slots__ = ("_deferral", "_process", "_what")

    def __init__(self, process: Process | None, deferral: Deferral | None, what: str) -> None:
        self._process = process
        self._deferral = deferral
        self._what = what

    def done(self) -> bool:
        """Whether the message was sent or given up."""
        return self._deferral is None or self._deferral.done()

    def cancel(self) -> bool:
        """Give the message up; false if it was sent. Cancelling a task that awaits it does the same."""
        return self._deferral is not None and self._deferral.cancel()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in ("get", "result", "then", "exception"):
                raise AttributeError(
                    f"this message has no reply, so there is no {name}(). Use call() or call_one() to get a reply, "
                    "or await this to wait until the message is sent."
                )
            raise AttributeError(f"'Sending' object has no attribute {name!r}")

    def __await__(self) -> Generator[Any, None, None]:
        if self._deferral is not None:
            yield from self._wait(self._deferral).__await__()

    async def _wait(self, deferral: Deferral) -> None:
        import asyncio

        from mesh_core._futures.deadlocks import refused

        process = self._process
        assert process is not None
        if not deferral.done():
            error = refused(process, deferral, None, lambda: self._what, awaited=True)
            if error is not None and deferral.cancel():
                raise error
            try:
                await process.bridge().wait(deferral)
            except asyncio.CancelledError:
                deferral.cancel()
                raise
        if not deferral.sent():
            if deferral.given_up():
                raise asyncio.CancelledError(f"{self._what} was cancelled before it was sent")
            raise MeshError(f"{self._what} was not sent: the runtime has been shut down")

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        # An endpoint may end with `return others.step.broadcast(batch)`.
        return _nothing, ()

    def __repr__(self) -> str:
        if self._deferral is None:
            return f"<{self._what}: sent>"
        state = "sent" if self._deferral.sent() else "given up" if self._deferral.done() else "waiting"
        return f"<{self._what}: {state}>"


def _nothing() -> None:
    """Return what a message that is being sent is to other processes: nothing."""


SENT: Final = Sending(None, None, "message")
"""The result of a send that did not have to wait."""
