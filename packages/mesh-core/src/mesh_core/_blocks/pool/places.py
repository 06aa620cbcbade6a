"""Which replica works next: the pool's one decision, without clock or I/O.

PLC-1: a place is given to one who asks for each of its ``per_rank`` turns, and to the next only when a turn was given back.
PLC-2: turns are given in the order in which they were asked for, each at a place that is least busy.
PLC-3: a place that drains, or is lost, gets nothing to do until it is ready again; who asks when no place can ever be had is
told so at once.
PLC-4: where all places are busy the next may be sent ahead: to the place that was last given, behind one who may have another
behind. It works there when that one's turn is given back, unless it has left before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from enum import Enum
from typing import Generic, TypeVar

A = TypeVar("A")


class State(Enum):
    """What a place is good for."""

    READY = "ready"
    DRAINING = "draining"
    """It finishes what it has; it may be resumed."""
    REPAIRING = "repairing"
    """It is lost, and is being made again."""
    LOST = "lost"


class Places(Generic[A]):
    """The places of one pool, and who waits for a turn. ``A`` is whoever asks, known by its identity."""

    def __init__(self, per_rank: int) -> None:
        self._per_rank = per_rank
        self._busy: dict[int, int] = {}
        self._state: dict[int, State] = {}
        # By how busy they are; within a level the one that has waited longest comes first.
        self._open: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(per_rank)]
        self._asking: OrderedDict[A, None] = OrderedDict()
        # Those where somebody may be sent ahead, in the order in which they were given.
        self._leading: OrderedDict[int, None] = OrderedDict()
        self.ahead_at: OrderedDict[int, A] = OrderedDict()
        """Who is ahead, by place, in the order in which they were sent; to be looked at only."""
        self._lost = 0

    def add(self, place: int) -> None:
        """There is a new place, or one that was lost is there again."""
        self._busy.setdefault(place, 0)
        self._withdraw(place)
        self._turn(place, State.READY)
        self._offer(place)

    def _turn(self, place: int, state: State | None) -> None:
        self._lost += (state is State.LOST) - (self._state.get(place) is State.LOST)
        if state is None:
            self._state.pop(place, None)
        else:
            self._state[place] = state

    def _offer(self, place: int) -> None:
        busy = self._busy[place]
        if busy < self._per_rank and self._state[place] is State.READY:
            self._open[busy][place] = None

    def _withdraw(self, place: int) -> None:
        for level in self._open:
            level.pop(place, None)

    def set(self, place: int, state: State) -> None:
        """Say what a place is good for from now on."""
        if place not in self._state:
            return
        self._withdraw(place)
        self._leading.pop(place, None)
        self._turn(place, state)
        self._offer(place)

    def remove(self, place: int) -> None:
        """The place is gone for good; turns on it may still be given back."""
        self._withdraw(place)
        self._leading.pop(place, None)
        self._turn(place, None)
        if not self._busy.get(place):
            self._busy.pop(place, None)

    def state(self, place: int) -> State | None:
        """What it is good for; nothing if it was removed."""
        return self._state.get(place)

    def busy(self, place: int) -> int:
        """How many turns on it are taken."""
        return self._busy.get(place, 0)

    def ask(self, who: A, *, first: bool = False) -> None:
        """Want a turn; :meth:`give` says when there is one. ``first`` is for those who had one and could not use it."""
        self._asking[who] = None
        if first:
            self._asking.move_to_end(who, last=False)

    def drop(self, who: A) -> bool:
        """Want none any more; false if there was none asked for."""
        return self._asking.pop(who, _MISSING) is not _MISSING

    def candidate(self) -> int | None:
        """The place that the next turn would be on; nothing if nobody asks, or all places are busy."""
        if self._asking:
            for level in self._open:
                if level:
                    return next(iter(level))
        return None

    def give(self, place: int) -> A:
        """Give a turn on the :meth:`candidate` to whoever asked first."""
        who, _ = self._asking.popitem(last=False)
        self._withdraw(place)
        self._busy[place] += 1
        self._offer(place)
        return who

    def back(self, place: int, *, is_lost: bool = False) -> A | None:
        """A turn was given back. Returns whoever was ahead there, and has it now; nobody if whoever gave it back was lost."""
        busy = self._busy.get(place, 0)
        if not busy:
            return None
        self._leading.pop(place, None)
        if place in self.ahead_at and not is_lost:
            if self._state.get(place) is State.READY:
                self._leading[place] = None
            return self.ahead_at.pop(place)
        self._busy[place] = busy - 1
        if place in self._state:
            self._withdraw(place)
            self._offer(place)
        elif busy == 1:
            del self._busy[place]
        return None

    # Ahead (PLC-4).

    def lead(self, place: int) -> None:
        """Another may be sent ahead there."""
        if self._busy.get(place) == 1 and self._per_rank == 1 and place not in self.ahead_at:
            self._leading[place] = None

    def next_asking(self) -> A | None:
        """Who asked first."""
        return next(iter(self._asking), None)

    def behind(self) -> int | None:
        """Where the next would be sent ahead."""
        return next(reversed(self._leading)) if self._leading else None

    def send_ahead(self, place: int) -> A:
        """Send whoever asked first ahead."""
        who, _ = self._asking.popitem(last=False)
        del self._leading[place]
        self.ahead_at[place] = who
        return who

    def leave(self, place: int, who: A) -> bool:
        """Who was ahead is there no more; false if it had its turn, or never was there."""
        if self.ahead_at.get(place, _MISSING) is not who:
            return False
        del self.ahead_at[place]
        return True

    @property
    def any_ahead(self) -> bool:
        """Whether anybody is ahead."""
        return bool(self.ahead_at)

    @property
    def first_ahead(self) -> int:
        """Where the one is that was sent ahead first."""
        return next(iter(self.ahead_at))

    def ahead(self) -> Iterator[tuple[int, A]]:
        """Who is ahead, and where, in the order in which they were sent."""
        return iter(self.ahead_at.items())

    @property
    def idle(self) -> int:
        """How many turns could be given."""
        if self._per_rank == 1:
            return len(self._open[0])
        return sum(len(level) * (self._per_rank - busy) for busy, level in enumerate(self._open))

    @property
    def waiting(self) -> int:
        """How many ask in vain so far."""
        return len(self._asking)

    def asking(self) -> list[A]:
        """Who asks, in order."""
        return list(self._asking)

    def refuse(self) -> list[A]:
        """As :meth:`asking`; nobody asks then."""
        refused = self.asking()
        self._asking.clear()
        return refused

    @property
    def turns(self) -> int:
        """How many turns can be taken at the same time."""
        return self._per_rank * sum(state is State.READY for state in self._state.values())

    @property
    def is_hopeless(self) -> bool:
        """Whether nobody who asks can ever get a turn, unless places are added."""
        return self._lost == len(self._state)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._state))

    def __len__(self) -> int:
        return len(self._state)


_MISSING = object()
