"""The actor that contains a queue: the store, the clock, and notifications when users of the queue end.

QSV-1: the end of a user takes effect after all of its earlier messages: a taker that has confirmed its items keeps them.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

from mesh_core._actors.actor import Actor
from mesh_core._actors.endpoint import endpoint
from mesh_core._blocks.queue.store import Entry, Owner, Store, Taker
from mesh_core._common.context import context
from mesh_core._common.errors import MeshError

if TYPE_CHECKING:
    from mesh_core._meshes.ports import Port
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._meshes.refs import Ref
    from mesh_core.extensions import ProcEnd, Watch

Wire = tuple[bytes, "list[Any]", Any, float, "list[Ref[Any]]"]
"""An item on its way to the queue: its pickle and buffers, its version, when it was put, and the references in it."""
Given = tuple[int, bytes, "list[Any]", Any, str, float, int, "list[Ref[Any]]"]
"""An item on its way to a taker: its number, pickle, buffers, version, producer, when it was put, how often it was delivered
before, and the references in it, which have to be kept alive while it is unpickled."""

Key = tuple[Owner, int]
"""A take call: the process that takes, and the call's number there."""

_ENTRY_COST = 128
"""The overhead that each item counts beyond its bytes, so that empty items are limited too."""


@dataclass(frozen=True, slots=True)
class QueueStats:
    """Statistics of a queue; see :meth:`Queue.stats`."""

    ready: int
    """Items that can be taken."""
    leased: int
    """Items that takers have and have not acknowledged."""
    bytes: int
    """The size of both, including a small overhead for each item."""
    put: int
    """How many items were put so far."""
    given_back: int
    """How often an item came back: from a taker, or because the taker or its lease ended."""
    dropped: int
    """How many items were dropped because they were delivered too often (``most_deliveries=``)."""
    putters: int
    """Producers that wait for room."""
    takers: int
    """Takers that wait for items."""
    closed: bool


class QueueServer(Actor):
    """The queue itself."""

    def __init__(
        self, name: str, max_items: int | None, max_bytes: int | None, most_deliveries: int | None
    ) -> None:
        self._name = name
        self._lock = threading.Condition()
        self._store = Store(max_items, max_bytes, most_deliveries, self._dropped)
        self._watches: dict[Owner, Watch] = {}
        self._clock: threading.Thread | None = None
        self._waits: dict[Key, float] = {}
        """The deadlines of takers that do not wait forever."""
        self._over = False

    def _dropped(self, entry: Entry) -> None:
        logging.getLogger("mesh").error(
            "item %d of queue %r, put by %s, was given to %d takers and acknowledged by none; it is dropped (most_deliveries=)",
            entry.number,
            self._name,
            entry.producer,
            entry.leases,
        )

    # Users.

    @endpoint
    def hello(self, user: ProcMesh, owner: Owner) -> None:
        """A process is about to use the queue: watch for its end."""
        from mesh_core.extensions import watch

        if owner != _CONTROLLER and owner not in self._watches:
            self._watches[owner] = watch(user, partial(self._ended, context().actor_instance.ref, owner))

    def _ended(self, own: Any, owner: Owner, _end: ProcEnd) -> None:
        # This notification overtakes waiting messages; a message to itself goes behind them (QSV-1).
        try:
            own.gone.broadcast(owner)
        except MeshError:
            # There is no room for the message, or the queue is ending. Too early is better than never.
            self._gone(owner)

    @endpoint
    def gone(self, owner: Owner) -> None:
        """A user has ended."""
        self._gone(owner)

    def _gone(self, owner: Owner) -> None:
        self._watches.pop(owner, None)
        with self._lock:
            self._store.gone(owner, time.monotonic())

    # Putting.

    @endpoint(explicit_response_port=True)
    def put(self, port: Port[bool], producer: str, items: Sequence[Wire]) -> None:
        """Add items; answers when all are in, with false if the queue is closed."""
        entries = [_entry(producer, item) for item in items]
        with self._lock:
            self._store.put(entries, partial(_send, port), time.monotonic())

    @endpoint
    def put_now(self, producer: str, item: Wire) -> bool | None:
        """Add an item if there is room; ``None`` if the queue is closed."""
        with self._lock:
            if self._store.closed:
                return None
            return self._store.put_now(_entry(producer, item), time.monotonic())

    # Taking.

    @endpoint(explicit_response_port=True)
    def take(
        self, port: Port[list[Given] | None], key: Key, most: int, lease: float | None, wait: float | None
    ) -> None:
        """Reply with items as soon as there are some; with an empty list after ``wait`` seconds, with ``None`` if none can come."""
        now = time.monotonic()
        taker = Taker(*key, most, lease, self._answer(port, key))
        with self._lock:
            if wait is not None and not (self._store.ready or self._store.is_over):
                if wait <= 0:
                    _send(port, [])
                    return
                self._waits[key] = now + wait
            self._store.take(taker, now)
            self._mind()

    def _answer(self, port: Port[list[Given] | None], key: Key) -> Callable[[list[Entry] | None], object]:
        def answer(entries: list[Entry] | None) -> None:
            self._waits.pop(key, None)
            if entries is None:
                _send(port, [])
            else:
                _send(port, [_given(each) for each in entries] or None)

        return answer

    @endpoint
    def confirm(self, owner: Owner, number: int) -> None:
        """Items have arrived at their taker."""
        with self._lock:
            self._store.confirm(owner, number, time.monotonic())

    @endpoint
    def undo(self, owner: Owner, number: int) -> None:
        """A taker has given up, or has not looked at its items."""
        with self._lock:
            self._waits.pop((owner, number), None)
            self._store.undo(owner, number, time.monotonic())

    # Leases.

    @endpoint
    def ack(self, owner: Owner, entries: Mapping[int, list[int]]) -> int:
        """A taker is done with items of these take calls."""
        now = time.monotonic()
        with self._lock:
            return sum(self._store.ack(owner, number, each, now) for number, each in entries.items())

    @endpoint
    def release(self, owner: Owner, entries: Mapping[int, list[int]]) -> int:
        """A taker returns items."""
        now = time.monotonic()
        with self._lock:
            return sum(self._store.release(owner, number, each, now) for number, each in entries.items())

    @endpoint
    def renew(self, owner: Owner, number: int, seconds: float) -> bool:
        """Extend a lease, counted from now."""
        with self._lock:
            renewed = self._store.renew(owner, number, time.monotonic() + seconds)
            self._mind()
            return renewed

    # The whole.

    @endpoint
    def stats(self) -> QueueStats:
        """Return the statistics."""
        with self._lock:
            store = self._store
            return QueueStats(
                ready=store.ready,
                leased=store.leased,
                bytes=store.bytes,
                put=store.put_items,
                given_back=store.given_back,
                dropped=store.dropped,
                putters=store.putters,
                takers=store.takers,
                closed=store.closed,
            )

    @endpoint
    def close(self, discard: bool) -> None:
        """Take no more items."""
        with self._lock:
            self._store.close(discard=discard, now=time.monotonic())

    def __cleanup__(self, exc: BaseException | None) -> None:
        with self._lock:
            self._over = True
            self._lock.notify_all()
        for each in list(self._watches.values()):
            each.cancel()
        if self._clock is not None:
            self._clock.join()

    # The clock: a thread, which exists only once there is a lease or a taker with a deadline.

    def _mind(self) -> None:
        if self._next() is None:
            return
        if self._clock is None:
            self._clock = threading.Thread(target=self._tick, name="mesh-queue-clock", daemon=True)
            self._clock.start()
        self._lock.notify_all()

    def _next(self) -> float | None:
        times = [*self._waits.values(), self._store.next_expiry]
        return min((each for each in times if each is not None), default=None)

    def _tick(self) -> None:
        with self._lock:
            while not self._over:
                now, due = time.monotonic(), self._next()
                if due is not None and due <= now:
                    for key in [key for key, until in self._waits.items() if until <= now]:
                        taker = self._store.leave(*key)
                        if taker is None:
                            del self._waits[key]
                        else:
                            taker.answer(None)
                    self._store.settle(now)
                    continue
                self._lock.wait(None if due is None else due - now)


_CONTROLLER = (0, 0, 0)


def _entry(producer: str, item: Wire) -> Entry:
    data, buffers, version, made, refs = item
    size = _ENTRY_COST + len(data) + sum(memoryview(each).nbytes for each in buffers)
    return Entry((data, buffers, refs), size, producer, made, version)


def _send(port: Port[Any], answer: Any) -> None:
    # The caller may have ended or given up. Its items come back when that is reported; it must not affect others.
    with contextlib.suppress(MeshError):
        port.send(answer)


def _given(entry: Entry) -> Given:
    data, buffers, refs = entry.data
    return (
        entry.number,
        data,
        [PickleBuffer(each) for each in buffers],
        entry.version,
        entry.producer,
        entry.made,
        entry.deliveries - 1,
        refs,
    )
