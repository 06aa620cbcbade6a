"""The state of an actor: who drains its inbox, and how far its life is. A state machine, without threads or locks."""

from __future__ import annotations

THREAD, LENT, LOOP, NOBODY = range(4)
"""Who drains the inbox: the actor's own thread; the loop, until it comes upon a message for the thread, which waits for that; the
loop alone, as there is no thread, or it has died, or has not come back; nobody, as the thread waits for the actor's end."""

MAKING, WORKING, ENDING, OVER = range(4)
"""The phases: its constructor runs; it has an object, or the reason why not; it is being stopped or has failed; it is gone."""


class CellState:
    """What an actor may do. Phases only follow each other."""

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
        """Whether it has ended: stopped, not merely failed."""
        return self.phase == OVER

    @property
    def loop_takes(self) -> bool:
        """Whether the loop takes from the inbox just now."""
        return self.drains in (LOOP, LENT)

    @property
    def threadless(self) -> bool:
        """Whether no thread does what is to be done between two messages: that is the loop's."""
        return self.drains in (LOOP, NOBODY)

    def advance(self, phase: int) -> bool:
        """Enter a phase; false, and nothing happens, if it has been entered before."""
        if self.phase >= phase:
            return False
        self.phase = phase
        return True

    def give_up(self) -> bool:
        """End before it was made; false if it is made."""
        return self.phase == MAKING and self.advance(OVER)

    def leave_errands(self) -> None:
        """The thread waits for the loop, which does from now on what is to be done between two messages."""
        if self.drains == THREAD:
            self.drains = NOBODY

    def lend(self) -> None:
        """The thread leaves the inbox to the loop."""
        if self.drains == THREAD:
            self.drains = LENT

    def hand_back(self) -> None:
        """The loop gives the inbox back to the thread."""
        if self.drains == LENT:
            self.drains = THREAD
