"""Run blocking work for a coroutine in a thread that ends before the coroutine continues."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

R = TypeVar("R")


async def in_thread(work: Callable[[], R], name: str, interrupt: Callable[[], object]) -> R:
    """Run ``work`` in a new thread, and return or raise its outcome.

    If the coroutine is cancelled, ``interrupt`` is called, which must make the work end soon. The cancellation is raised only
    when the thread has ended.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[R] = loop.create_future()

    def run() -> None:
        settle: Callable[[], None]
        try:
            settle = partial(done.set_result, work())
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            settle = partial(done.set_exception, error)
        with suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(settle)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    cancelled: asyncio.CancelledError | None = None
    try:
        while not done.done():
            try:
                await asyncio.wait([done])
            except asyncio.CancelledError as error:
                cancelled = error
                interrupt()
    finally:
        if not done.done():
            # The loop was stopped: leave nothing of the work behind.
            interrupt()
        thread.join()
    if cancelled is not None:
        done.exception()  # counts as retrieved
        raise cancelled
    return done.result()
