"""The state of an actor: who handles its messages, and its phase of life. A state machine, without threads or locks."""

from __future__ import annotations

THREAD, LOOP, NOBODY = range(3)
"""Who handles messages: the actor's own thread, in turns with the loop if the actor has coroutines too; the loop alone, because
there is no thread, or it died or did not come back; nobody, because the thread waits for the actor's end."""

MAKING, WORKING, ENDING, OVER = range(4)
"""The phases: its constructor runs; it has an object, or the reason why not; it is being stopped or has failed; it is gone."""


class CellState:
    """What an actor may do. Phases only advance."""

    __slots__ = ("drains", "phase")

    def __init__(self, *, threaded: bool) -> None:
        self.phase = MAKING
        self.drains = THREAD if threaded else LOOP

    @property
    def made(self) -> bool:
        """Whether the constructor has returned or raised, or is no longer waited for."""
        return self.phase > MAKING

    @property
    def ending(self) -> bool:
        """Whether it is being stopped, or has failed: what it owns ends with it."""
        return self.phase > WORKING

    @property
    def over(self) -> bool:
        """Whether it has ended: it was stopped, not merely failed."""
        return self.phase == OVER

    @property
    def threadless(self) -> bool:
        """Whether the loop, and no thread, runs what is due between two messages."""
        return self.drains in (LOOP, NOBODY)

    def advance(self, phase: int) -> bool:
        """Enter a phase; return false, and do nothing, if it was entered before."""
        if self.phase >= phase:
            return False
        self.phase = phase
        return True

    def give_up(self) -> bool:
        """End before the object was made; return false if it is made."""
        return self.phase == MAKING and self.advance(OVER)

    def leave_errands(self) -> None:
        """Leave what is due between two messages to the loop, for which the thread waits."""
        if self.drains == THREAD:
            self.drains = NOBODY
