"""What ``map`` and similar methods return: tasks are submitted as their results are taken."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from _thread import get_ident
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from mesh_core._blocks.pool.following import Followers, Steps
from mesh_core._blocks.pool.items import Arrivals, Item
from mesh_core._common.checks import is_whole
from mesh_core._common.closing import Closing
from mesh_core._common.errors import MailboxFull, MeshError
from mesh_core._futures.output import follow, follow_async

if TYPE_CHECKING:
    from typing import Self

    from mesh_core._blocks.pool.bar import Bar
    from mesh_core._blocks.pool.pool import Pool
    from mesh_core._blocks.pool.tasks import Call
    from mesh_core._futures.future import Future
    from mesh_core._meshes.adverbs import Endpoint

R = TypeVar("R")
_AHEAD = 4
_AT_HAND = frozenset({range, list, tuple, dict, set, frozenset, str, bytes})
_END: Any = object()


class Results(Closing, ABC, Generic[R]):
    """The results of many tasks, for ``for`` and ``async for``. Leaving the loop early cancels the remaining tasks."""

    def __init__(
        self,
        pool: Pool[Any],
        endpoint: Endpoint[..., Any],
        values: tuple[Iterable[Any] | AsyncIterable[Any], ...],
        ahead: int | None,
        bar: bool,
    ) -> None:
        if not values:
            raise TypeError(
                "map() takes an endpoint and what to call it with, such as pool.map(scorers.score, texts)"
            )
        if ahead is not None and not is_whole(ahead, 1):
            raise ValueError(f"ahead= must be a whole number from 1, got {ahead!r}")
        self._pool = pool
        self._endpoint = endpoint
        self._many = len(values) > 1
        self._values: Iterator[Any] | None = None
        self._values_async: AsyncIterator[Any] | None = None
        if any(isinstance(each, AsyncIterable) for each in values):
            self._values_async = _zip(values).__aiter__()
        else:
            self._values = zip(*cast("tuple[Iterable[Any], ...]", values), strict=False)
        self._at_hand = all(type(each) in _AT_HAND for each in values)
        """Whether reading a value takes no time and cannot wait, so that several may be read before their tasks are submitted."""
        self._ahead = ahead
        self._ended = False
        self._few: float = math.inf
        """With more tasks than this in progress, results that are there are taken first, and then many values are read at once."""
        self._numbers = itertools.count()
        self._open: dict[int, Any] = {}
        """Tasks that were submitted and whose results were not taken, by number."""
        self._steps: Steps | None = None
        self._last: Call | None = None
        """The call that was submitted last."""
        self._held: Any = _END
        self._bar: Bar | None = None
        if bar:
            from mesh_core._blocks.pool.bar import Bar

            sizes = [len(each) for each in values if isinstance(each, Sized)]
            self._bar = Bar(min(sizes) if len(sizes) == len(values) else None)
        self._prepare()

    # What differs between the kinds of results.

    @abstractmethod
    def _prepare(self) -> None:
        """Create what collects the results."""

    @abstractmethod
    def _begin(self, value: tuple[Any, ...], call: Call) -> None:
        """Submit a task."""

    @abstractmethod
    def _is_ready(self) -> bool:
        """Whether the next result is available."""

    @abstractmethod
    def _wait(self, steps: Steps) -> None:
        """Wait until it is available, or until all tasks are cancelled."""

    @abstractmethod
    async def _wait_async(self) -> None:
        """The same in a coroutine."""

    @abstractmethod
    def _take(self) -> R:
        """Return the next result, or raise the error of its task."""

    @abstractmethod
    def _cancel(self) -> None:
        """Cancel all tasks whose results were not taken."""

    def _follow(self) -> None:
        """Wait until what the task has printed is shown, before its result is."""

    async def _follow_async(self) -> None:
        """The same in a coroutine."""

    # Feeding.

    def _limit(self) -> int:
        turns = self._pool._turns
        limit = self._ahead or _AHEAD * turns or 1
        if self._at_hand:
            self._few = -1 if self._ended else max(min(limit - 1, 2 * turns), limit // 2)
        return limit

    def _draw(self, limit: int) -> bool:
        """Read the next value; true if there is one and, as far as is known, room for its task, or no task is in progress."""
        if self._held is _END:
            if self._ended or len(self._open) >= limit:
                return False
            if self._values is None:
                raise TypeError("these values are asynchronous: use `async for`")
            self._held = next(self._values, _END)
            if self._held is _END:
                self._ended = True
                return False
        return not (self._pool._runner.is_full and self._open)

    def _advance(self) -> None:
        """Submit as many tasks as allowed, and wait for a result. Waits for room only if no task is in progress."""
        if len(self._open) > self._few and self._is_ready():
            return
        runner, limit = self._pool._runner, self._limit()
        runner.following.helps_soon()
        steps = self._steps
        if steps is None or steps.thread != get_ident():
            steps = self._steps = Steps()
        while self._draw(limit):
            with steps:
                if not self._try_begin(steps):
                    break
                if self._at_hand:
                    self._begin_more(limit)
                if len(self._open) >= limit or runner.is_full:
                    # In the same block: entering another for each task would take too long.
                    if not self._is_ready():
                        self._wait(steps)
                    return
        if self._open and not self._is_ready():
            with steps:
                self._wait(steps)

    def _begin_more(self, limit: int) -> None:
        """Submit several tasks at once, if that is less work."""

    def _try_begin(self, steps: Steps) -> bool:
        """Submit a task with the current value; false if there is no room and other tasks are in progress."""
        value = self._held
        call = self._call(value)
        try:
            room = self._pool._runner.room(wait=not self._open)
        except MailboxFull:
            return False
        if room is not None:
            self._pool._await_room(room, steps)
        self._held = _END
        self._begin(value, call)
        return True

    def _call(self, value: tuple[Any, ...]) -> Call:
        last = self._last
        if last is None:
            call = self._pool._call(self._endpoint, value, {})
        else:
            call = self._pool._call_again(self._endpoint, last, value)
        self._last = call
        return call

    async def _fill_async(self) -> None:
        if len(self._open) > self._few and self._is_ready():
            return
        limit = self._limit()
        while not self._ended and len(self._open) < limit:
            if self._held is _END:
                if self._values is not None:
                    self._held = next(self._values, _END)
                else:
                    assert self._values_async is not None
                    self._held = await anext(self._values_async, _END)
            value = self._held
            if value is _END:
                self._ended = True
                return
            call = self._call(value)
            try:
                room = self._pool._runner.room(wait=not self._open)
            except MailboxFull:
                return
            if room is not None:
                await self._pool._await_room_async(room)
            self._held = _END
            self._begin(value, call)
            if self._at_hand:
                self._begin_more(limit)

    # Taking.

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        try:
            self._advance()
            if self._open:
                self._follow()
                return self._taken()
        except BaseException:
            self.close()
            raise
        self._finish()
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> R:
        try:
            await self._fill_async()
            if self._open and not self._is_ready():
                await self._wait_async()
            if self._open:
                await self._follow_async()
                return self._taken()
        except BaseException:
            self.close()
            raise
        self._finish()
        raise StopAsyncIteration

    def _taken(self) -> R:
        if self._bar is not None:
            self._bar.step()
        return self._take()

    def _finish(self) -> None:
        if self._bar is not None:
            self._bar.end()
            self._bar = None

    def close(self) -> None:
        """Cancel the remaining tasks."""
        self._ended = True
        self._held = _END
        self._cancel()
        self._finish()

    def __del__(self) -> None:
        # A forked copy has nothing to cancel.
        if hasattr(self, "_pool") and self._open and self._pool._process.pid == os.getpid():
            with contextlib.suppress(MeshError):
                self.close()


async def _zip(several: tuple[Iterable[Any] | AsyncIterable[Any], ...]) -> AsyncIterator[tuple[Any, ...]]:
    """Like ``zip``, for iterables of which some are asynchronous."""
    each = [one.__aiter__() if isinstance(one, AsyncIterable) else iter(one) for one in several]
    while True:
        values = []
        for one in each:
            value = await anext(one, _END) if isinstance(one, AsyncIterator) else next(one, _END)
            if value is _END:
                return
            values.append(value)
        yield tuple(values)


class _Items(Results[R]):
    """Results of tasks that have no futures of their own."""

    def _prepare(self) -> None:
        self._arrivals = Arrivals(self._pool._process, f"results of {self._pool._runner.name}")

    def _begin(self, value: tuple[Any, ...], call: Call) -> None:
        pool = self._pool
        item = self._item(call, value)
        pool._runner.begin(item)
        self._open[item.number] = item

    def _begin_more(self, limit: int) -> None:
        pool, values = self._pool, self._values
        assert values is not None
        runner = pool._runner
        while not self._ended and (count := runner.rooms(limit - len(self._open))) > 0:
            drawn = list(itertools.islice(values, count))
            try:
                calls = [self._call(value) for value in drawn]
            except BaseException:
                runner.leave_rooms(count)
                raise
            runner.leave_rooms(count - len(calls))
            self._ended = len(calls) < count
            items = [self._item(call, value) for call, value in zip(calls, drawn, strict=True)]
            runner.begin_all(items)
            self._open.update((item.number, item) for item in items)

    def _item(self, call: Call, args: tuple[Any, ...]) -> Item:
        pool = self._pool
        number = next(self._numbers)
        return Item(pool._runner, call, args, pool._options.retries, number=number, arrivals=self._arrivals)

    def _is_over(self) -> bool:
        return not self._open or self._is_ready()

    def _wait(self, steps: Steps) -> None:
        following, arrivals = self._pool._runner.following, self._arrivals
        self._want()
        while not self._is_over():
            if not following.help_with(arrivals, self._is_over, steps):
                bell = arrivals.bell()
                if not self._is_over():
                    steps.wait(bell.wait)

    async def _wait_async(self) -> None:
        bridge = self._pool._process.bridge()
        self._want()
        while not self._is_over():
            bell = self._arrivals.bell()
            if not self._is_over():
                await bridge.wait(bell)

    def _follow(self) -> None:
        if self._arrivals.answered:
            follow(self._pool._process, self._arrivals.follow)

    async def _follow_async(self) -> None:
        if self._arrivals.answered:
            await follow_async(self._pool._process, self._arrivals.follow)

    def _want(self) -> None:
        """Note which task is awaited, if it is a particular one."""

    def _cancel(self) -> None:
        left, self._open = self._open, {}
        for item in left.values():
            if not item.is_over:
                item.cancel()
        self._arrivals.ring()


class Ordered(_Items[R]):
    """Results in the order of the values."""

    def _first(self) -> Item:
        first: Item = next(iter(self._open.values()))
        return first

    def _want(self) -> None:
        self._arrivals.wanted = self._first()

    def _is_ready(self) -> bool:
        return bool(self._open) and self._first().is_over

    def _take(self) -> R:
        item = self._first()
        del self._open[item.number]
        self._arrivals.ready.clear()
        result: R = item.result()
        return result


class Unordered(_Items[R]):
    """Results as they arrive."""

    def _is_ready(self) -> bool:
        return bool(self._arrivals.ready)

    def _take(self) -> R:
        item = self._arrivals.ready.popleft()
        del self._open[item.number]
        result: R = item.result()
        return result


class Completed(Results[tuple[Any, "Future[Any]"]]):
    """Finished futures as they arrive, each with its value."""

    def _prepare(self) -> None:
        self._coming = Followers(self._pool._process)
        self._next: int | None = None

    def _begin(self, value: tuple[Any, ...], call: Call) -> None:
        future = self._pool._submit(call, value, {})
        # Its error is reported by whoever receives the future.
        future._call.look_away()
        number = next(self._numbers)
        self._open[number] = (value if self._many else value[0], future)
        self._coming.add(number, future)

    def _is_ready(self) -> bool:
        while self._next is None and (number := self._coming.take()) is not None:
            self._coming.futures.pop(number, None)
            if number in self._open:
                self._next = number
        return self._next is not None

    def _wait(self, steps: Steps) -> None:
        coming, following = self._coming, self._pool._runner.following
        while not self._is_ready() and self._open:
            if not following.help(coming.list, coming.taken, steps):
                steps.wait(lambda: coming.list.wait(None, coming.taken))

    async def _wait_async(self) -> None:
        bridge, coming = self._pool._process.bridge(), self._coming
        while not self._is_ready() and self._open:
            await bridge.wait(coming.list, coming.taken)

    def _take(self) -> tuple[Any, Future[Any]]:
        number, self._next = self._next, None
        assert number is not None
        taken: tuple[Any, Future[Any]] = self._open.pop(number)
        return taken

    def _cancel(self) -> None:
        left, self._open, self._next = self._open, {}, None
        for _, future in left.values():
            future.cancel()
