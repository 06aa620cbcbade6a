"""Which replica works next: the pool's one decision, without clock or I/O.

A *place* is a replica as seen by the pool. An *asker* wants a turn on any place.

PLC-1: a place has at most ``per_rank`` turns taken at a time; another turn is given only after one was given back.
PLC-2: turns are given in the order in which they were asked for, each on one of the least busy places.
PLC-3: a place that drains or is lost gets no work until it is ready again. If no place can ever become free, askers are
refused at once.
PLC-4: if all places are busy, the next asker may be sent ahead: to the place that has the fewest ahead, of these to the one that
was given last, behind an asker that allows it. It gets its turn there when those before it have given theirs back, unless it
has left before.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from enum import Enum
from typing import Generic, TypeVar

A = TypeVar("A")


class State(Enum):
    """Whether a place can work."""

    READY = "ready"
    DRAINING = "draining"
    """It finishes its tasks and gets no more, until it is resumed."""
    REPAIRING = "repairing"
    """It is lost, and is being respawned."""
    LOST = "lost"


class Places(Generic[A]):
    """The places of one pool, and the askers that wait for a turn. ``A`` is the type of askers, compared by identity."""

    def __init__(self, per_rank: int) -> None:
        self._per_rank = per_rank
        self._busy: dict[int, int] = {}
        self._state: dict[int, State] = {}
        # By how busy they are; within a level, the place that has been idle longest comes first.
        self._open: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(per_rank)]
        self._asking: OrderedDict[A, None] = OrderedDict()
        # Those that had a turn and could not use it, in the order in which they came back: they are the first.
        self._again: OrderedDict[A, None] = OrderedDict()
        # Places to which an asker may be sent ahead, by how many are ahead there, in the order in which they were given.
        self._leading: list[OrderedDict[int, None]] = [OrderedDict()]
        self.ahead_at: OrderedDict[int, deque[A]] = OrderedDict()
        """Askers that were sent ahead, by place, in the order of their turns. Read-only."""
        self._lost = 0

    def add(self, place: int) -> None:
        """Add a new place, or one that was lost and has been respawned."""
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
        """Set the state of a place."""
        if place not in self._state:
            return
        self._withdraw(place)
        self._unlead(place)
        self._turn(place, state)
        self._offer(place)

    def remove(self, place: int) -> None:
        """Remove a place forever. Turns on it may still be given back."""
        self._withdraw(place)
        self._unlead(place)
        self._turn(place, None)
        if not self._busy.get(place):
            self._busy.pop(place, None)

    def state(self, place: int) -> State | None:
        """The state of a place; None if it was removed."""
        return self._state.get(place)

    def busy(self, place: int) -> int:
        """How many turns on a place are taken."""
        return self._busy.get(place, 0)

    def ask(self, who: A, *, first: bool = False) -> None:
        """Ask for a turn, which :meth:`give` will return. ``first`` is for askers that had a turn and could not use it."""
        (self._again if first else self._asking)[who] = None

    def drop(self, who: A) -> bool:
        """Withdraw a request; false if there was none."""
        return any(some.pop(who, _MISSING) is not _MISSING for some in (self._again, self._asking))

    def _next(self) -> A:
        """Return the asker that asked first, and forget it."""
        who, _ = (self._again or self._asking).popitem(last=False)
        return who

    def candidate(self) -> int | None:
        """The place of the next turn; None if nobody asks or all places are busy."""
        if self._asking or self._again:
            for level in self._open:
                if level:
                    return next(iter(level))
        return None

    def give(self, place: int) -> A:
        """Give a turn on the :meth:`candidate` to the asker that asked first."""
        who = self._next()
        self._withdraw(place)
        self._busy[place] += 1
        self._offer(place)
        return who

    def back(self, place: int, *, is_lost: bool = False) -> A | None:
        """A turn was given back. Returns the asker that was ahead there and has the turn now; None if the replica was lost."""
        busy = self._busy.get(place, 0)
        if not busy:
            return None
        self._unlead(place)
        chain = self.ahead_at.get(place)
        if chain is not None and not is_lost:
            who = chain.popleft()
            if chain:
                self.ahead_at.move_to_end(place)
            else:
                del self.ahead_at[place]
            if self._state.get(place) is State.READY:
                self._offer_behind(place, len(chain))
            return who
        self._busy[place] = busy - 1
        if place in self._state:
            self._withdraw(place)
            self._offer(place)
        elif busy == 1:
            del self._busy[place]
        return None

    # Ahead (PLC-4).

    def _offer_behind(self, place: int, count: int) -> None:
        """Askers may be sent ahead to this place, at which ``count`` are ahead already."""
        while len(self._leading) <= count:
            self._leading.append(OrderedDict())
        self._leading[count][place] = None

    def _unlead(self, place: int) -> bool:
        """No asker may be sent ahead to this place; false if none might before."""
        count = len(self.ahead_at.get(place, ()))
        return count < len(self._leading) and self._leading[count].pop(place, _MISSING) is not _MISSING

    def lead(self, place: int) -> None:
        """Allow askers to be sent ahead to this place."""
        if self._busy.get(place) == 1 and self._per_rank == 1 and place not in self.ahead_at:
            self._offer_behind(place, 0)

    def next_asking(self) -> A | None:
        """The asker that asked first."""
        return next(iter(self._again or self._asking), None)

    def behind(self, most: int = 1) -> int | None:
        """The place to which the next asker would be sent ahead, if at most so many may be ahead at a place."""
        for level in self._leading[:most]:
            if level:
                return next(reversed(level))
        return None

    def send_ahead(self, place: int) -> A:
        """Send the asker that asked first ahead to this place."""
        who = self._next()
        self._unlead(place)
        chain = self.ahead_at.setdefault(place, deque())
        chain.append(who)
        self._offer_behind(place, len(chain))
        return who

    def leave(self, place: int, who: A) -> bool:
        """An asker is no longer ahead at this place; false if it has got its turn, or never was ahead here."""
        chain = self.ahead_at.get(place)
        if chain is None or who not in chain:
            return False
        led = self._unlead(place)
        chain.remove(who)
        if not chain:
            del self.ahead_at[place]
        elif led:
            self._offer_behind(place, len(chain))
        return True

    def ahead(self) -> Iterator[tuple[int, A]]:
        """Places and the askers that are ahead there."""
        return ((place, who) for place, chain in self.ahead_at.items() for who in chain)

    @property
    def idle(self) -> int:
        """How many turns are free."""
        if self._per_rank == 1:
            return len(self._open[0])
        return sum(len(level) * (self._per_rank - busy) for busy, level in enumerate(self._open))

    @property
    def waiting(self) -> int:
        """How many askers are waiting."""
        return len(self._asking) + len(self._again)

    def asking(self) -> list[A]:
        """The waiting askers, in order."""
        return [*self._again, *self._asking]

    def refuse(self) -> list[A]:
        """Like :meth:`asking`, and forget them."""
        refused = self.asking()
        self._asking.clear()
        self._again.clear()
        return refused

    @property
    def turns(self) -> int:
        """How many turns can be taken at the same time."""
        return self._per_rank * sum(state is State.READY for state in self._state.values())

    @property
    def is_hopeless(self) -> bool:
        """Whether no asker can ever get a turn unless places are added."""
        return self._lost == len(self._state)

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._state))

    def __len__(self) -> int:
        return len(self._state)


_MISSING = object()
