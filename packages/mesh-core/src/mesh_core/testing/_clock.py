"""A clock that tests control."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio


class Timer:
    """A scheduled call that can be cancelled; returned by :meth:`FakeClock.call_later`."""

    __slots__ = ("cancelled", "function")

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function
        self.cancelled = False

    def cancel(self) -> None:
        """Cancel the call, unless it has happened."""
        self.cancelled = True


class FakeClock:
    """A clock that tests advance. Calling it returns the time, so it replaces functions such as ``time.monotonic``.

    While the clock advances, sleepers and timers run in the order of their times, each at its own time.

    >>> from mesh_core.testing import FakeClock
    >>> clock, rung = FakeClock(start=100.0), []
    >>> timer = clock.call_later(5.0, lambda: rung.append(clock()))
    >>> clock.advance(4.0), rung
    (104.0, [])
    >>> clock.advance(4.0), rung
    (108.0, [105.0])
    """

    def __init__(self, start: float = 0.0) -> None:
        self._now = float(start)
        self._due: list[tuple[float, int, Timer]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()

    def __call__(self) -> float:
        """The time, in seconds."""
        return self._now

    @property
    def now(self) -> float:
        """The time, in seconds."""
        return self._now

    @property
    def waiting(self) -> int:
        """How many sleepers and timers are waiting for a later time."""
        with self._changed:
            return sum(not timer.cancelled for _, _, timer in self._due)

    def wait_until_waiting(self, count: int = 1, limit: float = 30.0) -> None:
        """Wait until ``count`` sleepers and timers are waiting; raise ``TimeoutError`` after ``limit`` real seconds."""

        def enough() -> bool:
            return sum(not timer.cancelled for _, _, timer in self._due) >= count

        with self._changed:
            if not self._changed.wait_for(enough, limit):
                raise TimeoutError(
                    f"fewer than {count} sleepers and timers waited for the clock within {limit} s"
                )

    def call_later(self, seconds: float, function: Callable[[], object]) -> Timer:
        """Call ``function`` after this many seconds, on the thread that advances the clock; at once for 0 or less."""
        timer = Timer(function)
        if seconds <= 0:
            function()
            return timer
        with self._changed:
            heapq.heappush(self._due, (self._now + seconds, next(self._numbers), timer))
            self._changed.notify_all()
        return timer

    def advance(self, seconds: float) -> float:
        """Advance the clock and return the new time. It never goes back."""
        if not seconds >= 0:
            raise ValueError(f"seconds must be at least 0, got {seconds!r}")
        until = self._now + seconds
        while True:
            with self._changed:
                if not self._due or self._due[0][0] > until:
                    self._now = max(self._now, until)
                    return self._now
                at, _, timer = heapq.heappop(self._due)
                self._now = max(self._now, at)
            if not timer.cancelled:
                timer.function()

    def sleep(self, seconds: float) -> None:
        """Block this thread until another thread has advanced the clock by ``seconds``."""
        woken = threading.Event()
        self.call_later(seconds, woken.set)
        woken.wait()

    async def sleep_async(self, seconds: float) -> None:
        """Suspend this coroutine until the clock was advanced by ``seconds``, from any thread."""
        import asyncio

        loop = asyncio.get_running_loop()
        woken: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(_finish, woken)

        timer = self.call_later(seconds, wake)
        try:
            await woken
        finally:
            timer.cancel()

    @contextlib.asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[None]:
        """Like ``asyncio.timeout``, by this clock: cancel the block after ``seconds`` and raise ``TimeoutError``.

        >>> import asyncio
        >>> clock = FakeClock()
        >>> async def main():
        ...     async with clock.timeout(5.0):
        ...         clock.advance(6.0)
        ...         await asyncio.Event().wait()
        >>> asyncio.run(main())
        Traceback (most recent call last):
        ...
        TimeoutError
        """
        import asyncio

        loop = asyncio.get_running_loop()
        async with asyncio.timeout(None) as limit:

            def expire() -> None:
                with contextlib.suppress(RuntimeError):  # the block was left or the loop closed
                    limit.reschedule(loop.time())

            def ring() -> None:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(expire)

            timer = self.call_later(seconds, ring)
            try:
                yield
            finally:
                timer.cancel()

    def __repr__(self) -> str:
        return f"FakeClock(now={self._now}, waiting={self.waiting})"


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
