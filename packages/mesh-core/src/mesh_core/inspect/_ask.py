"""Ask processes questions, which their runtimes answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mesh_core._common.codes import MessageKind, Question
from mesh_core._native import Message, Placement, Target, seat
from mesh_core._system.process_state import is_stopped

if TYPE_CHECKING:
    from mesh_core._native import Call
    from mesh_core._process.process import Process

Addr = tuple[int, int, int]
"""A process's mesh, its rank there, and its host. Host agents are mesh 0; the controller is the agent of host 0."""

ROOT: Addr = (0, 0, 0)

_USUAL_S = 0.1
"""If a process has not answered after this long, check whether a signal has stopped it."""


def addr_of(told: Sequence[int]) -> Addr:
    """Convert an address from JSON."""
    return told[0], told[1], told[2]


def _from_json(message: Message) -> Any:
    return json.loads(message.raw()[0])


def ask(
    process: Process,
    question: Question,
    whom: Mapping[Addr, int | None],
    deadline: float,
    read: Callable[[Message], Any] = _from_json,
) -> dict[Addr, Any]:
    """Ask processes a question and return the answers that arrive by ``deadline``.

    ``whom`` maps processes to their pids, ``None`` for processes on other hosts. A process on this host that a signal has
    stopped is not waited for.
    """
    return hear(put(process, question, whom), whom, deadline, read)


def put(process: Process, question: Question, whom: Iterable[Addr]) -> dict[Addr, Call]:
    """Send a question to processes; :func:`hear` waits for the answers."""
    return {
        (mesh, rank, host): process.runtime.asker(Target.one(mesh, rank, Placement.on(host)), question).call(
            None
        )
        for mesh, rank, host in whom
    }


def hear(
    calls: Mapping[Addr, Call],
    whom: Mapping[Addr, int | None],
    deadline: float,
    read: Callable[[Message], Any] = _from_json,
) -> dict[Addr, Any]:
    """Return the answers that arrive by ``deadline``; see :func:`ask`."""
    answers: dict[Addr, Any] = {}
    soon = min(deadline, time.monotonic() + _USUAL_S)
    for addr, call in calls.items():
        if not call.wait(max(0.0, soon - time.monotonic())) and (
            is_stopped(whom[addr]) or not call.wait(max(0.0, deadline - time.monotonic()))
        ):
            call.cancel()
            continue
        outcome = call.outcomes()[0]
        if isinstance(outcome, Message) and outcome.kind is MessageKind.REPLY:
            answers[addr] = read(outcome)
    return answers


def split_title(title: str) -> tuple[str, dict[str, int]]:
    """Split a title into the name of a mesh and its sizes."""
    name, _, shape = title.partition("\0")
    shape = shape.partition("\0")[0]
    pairs = (dim.rsplit("=", 1) for dim in shape.split(",") if dim)
    return name, {label: int(size) for label, size in pairs}


def point_of(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """Return the coordinates of a rank."""
    point: dict[str, int] = {}
    for label, size in reversed(sizes.items()):
        rank, point[label] = divmod(rank, size)
    return dict(reversed(point.items()))


def proc_name(process: Process, addr: Addr, names: dict[int, str]) -> str:
    """Return a process's display name, with its rank in its mesh."""
    mesh, rank = addr[0], seat(process.runtime, *addr)[1]
    if addr == ROOT:
        return "controller"
    if mesh == 0:
        return f"agent of host {rank}"
    return f"{names.get(mesh, f'mesh {mesh:x}')}[{rank}]"
