"""Questions to processes, which their runtimes answer."""

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
"""A process's mesh, its rank there and its host; agents of hosts are mesh 0, and the controller is host 0's."""

ROOT: Addr = (0, 0, 0)

_USUAL_S = 0.1
"""A process that has not answered after this long is checked: a signal may have stopped it."""


def addr_of(told: Sequence[int]) -> Addr:
    """An address as JSON has it."""
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
    """Put a question to processes, given with their pids where these are known.

    Pids are those of this very host; of processes elsewhere there is none. Those that have not answered by ``deadline`` are not in the answer; those that turn out to be stopped by a signal are
    not waited for that long.
    """
    return hear(put(process, question, whom), whom, deadline, read)


def put(process: Process, question: Question, whom: Iterable[Addr]) -> dict[Addr, Call]:
    """Put a question to processes, whose answers :func:`hear` waits for."""
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
    """The answers that have come by ``deadline``; see :func:`ask`."""
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
    """What a mesh is called, and its shape."""
    name, _, shape = title.partition("\0")
    shape = shape.partition("\0")[0]
    pairs = (dim.rsplit("=", 1) for dim in shape.split(",") if dim)
    return name, {label: int(size) for label, size in pairs}


def point_of(rank: int, sizes: dict[str, int]) -> dict[str, int]:
    """The coordinates of a rank."""
    point: dict[str, int] = {}
    for label, size in reversed(sizes.items()):
        rank, point[label] = divmod(rank, size)
    return dict(reversed(point.items()))


def proc_name(process: Process, addr: Addr, names: dict[int, str]) -> str:
    """A process for people: the rank that its mesh knows it by."""
    mesh, rank = addr[0], seat(process.runtime, *addr)[1]
    if addr == ROOT:
        return "controller"
    if mesh == 0:
        return f"agent of host {rank}"
    return f"{names.get(mesh, f'mesh {mesh:x}')}[{rank}]"
