"""Waiting for several futures: :func:`gather`, :func:`wait`, :func:`wait_async`, :func:`as_completed`.

Each future puts a token into one shared list when it is done (``Completion`` in Rust). So one wait is enough for all of them,
without a thread or a poll for each.
"""

from __future__ import annotations

import contextlib
import heapq
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, overload

from mesh_core._common.checks import is_whole
from mesh_core._common.context import running_loop
from mesh_core._common.current import current
from mesh_core._common.errors import ActorTimeout, MeshError
from mesh_core._futures.future import _DONE, _FAILED, _PENDING, Future
from mesh_core._futures.promise_registry import Promises

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Awaitable, Callable, Iterable, Sequence
    from types import TracebackType
    from typing import Self

    from mesh_core._native import Completion
    from mesh_core._process.process import Process

R = TypeVar("R")
# Not bound to Future: type checkers would infer `object` for a list with several kinds of futures, and reject it.
F = TypeVar("F")


# Futures of other libraries.


class _Adopted(Future[R]):
    """A future of another library, wrapped as one of ours."""

    __slots__ = ("_given", "_loop")

    def __init__(self, given: Any, process: Process, call: Completion) -> None:
        super().__init__(process, call, lambda _call: given.result(), lambda: _shown(given))
        self._given = given
        self._loop = given.get_loop() if hasattr(given, "get_loop") else None

    def _check_wait(self, *, awaited: bool) -> None:
        if awaited or self._loop is None or self._arrived():
            return
        if running_loop() is self._loop:
            raise MeshError(
                f"deadlock: {self._what()} belongs to the event loop of this thread, which cannot run while the thread "
                "waits here. Await it instead."
            )

    def _wait(self, timeout: float | None, heed: bool = True) -> bool:
        self._check_wait(awaited=False)
        return super()._wait(timeout, heed)

    def cancel(self) -> bool:
        """Ask the library to cancel it, which may refuse; false if it was done."""
        if self.done():
            return False
        if self._loop is None or running_loop() is self._loop:
            return bool(self._given.cancel())
        with contextlib.suppress(RuntimeError):  # its loop is closed, so it will never be done
            self._loop.call_soon_threadsafe(self._given.cancel)
        return True


def _shown(given: Any) -> str:
    name = getattr(given, "get_name", None)
    return f"{type(given).__name__} {name()!r}" if name is not None else f"a {type(given).__name__}"


def adopt(given: Any, process: Process, where: str) -> Future[Any]:
    """Return anything that can be waited for as a :class:`Future`. Errors name ``where`` it was passed."""
    if isinstance(given, Future):
        return given
    # If a module was never imported, nobody has made one of its futures.
    threads, asyncio = sys.modules.get("concurrent.futures"), sys.modules.get("asyncio")
    if threads is not None and isinstance(given, threads.Future):
        return _Adopted(given, process, _completion_of(given, process, given.add_done_callback))
    if not hasattr(type(given), "__await__") and not (asyncio is not None and asyncio.isfuture(given)):
        raise TypeError(f"{where} must be futures or awaitables, got {given!r}")
    if asyncio is None or not asyncio.isfuture(given):
        if asyncio is None or running_loop() is None:
            raise MeshError(
                f"cannot wait for {given!r}: it runs in an event loop, and none runs in this thread. Call {where} in a "
                "coroutine, or pass asyncio.run_coroutine_threadsafe(..., loop)."
            )
        given = asyncio.ensure_future(given)
    return _Adopted(given, process, _completion_of(given, process, _listen_on_loop(given)))


def _completion_of(
    given: Any, process: Process, listen: Callable[[Callable[[Any], object]], object]
) -> Completion:
    """Return a completion that is done when ``given`` is; one per future, because some libraries cannot remove callbacks."""
    adopted = process.slots.of(Promises).adopted
    found = adopted.get(given)
    if found is None:
        found = process.runtime.completion()
        finish = found.set
        if given.done():
            finish(None, False, 0)
        else:
            listen(lambda _given: finish(None, False, 0))
        adopted[given] = found
    return found


def _listen_on_loop(given: Any) -> Callable[[Callable[[Any], object]], object]:
    loop = given.get_loop()
    if running_loop() is loop:
        return given.add_done_callback  # type: ignore[no-any-return]

    def listen(callback: Callable[[Any], object]) -> None:
        try:
            loop.call_soon_threadsafe(given.add_done_callback, callback)
        except RuntimeError:
            raise MeshError(
                f"cannot wait for {_shown(given)}: its event loop is closed, and it will never be done"
            ) from None

    return listen


# Waiting for several.


def all_done(process: Process, members: Sequence[Future[Any]], what: str) -> Future[None]:
    """Return a future that is done when all members are, and fails as soon as one does."""
    gathered: Any = _AllDone(process, members, each=False)
    gathered._what = lambda: what
    return gathered  # type: ignore[no-any-return]


class _Watch:
    """A set of futures that are waited for together, in the order in which they finish."""

    __slots__ = ("_deadlines", "_members", "_pending", "done", "list", "lock", "taken")

    def __init__(self, process: Process, members: Sequence[Future[Any]]) -> None:
        self._members = members
        self._pending = dict.fromkeys(range(len(members)))
        self.done: list[int] = []
        """Indices, in the order in which the futures finished."""
        self.list = process.runtime.completion()
        self.taken = 0
        """How many tokens of the list were processed."""
        # Reentrant: checking a future may run the user's code, which may check this one.
        self.lock = threading.RLock()
        self._deadlines = [
            (member._deadline, place)
            for place, member in enumerate(members)
            if member._deadline is not None and not member.done()
        ]
        heapq.heapify(self._deadlines)
        for place, member in enumerate(members):
            member._listen(self.list, place)

    def take(self) -> None:
        """Check all futures that have progressed."""
        with self.lock:
            while (place := self.list.token(self.taken)) is not None:
                self.taken += 1
                if place not in self._pending:
                    continue
                if self._members[place]._progress():
                    del self._pending[place]
                    self.done.append(place)
                else:
                    self._members[place]._listen(self.list, place)

    def pending(self) -> list[int]:
        """Indices of the futures that are not done, in order."""
        with self.lock:
            return list(self._pending)

    def parted(self, given: Sequence[F]) -> tuple[list[F], list[F]]:
        """Split ``given`` into what is done, in the order in which it finished, and the rest."""
        with self.lock:
            return [given[place] for place in self.done], [given[place] for place in self._pending]

    def check(self, *, awaited: bool) -> None:
        """Raise if waiting could never end."""
        for place in self.pending():
            self._members[place]._check_wait(awaited=awaited)

    def due(self) -> float | None:
        """When to call :meth:`expire` next."""
        with self.lock:
            return self._deadlines[0][0] if self._deadlines else None

    def expire(self) -> float | None:
        """End futures whose deadline has passed; returns the seconds until the next deadline."""
        if not self._deadlines:
            return None
        with self.lock:
            now = time.monotonic()
            while self._deadlines:
                deadline, place = self._deadlines[0]
                if place in self._pending:
                    if deadline > now:
                        return deadline - now
                    self._members[place]._expire()
                heapq.heappop(self._deadlines)
        return None

    def wait(self, count: int, until: float | None, heed: bool = True) -> bool:
        """Block until ``count`` are done or the list is cancelled; false if the time ``until`` came first."""
        while True:
            left = self.expire()
            self.take()
            if len(self.done) >= count or self.list.done():
                return True
            if until is not None:
                rest = until - time.monotonic()
                if rest <= 0:
                    return False
                left = rest if left is None else min(left, rest)
            self.list.wait(left, self.taken, heed)

    async def wait_async(self, process: Process, count: int) -> None:
        """Wait until ``count`` are done or the list is cancelled."""
        bridge = process.bridge()
        while True:
            left = self.expire()
            self.take()
            if len(self.done) >= count or self.list.done():
                return
            if left is None:
                await bridge.wait(self.list, self.taken)
                continue
            import asyncio

            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await bridge.wait(self.list, self.taken)

    def close(self) -> None:
        """Stop listening."""
        for place in self.pending():
            self._members[place]._forget(self.list)


class _Gathered(Future[list[Any]]):
    """The result of :func:`gather`."""

    __slots__ = ("_each", "_first", "_looked", "_members", "_watch")

    _goes_on = "they go on"
    _call: Completion

    def __init__(self, process: Process, members: Sequence[Future[Any]], each: bool) -> None:
        self._watch = _Watch(process, members)
        self._members = members
        self._each = each
        self._first: BaseException | None = None
        self._looked = 0
        count = len(members)
        super().__init__(process, self._watch.list, _unused, lambda: f"a gathering of {count} futures")

    def _look(self) -> bool:
        """Check the futures that are done; true once the outcome is known."""
        if self._state != _PENDING:
            return True
        watch = self._watch
        watch.take()
        with watch.lock:
            while not self._each and self._first is None and self._looked < len(watch.done):
                member = self._members[watch.done[self._looked]]
                if member._state == _PENDING:
                    member._settle()
                self._looked += 1
                if member._state == _FAILED:
                    self._first = member._value
            if self._each:
                self._looked = len(watch.done)
            known = self._first is not None or self._looked == len(self._members)
        if known and not self._call.done():
            # Wake other threads that wait for this future.
            self._call.set(None, False, 0)
        return known or self._call.done()

    def _arrived(self) -> bool:
        return self._look()

    def _progress(self) -> bool:
        return self._look()

    def _is_behind(self) -> bool:
        return any(member._is_behind() for member in self._seen())

    def _catch_up(self, limit: float) -> list[Completion]:
        behind = [member for member in self._seen() if member._is_behind()]
        return [waiting for member in behind for waiting in member._catch_up(limit)]

    def _seen(self) -> list[Future[Any]]:
        return [self._members[place] for place in tuple(self._watch.done)]

    def _listen(self, listener: Completion, token: int) -> None:
        self._call.note(listener, token, self._watch.taken)

    # The deadlines are those of its members.

    def _due(self) -> float | None:
        return None if self._state != _PENDING else self._watch.due()

    def _expire(self, chain: str | None = "") -> None:
        self._watch.expire()

    def _check_wait(self, *, awaited: bool) -> None:
        self._watch.check(awaited=awaited)

    def _wait(self, timeout: float | None, heed: bool = True) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        while not self._look():
            self._watch.check(awaited=False)
            if not self._watch.wait(self._looked + 1, until, heed):
                return False
        return True

    async def _arrive(self) -> None:
        self._watch.check(awaited=True)
        while not self._look():
            await self._watch.wait_async(self._process, self._looked + 1)

    def _settle(self) -> None:
        if not self._look():
            return
        watch = self._watch
        value: Any = self._first
        if self._first is None and len(watch.done) == len(self._members):
            for member in self._members:
                if member._state == _PENDING:
                    member._settle()
            value = [member._value for member in self._members]
            if self._each:
                for member in self._members:
                    if member._state == _FAILED:
                        member._tell()
        with self._process.settling:
            # If it was cancelled, it already has its outcome.
            if self._state == _PENDING:
                self._value = value
                self._state = _DONE if self._first is None else _FAILED
        # Without the `settling` lock, which is taken by threads that hold the lock of the watch.
        watch.close()

    def _trace(self) -> TracebackType | None:
        for member in self._members:
            if member._state == _FAILED and member._value is self._value:
                return member._trace()
        return None

    def _let_go(self) -> None:
        for place in self._watch.pending():
            self._members[place].cancel()

    def _late(self, waited: float | None, chain: str | None) -> tuple[str, dict[str, Any]]:
        pending = self._watch.pending()
        if not pending:
            return "", {}
        more = f" and {len(pending) - 1} more" if len(pending) > 1 else ""
        said, fields = self._members[pending[0]]._late(waited, chain)
        return f" (waiting for {self._members[pending[0]]._what()}{more}{said})", fields


class _AllDone(_Gathered):
    """The result of :func:`all_done`."""

    __slots__ = ()

    def _settle(self) -> None:
        super()._settle()
        if self._state == _DONE:
            self._value = None


def _unused(_call: Completion) -> Any:
    raise AssertionError("a gathering settles by itself")


@overload
def gather(
    *futures: Awaitable[R] | concurrent.futures.Future[R], return_exceptions: Literal[False] = False
) -> Future[list[R]]: ...
@overload
def gather(
    *futures: Awaitable[R] | concurrent.futures.Future[R], return_exceptions: bool
) -> Future[list[R | BaseException]]: ...
def gather(*futures: Any, return_exceptions: bool = False) -> Future[Any]:
    """Return a future of the list of all results, in the order of ``futures``.

    The first failure, in order of time, is raised at once; the other futures go on. With ``return_exceptions``, nothing is
    raised, and the list contains exceptions for futures that failed. ``cancel()`` cancels the futures that are not done.

    Futures may be of calls, of promises, ``concurrent.futures`` and asyncio futures. Other awaitables run in the event loop of
    the calling thread, so they can be passed, and the result awaited, only in a coroutine.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from mesh_core import Promise, gather
    >>> promise = Promise[int]()
    >>> with ThreadPoolExecutor() as pool:
    ...     both = gather(promise.future, pool.submit(abs, -2))
    >>> promise.set_result(1)
    True
    >>> both.get(timeout=30)
    [1, 2]
    """
    process = current()
    return _Gathered(process, [adopt(each, process, "gather()") for each in futures], return_exceptions)


def _members_of(futures: Iterable[Any], process: Process, name: str) -> tuple[list[Any], list[Future[Any]]]:
    """Return the given objects without duplicates, and a :class:`Future` for each."""
    if hasattr(futures, "__await__") or not hasattr(futures, "__iter__"):
        raise TypeError(f"{name}() must be given an iterable of futures, got {futures!r}")
    given = list({id(each): each for each in futures}.values())
    for each in given:
        # The caller gets it back, and could not ask it for its result.
        if not hasattr(each, "result"):
            raise TypeError(
                f"{name}() must be given futures, got {each!r}. Make a future of an awaitable with "
                "asyncio.ensure_future()."
            )
    return given, [adopt(each, process, f"{name}()") for each in given]


def wait(
    futures: Iterable[F], *, count: int | None = None, timeout: float | None = None
) -> tuple[list[F], list[F]]:
    """Block until ``count`` of the futures are done (by default, all of them); return those that are done, and the others.

    A future is done when it has a result, an exception, or was cancelled; nothing is raised. Futures that were done before come
    first, in the order given; the others follow in the order in which they finish. After ``timeout`` seconds, it returns what is
    done by then. It takes what :func:`gather` takes, except awaitables that are not futures, and returns the same objects.

    >>> from mesh_core import Promise, wait
    >>> one, two = Promise[str](), Promise[str]()
    >>> two.set_result("two")
    True
    >>> done, pending = wait([one.future, two.future], count=1)
    >>> [future.get() for future in done], pending == [one.future]
    (['two'], True)
    """
    process = current()
    given, members = _members_of(futures, process, "wait")
    count = _count(count, members, "wait")
    until = None if timeout is None else time.monotonic() + timeout
    watch = _Watch(process, members)
    try:
        watch.take()
        if len(watch.done) < count:
            watch.check(awaited=False)
            _heed_alarm(process, members)
            watch.wait(count, until)
        return watch.parted(given)
    finally:
        watch.close()


async def wait_async(
    futures: Iterable[F],
    *,
    count: int | None = None,
    timeout: float | None = None,  # noqa: ASYNC109 - it raises nothing, unlike asyncio.timeout
) -> tuple[list[F], list[F]]:
    """Like :func:`wait`, for coroutines: the event loop continues meanwhile.

    Cancelling the wait cancels none of the futures.

    >>> import asyncio
    >>> from mesh_core import Promise, wait_async
    >>> async def first() -> int:
    ...     one, two = Promise[int](), Promise[int]()
    ...     asyncio.get_running_loop().call_soon(one.set_result, 1)
    ...     done, pending = await wait_async([one.future, two.future], count=1)
    ...     return done[0].get()
    >>> asyncio.run(first())
    1
    """
    import asyncio

    process = current()
    given, members = _members_of(futures, process, "wait_async")
    count = _count(count, members, "wait_async")
    watch = _Watch(process, members)
    try:
        watch.take()
        if len(watch.done) < count:
            watch.check(awaited=True)
            _heed_alarm(process, members)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    await watch.wait_async(process, count)
        return watch.parted(given)
    finally:
        watch.close()


def _count(count: int | None, members: Sequence[Future[Any]], name: str) -> int:
    """Return how many futures to wait for."""
    if count is None:
        return len(members)
    if not is_whole(count, 1):
        raise ValueError(f"{name}(count=) must be a positive integer or None, got {count!r}")
    return min(count, len(members))


def _heed_alarm(process: Process, members: Sequence[Future[Any]]) -> None:
    if process.alarmed and members:
        members[0]._raise_failure()


class _Completed(Generic[F]):
    """The result of :func:`as_completed`."""

    __slots__ = ("_given", "_limit", "_members", "_n", "_process", "_until", "_watch")

    def __init__(
        self, process: Process, given: list[F], members: list[Future[Any]], limit: float | None
    ) -> None:
        self._process = process
        self._given = given
        self._members = members
        self._limit = limit
        self._until = None if limit is None else time.monotonic() + limit
        self._n = 0
        self._watch = _Watch(process, members)

    def __len__(self) -> int:
        """How many have not been returned yet."""
        return len(self._given) - self._n

    def _next(self) -> F:
        self._n += 1
        return self._given[self._watch.done[self._n - 1]]

    def _too_late(self) -> ActorTimeout:
        return ActorTimeout(
            f"{len(self)} of {len(self._given)} futures have not finished within {self._limit} s; they go on, and can be "
            "waited for again",
            timeout=self._limit,
        )

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> F:
        if self._n == len(self._given):
            raise StopIteration
        self._watch.take()
        if len(self._watch.done) <= self._n:
            self._watch.check(awaited=False)
            _heed_alarm(self._process, self._members)
            if not self._watch.wait(self._n + 1, self._until):
                raise self._too_late()
        return self._next()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> F:
        if self._n == len(self._given):
            raise StopAsyncIteration
        self._watch.take()
        if len(self._watch.done) <= self._n:
            import asyncio

            self._watch.check(awaited=True)
            _heed_alarm(self._process, self._members)
            left = None if self._until is None else self._until - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    await self._watch.wait_async(self._process, self._n + 1)
            except TimeoutError:
                raise self._too_late() from None
        return self._next()

    def __del__(self) -> None:
        # The remaining futures must not keep adding to a list that nobody reads.
        watch = getattr(self, "_watch", None)
        if watch is not None:
            watch.close()


def as_completed(futures: Iterable[F], *, timeout: float | None = None) -> _Completed[F]:
    """Iterate over futures in the order in which they finish, with ``for`` or, in a coroutine, ``async for``.

    Futures that were done before come first, in the order given. It takes what :func:`wait` takes, and returns the same objects.
    A future that is not done ``timeout`` seconds after this call makes the loop raise :class:`ActorTimeout`.

    >>> from mesh_core import Promise, as_completed
    >>> one, two = Promise[str](), Promise[str]()
    >>> two.set_result("two"), one.set_exception(ValueError("one"))
    (True, True)
    >>> [future.exception() for future in as_completed([one.future, two.future])]
    [ValueError('one'), None]
    """
    process = current()
    given, members = _members_of(futures, process, "as_completed")
    return _Completed(process, given, members, timeout)
