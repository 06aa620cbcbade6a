"""Clients of stopped threads: find what is stopped, send commands, and read the answers."""

from __future__ import annotations

import contextlib
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_core._common.errors import MeshError
from mesh_core._features.debug import places
from mesh_core._features.debug.wire import Garbled, Wire

_ANSWER_S = 2.0


@dataclass(frozen=True)
class Stop:
    """A stopped thread, as its process describes it."""

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
        """Its mesh and coordinates, for display."""
        place = ",".join(f"{label}={index}" for label, index in self.coordinates.items())
        return f"{self.mesh} {place}".rstrip()


@dataclass(frozen=True)
class Found:
    """The stopped threads, and the sockets of processes that do not answer."""

    stops: list[Stop]
    silent: list[str]


def find(job: int | None = None) -> Found:
    """Ask every process of this user for its stopped threads; only those of one job if its pid is given."""
    asked: list[tuple[str, Wire]] = []
    silent: list[str] = []
    for path, peer in places.find(job):
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


_SHOWN: dict[str, type | tuple[type, ...]] = {
    "rank": int,
    "since": (int, float),
    "state": str,
    "attached": bool,
    "file": str,
    "line": int,
    "function": str,
    "why": str,
}


def _stop(path: str, told: dict[str, Any], about: dict[str, Any]) -> Stop:
    for name, kind in _SHOWN.items():
        _checked(about[name], kind)
    coordinates = {
        _checked(label, str): _checked(index, int) for label, index in about["coordinates"].items()
    }
    return Stop(
        path=path,
        number=_checked(about["id"], int),
        job=_checked(told["job"], int),
        script=_checked(told["script"], str),
        pid=_checked(told["pid"], int),
        mesh=_checked(about["mesh"], str),
        coordinates=coordinates,
        about=about,
    )


def _checked(value: Any, kind: type | tuple[type, ...]) -> Any:
    """Check the type of a value that is later shown or sorted by."""
    if not isinstance(value, kind):
        raise TypeError(f"unexpected answer from a stopped process: {value!r}")
    return value


def attach(stop: Stop, *, quiet: bool = False) -> Wire:
    """Connect to a stopped thread; with ``quiet``, it does not print its position."""
    try:
        wire = Wire(places.connect(stop.path))
    except OSError as error:
        raise MeshError(
            f"{stop.name} cannot be reached: {error}. It may be running again, or have ended"
        ) from error
    wire.tell(do="attach", stop=stop.number, quiet=quiet)
    return wire


@dataclass
class Answer:
    """The answer of one thread to a command."""

    stop: Stop
    text: str = ""
    done: bool = False


class Cast:
    """One command for many threads, and their answers as they arrive."""

    def __init__(self, stops: Sequence[Stop], line: str) -> None:
        self._line = line
        self._stops = stops
        self._wires: dict[int, Wire] = {}
        self._asked: set[int] = set()
        self.answers: dict[int, Answer] = {}

    def collect(self, waiting: Callable[[int], object]) -> list[Answer]:
        """Wait for the answers. Ctrl-C gives up the missing ones.

        ``waiting`` is called with their number whenever no answer has arrived for a second.
        """
        missed: list[Answer] = []
        try:
            for stop in self._stops:
                try:
                    wire = attach(stop, quiet=True)
                except MeshError as error:
                    missed.append(Answer(stop, f"({error})\n", done=True))
                else:
                    self._wires[wire.peer.fileno()] = wire
                    self.answers[wire.peer.fileno()] = Answer(stop)
            with contextlib.suppress(KeyboardInterrupt):
                self._wait(waiting)
        finally:
            for wire in self._wires.values():
                wire.close()
        for answer in self.answers.values():
            if not answer.done:
                answer.text += "(no answer yet)\n"
        return [*self.answers.values(), *missed]

    def _wait(self, waiting: Callable[[int], object]) -> None:
        poll = select.poll()
        for fd in self._wires:
            poll.register(fd, select.POLLIN)
        left = len(self._wires)
        while left:
            ready = poll.poll(1000)
            if not ready:
                waiting(left)
            for fd, _ in ready:
                self._hear(fd)
                if self.answers[fd].done:
                    poll.unregister(fd)
                    left -= 1

    def _hear(self, fd: int) -> None:
        try:
            told = self._wires[fd].take()
        except Garbled as error:
            told = [{"error": str(error)}]
        for each in [{"over": "has ended"}] if told is None else told:
            if not self.answers[fd].done:
                self._note(fd, each)

    def _note(self, fd: int, told: dict[str, Any]) -> None:
        answer = self.answers[fd]
        if "out" in told:
            answer.text += str(told["out"])
        elif "prompt" in told:
            answer.done = fd in self._asked
            if not answer.done:
                # Output from before the command is not part of the answer.
                answer.text = ""
                self._asked.add(fd)
                self._wires[fd].tell(do="answer", line=self._line)
        elif "over" in told or told.get("continued"):
            answer.text += f"({told.get('over', 'continues')})\n"
            answer.done = True
        elif "error" in told:
            answer.text += f"({told['error']})\n"
            answer.done = True
