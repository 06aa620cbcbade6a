"""Waits that can never end are refused when they begin.

WAIT-1: an actor that handles one message at a time does not wait for its own mailbox while it handles one.
WAIT-2: the thread of an event loop does not block for an answer that this loop has to give.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MeshError

if TYPE_CHECKING:
    from mesh_core._futures.awaited import Coming
    from mesh_core._process.process import Process


def refused(
    process: Process, call: Coming, owner: Any, describe: Callable[[], str], *, awaited: bool
) -> MeshError | None:
    """Return the error of a wait that can never end; ``None`` for other waits. Called in processes that host actors."""
    actor_host = process._actor_host
    if actor_host is None or not call.is_local():
        return None
    actor = actor_host.actors.get(call.actor)
    if awaited:
        own = actor is not None and actor.is_handled_here()
    else:
        own = actor is not None and actor.is_thread(threading.get_ident())
    if own:
        assert actor is not None
        return MeshError(
            f"deadlock: actor {actor.instance.name!r} is waiting for its own endpoint: {describe()} would wait "
            "forever, because an actor handles one message at a time. Call the method itself "
            "(self.method(...)), do not wait here, or mark the waiting endpoint "
            "@endpoint(concurrent=True)"
        )
    if not awaited and (actor_host.loop if actor is None else actor.loop).is_here:
        if actor is not None and not actor.needs_loop(getattr(owner, "_name", "")):
            return None
        return MeshError(
            f"deadlock: get() on {describe()} would block the thread of the event loop that has to answer it, and "
            "wait forever. Await it (`await future`), or make the endpoint a "
            "plain function, which runs on another thread"
        )
    return None
