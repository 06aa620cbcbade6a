"""Whether a rank's actor will be respawned: what the owner of supervised actors tells those who hold calls back for them.

No clock and no I/O: :mod:`mesh_core._failures.supervision` reports what happened, and answers go to a callback.

RTN-1: a question is answered once: either a later incarnation exists than the one it names, or there will be none.
RTN-2: a failure that a policy put off, or is repairing, is not decided yet.
RTN-3: after the end of the mesh or of its policy, every question is answered with "there will be none".
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from mesh_core._common.errors import MeshError
from mesh_core._native import known_moves

if TYPE_CHECKING:
    from mesh_core._failures.policies import Respawn, Restart
    from mesh_core._native import Message
    from mesh_core._process.process import Process

NOT_BEGUN = "stopped before it began"
"""The reason given for a message that did not begin because its actor ended."""

Answer = Callable[["int | None"], object]
"""Called with the current incarnation, or ``None`` if there will be none."""


class Returns:
    """What is known about the incarnations of the actors of one mesh, by their places in it. Thread-safe."""

    def __init__(self, procs_id: int) -> None:
        self.procs_id = procs_id
        self._lock = threading.Lock()
        self._lives: dict[int, int] = {}
        """The latest incarnation of each place, unless it is the first."""
        self._down: dict[int, int] = {}
        """Places that failed since then, with the number of the failure."""
        self._strokes = 0
        self._gone: set[int] = set()
        self._left: set[int] = set()
        """Places whose failure was handled, but which may still be respawned together with others."""
        self._pending: list[object] = []
        """Events that the policy will be asked about."""
        self._repairs = 0
        self._put_off = False
        self._closed = False
        self._asked: list[tuple[int, int, Answer]] = []

    def ask(self, place: int, life: int, answer: Answer, *, in_order: bool) -> None:
        """Ask for a later incarnation than ``life``; ``in_order`` if the asker knows of no failure there."""
        verdict: int | None = None
        with self._lock:
            there = self._lives.get(place, 0)
            if self._closed or place in self._gone:
                pass
            elif place not in self._down and life < there:
                verdict = there
            elif place in self._down or not in_order:
                # The failure will be reported here too, if it was not yet.
                self._asked.append((place, life, answer))
                return
        answer(verdict)

    def struck(self, place: int) -> None:
        """Record that a place's actor or process ended, or is about to be stopped for a respawn."""
        with self._lock:
            self._strokes += 1
            self._down[place] = self._strokes

    def stopped(self, places: Iterable[int]) -> None:
        """Record that the owner stopped these actors in order."""
        self._lose(set(places))

    def begin(self, places: Iterable[int]) -> dict[int, int | None]:
        """Record that these failed actors are about to be respawned; the result is for :meth:`back`."""
        with self._lock:
            return {place: self._down.get(place) for place in places}

    def back(self, begun: dict[int, int | None]) -> None:
        """Record that they were respawned."""
        answers: list[tuple[Answer, int]] = []
        with self._lock:
            for place, stroke in begun.items():
                self._lives[place] = self._lives.get(place, 0) + 1
                self._gone.discard(place)
                self._left.discard(place)
                if self._down.get(place) == stroke:
                    self._down.pop(place, None)
            rest: list[tuple[int, int, Answer]] = []
            for asked in self._asked:
                place, life, answer = asked
                there = self._lives.get(place, 0)
                if place not in self._down and life < there:
                    answers.append((answer, there))
                else:
                    rest.append(asked)
            self._asked = rest
        for answer, there in answers:
            answer(there)

    # Decisions of a policy.

    def awaits(self, event: object) -> None:
        """Record that the policy will be asked about this event."""
        with self._lock:
            self._pending.append(event)

    def decided(
        self,
        event: object,
        *,
        gone: Iterable[int],
        left: Iterable[int],
        timers: Iterable[object],
        put_off: bool,
        repairs: bool,
    ) -> None:
        """Record a policy's decision: the places in ``gone`` are lost, those in ``left`` were handled without a repair."""
        with self._lock:
            self._pending = [each for each in self._pending if each is not event]
            self._pending += timers
            self._put_off = put_off
            self._repairs += repairs
            self._left.update(left)
        self._lose(set(gone))

    def before(self, places: set[int], repairs: Iterable[Restart | Respawn]) -> dict[int, int]:
        """Return the incarnations of the places about to be repaired, for :meth:`repaired`."""
        with self._lock:
            for each in repairs:
                places |= set(self._down if each.ranks is None else each.ranks)
            return {place: self._lives.get(place, 0) for place in places}

    def repaired(self, was: dict[int, int], more: object | None, *, lost: bool) -> None:
        """Record that a repair ended; ``was`` is the result of :meth:`before`.

        The policy is asked about ``more`` next, if given. With ``lost`` the repair failed, and nobody is asked.
        """
        with self._lock:
            self._repairs -= 1
            if more is not None:
                self._pending.append(more)
            rest = {place for place, life in was.items() if self._lives.get(place, 0) == life}
            self._left |= rest
        self._lose(rest if lost else set())

    def close(self) -> None:
        """Answer all questions: the mesh was stopped, or its policy is no longer asked."""
        with self._lock:
            self._closed = True
            asked, self._asked = self._asked, []
        for _, _, answer in asked:
            answer(None)

    def _lose(self, gone: set[int]) -> None:
        answers: list[Answer] = []
        with self._lock:
            if not (self._pending or self._repairs or self._put_off):
                # Nothing pending could still repair them.
                gone |= self._left
                self._left.clear()
            self._gone |= gone
            for place, _, answer in self._asked:
                if place in gone:
                    answers.append(answer)
            self._asked = [each for each in self._asked if each[0] not in gone]
        for answer in answers:
            answer(None)


def on_question(message: Message, process: Process) -> None:
    """Answer a question, now or later."""
    actor_id, place, life, in_order = message.load()
    returns = process.owners.returns(actor_id)

    def answer(there: int | None) -> None:
        moves = None if there is None or returns is None else known_moves(process.runtime, returns.procs_id)
        with contextlib.suppress(MeshError):  # the runtime has been shut down
            message.reply(None if there is None else (there, moves))

    if returns is None:
        answer(None)
    else:
        returns.ask(place, life, answer, in_order=in_order)
