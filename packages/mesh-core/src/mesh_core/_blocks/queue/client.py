"""A queue's client in one process: items are put in batches, and taken by calls that can be undone.

QCL-1: a process has one batch in flight at a time, so that its items arrive in the order in which they were put. The next batch
is sent when the queue has accepted the one before.
QCL-2: taken items whose future was cancelled or dropped before anybody looked at it go back into the queue.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from functools import partial
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

from mesh_core._common.errors import MailboxFull, MeshError, first_line
from mesh_core._futures.promise import Promise
from mesh_core._meshes.refs import capture
from mesh_core._serialize import dumps
from mesh_core.extensions import Extension

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mesh_core._blocks.queue.server import Wire
    from mesh_core._futures.future import Future
    from mesh_core._process.process import Process

_BATCH = 256
"""Items in a batch, at most."""
_BATCH_BYTES = 1 << 20
_AHEAD = 1024
"""How many items may wait here before a thread that puts another one has to wait."""
_AHEAD_BYTES = 4 << 20


class QueueClosed(MeshError, EOFError):
    """The queue is closed: nothing can be put into it, or there is nothing left to take."""


class Batch:
    """Items that are sent to the queue together."""

    __slots__ = ("bytes", "items", "promise")

    def __init__(self, name: str) -> None:
        self.items: list[Wire] = []
        self.bytes = 0
        self.promise: Promise[None] = Promise(name)


class Client:
    """The client of one queue in one process."""

    def __init__(self, process: Process, server: Any, name: str, numbers: Iterator[int]) -> None:
        from mesh_core._meshes.hosts import this_proc
        from mesh_core.extensions import current_proc

        self.server = server
        self.name = name
        self.owner = process.runtime.me
        self._producer = str(current_proc())
        self._numbers = numbers
        self._lock = threading.Lock()
        self._batches: list[Batch] = []
        """Batches that wait; the one in flight is not among them."""
        self._waiting = self._waiting_bytes = 0
        self._under_way: Batch | None = None
        self._error: BaseException | None = None
        server.hello.broadcast(this_proc(), self.owner)

    def number(self) -> int:
        """The number of the next take call."""
        return next(self._numbers)

    # Putting.

    def wire(self, value: Any, version: Any) -> tuple[Wire, int]:
        """An item as it is sent, and its size in bytes."""
        (data, buffers), refs = capture(partial(dumps, value, root="the item"))
        size = len(data)
        if not buffers:
            return (data, [], version, time.time(), refs), size
        size += sum(each.nbytes for each in buffers)
        # The buffers are copied, so that later changes do not affect the item, whenever it is sent.
        return (data, [PickleBuffer(bytearray(each)) for each in buffers], version, time.time(), refs), size

    def put(self, value: Any, version: Any, *, may_wait: bool) -> Future[None]:
        """Send an item to the queue, now or later."""
        item, size = self.wire(value, version)
        full: Future[None] | None = None
        with self._lock:
            if self._error is not None:
                raise self._again(self._error)
            if self._waiting >= _AHEAD or self._waiting_bytes >= _AHEAD_BYTES:
                if not may_wait and self._waiting_bytes >= 16 * _AHEAD_BYTES:
                    raise MailboxFull(
                        f"{self.name} has no room, and {self._waiting_bytes:,} bytes wait here to be put into it; await what put() "
                        "returns, so that a coroutine puts no faster than others take"
                    )
                full = self._batches[0].promise.future
            last = self._batches[-1] if self._batches else None
            if last is None or len(last.items) >= _BATCH or last.bytes >= _BATCH_BYTES:
                last = Batch(f"putting into {self.name}")
                self._batches.append(last)
            last.items.append(item)
            last.bytes += size
            self._waiting += 1
            self._waiting_bytes += size
            future = last.promise.future
        self._send()
        if full is not None and may_wait:
            full.get()
        return future

    def _again(self, error: BaseException) -> BaseException:
        if isinstance(error, QueueClosed):
            return QueueClosed(str(error))
        return MeshError(f"cannot put into {self.name}: {first_line(error)}")

    def _send(self) -> None:
        """Send the next batch, unless one is in flight."""
        with self._lock:
            if self._under_way is not None or not self._batches:
                return
            batch = self._under_way = self._batches.pop(0)
            self._waiting -= len(batch.items)
            self._waiting_bytes -= batch.bytes
        try:
            sent = self.server.put.call_one(self._producer, batch.items)
        except BaseException as error:
            self._fail(error)
            raise
        sent.add_done_callback(self._sent)

    def _sent(self, sent: Future[bool]) -> None:
        error = sent.exception()
        if error is not None:
            self._fail(error)
        elif not sent.get():
            self._fail(QueueClosed(f"{self.name} is closed; nothing more can be put into it"))
        else:
            with self._lock:
                batch, self._under_way = self._under_way, None
            self._send()
            assert batch is not None
            batch.promise.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """The queue accepts nothing more, or is gone."""
        with self._lock:
            self._error = error
            failed = [*([] if self._under_way is None else [self._under_way]), *self._batches]
            self._under_way, self._batches = None, []
            self._waiting = self._waiting_bytes = 0
        for batch in failed:
            batch.promise.set_exception(self._again(error))

    @property
    def waiting(self) -> int:
        """How many items the queue does not have yet."""
        with self._lock:
            return self._waiting + (0 if self._under_way is None else len(self._under_way.items))

    def flush(self) -> Future[None] | None:
        """A future that is done when the queue has everything that was put here so far; None if it has it already."""
        with self._lock:
            last = self._batches[-1] if self._batches else self._under_way
        return None if last is None else last.promise.future


class Queues(Extension):
    """The queue clients of one process. In an orderly end of the process, waiting items are sent first."""

    name = "mesh.queues"
    _everywhere = True

    def __init__(self) -> None:
        self.clients: weakref.WeakValueDictionary[tuple[int, int], Client] = weakref.WeakValueDictionary()
        self.numbers = itertools.count(1)
        """Numbers of the take calls of the whole process: leases outlive the client that made them."""

    def stop(self) -> None:
        until = time.monotonic() + _END_S
        for client in list(self.clients.values()):
            flushed = client.flush()
            try:
                if flushed is not None:
                    flushed.get(timeout=max(0.0, until - time.monotonic()))
            except MeshError as error:
                if not client.waiting:
                    continue  # the queue has refused them; the promise of their batch says so
                logging.getLogger("mesh").error(  # noqa: TRY400 - where it was noticed says nothing
                    "%d items that were put into %s are lost: the process ended before there was room for them (%s). Wait for "
                    "flush() first",
                    client.waiting,
                    client.name,
                    first_line(error),
                )


_END_S = 1.0


def client_of(process: Process, server: Any, name: str) -> Client:
    """Return this process's client of a queue."""
    process.extensions.ensure(Queues)
    queues = process.extensions.find(Queues.name)
    assert isinstance(queues, Queues)
    key = (server._procs_id, server._actor_id)
    client = queues.clients.get(key)
    if client is None:
        client = queues.clients[key] = Client(process, server, name, queues.numbers)
    return client
