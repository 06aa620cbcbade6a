"""How event loops learn that a call has progressed: one file descriptor per loop, read once per burst."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
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
# The standard library's loops have a queue of what they run next, ``_ready``; other loops may not.
_NOTHING: deque[object] = deque()


class ActorSelector(selectors.EpollSelector):
    """The selector of a loop that runs actors: it waits inside the runtime, where the loop's thread may read connections itself.

    A message for an actor then wakes the loop's thread directly. If the waker has tokens, its descriptor is reported as readable,
    although it is rarely written. The loop's own descriptors are polled only if the runtime has seen that one of them is ready.
    """

    def __init__(self, runtime: Runtime, waker: Waker) -> None:
        super().__init__()
        self._inside = EventLoop(runtime, waker)
        self._mesh_waker = waker

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for descriptors and for messages."""
        waker = self._mesh_waker
        if timeout is None or timeout > 0:
            self._inside.wait(self.fileno(), timeout)
        events = [] if self._inside.is_quiet() else super().select(0)
        if waker.any():
            key = self.get_key(waker.fileno())
            if not any(key is found for found, _ in events):
                events.append((key, selectors.EVENT_READ))
        return events


class Bridge:
    """The connection between one event loop and the runtime; the loop keeps it alive, as its reader."""

    def __init__(self, loop: asyncio.AbstractEventLoop, failure: Callable[[], BaseException | None]) -> None:
        self.loop = weakref.ref(loop)
        self._failure = failure
        self._waker = Waker()
        self._tokens = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[None]] = {}
        self._deaf: set[int] = set()
        """Those of them that no failure of the script interrupts."""
        loop.add_reader(self._waker.fileno(), self._on_ready)

    def _on_ready(self) -> None:
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
        # If the loop has nothing else to run, polling for a moment is faster than going to sleep.
        if not self._waiting and getattr(self.loop(), "_ready", True) == _NOTHING and call.look(seen):
            return
        token = next(self._tokens)
        waiting = asyncio.get_running_loop().create_future()
        self._waiting[token] = waiting
        if not heed:
            self._deaf.add(token)
        try:
            call.tell(self._waker, token, seen)
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
