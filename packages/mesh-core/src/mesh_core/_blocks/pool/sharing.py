"""Sharing a pool with other processes: an actor in the pool's process hands out turns, and watches the processes that have them.

SHR-1: a turn that was given to another process comes back exactly once: when that process returns it, or when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import threading
import weakref
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple

from mesh_core._actors.actor import Actor
from mesh_core._actors.endpoint import endpoint
from mesh_core._blocks.pool.following import Following
from mesh_core._common.current import current
from mesh_core._common.errors import (
    MeshError,
    PoolLost,
    SupervisionError,
    Undeliverable,
    Unsendable,
    first_line,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mesh_core._blocks.pool.pool import Pool
    from mesh_core._blocks.pool.turns import Asker, OwnTurns
    from mesh_core._futures.future import Future
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._process.process import Process
    from mesh_core.extensions import ProcEnd, Watch

Addr = tuple[int, int, int]


class Pools:
    """The pools of a process that are shared with others."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.numbers = itertools.count(1)
        self.made: weakref.WeakValueDictionary[int, Pool[Any]] = weakref.WeakValueDictionary()
        self.known: weakref.WeakValueDictionary[tuple[Addr, int], Pool[Any]] = weakref.WeakValueDictionary()
        """Pools that were made in other processes."""


class Desk(Actor):
    """The actor that gives other processes access to a pool of its own process."""

    def __init__(self, number: int) -> None:
        pool = current().slots.of(Pools).made.get(number)
        own = None if pool is None else pool._own
        if own is None:
            raise MeshError("the pool was closed before it could be shared")
        self._turns: OwnTurns = own
        self._held: dict[Addr, Counter[int]] = {}
        self._watches: dict[Addr, Watch] = {}
        self._lock = threading.Lock()

    @endpoint(concurrent=True)
    async def take(self, user: ProcMesh, addr: Addr) -> tuple[int, ActorMesh[Any]]:
        """Wait for a turn, and return its place and replica."""
        self._heed(user, addr)
        asked = _Asked(self._turns)
        self._turns.ask(asked)
        try:
            place, replica = await asked.turn
        except asyncio.CancelledError:
            self._turns.drop(asked)
            asked.abandon()
            raise
        with self._lock:
            held = self._held.get(addr)
            if held is not None:
                held[place] += 1
        if held is None:
            # The process has ended meanwhile.
            self._turns.back(place, None)
        return place, replica

    @endpoint
    async def back(self, addr: Addr, place: int, lost: BaseException | None) -> None:
        """Give a turn back."""
        with self._lock:
            held = self._held.get(addr)
            known = held is not None and held[place] > 0
            if held is not None and known:
                held[place] -= 1
        if known:
            self._turns.back(place, lost)

    def _heed(self, user: ProcMesh, addr: Addr) -> None:
        """Be notified of the end of processes that have turns."""
        from mesh_core.extensions import watch

        with self._lock:
            if addr in self._held:
                return
            self._held[addr] = Counter()
        if addr != _CONTROLLER:
            self._watches[addr] = watch(user, lambda end: self._ended(addr, end))

    def _ended(self, addr: Addr, _end: ProcEnd) -> None:
        with self._lock:
            held = self._held.pop(addr, Counter())
            self._watches.pop(addr, None)
        for place in held.elements():
            self._turns.back(place, None)

    def __cleanup__(self, exc: BaseException | None) -> None:
        for each in list(self._watches.values()):
            each.cancel()


_CONTROLLER = (0, 0, 0)


class _Asked:
    """An asker that waits on the event loop."""

    may_go_ahead = False
    """The outcome of a task is known first in the process that submitted it, so nothing is sent ahead."""

    def __init__(self, turns: OwnTurns) -> None:
        self._loop = asyncio.get_running_loop()
        self.turn: asyncio.Future[tuple[int, ActorMesh[Any]]] = self._loop.create_future()
        self._turns = turns
        self._lock = threading.Lock()
        self._got: int | None = None
        self._abandoned = False

    def got(self, place: int, replica: ActorMesh[Any], *, ahead: bool = False) -> None:
        with self._lock:
            wanted = not self._abandoned
            self._got = place if wanted else None
        if wanted and not self._on_loop(self._set, (place, replica)):
            self.abandon()
        elif not wanted:
            self._turns.back(place, None)

    def take_back(self) -> None:
        """Nothing to do: it is never sent ahead."""

    def refused(self, error: BaseException) -> None:
        self._on_loop(self._fail, error)

    def abandon(self) -> None:
        """The turn is no longer wanted; give it back if there is one."""
        with self._lock:
            self._abandoned = True
            place, self._got = self._got, None
        if place is not None:
            self._turns.back(place, None)

    def _on_loop(self, call: Callable[[Any], None], what: object) -> bool:
        try:
            self._loop.call_soon_threadsafe(call, what)
        except RuntimeError:  # the loop is closed
            return False
        return True

    def _set(self, turn: tuple[int, ActorMesh[Any]]) -> None:
        if not self.turn.done():
            self.turn.set_result(turn)

    def _fail(self, error: BaseException) -> None:
        if not self.turn.done():
            self.turn.set_exception(error)


class Shared:
    """How a pool is shared, in the process that made it."""

    def __init__(self, pool: Pool[Any], revive: Callable[..., Pool[Any]]) -> None:
        self._pool = weakref.ref(pool)
        self._revive = revive
        self._process = pool._process
        self._lock = threading.Lock()
        self._desk: Any = None
        pools = self._process.slots.of(Pools)
        self._number = next(pools.numbers)
        pools.made[self._number] = pool
        # The actor is owned by the code that made the pool, whichever code sends it.
        self._context = contextvars.copy_context()

    def reduce(self) -> Any:
        """Return what the pool is pickled as."""
        pool = self._pool()
        assert pool is not None
        if pool._runner.closed:
            raise Unsendable(
                f"cannot send {pool._runner.name}, which is closed", "Make another pool of its actors."
            )
        with self._lock:
            if self._desk is None:
                self._desk = self._context.copy().run(self._open)
        return self._revive, (self._process.runtime.me, self._number, self._desk, pool._actors, pool._options)

    def _open(self) -> Any:
        from mesh_core._meshes.hosts import this_proc

        return this_proc().spawn("pool", Desk, self._number)

    def close(self) -> None:
        """Other processes can no longer use the pool."""
        with self._lock:
            desk, self._desk = self._desk, None
        if desk is not None:
            desk.stop()


class FarTurns:
    """The turns of a pool that was made in another process."""

    def __init__(self, process: Process, desk: Any, name: str) -> None:
        from mesh_core._meshes.hosts import this_proc

        self._name = name
        self._desk = desk
        self._addr: Addr = process.runtime.me
        self._user = this_proc()
        self._following = Following.of(process)
        self._lock = threading.Lock()
        self._asking: OrderedDict[Asker, None] = OrderedDict()
        self._coming = 0
        """How many requested turns have not arrived. A request is never withdrawn, since its turn may be on its way."""

    def ask(self, asker: Asker, *, first: bool = False) -> None:
        with self._lock:
            self._asking[asker] = None
            if first:
                self._asking.move_to_end(asker, last=False)
            enough = self._coming >= len(self._asking)
            self._coming += not enough
        if enough:
            return
        try:
            take = self._desk.take.call_one(self._user, self._addr)
            self._following.follow(take, lambda: self._taken(take))
        except BaseException:
            with self._lock:
                self._coming -= 1
                self._asking.pop(asker, None)
            raise

    def ask_all(self, askers: Sequence[Asker]) -> None:
        for asker in askers:
            self.ask(asker)

    def _taken(self, take: Future[Any]) -> None:
        error = take.exception()
        with self._lock:
            self._coming -= 1
            asker = next(iter(self._asking), None)
            if asker is not None:
                del self._asking[asker]
        if error is not None:
            if asker is not None:
                asker.refused(self._closed(error))
            return
        place, replica = take.get()
        if asker is None:
            self.back(place, None)
        else:
            asker.got(place, replica)

    def _closed(self, error: BaseException) -> BaseException:
        if isinstance(error, SupervisionError) and not isinstance(error, Undeliverable):
            lost = PoolLost(
                f"{self._name} is lost with the process that made it: {first_line(error)}. Make another pool of "
                "its actors, if they are alive",
                failure=error.failure,
            )
            lost.__cause__ = error
            return lost
        if not isinstance(error, Undeliverable):
            return error
        gone = MeshError(f"{self._name} was closed, or has ended, where it was made")
        gone.__cause__ = error
        return gone

    def drop(self, asker: Asker) -> bool:
        with self._lock:
            return self._asking.pop(asker, self) is None

    def leave(self, place: int, asker: Asker, lost: BaseException | None) -> bool:
        return False

    def sent_back(self) -> None:
        """Nothing is sent ahead from here."""

    def back(self, place: int, lost: BaseException | None) -> None:
        # If the pool was closed meanwhile, the turn is no longer needed.
        with contextlib.suppress(MeshError):
            self._desk.back.broadcast(self._addr, place, lost)


class Options(NamedTuple):
    """The options of a pool."""

    per_rank: int
    retries: int
    timeout: float | None
    waiting: int | None
    drain: float | None
