"""How event loops learn that a call has progressed: one file descriptor per loop, read once per burst."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import selectors
import weakref
from collections import deque
from typing import TYPE_CHECKING

from mesh_core._native import EventLoop, Waker

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from mesh_core._futures.awaited import Coming
    from mesh_core._native import Runtime

_ALL = 2**63 - 1
BRIDGE = 2**64 - 1
"""What the waker of a loop that runs actors gets for the loop's bridge; no actor has this number."""
# The standard library's loops have a queue of what they run next, ``_ready``; other loops may not.
_NOTHING: deque[object] = deque()


class ActorSelector(selectors.EpollSelector):
    """The selector of a loop that runs actors: it waits inside the runtime, where the loop's thread may read connections itself.

    A message for an actor then wakes the loop's thread directly. What the waker has is passed on at once, so that what it starts runs
    in this turn of the loop; its descriptor is rarely written. The loop's own descriptors are polled only if the runtime has seen that one
    of them is ready.
    """

    def __init__(self, runtime: Runtime, waker: Waker) -> None:
        super().__init__()
        self._inside = EventLoop(runtime, waker, True)
        self._mesh_waker = waker
        self.on_tokens: Callable[[], None] | None = None
        """Called, on the loop's thread, when the waker has tokens, which it takes."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for descriptors and for messages."""
        waker = self._mesh_waker
        # With tokens the runtime would return at once.
        if (timeout is None or timeout > 0) and not waker.any():
            self._inside.wait(self.fileno(), timeout)
        events = [] if self._inside.is_quiet() else super().select(0)
        if self.on_tokens is not None and waker.any():
            self.on_tokens()
        return events


def _idle_for(loop: Any) -> float:
    """For how many seconds a loop of the standard library, which has nothing to run now, has no timer."""
    if loop._stopping or loop._debug:
        return 0.0  # in debug mode it warns of callbacks that take long
    if not loop._scheduled:
        return math.inf
    # It may have been cancelled: then the loop removes it, a little early.
    return loop._scheduled[0].when() - loop.time()  # type: ignore[no-any-return]


class Bridge:
    """The connection between one event loop and the runtime; the loop keeps it alive, as its reader."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        failure: Callable[[], BaseException | None],
        runtime: Runtime,
        *,
        above: Waker | None = None,
    ) -> None:
        self.loop = weakref.ref(loop)
        self._failure = failure
        self._above = above
        """The waker of a loop that runs actors, and calls :meth:`on_ready` when that has the token ``BRIDGE``."""
        self._waker = Waker() if above is None else Waker(above, BRIDGE)
        self._tokens = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._deaf: set[int] = set()
        """Those of them that no failure of the script interrupts."""
        self._inside: EventLoop | None = None
        """The loop as the runtime knows it, for a loop of the standard library that runs no actors."""
        if above is None:
            loop.add_reader(self._waker.fileno(), self.on_ready)
            # No others: they may keep another time, or look at more than their selector.
            if type(loop) is asyncio.SelectorEventLoop and type(loop._selector) is selectors.EpollSelector:  # type: ignore[attr-defined]
                self._inside = EventLoop(runtime, self._waker, False)

    def on_ready(self) -> None:
        """Continue what waits for calls that have progressed."""
        for token in self._waker.drain():
            waiting = self._waiting.pop(token, None)
            if waiting is not None and not waiting.done():
                waiting.set_result(None)

    def alarm(self) -> None:
        """Raise the script's failure in everything that waits in this event loop; may be called from any thread."""
        loop = self.loop()
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nothing waits there
                loop.call_soon_threadsafe(self._on_alarm)

    def _on_alarm(self) -> None:
        waiting = [
            each for token, each in self._waiting.items() if token not in self._deaf and not each.done()
        ]
        error = self._failure() if waiting else None
        if error is not None:
            for each in waiting:
                each.set_exception(error)

    async def wait(self, call: Coming, seen: int = _ALL, heed: bool = True) -> None:
        """Return once the call is complete or, for a streamed call, has more than ``seen`` outcomes.

        Unless ``heed`` is false, the script's failure may be raised meanwhile.
        """
        loop = self.loop()
        assert loop is not None
        idle = not self._waiting and getattr(loop, "_ready", True) == _NOTHING
        inside, timeout = self._inside, math.inf
        if idle and inside is not None:
            timeout = _idle_for(loop)
            idle = timeout > 0
        # Polling for a moment is faster than going to sleep.
        if (
            idle
            and (inside is None or inside.is_quiet())
            and not (self._above is not None and self._above.any())
            and call.look(seen)
        ):
            return
        token = next(self._tokens)
        waiting = loop.create_future()
        self._waiting[token] = waiting
        if not heed:
            self._deaf.add(token)
        try:
            call.tell(self._waker, token, seen)
            if idle and inside is not None:
                # It sleeps in the runtime, so that the answer wakes this thread directly.
                inside.visit(loop._selector.fileno(), None if timeout == math.inf else timeout)  # type: ignore[attr-defined]
                if self._waker.any():
                    self.on_ready()
            await waiting
        finally:
            self._waiting.pop(token, None)
            self._deaf.discard(token)


def settle(answer: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    """Complete a future with a result or an error, unless it is done already. Call this on its loop."""
    if not answer.done():
        if error is None:
            answer.set_result(result)
        else:
            answer.set_exception(error)
