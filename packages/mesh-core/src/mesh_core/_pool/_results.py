"""What ``map`` and its like return: results that are asked for as they are taken."""

from __future__ import annotations

import contextlib
import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from mesh_core._errors import MailboxFull, MeshError
from mesh_core._pool._following import Followers, Steps

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from mesh_core._adverbs import Endpoint
    from mesh_core._future import Future
    from mesh_core._pool._bar import Bar
    from mesh_core._pool._pool import Pool

R = TypeVar("R")
_AHEAD = 4
_END: Any = object()


class Results(ABC, Generic[R]):
    """The results of many tasks, for ``for`` and ``async for``. Leaving the loop early cancels what is left."""

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
        if ahead is not None and (isinstance(ahead, bool) or not isinstance(ahead, int) or ahead < 1):
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
        self._ahead = ahead
        self._ended = False
        self._open: dict[int, tuple[Any, Future[Any]]] = {}
        self._numbers = itertools.count()
        self._held: Any = _END
        self._bar: Bar | None = None
        if bar:
            from mesh_core._pool._bar import Bar

            sizes = [len(each) for each in values if isinstance(each, Sized)]
            self._bar = Bar(min(sizes) if len(sizes) == len(values) else None)

    # What the kinds differ in.

    @abstractmethod
    def _added(self, number: int, future: Future[Any]) -> None:
        """A task was begun."""

    @abstractmethod
    def _wait(self) -> int | None:
        """Wait until the next that is to be given is done; its number. None if all was cancelled meanwhile."""

    @abstractmethod
    async def _wait_async(self) -> int | None:
        """The same in a coroutine."""

    def _give(self, value: Any, future: Future[Any]) -> R:
        result: R = future.get()
        return result

    # Feeding.

    @property
    def _limit(self) -> int:
        return self._ahead if self._ahead is not None else max(_AHEAD * self._pool._turns, 1)

    def _fill(self) -> None:
        """Begin as many tasks as may be; waits for room only if nothing is under way."""
        while not self._ended and len(self._open) < self._limit:
            if self._values is None:
                raise TypeError("these values are asynchronous: use `async for`")
            if self._held is _END:
                self._held = next(self._values, _END)
            if self._held is _END:
                self._ended = True
            elif (self._open and self._pool._runner.is_full) or not self._begin():
                return

    def _begin(self) -> bool:
        """Begin a task with the value that is held; false if there is no room, and something is under way."""
        value = self._held
        call = self._pool._call(self._endpoint, value, {})
        with Steps() as steps:
            try:
                room = self._pool._runner.room(wait=not self._open)
            except MailboxFull:
                return False
            if room is not None:
                self._pool._await_room(room, steps)
            self._begun(value, self._pool._submit(call))
        return True

    async def _fill_async(self) -> None:
        while not self._ended and len(self._open) < self._limit:
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
            call = self._pool._call(self._endpoint, value, {})
            try:
                room = self._pool._runner.room(wait=not self._open)
            except MailboxFull:
                return
            if room is not None:
                await self._pool._await_room_async(room)
            self._begun(value, self._pool._submit(call))

    def _begun(self, value: tuple[Any, ...], future: Future[Any]) -> None:
        self._held = _END
        # It is raised where its result is taken, or concerns nobody.
        future._call.look_away()
        number = next(self._numbers)
        self._open[number] = (value if self._many else value[0], future)
        self._added(number, future)

    # Taking.

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        with self._closing():
            self._fill()
            number = self._wait() if self._open else None
            if number is None or number not in self._open:
                self._finish()
                raise StopIteration
            return self._taken(number)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> R:
        with self._closing():
            await self._fill_async()
            number = await self._wait_async() if self._open else None
            if number is None or number not in self._open:
                self._finish()
                raise StopAsyncIteration
            return self._taken(number)

    def _taken(self, number: int) -> R:
        value, future = self._open.pop(number)
        if self._bar is not None:
            self._bar.step()
        return self._give(value, future)

    @contextlib.contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        except (StopIteration, StopAsyncIteration):
            raise
        except BaseException:
            self.close()
            raise

    def _finish(self) -> None:
        if self._bar is not None:
            self._bar.end()
            self._bar = None

    def close(self) -> None:
        """Cancel what is left."""
        self._ended = True
        self._held = _END
        left, self._open = self._open, {}
        for _, future in left.values():
            future.cancel()
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # A forked copy has nothing to cancel.
        if getattr(self, "_open", None) and self._pool._process.pid == os.getpid():
            with contextlib.suppress(MeshError):
                self.close()


async def _zip(several: tuple[Iterable[Any] | AsyncIterable[Any], ...]) -> AsyncIterator[tuple[Any, ...]]:
    """As ``zip``, where some are asynchronous."""
    each = [one.__aiter__() if isinstance(one, AsyncIterable) else iter(one) for one in several]
    while True:
        values = []
        for one in each:
            value = await anext(one, _END) if isinstance(one, AsyncIterator) else next(one, _END)
            if value is _END:
                return
            values.append(value)
        yield tuple(values)


class Ordered(Results[R]):
    """In the order of the values."""

    def _added(self, number: int, future: Future[Any]) -> None:
        pass

    def _first(self) -> tuple[int, Future[Any]]:
        number = next(iter(self._open))
        return number, self._open[number][1]

    def _wait(self) -> int:
        number, future = self._first()
        if not future.done():
            self._pool._help(future)
            # It is raised, if it has failed, where the result is given.
            future.exception()
        return number

    async def _wait_async(self) -> int:
        number, future = self._first()
        if not future.done():
            await future._await_arrival()
        return number


class Unordered(Results[R]):
    """As they come."""

    def __init__(
        self,
        pool: Pool[Any],
        endpoint: Endpoint[..., Any],
        values: tuple[Iterable[Any] | AsyncIterable[Any], ...],
        ahead: int | None,
        bar: bool,
    ) -> None:
        super().__init__(pool, endpoint, values, ahead, bar)
        self._coming = Followers(pool._process)

    def _added(self, number: int, future: Future[Any]) -> None:
        self._coming.add(number, future)

    def _next(self) -> int | None:
        while (number := self._coming.take()) is not None:
            self._coming.remove(number)
            if number in self._open:
                return number
        return None

    def _wait(self) -> int | None:
        coming, following = self._coming, self._pool._runner.following
        while (number := self._next()) is None and self._open:
            if not following.help(coming.list, coming.taken):
                coming.list.wait(None, coming.taken)
        return number

    async def _wait_async(self) -> int | None:
        bridge, coming = self._pool._process.bridge(), self._coming
        while (number := self._next()) is None and self._open:
            await bridge.wait(coming.list, coming.taken)
        return number


class Completed(Unordered[tuple[Any, "Future[Any]"]]):
    """As they come, each with its value."""

    def _give(self, value: Any, future: Future[Any]) -> tuple[Any, Future[Any]]:
        return value, future
