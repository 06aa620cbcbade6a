"""Notifications of the ends of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesh_core._common.current import current
from mesh_core._extensions.events import ProcEnd
from mesh_core._native import incarnation, locate

if TYPE_CHECKING:
    from mesh_core import ActorMesh, ProcMesh
    from mesh_core._native import Lost


class Watch:
    """Returned by :func:`watch`."""

    def __init__(self, mesh: Any, callback: Callable[[ProcEnd], object]) -> None:
        self._mesh = mesh
        self._callback = callback
        import asyncio

        from mesh_core._hosting.actor_loops import ActorLoop

        # A coroutine's callback may use what belongs to its event loop.
        self._loop = here if isinstance(here := asyncio._get_running_loop(), ActorLoop) else None
        self._lock = threading.Lock()
        runtime, addrs = (
            mesh._process.runtime,
            [mesh._location.addr(mesh._procs_id, rank) for rank in mesh._view],
        )
        self._left = {
            rank: (incarnation(runtime, *addr[:2]), locate(runtime, *addr))
            for rank, addr in zip(mesh._view, addrs, strict=True)
        }
        """By rank of the living processes: the incarnation being watched, and its address."""
        self._target = mesh._location.target(mesh._procs_id, mesh._view)

    def cancel(self) -> None:
        """Stop the notifications."""
        with self._lock:
            self._left.clear()
        current().watches.discard(self)

    def _ended(self, procs_id: int, rank: int, lost: Lost) -> None:
        """Report the end of a process, if it is watched and was not reported before."""
        mesh = self._mesh
        within = mesh._location.rank_of(mesh._procs_id, procs_id, rank)
        if within is None:
            return
        rank = within
        with self._lock:
            if rank not in self._left:
                return
            life, address = self._left.pop(rank)
        point = mesh._root.point_of(rank)
        failure = None
        if not lost.orderly:
            from mesh_core._failures.failure import of_loss

            host = mesh._location.name_now(mesh._process.runtime, mesh._procs_id, rank)
            failure = of_loss(lost, mesh, name=mesh._name, host=host, point=point, rank=rank)
        end = ProcEnd(address=address, point=point, mesh=mesh, failure=failure, incarnation=life)
        if self._loop is None or self._loop.is_here:
            self._callback(end)
        else:
            self._loop.soon(self._callback, end)

    @property
    def living(self) -> int:
        """How many processes are still watched."""
        return len(self._left)


def watch(mesh: ProcMesh | ActorMesh[Any], callback: Callable[[ProcEnd], object]) -> Watch:
    """Call ``callback`` with a :class:`ProcEnd` once for each process of the mesh, when it ends.

    A process that already ended is reported soon after the call. The callback runs on the event loop of the coroutine that calls this; otherwise on
    a runtime thread, or in a worker on its own event loop. It must return quickly, and its exceptions are logged. Processes that end in order are
    reported too, with ``failure`` set to ``None``.
    """
    if not callable(callback):
        raise TypeError(f"callback must be callable, got {callback!r}")
    if not (hasattr(mesh, "_procs_id") and hasattr(mesh, "_view")):
        raise TypeError(f"watch() takes a ProcMesh or an ActorMesh, got {type(mesh).__name__}")
    process = current()
    made = Watch(mesh, callback)
    process.watches.add(made)
    return made
