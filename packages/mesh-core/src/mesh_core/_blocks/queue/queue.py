"""The public part of queues."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, Full
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast, overload

from mesh_core._blocks.queue.client import QueueClosed, client_of
from mesh_core._blocks.queue.server import QueueServer, QueueStats
from mesh_core._common import checks
from mesh_core._common.context import running_loop
from mesh_core._common.current import current
from mesh_core._common.errors import MeshError, first_line
from mesh_core._futures.future import Future
from mesh_core._futures.promise import Promise
from mesh_core._serialize import loads

if TYPE_CHECKING:
    from typing import Self

    from mesh_core._blocks.queue.server import Given
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._process.process import Process

T = TypeVar("T")
R = TypeVar("R")


class QueueEmpty(MeshError, Empty):
    """The queue had no items, now or within the timeout."""


class QueueFull(MeshError, Full):
    """The queue had no room, and the caller does not wait."""


class QueueItemError(MeshError):
    """An item cannot be unpickled where it was taken, for example because a module is missing there. The other items that were
    taken with it are in ``rest``.

    >>> from mesh_core import Queue, QueueItemError
    >>> class Unreadable:
    ...     def __reduce__(self):
    ...         return int, ("nothing that int() takes",)
    >>> with Queue() as queue:
    ...     _ = queue.put_many([1, Unreadable(), 2])
    ...     queue.flush().get(timeout=30)
    ...     try:
    ...         queue.take(3, lease=30).get(timeout=30)
    ...     except QueueItemError as error:
    ...         [item.value for item in error.rest], error.items[0].producer, queue.ack(error.items).get(timeout=30)
    ([1, 2], 'controller', 1)
    """

    def __init__(
        self, message: str = "", *, items: Sequence[QueueItem[Any]] = (), rest: Sequence[Any] = ()
    ) -> None:
        super().__init__(message)
        self.items = list(items)
        """The items that could not be unpickled, without values. If they are leased, they can be acknowledged or given back."""
        self.rest = list(rest)
        """What ``take`` would have returned without them."""


@dataclass(frozen=True, slots=True, eq=False)
class QueueItem(Generic[T]):
    """An item of a queue, with its metadata."""

    value: T
    producer: str
    """The process that put it: the name of its mesh and its rank, or ``controller``."""
    made: float
    """When it was put: ``time.time()`` of the producer."""
    version: Any
    """The ``version=`` of :meth:`Queue.put`."""
    deliveries: int
    """How often it was delivered before, to takers that gave it back or ended."""
    _number: int = field(repr=False)
    _lease: int | None = field(repr=False)
    """The number of the take call that leased it, if it is leased."""


class Queue(Generic[T]):
    """A queue that many processes can put into and take from. It can be sent to other processes.

    >>> from mesh_core import Queue
    >>> with Queue[str](max_items=100) as queue:
    ...     for word in ["a", "b", "c"]:
    ...         _ = queue.put(word)
    ...     queue.take().get(timeout=30), queue.take(10).get(timeout=30)
    ('a', ['b', 'c'])

    The items of one process are taken in the order in which it put them. Each item is taken at most once or, with ``lease=``, at
    least once: an item whose taker ends, or does not :meth:`ack` it in time, goes to the next taker. Items stay pickled in the
    queue, and are unpickled by their takers.

    The queue lives in a process of its own on this host, or in ``on``. It ends with its creator.

    Args:
        max_items: how many items it holds, leased items included; when it is full, producers wait.
        most_deliveries: how often an item is leased without being acknowledged before it is dropped, which is logged; by
            default, there is no limit.
        max_bytes: how many bytes it holds; 256 MiB if neither limit is given.
        on: the process that it lives in, as a mesh of one.
        name: its name in errors and listings.
    """

    def __init__(
        self,
        *,
        max_items: int | None = None,
        max_bytes: int | None = None,
        most_deliveries: int | None = None,
        on: ProcMesh | None = None,
        name: str = "queue",
    ) -> None:
        limits = {"max_items": max_items, "max_bytes": max_bytes, "most_deliveries": most_deliveries}
        for what, limit in limits.items():
            if limit is not None:
                checks.whole(limit, f"Queue({what}=)", 1)
        if max_items is None and max_bytes is None:
            max_bytes = 256 << 20
        if on is not None and len(on) != 1:
            raise ValueError(f"Queue(on=) must be one process, got {on!r}; slice it first")
        self._procs: ProcMesh | None = None
        if on is None:
            from mesh_core._meshes.hosts import this_host

            on = self._procs = this_host().spawn_procs(name=name)
        server = on.spawn(name, QueueServer, name, max_items, max_bytes, most_deliveries)
        self._begin(server, name)

    def _begin(self, server: Any, name: str) -> None:
        process: Process = current()
        self._name = name
        self._server = server
        self._process = process
        self._client = client_of(process, server, f"queue {name!r}")

    # Putting.

    def put(self, item: T, *, version: Any = None) -> Future[None]:
        """Put an item into the queue. The future is done when the queue has the item; it may be ignored.

        On a thread, this blocks while many items of this process wait for room. In a coroutine it returns at once: await the
        future, so that you do not put faster than others take. Items that are put in quick succession are sent together.
        """
        return self._client.put(item, version, may_wait=running_loop() is None)

    def put_many(self, items: Iterable[T], *, version: Any = None) -> Future[None]:
        """Put several items; the future is done when the queue has all of them."""
        future: Future[None] | None = None
        for item in items:
            future = self.put(item, version=version)
        if future is None:
            promise: Promise[None] = Promise()
            promise.set_result(None)
            future = promise.future
        return future

    def put_nowait(self, item: T, *, version: Any = None) -> Future[None]:
        """Put an item if there is room for it now; otherwise the future raises :class:`QueueFull`."""
        wire, _ = self._client.wire(item, version)
        call = self._server.put_now.call_one(self._client._producer, wire)
        return cast("Future[None]", call.then(self._put_now))

    def _put_now(self, done: bool | None) -> None:
        if done is None:
            raise QueueClosed(f"queue {self._name!r} is closed; nothing more can be put into it")
        if not done:
            raise QueueFull(f"queue {self._name!r} is full; put() waits for room")

    def flush(self) -> Future[None]:
        """Return a future that is done when the queue has all items that this process has put."""
        return self._client.flush() or self.put_many(())

    # Taking.

    @overload
    def take(
        self, *, timeout: float | None = ..., lease: None = ..., items: Literal[False] = ...
    ) -> Future[T]: ...
    @overload
    def take(
        self, n: int, *, timeout: float | None = ..., lease: None = ..., items: Literal[False] = ...
    ) -> Future[list[T]]: ...
    @overload
    def take(
        self, *, timeout: float | None = ..., lease: float, items: bool = ...
    ) -> Future[QueueItem[T]]: ...
    @overload
    def take(
        self, n: int, *, timeout: float | None = ..., lease: float, items: bool = ...
    ) -> Future[list[QueueItem[T]]]: ...
    @overload
    def take(
        self, *, timeout: float | None = ..., lease: float | None = ..., items: Literal[True]
    ) -> Future[QueueItem[T]]: ...
    @overload
    def take(
        self, n: int, *, timeout: float | None = ..., lease: float | None = ..., items: Literal[True]
    ) -> Future[list[QueueItem[T]]]: ...
    def take(
        self,
        n: int | None = None,
        *,
        timeout: float | None = None,
        lease: float | None = None,
        items: bool = False,
    ) -> Any:
        """Take an item or, with ``n``, a list of one to ``n`` items: those that are available, but at least one.

        The future raises :class:`QueueClosed` once the queue is closed and empty, and :class:`QueueItemError` if an item cannot
        be unpickled. If the future is cancelled, or its result is never read, its items go back into the queue.

        Args:
            n: the maximum number of items.
            timeout: seconds after which the future raises :class:`QueueEmpty`.
            lease: the queue keeps the items for this many seconds, and the result has :class:`QueueItem` objects. Call
                :meth:`ack` when you are done with them, or they go to the next taker.
            items: whether to return :class:`QueueItem` objects, which also tell who put the item, and when.
        """
        if n is not None and not checks.is_whole(n, 1):
            raise ValueError(f"take(n) must be a whole number from 1, got {n!r}")
        checks.seconds(lease, "lease")
        if timeout != 0:
            checks.seconds(timeout, "timeout")
        return self._take(n, timeout, lease, items=items or lease is not None)

    def take_nowait(self, n: int | None = None) -> Future[Any]:
        """Like :meth:`take`, for items that are available now; if there are none, the future raises :class:`QueueEmpty`."""
        return self._take(n, 0.0, None, items=False)

    def _take(self, n: int | None, wait: float | None, lease: float | None, *, items: bool) -> Future[Any]:
        client = self._client
        number = client.number()
        call = self._server.take.call_one((client.owner, number), n or 1, lease, wait)
        coming = _Coming(self, call, number, single=n is None, items=items, leased=lease is not None)
        return _Taking(coming, call)

    def ack(self, items: QueueItem[T] | Sequence[QueueItem[T]]) -> Future[int]:
        """Acknowledge leased items. The future's result is how many of them were still leased; the others were delivered again."""
        return self._leased("ack", items)

    def give_back(self, items: QueueItem[T] | Sequence[QueueItem[T]]) -> Future[int]:
        """Return leased items to the queue, for other takers."""
        return self._leased("release", items)

    def renew(self, item: QueueItem[T], seconds: float) -> Future[bool]:
        """Extend the lease of an item, and of all items taken with it, to this many seconds from now; false if it has ended."""
        checks.seconds(seconds, "seconds")
        if item._lease is None:
            raise ValueError(f"{item!r} was not leased: there is nothing to renew")
        return cast("Future[bool]", self._server.renew.call_one(self._client.owner, item._lease, seconds))

    def _leased(self, what: str, items: QueueItem[T] | Sequence[QueueItem[T]]) -> Future[int]:
        numbers: dict[int, list[int]] = {}
        for item in [items] if isinstance(items, QueueItem) else items:
            if item._lease is None:
                raise ValueError(
                    f"{item!r} was not leased; take items with lease= to keep them until they are acknowledged"
                )
            numbers.setdefault(item._lease, []).append(item._number)
        return cast("Future[int]", getattr(self._server, what).call_one(self._client.owner, numbers))

    # The whole.

    def stats(self) -> Future[QueueStats]:
        """Return the queue's statistics."""
        return cast("Future[QueueStats]", self._server.stats.call_one())

    def close(self, *, discard: bool = False) -> Future[None]:
        """Close the queue for new items. Takers get the remaining items, and then :class:`QueueClosed`.

        Items that this process has put before are still accepted if there is room. ``discard`` drops the remaining items.
        """
        closed: Promise[None] = Promise(f"the end of queue {self._name!r}")

        def settle(call: Future[None]) -> None:
            error = call.exception()
            if error is None:
                closed.set_result(None)
            else:
                closed.set_exception(error)

        def close(_flushed: Future[None]) -> None:
            _flushed.exception()
            self._server.close.call_one(discard).add_done_callback(settle)

        self.flush().add_done_callback(close)
        return closed.future

    def stop(self) -> Future[None]:
        """End the queue and drop its items. Only its creator can do this."""
        if self._procs is not None:
            return self._procs.stop()
        return cast("Future[None]", self._server.stop())

    def __iter__(self) -> Iterator[T]:
        while True:
            try:
                value = self.take().get()
            except QueueClosed:
                return
            yield value

    async def __aiter__(self) -> AsyncIterator[T]:
        while True:
            try:
                value = await self.take()
            except QueueClosed:
                return
            yield value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # A forked copy leaves the queue to its parent.
        if self._server._process.pid == os.getpid():
            self.stop().get()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def __reduce__(self) -> Any:
        return _revive, (self._server, self._name)

    def __repr__(self) -> str:
        return f"<Queue {self._name!r}>"


def _revive(server: Any, name: str) -> Queue[Any]:
    queue: Queue[Any] = Queue.__new__(Queue)
    queue._procs = None
    queue._begin(server, name)
    return queue


class _Coming:
    """Items on their way to a taker."""

    __slots__ = ("_call", "_items", "_leased", "_number", "_queue", "_single", "looked")

    def __init__(
        self, queue: Queue[Any], call: Future[Any], number: int, *, single: bool, items: bool, leased: bool
    ) -> None:
        self._queue = queue
        self._call = call
        self._number = number
        self._single = single
        self._items = items
        self._leased = leased
        self.looked = False

    def look(self, call: Any) -> Any:
        """Return what has arrived. From now on it belongs to the taker."""
        self.looked = True
        given: list[Given] | None = self._call._finish(call)
        queue = self._queue
        if given is None:
            raise QueueClosed(f"queue {queue._name!r} is closed and empty")
        if not given:
            raise QueueEmpty(f"nothing could be taken from queue {queue._name!r} within the timeout")
        if not self._leased:
            # Before the taker has them: if it ends from now on, its items are gone too.
            queue._server.confirm.broadcast(queue._client.owner, self._number)
        values: list[Any] = []
        bad: list[QueueItem[Any]] = []
        first: Exception | None = None
        for each in given:
            try:
                value = loads(each[1], each[2])
            except Exception as error:  # noqa: BLE001 - concerns this item only
                first = first or error
                bad.append(self._item(each, None))
            else:
                values.append(self._item(each, value) if self._items else value)
        if first is not None:
            raise self._unreadable(bad, values, first) from first
        return values[0] if self._single else values

    def _item(self, given: Given, value: Any) -> QueueItem[Any]:
        number, _, _, version, producer, made, deliveries, _ = given
        lease = self._number if self._leased else None
        return QueueItem(value, producer, made, version, deliveries, number, lease)

    def _unreadable(self, bad: list[QueueItem[Any]], rest: list[Any], error: Exception) -> QueueItemError:
        item, name = bad[0], self._queue._name
        said = [
            (
                f"item {item._number} of queue {name!r}, put by {item.producer}, cannot be unpickled here: "
                f"{first_line(error).rstrip('.')}"
            )
        ]
        if len(bad) > 1:
            said.append(f"nor can {len(bad) - 1} more that were taken with it")
        if rest:
            said.append(f"the others that were taken with it are in .rest ({len(rest)})")
        if self._leased:
            said.append("ack() those in .items, or they will be delivered again")
        return QueueItemError("; ".join(said), items=bad, rest=rest)

    def undo(self) -> None:
        """Return the items, unless the taker has looked at them."""
        if not self.looked:
            self.looked = True
            self._queue._server.undo.broadcast(self._queue._client.owner, self._number)


class _Taking(Future[Any]):
    """The future of a take call."""

    __slots__ = ("_coming",)

    def __init__(self, coming: _Coming, call: Future[Any]) -> None:
        super().__init__(call._process, call._call, coming.look, call._what, call._limit)
        self._deadline = call._deadline
        self._coming = coming

    def _let_go(self) -> None:
        self._coming.undo()

    def __del__(self) -> None:
        coming = getattr(self, "_coming", None)
        if coming is not None and not coming.looked and not self._process.closed:
            # If the queue is gone, so are its items.
            with contextlib.suppress(Exception):
                coming.undo()
