"""Which replica works next: the pool's one decision, without clock or I/O.

PLC-1: a place is given to one who asks for each of its ``per_rank`` turns, and to the next only when a turn was given back.
PLC-2: turns are given in the order in which they were asked for, each at a place that is least busy.
PLC-3: a place that drains, or is lost, gets nothing to do until it is ready again; who asks when no place can ever be had is
told so at once.
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
        if self._state[place] is State.READY and busy < self._per_rank:
            self._open[busy][place] = None

    def _withdraw(self, place: int) -> None:
        for level in self._open:
            level.pop(place, None)

    def set(self, place: int, state: State) -> None:
        """Say what a place is good for from now on."""
        if place not in self._state:
            return
        self._withdraw(place)
        self._turn(place, state)
        self._offer(place)

    def remove(self, place: int) -> None:
        """The place is gone for good; turns on it may still be given back."""
        self._withdraw(place)
        self._turn(place, None)
        if not self._busy.get(place):
            self._busy.pop(place, None)

    def state(self, place: int) -> State | None:
        """What it is good for; nothing if it was removed."""
        return self._state.get(place)

    def busy(self, place: int) -> int:
        """How many turns on it are taken."""
        return self._busy.get(place, 0)

    def ask(self, who: A) -> None:
        """Want a turn; :meth:`give` says when there is one."""
        self._asking[who] = None

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

    def back(self, place: int) -> None:
        """A turn was given back."""
        busy = self._busy.get(place, 0)
        if not busy:
            return
        self._busy[place] = busy - 1
        if place in self._state:
            self._withdraw(place)
            self._offer(place)
        elif busy == 1:
            del self._busy[place]

    @property
    def waiting(self) -> int:
        """How many ask in vain so far."""
        return len(self._asking)

    def asking(self) -> list[A]:
        """Who asks, in order."""
        return list(self._asking)

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
