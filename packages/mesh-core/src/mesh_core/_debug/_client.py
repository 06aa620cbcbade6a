"""The other end of a stopped thread's socket: find what is stopped, say something to it, hear its answers."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_core._debug import _places
from mesh_core._debug._wire import Garbled, Wire
from mesh_core._errors import MeshError

_ANSWER_S = 2.0


@dataclass(frozen=True)
class Stop:
    """A thread that is stopped, as its process describes it."""

    path: str
    number: int
    job: int
    script: str
    pid: int
    mesh: str
    coordinates: dict[str, int]
    about: dict[str, Any]

    @property
    def name(self) -> str:
        """Its mesh and place, for people."""
        place = ",".join(f"{label}={index}" for label, index in self.coordinates.items())
        return f"{self.mesh} {place}".rstrip()


@dataclass(frozen=True)
class Found:
    """What is stopped, and the sockets of processes that do not answer."""

    stops: list[Stop]
    silent: list[str]


def find(job: int | None = None) -> Found:
    """Ask every process of this user what it has stopped; of one job, if its pid is given."""
    asked: list[tuple[str, Wire]] = []
    silent: list[str] = []
    for path, peer in _places.find(job):
        if peer is None:
            silent.append(path)
            continue
        wire = Wire(peer)
        wire.tell(do="describe")
        asked.append((path, wire))
    stops: list[Stop] = []
    until = time.monotonic() + _ANSWER_S
    for path, wire in asked:
        try:
            told = wire.hear(max(0.0, until - time.monotonic()))
            if told:
                stops += (_stop(path, told[0], about) for about in told[0]["stops"])
        except (TimeoutError, Garbled, KeyError, TypeError, AttributeError):
            silent.append(path)
        finally:
            wire.close()
    stops.sort(key=lambda stop: (stop.job, stop.mesh, stop.about["rank"], stop.pid, stop.number))
    return Found(stops, silent)


def _stop(path: str, told: dict[str, Any], about: dict[str, Any]) -> Stop:
    about["rank"], about["since"], about["state"], about["attached"]  # noqa: B018 - a KeyError if one is missing
    return Stop(
        path=path,
        number=about["id"],
        job=told["job"],
        script=told["script"],
        pid=told["pid"],
        mesh=about["mesh"],
        coordinates=about["coordinates"],
        about=about,
    )


def attach(stop: Stop, *, quiet: bool = False) -> Wire:
    """Connect to a stopped thread; with ``quiet`` it does not say where it is."""
    try:
        wire = Wire(_places.connect(stop.path))
    except OSError as error:
        raise MeshError(f"{stop.name} cannot be reached: {error}; it may go on already, or have ended") from error
    wire.tell(do="attach", stop=stop.number, quiet=quiet)
    return wire


@dataclass
class Answer:
    """What one thread answered to a command."""

    stop: Stop
    text: str = ""
    done: bool = False
    moved: bool = False
    """Whether it stands somewhere else than before, or nowhere."""


def cast(stops: Sequence[Stop], line: str, *, waiting: Callable[[int], object]) -> list[Answer]:
    """Give one command to many and collect their answers. Ctrl-C gives up waiting for those that have none yet.

    ``waiting`` is told how many those are, whenever a second has gone by.
    """
    answers: dict[int, Answer] = {}
    wires: dict[int, Wire] = {}
    missed = []
    poll = select.poll()
    try:
        for stop in stops:
            try:
                wire = attach(stop, quiet=True)
            except MeshError as error:
                missed.append(Answer(stop, f"{error}\n", done=True))
                continue
            fd = wire.peer.fileno()
            answers[fd], wires[fd] = Answer(stop), wire
            poll.register(fd, select.POLLIN)
        asked: set[int] = set()
        with contextlib.suppress(KeyboardInterrupt):
            _collect(poll, answers, wires, asked, line, waiting)
        for answer in answers.values():
            if not answer.done:
                answer.text += "(no answer yet; it is stopped again once it has one)\n"
    finally:
        for wire in wires.values():
            wire.close()
    return [*answers.values(), *missed]


def _collect(
    poll: select.poll,
    answers: dict[int, Answer],
    wires: dict[int, Wire],
    asked: set[int],
    line: str,
    waiting: Callable[[int], object],
) -> None:
    open_ = set(wires)
    while open_:
        ready = poll.poll(1000)
        if not ready:
            waiting(len(open_))
        for fd, _ in ready:
            try:
                told = wires[fd].take()
            except Garbled as error:
                told = [{"error": str(error)}]
            if told is None:
                told = [{"over": "has ended"}]
            for each in told:
                if not answers[fd].done:
                    _note(answers[fd], each, wires[fd], asked, fd, line)
            if answers[fd].done:
                poll.unregister(fd)
                open_.discard(fd)


def _note(
    answer: Answer, told: dict[str, Any], wire: Wire, asked: set[int], fd: int, line: str
) -> None:
    if "out" in told:
        answer.text += str(told["out"])
    elif "prompt" in told:
        if fd in asked:
            answer.done = True
        else:
            asked.add(fd)
            answer.text = ""
            wire.tell(do="answer", line=line)
    elif "over" in told or told.get("continued"):
        answer.text += f"({told.get('over', 'goes on')})\n"
        answer.done = True
    elif "error" in told:
        answer.text += f"({told['error']})\n"
        answer.done = True
