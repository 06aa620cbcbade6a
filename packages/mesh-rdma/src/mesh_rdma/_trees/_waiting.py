"""To wait in a coroutine for what is done elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from mesh_core import Future, Promise
from mesh_rdma._here import engine
from mesh_rdma._native import Handle, Memory, Operation

R = TypeVar("R")


async def arrival(future: Future[R]) -> R:
    """Return a future's result. If the coroutine is cancelled, so is the future.

    Not ``await``: in the script that also raises failures of what has nothing to do with the future.
    """
    if not future.done():
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        future.add_done_callback(lambda _: _wake(loop, arrived))
        try:
            await arrived.wait()
        except asyncio.CancelledError:
            future.cancel()
            raise
    error = future.exception()
    if error is not None:
        raise error
    return future.get()


async def read(handle: Handle, memory: Memory, transport: str | None) -> None:
    """Fill memory. If the coroutine is cancelled, it ends when nobody writes there any longer."""
    operation = engine().read(handle, memory, 0, None, transport)
    if operation is None:
        return
    ended = _end_of(operation)
    cancelled: asyncio.CancelledError | None = None
    while not ended.is_set():
        try:
            await ended.wait()
        except asyncio.CancelledError as error:
            operation.cancel()
            cancelled = error
    if cancelled is not None:
        raise cancelled
    operation.result()


def _end_of(operation: Operation) -> asyncio.Event:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    promise: Promise[Any] = Promise("", finish=lambda _status: None)
    operation.finishes(promise.native_handle())
    promise.future.add_done_callback(lambda _: _wake(loop, ended))
    return ended


def _wake(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    # Where the loop has ended, nobody waits.
    if not loop.is_closed():
        loop.call_soon_threadsafe(event.set)
