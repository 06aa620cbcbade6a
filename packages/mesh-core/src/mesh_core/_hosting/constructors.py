"""Construct coroutine actors on a thread beside the event loop, which keeps running meanwhile.

One thread constructs them one after the other. If a constructor does not return while others wait, another thread is started.
Constructed actors join the loop in batches: if thousands are constructed, the loop would otherwise be
woken for each, and take the interpreter from the thread that constructs the next.
"""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVarTuple

if TYPE_CHECKING:
    from mesh_core._hosting.actor_cell import ActorCell

_Ts = TypeVarTuple("_Ts")
_PATIENCE_S = 0.05
"""How long others wait for one constructor."""
_TOGETHER = 64
"""How many join the loop at once, at most."""


class ActorLoop(asyncio.SelectorEventLoop):
    """The event loop of a process's actors; constructors, which run beside it, may start tasks and timers on it."""

    ident = 0
    """The thread that runs it."""

    def call_at(
        self,
        when: float,
        callback: Callable[[*_Ts], object],
        *args: *_Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        """Call something at a given time; may be called by a constructor, too."""
        if self.ident in (0, threading.get_ident()):
            return super().call_at(when, callback, *args, context=context)
        context = contextvars.copy_context() if context is None else context
        handle = asyncio.TimerHandle(when, callback, args, self, context)

        def run() -> None:
            if not handle.cancelled():
                callback(*args)

        # Only the loop's own thread may use its timers.
        self.call_soon_threadsafe(super().call_at, when, lambda: context.run(run))
        return handle


class Constructors:
    """The threads that construct a process's coroutine actors."""

    def __init__(self, loop: ActorLoop) -> None:
        self._loop = loop
        self._waiting: queue.SimpleQueue[ActorCell | None] = queue.SimpleQueue()
        self._made: deque[ActorCell] = deque()
        """Constructed actors that have not joined the loop; the thread that removes one joins it."""
        self._lock = threading.Lock()
        self._at: dict[threading.Thread, ActorCell | None] = {}
        """What each thread is constructing."""
        self._seen: set[ActorCell | None] = set()
        """What they were constructing at the last look."""
        self._watched = False

    def construct(self, cell: ActorCell) -> None:
        """Construct an actor soon; called on the loop."""
        if not self._at and not self.start():
            # No thread can be started. This holds up the loop, but the actor is constructed.
            cell.be_made()
            cell.join()
            return
        self._waiting.put(cell)
        if not self._watched:
            self._watched = True
            self._loop.call_later(_PATIENCE_S, self._look)

    def start(self) -> bool:
        """Start another thread; return false if that is impossible."""
        thread = threading.Thread(target=self._serve, name="mesh-constructors", daemon=True)
        with self._lock:
            self._at[thread] = None
        try:
            thread.start()
        except RuntimeError:
            with self._lock:
                del self._at[thread]
            return False
        return True

    def end(self, limit: float) -> None:
        """End the threads, and wait for those that are not in a constructor."""
        until = time.monotonic() + limit
        with self._lock:
            threads = dict(self._at)
        for _ in threads:
            self._waiting.put(None)
        for thread, at in threads.items():
            # One that has not started yet finds its end in the queue.
            if at is None and thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _join(self) -> None:
        while self._made:
            try:
                cell = self._made.popleft()
            except IndexError:  # another thread was quicker
                return
            cell.join()

    def _look(self) -> None:
        # Constructed actors do not wait for those behind them.
        self._join()
        if self._waiting.empty():
            self._watched = False
            self._seen = set()
            return
        with self._lock:
            now = set(self._at.values())
        if None not in now and now <= self._seen:
            self.start()
        self._seen = now
        self._loop.call_later(_PATIENCE_S, self._look)

    def _serve(self) -> None:
        me = threading.current_thread()
        # For constructors that start tasks.
        asyncio._set_running_loop(self._loop)
        while (cell := self._waiting.get()) is not None:
            self._at[me] = cell
            try:
                contextvars.copy_context().run(cell.be_made)
            except BaseException as error:  # noqa: BLE001 - whatever it is, others wait to be constructed
                cell.lost(error)
            self._made.append(cell)
            del cell
            if self._waiting.empty() or len(self._made) >= _TOGETHER:
                self._join()
            if getattr(self._loop, "_ready", True):
                # A constructor may have scheduled something while the loop is asleep.
                self._loop.call_soon_threadsafe(_nothing)
            with self._lock:
                self._at[me] = None
                if len(self._at) > 1:
                    # One thread stays.
                    del self._at[me]
                    return
        self._join()


def _nothing() -> None:
    """Do nothing: scheduling it wakes the loop."""
