"""Deadlines: how calls inherit them, and which receivers have not answered in time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh_core._common.context import current_message
from mesh_core._common.errors import ActorTimeout

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh_core._futures.awaited import Awaited
    from mesh_core._meshes.outcomes import Addressee
    from mesh_core._native import Message
    from mesh_core._process.process import Process

_LEAST_S = 0.001
_NAMED = 8
# To name the hosts, at most this many ranks are examined.
_LOOKED_AT = 1000


def inherited(limit: float | None) -> float | None:
    """Return the time limit of a call: its own, or what is left of the deadline of the message being handled, whichever is less."""
    message = current_message()
    left = None if message is None else message.left
    if left is None:
        return limit
    # A call whose time has run out is sent anyway: it times out like any other.
    left = max(left, _LEAST_S)
    return left if limit is None else min(limit, left)


def late(process: Process, call: Awaited, owner: Any) -> tuple[str, dict[str, Any]]:
    """Describe which receivers have not answered: text for the error, and the error's fields."""
    who: Addressee | None = getattr(owner, "_who", None)
    missing = call.missing()
    if who is None or not missing:
        return "", {}
    points = [who.point(index) for index in missing[:_NAMED]]
    ranks = ", ".join(str(point.rank) for point in points)
    waits_here: Callable[[], bool] | None = getattr(call, "waits_here", None)
    if waits_here is not None and waits_here():
        those = f"rank {ranks}" if len(missing) == 1 else f"some of {len(missing)} ranks"
        text = f"it was not sent, since actor {who.name!r} on {those} lags behind"
    elif len(missing) == 1:
        text = f"actor {who.name!r} on rank {ranks}, host {who.host(missing[0])}, has not answered"
    else:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        text = f"actors {who.name!r} on ranks {ranks}{more}, {_hosts(missing, who)}, have not answered"
    from mesh_core._native import locate
    from mesh_core._system.process_state import is_stopped

    # A message that an extension sends to one process names no mesh.
    for index in [] if who.mesh is None else missing[:_NAMED]:
        first = who.location.addr(who.mesh._procs_id, who.view.rank_at(index))
        pid = process.runtime.pid_of(*locate(process.runtime, *first))
        if is_stopped(pid):
            text += (
                f"; process {pid} of rank {who.point(index).rank} is stopped by a signal; SIGCONT resumes it"
            )
    return text, {"actor": who.name, "rank": points[0].rank, "host": who.host(missing[0])}


def _hosts(missing: list[int], who: Addressee) -> str:
    # A few names are enough; counting the hosts of a large mesh is not worth the time.
    names = list(dict.fromkeys(who.host(index) for index in missing[:_LOOKED_AT]))
    if len(names) == 1:
        return f"host {names[0]}"
    return f"hosts {', '.join(names[:_NAMED])}{' and others' if len(names) > _NAMED else ''}"


def expired(message: Message) -> ActorTimeout:
    """Return the error of a message whose deadline has passed."""
    return ActorTimeout(
        f"the deadline of {message.name} passed before it returned; it was not run to its end"
    )
