"""Who waits for whom: the wait-for graph of the job."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mesh_core._common.codes import Question
from mesh_core._common.current import current
from mesh_core._common.display import counted
from mesh_core._futures.wait_chain import name_of, wanted
from mesh_core._native import seat
from mesh_core._system.process_state import is_stopped
from mesh_core.inspect._ask import ROOT, Addr, ask, proc_name
from mesh_core.inspect._circles import circles
from mesh_core.inspect._hosts import look
from mesh_core.inspect._table import span

if TYPE_CHECKING:
    from mesh_core._process.process import Process

_MOST_SHOWN = 40

Node = tuple[Addr, int]
"""An actor: its process and its number there. Number 0 is the process itself, for threads that belong to no actor."""


@dataclass(frozen=True)
class Wait:
    """One wait and what it is for."""

    waiter: str
    """The actor that waits, such as ``trainers[3]``, or the process if no actor waits; the script is ``controller``."""
    endpoint: str
    """The endpoint that the waiter is running; empty if there is none."""
    kind: str
    """What it waits for: ``call``, an endpoint's answer; ``room``, space in a full mailbox or link, to send a message;
    ``port``, a value from a channel; ``promise``, a named promise; ``runtime``, an answer from Mesh itself."""
    text: str
    """A description of what it waits for."""
    whom: tuple[str, ...]
    """Those that have not answered, at most eight."""
    missing: int
    """How many have not answered."""
    seconds: float
    """For how long."""
    proc: str
    """The waiter's process, as :attr:`ProcState.name`."""

    def __str__(self) -> str:
        at = f", in {self.endpoint}," if self.endpoint else ""
        return f"{self.waiter}{at} has waited {span(self.seconds)} {self.text}"


@dataclass(frozen=True)
class Circle:
    """A circle of waits: each waits for the waiter of the next, and the last for the waiter of the first."""

    waits: tuple[Wait, ...]
    """The longest wait first, then around the circle. Processes are asked at slightly different times, so of waits that
    began together, any may come first."""
    is_stuck: bool
    """Whether it is a deadlock: no actor in it can handle another message that could end it."""


@dataclass(frozen=True)
class Waits:
    """The wait-for graph at one moment; printing it lists circles first, then the longest waits."""

    time: float
    """When it was taken, in seconds since the epoch."""
    waits: tuple[Wait, ...]
    """The longest first."""
    circles: tuple[Circle, ...]
    """One circle for each set of actors that all wait for each other."""
    silent: tuple[str, ...]
    """Processes that did not answer, and why; their waits are unknown."""
    left_out: int
    """How many waits are missing from the list: each process reports only its thousand longest."""

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, lists, strings and numbers, ready for JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        when = time.strftime("%H:%M:%S", time.localtime(self.time))
        lines = [
            f"{counted(len(self.waits) + self.left_out, 'wait')}, {counted(len(self.circles), 'circle')} at {when}"
        ]
        for circle in self.circles:
            lines.append("a deadlock:" if circle.is_stuck else "a circle of waits, which may end:")
            lines += [f"  {wait}" for wait in circle.waits]
        if self.waits:
            lines.append("waits, the longest first:")
            lines += [f"  {wait}" for wait in self.waits[:_MOST_SHOWN]]
        hidden = (
            len(self.waits) - _MOST_SHOWN + self.left_out if len(self.waits) > _MOST_SHOWN else self.left_out
        )
        if hidden:
            lines.append(f"  … {hidden:,} more")
        lines += [f"not known: {one}" for one in self.silent]
        return "\n".join(lines)

    __str__ = __repr__


def waits(timeout: float = 1.0) -> Waits:
    """Find out who waits for whom in the whole job. Start here when a program hangs.

    Works in the script and inside actors. Processes answer without running any Python. :attr:`Waits.silent` names those
    that do not answer within ``timeout`` seconds.

    >>> from mesh_core import Actor, Channel, endpoint, inspect, this_host
    >>> class Reader(Actor):
    ...     @endpoint
    ...     def read(self, receiver_of):
    ...         port, receiver = Channel.open()
    ...         receiver_of.send(port)
    ...         return receiver.recv().get()
    >>> with this_host().spawn_procs() as procs:
    ...     port, receiver = Channel.open()
    ...     answer = procs.spawn("reader", Reader).read.call_one(port)
    ...     other = receiver.recv().get(timeout=30)
    ...     while not (found := [one for one in inspect.waits().waits if one.waiter == "reader"]):
    ...         pass  # it is about to wait
    ...     _ = other.send(5)
    ...     found[0].endpoint, found[0].text, answer.get(timeout=30)
    ('read', 'for a value from a channel', 5)
    """
    process = current()
    tree, deadline = look(process, timeout, pss=False)
    here = process.identity.host_no
    names = {mesh: name for mesh, (name, _) in tree.titles.items()}
    pids: dict[Addr, int | None] = {ROOT: None}
    silent = []
    for (mesh, rank, host), stage, pid, *_ in tree.procs:
        if stage not in ("running", "stopping"):
            continue
        if host == here and is_stopped(pid):
            silent.append(f"{proc_name(process, (mesh, rank, host), names)}, which was stopped by a signal")
        else:
            pids[mesh, rank, host] = pid if host == here else None
    answers = ask(process, Question.WAITS, pids, deadline)
    silent += [
        f"{proc_name(process, addr, names)}, which did not answer within {timeout:g} s"
        for addr in pids
        if addr not in answers
    ]
    silent += [
        f"host {host.name}, which is {host.state}" for host in tree.hosts.values() if host.state not in _WELL
    ]
    many = {mesh for mesh, (_, sizes) in tree.titles.items() if sizes}
    return _Graph(process, names, many, answers).read(tuple(silent))


_SETTLED_S = 0.1
"""A message sent longer ago than this has been started or is queued."""
_WELL = ("running", "suspect")


class _Graph:
    def __init__(
        self,
        process: Process,
        names: dict[int, str],
        many: set[int],
        answers: Mapping[Addr, dict[str, Any]],
    ) -> None:
        self._process = process
        self._names = names
        self._answers = answers
        self._many = many
        self._actors: dict[Node, dict[str, Any]] = {
            (addr, actor["id"]): actor
            for addr, answer in answers.items()
            for actor in answer["actors"]
            if actor["id"]
        }

    def _name(self, node: Node, known: str = "") -> str:
        addr, number = node
        actor = self._actors.get(node)
        if actor is not None:
            return name_of(actor)
        if number and known:
            # Its process is silent, or the actor is new and not reported yet.
            return f"{known}[{seat(self._process.runtime, *addr)[1]}]" if addr[0] in self._many else known
        return proc_name(self._process, addr, self._names)

    def _wait(self, addr: Addr, told: dict[str, Any]) -> tuple[Node, Wait, list[Node]]:
        node: Node = (addr, told["by"] if (addr, told["by"]) in self._actors else 0)
        running = self._actors[node]["running"] if node in self._actors else []
        whom: list[Node] = []
        if told["kind"] in ("call", "room"):
            whom = [((mesh, rank, host), told["actor"]) for mesh, rank, host in told["whom"]]
        named = tuple(self._name(one, told.get("name", "")) for one in whom)
        missing = told.get("missing", len(whom))
        known = ", ".join(named[:2])
        said = known if missing <= 2 else f"{named[0]} and {missing - 1} more" if named else ""
        wait = Wait(
            waiter=self._name(node),
            endpoint=max(running, key=lambda one: one[1], default=("",))[0],
            kind=told["kind"],
            text=wanted(told, said or None),
            whom=named,
            missing=missing,
            seconds=told["seconds"],
            proc=proc_name(self._process, addr, self._names),
        )
        return node, wait, whom

    def read(self, silent: tuple[str, ...]) -> Waits:
        edges: dict[tuple[Node, Node], Wait] = {}
        graph: dict[Node, list[Node]] = {}
        all_waits = []
        for addr, answer in self._answers.items():
            for told in answer["waits"]:
                node, wait, whom = self._wait(addr, told)
                all_waits.append(wait)
                # Threads without an actor cannot be waited for, so they are in no circle.
                for one in whom if node[1] else ():
                    graph.setdefault(node, []).append(one)
                    edges.setdefault((node, one), wait)
        found = []
        for circle in circles(graph):
            around = [edges[node, circle[(n + 1) % len(circle)]] for n, node in enumerate(circle)]
            longest = max(range(len(around)), key=lambda n: around[n].seconds)
            around = around[longest:] + around[:longest]
            settled = all(wait.seconds >= _SETTLED_S for wait in around)
            found.append(Circle(tuple(around), settled and all(self._is_stuck(node) for node in circle)))
        all_waits.sort(key=lambda wait: -wait.seconds)
        return Waits(
            time=time.time(),
            waits=tuple(all_waits),
            circles=tuple(found),
            silent=silent,
            left_out=sum(answer["left_out"] for answer in self._answers.values()),
        )

    def _is_stuck(self, node: Node) -> bool:
        """Return whether an actor is doing nothing but waiting: any other message to it is queued behind this wait."""
        actor = self._actors.get(node)
        return actor is not None and len(actor["running"]) == 1
