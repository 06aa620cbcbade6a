"""Let the console come up to a result: what an endpoint has printed or logged is shown before its result is seen (LOG-8).

The runtime knows whether anything of a call's processes is on its way. Only then is this imported. It is the script that waits,
for at most ``log_wait`` seconds; actors that call others do not. A script that has joined a job asks the job's controller, which
collects the output.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mesh_core._native import Call, Completion
    from mesh_core._process.process import Process


def caught_up(process: Process, call: Call, limit: float, nth: int | None = None) -> list[Completion]:
    """Return what is done when the output of a call's processes has been shown, or after ``limit`` seconds."""
    if process.ask_shown is None:
        waiting = call.catch_up(limit, nth)
    else:
        procs = call.printed(nth)
        waiting = process.ask_shown(procs, limit) if procs else None
    return [] if waiting is None else [waiting]


def _to_show(catch_up: Callable[[float], list[Completion]], limit: float) -> list[Completion]:
    from mesh_core._common.context import current_instance

    return catch_up(limit) if limit > 0 and current_instance() is None else []


def follow(
    process: Process, catch_up: Callable[[float], list[Completion]], timeout: float | None = None
) -> None:
    """Wait until what was printed before a result is shown, though no longer than for the result itself."""
    limit = process.settings.log_wait
    if timeout is not None:
        limit = min(limit, timeout)
    until = time.monotonic() + limit
    for waiting in _to_show(catch_up, limit):
        waiting.wait(max(0.0, until - time.monotonic()), None, False)


async def follow_async(process: Process, catch_up: Callable[[float], list[Completion]]) -> None:
    """As :func:`follow`, on an event loop."""
    import asyncio

    limit = process.settings.log_wait
    try:
        async with asyncio.timeout(limit):
            for waiting in _to_show(catch_up, limit):
                await process.bridge().wait(waiting, heed=False)
    except TimeoutError:
        pass
