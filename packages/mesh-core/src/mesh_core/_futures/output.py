"""Let the console come up to a result: what an endpoint has printed or logged is shown before its result is seen (LOG-8).

The runtime knows whether anything of a call's processes is on its way. Only then is this imported. It is the script that waits,
for at most ``log_wait`` seconds; actors that call others do not.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mesh_core._futures.future import Future
    from mesh_core._native import Completion


def _to_show(future: Future[Any], limit: float) -> list[Completion]:
    from mesh_core._common.context import current_instance

    return future._catch_up(limit) if limit > 0 and current_instance() is None else []


def follow(future: Future[Any], timeout: float | None) -> None:
    """Wait until what was printed before the result of ``future`` is shown, though no longer than a result itself would be."""
    limit = future._process.settings.log_wait
    if timeout is not None:
        limit = min(limit, timeout)
    until = time.monotonic() + limit
    for waiting in _to_show(future, limit):
        waiting.wait(max(0.0, until - time.monotonic()), None, False)


async def follow_async(future: Future[Any]) -> None:
    """As :func:`follow`, on an event loop."""
    limit = future._process.settings.log_wait
    try:
        async with asyncio.timeout(limit):
            for waiting in _to_show(future, limit):
                await future._process.bridge().wait(waiting, heed=False)
    except TimeoutError:
        pass
