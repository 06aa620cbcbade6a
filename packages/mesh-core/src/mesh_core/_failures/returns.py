"""Whether a rank's actor comes back: what the owner of supervised actors tells those who hold calls back for them.

No clock and no I/O: :mod:`mesh_core._failures.supervision` says what has happened, and what is answered is given to a function.

RTN-1: a question is answered once: that a later life is there than the one it names, or that none will come.
RTN-2: what a policy has put off, or is having made again, is no verdict.
RTN-3: after the end of its mesh, or of its policy, every question is answered that none will come.
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
"""The reason of a message that its actor's end has kept from being begun."""

Answer = Callable[["int | None"], object]
"""Takes the life that is there, or ``None`` if none will be."""


class Returns:
    """What is known of the lives of the actors of one mesh, by their places in it. Thread-safe."""

    def __init__(self, procs_id: int) -> None:
        self.procs_id = procs_id
        self._lock = threading.Lock()
        self._lives: dict[int, int] = {}
        """Which life a place has had last, but for the first."""
        self._down: dict[int, int] = {}
        """Places that were struck since, by the number of the stroke."""
        self._strokes = 0
        self._gone: set[int] = set()
        self._left: set[int] = set()
        """Places whose failure was handled, while others may still be made again with them."""
        self._pending: list[object] = []
        """Events that the policy is going to be asked about."""
        self._repairs = 0
        self._put_off = False
        self._closed = False
        self._asked: list[tuple[int, int, Answer]] = []

    def ask(self, place: int, life: int, answer: Answer, *, in_order: bool) -> None:
        """Ask for a later life than this one; ``in_order`` if nothing has failed there, as far as the asker knows."""
        verdict: int | None = None
        with self._lock:
            there = self._lives.get(place, 0)
            if self._closed or place in self._gone:
                pass
            elif place not in self._down and life < there:
                verdict = there
            elif place in self._down or not in_order:
                # What has failed is told here too, if it was not yet.
                self._asked.append((place, life, answer))
                return
        answer(verdict)

    def struck(self, place: int) -> None:
        """Its actor or its process has ended, or is about to be stopped so that it is made again."""
        with self._lock:
            self._strokes += 1
            self._down[place] = self._strokes

    def stopped(self, places: Iterable[int]) -> None:
        """Actors were stopped in order by their owner."""
        self._lose(set(places))

    def begin(self, places: Iterable[int]) -> dict[int, int | None]:
        """Actors are about to be made again; the result is for :meth:`back`."""
        with self._lock:
            return {place: self._down.get(place) for place in places}

    def back(self, begun: dict[int, int | None]) -> None:
        """They are there."""
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

    # What a policy decides.

    def awaits(self, event: object) -> None:
        """The policy is going to be asked about this."""
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
        """The policy has decided about an event: these places are lost, these were handled without a repair."""
        with self._lock:
            self._pending = [each for each in self._pending if each is not event]
            self._pending += timers
            self._put_off = put_off
            self._repairs += repairs
            self._left.update(left)
        self._lose(set(gone))

    def before(self, places: set[int], repairs: Iterable[Restart | Respawn]) -> dict[int, int]:
        """Which lives those have that are to be made again, for :meth:`repaired`."""
        with self._lock:
            for each in repairs:
                places |= set(self._down if each.ranks is None else each.ranks)
            return {place: self._lives.get(place, 0) for place in places}

    def repaired(self, was: dict[int, int], more: object | None, *, lost: bool) -> None:
        """A repair of what had these lives has ended.

        The policy is asked about ``more`` next, if that is given. With ``lost`` it has failed, and nobody is asked.
        """
        with self._lock:
            self._repairs -= 1
            if more is not None:
                self._pending.append(more)
            rest = {place for place, life in was.items() if self._lives.get(place, 0) == life}
            self._left |= rest
        self._lose(rest if lost else set())

    def close(self) -> None:
        """The mesh was stopped, or its policy is no longer asked."""
        with self._lock:
            self._closed = True
            asked, self._asked = self._asked, []
        for _, _, answer in asked:
            answer(None)

    def _lose(self, gone: set[int]) -> None:
        answers: list[Answer] = []
        with self._lock:
            if not (self._pending or self._repairs or self._put_off):
                # Nothing is to come that could mend them.
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
