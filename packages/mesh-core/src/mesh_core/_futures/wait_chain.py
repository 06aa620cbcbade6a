"""Why a call has no answer yet: what its receivers are doing, and what they wait for in turn.

The runtimes of their processes report this (``crates/mesh-runtime/src/waits.rs``), so it works even while actors and loops are stuck.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any, Final

from mesh_core._common.codes import MessageKind, Question
from mesh_core._common.context import running_loop
from mesh_core._native import Message, Placement, Target, locate

if TYPE_CHECKING:
    from mesh_core._futures.awaited import Awaited
    from mesh_core._meshes.outcomes import Addressee
    from mesh_core._process.process import Process

Addr = tuple[int, int, int]

_LEAST_S: Final = 1.0
"""No explanation is sought for shorter waits: polling in short steps is normal."""
_MOST_S: Final = 0.25
_PAUSE_S: Final = 1.0
_MOST_LINKS: Final = 8


class _Asking:
    """The process looks for one explanation at a time, and at most once a second."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.last = -_PAUSE_S


def is_wanted(process: Process, waited: float | None) -> bool:
    """Whether a caller that has waited this long should get an explanation."""
    return (
        waited is not None
        and waited >= _LEAST_S
        and time.monotonic() - process.slots.of(_Asking).last >= _PAUSE_S
    )


def chain(process: Process, call: Awaited, owner: Any, waited: float | None) -> str:
    """Describe what the first receiver without an answer is doing, what it waits for, and so on; empty if that is not known.

    Takes at most a quarter of a second; returns at once on the thread of a running event loop.
    """
    who: Addressee | None = getattr(owner, "_who", None)
    if who is None or who.mesh is None or not call.actor or not is_wanted(process, waited):
        return ""
    if running_loop() is not None:
        return ""
    asking = process.slots.of(_Asking)
    if not asking.lock.acquire(blocking=False):
        return ""
    try:
        missing = call.missing()
        if not missing:
            return ""
        first = locate(process.runtime, *who.location.addr(who.mesh._procs_id, who.view.rank_at(missing[0])))
        return "".join(f"; {link}" for link in _links(process, first, call.actor))
    except Exception:  # noqa: BLE001 - only an addition to another error
        return ""
    finally:
        asking.last = time.monotonic()
        asking.lock.release()


def _links(process: Process, addr: Addr, actor: int) -> list[str]:
    links: list[str] = []
    seen: set[tuple[Addr, int]] = set()
    deadline = time.monotonic() + _MOST_S
    while len(links) < _MOST_LINKS:
        if (addr, actor) in seen:
            links[-1] += ": a deadlock"
            break
        seen.add((addr, actor))
        answer = _ask(process, addr, deadline)
        if answer is None:
            if links:
                links.append("its process does not answer questions about that")
            break
        found = next((one for one in answer["actors"] if one["id"] == actor), None)
        if found is None:
            break
        name = name_of(found)
        wait = next((one for one in answer["waits"] if one["by"] == actor), None)
        running = max(found["running"], key=lambda one: one[1], default=None)
        if running is None:
            if not found["up"]:
                links.append(f"{name} has not been made yet: its constructor has not returned")
            break
        text = f"{name} has run {running[0]} for {running[1]:.1f} s"
        if wait is None:
            links.append(text)
            break
        links.append(f"{text}, and has waited {wait['seconds']:.1f} s {wanted(wait)}")
        if wait["kind"] not in ("call", "room") or not wait["whom"]:
            break
        mesh, rank, host = wait["whom"][0]
        addr, actor = (mesh, rank, host), wait["actor"]
    return links


def _ask(process: Process, addr: Addr, deadline: float) -> dict[str, Any] | None:
    mesh, rank, host = addr
    target = Target.one(mesh, rank, Placement.on(host))
    call = process.runtime.asker(target, Question.WAITS).call(None)
    if not call.wait(max(0.0, deadline - time.monotonic())):
        call.cancel()
        return None
    outcome = call.outcomes()[0]
    if not isinstance(outcome, Message) or outcome.kind is not MessageKind.REPLY:
        return None
    told: dict[str, Any] = json.loads(outcome.raw()[0])
    return told


def name_of(actor: dict[str, Any]) -> str:
    """Return an actor's name as it is shown to users."""
    name, _, shape = actor["title"].partition("\0")
    return f"{name}[{actor['rank']}]" if shape.partition("\0")[0] else str(name)


def wanted(wait: dict[str, Any], whom: str | None = None) -> str:
    """Describe what somebody waits for; ``whom`` names the receivers of a call that have not answered."""
    kind = wait["kind"]
    if kind == "promise":
        return f"for {wait['name']}"
    if kind == "port":
        return "for a value from a channel"
    if kind == "runtime":
        return "for an answer of the runtime"
    of = whom or wait.get("name") or "an actor"
    what = f"{of}.{wait['endpoint']}" if wait.get("endpoint") else of
    return f"for room in the mailbox of {of}" if kind == "room" else f"for {what}"
