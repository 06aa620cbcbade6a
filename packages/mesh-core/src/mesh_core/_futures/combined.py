"""Several futures at once: :func:`gather`, :func:`wait`, :func:`wait_async`, :func:`as_completed`.

Whatever is waited for puts its number into one list when it is done (``Completion`` in Rust): one wait for all of them,
without a thread or a look for each.
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
# Unbound: a list of several kinds of futures would otherwise be a list of objects, and refused by type checkers.
F = TypeVar("F")


# Futures of other libraries.


class _Adopted(Future[R]):
    """A future of another library, as one of ours."""

    __slots__ = ("_given", "_loop")

    def __init__(self, given: Any, process: Process, call: Completion) -> None:
        super().__init__(process, call, _result_of(given), lambda: _shown(given))
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
        """Ask for its cancellation where it is from, which decides; false if it was done."""
        if self.done():
            return False
        if self._loop is None or running_loop() is self._loop:
            return bool(self._given.cancel())
        with contextlib.suppress(RuntimeError):  # its loop is closed, and never ends it
            self._loop.call_soon_threadsafe(self._given.cancel)
        return True


def _result_of(given: Any) -> Callable[[Completion], Any]:
    return lambda _call: given.result()


def _shown(given: Any) -> str:
    name = getattr(given, "get_name", None)
    return f"{type(given).__name__} {name()!r}" if name is not None else f"a {type(given).__name__}"


def adopt(given: Any, process: Process, where: str) -> Future[Any]:
    """Whatever can be waited for, as a future of ours. ``where`` it was given is named in errors."""
    if isinstance(given, Future):
        return given
    # Nobody has made such a future where these were never imported.
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
    """What is done when ``given`` is; one for each, as not every library takes callbacks back."""
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
    """What is done when all are, and fails with the first that does."""
    gathered: Any = _AllDone(process, members, each=False)
    gathered._what = lambda: what
    return gathered  # type: ignore[no-any-return]


class _Watch:
    """Futures that somebody waits for together, and the order in which they are done."""

    __slots__ = ("_deadlines", "_members", "_pending", "done", "list", "lock", "taken")

    def __init__(self, process: Process, members: Sequence[Future[Any]]) -> None:
        self._members = members
        self._pending = dict.fromkeys(range(len(members)))
        self.done: list[int] = []
        """Places, in the order in which they were done."""
        self.list = process.runtime.completion()
        self.taken = 0
        """How much of the list was looked at."""
        # Looking at a future may run the user's code, which may look at this one.
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
        """Look at all that have progressed."""
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
        """Places of those that were not done, in order."""
        with self.lock:
            return list(self._pending)

    def parted(self, given: Sequence[F]) -> tuple[list[F], list[F]]:
        """What was given: that which is done, as it came to be, and the rest."""
        with self.lock:
            return [given[place] for place in self.done], [given[place] for place in self._pending]

    def check(self, *, awaited: bool) -> None:
        """Raise where waiting could never end."""
        for place in self.pending():
            self._members[place]._check_wait(awaited=awaited)

    def due(self) -> float | None:
        """When :meth:`expire` is to be called next."""
        with self.lock:
            return self._deadlines[0][0] if self._deadlines else None

    def expire(self) -> float | None:
        """End those whose deadline has passed; returns the seconds until the next one does."""
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
        """Block until ``count`` are done, or the list is given up; false if ``until`` came first."""
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
        """Wait until ``count`` are done, or the list is given up."""
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
    """What :func:`gather` returns."""

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
        """Look at those that are done; true once the outcome is known."""
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
            # Wake other waiters of this one.
            self._call.set(None, False, 0)
        return known or self._call.done()

    def _arrived(self) -> bool:
        return self._look()

    def _progress(self) -> bool:
        return self._look()

    def _listen(self, listener: Completion, token: int) -> None:
        self._call.note(listener, token, self._watch.taken)

    # Its members have the deadlines.

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
            # If it was given up, it has its outcome already.
            if self._state == _PENDING:
                self._value = value
                self._state = _DONE if self._first is None else _FAILED
        # Not under the lock, which those take who hold the watch's.
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
    """What :func:`all_done` returns."""

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

    The first failure, in order of time, is raised at once; the others go on. With ``return_exceptions`` nothing is
    raised, and the list holds exceptions where futures have failed. ``cancel()`` cancels those that are not done.

    Futures may be of calls, of promises, ``concurrent.futures`` and asyncio futures. Other awaitables are run in the
    event loop of the calling thread, and so can only be given, and awaited, in a coroutine.

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
    """What was given, each once, and the futures of it."""
    if hasattr(futures, "__await__") or not hasattr(futures, "__iter__"):
        raise TypeError(f"{name}() must be given an iterable of futures, got {futures!r}")
    given = list({id(each): each for each in futures}.values())
    for each in given:
        # Who gets it back could not ask it for its result.
        if not hasattr(each, "result"):
            raise TypeError(
                f"{name}() must be given futures, got {each!r}. Make a future of an awaitable with "
                "asyncio.ensure_future()."
            )
    return given, [adopt(each, process, f"{name}()") for each in given]


def wait(
    futures: Iterable[F], *, count: int | None = None, timeout: float | None = None
) -> tuple[list[F], list[F]]:
    """Block until ``count`` of the futures are done, by default all; return those that are done, and the others.

    Done are those with a result, an exception, or given up; nothing is raised. Those that were done before come first, as
    they were given; the others follow in the order in which they finish. After ``timeout`` seconds it returns what there is. It takes what :func:`gather` takes, save for awaitables that are no
    futures, and gives back the objects it was given.

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
    """As :func:`wait`, for coroutines: the event loop goes on meanwhile.

    To cancel the wait cancels none of the futures.

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
    """How many are to be waited for."""
    if count is None:
        return len(members)
    if not is_whole(count, 1):
        raise ValueError(f"{name}(count=) must be a positive integer or None, got {count!r}")
    return min(count, len(members))


def _heed_alarm(process: Process, members: Sequence[Future[Any]]) -> None:
    if process.alarmed and members:
        members[0]._raise_failure()


class _Completed(Generic[F]):
    """What :func:`as_completed` returns."""

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
        """How many are still to come."""
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
        # The remaining futures must not go on adding to a list that nobody reads.
        watch = getattr(self, "_watch", None)
        if watch is not None:
            watch.close()


def as_completed(futures: Iterable[F], *, timeout: float | None = None) -> _Completed[F]:
    """Iterate over futures in the order in which they finish, with ``for`` or, in a coroutine, ``async for``.

    Those that were done before come first, as they were given. It takes what :func:`wait` takes and gives back the objects it was given. What has not come ``timeout`` seconds after
    this call is an :class:`ActorTimeout`.

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
