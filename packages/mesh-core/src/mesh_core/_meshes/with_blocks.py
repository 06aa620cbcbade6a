"""The end of a ``with`` block over hosts or processes: stop everything, then raise what failed meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_core._common.errors import SupervisionError

if TYPE_CHECKING:
    from mesh_core._futures.future import Future
    from mesh_core._process.process import Process


def end(process: Process, stopped: Future[None], error: BaseException | None) -> None:
    """Wait for a stop; ``error`` is the block's own, which takes precedence."""
    failed: BaseException | None = None
    while not stopped.done():
        try:
            stopped.get()
        except SupervisionError as unheard:
            failed = failed or unheard
    _raise_unless(error, process, failed)


async def end_async(process: Process, stopped: Future[None], error: BaseException | None) -> None:
    """Like :func:`end`, for ``async with``."""
    failed: BaseException | None = None
    while not stopped.done():
        try:
            await stopped
        except SupervisionError as unheard:
            failed = failed or unheard
    _raise_unless(error, process, failed)


def _raise_unless(error: BaseException | None, process: Process, failed: BaseException | None) -> None:
    process.supervision.hear_spawns()
    # Everything that ended sent its notices before, so catching up does not take long.
    if error is None and (failed := failed or process.supervision.catch_up()) is not None:
        raise failed
