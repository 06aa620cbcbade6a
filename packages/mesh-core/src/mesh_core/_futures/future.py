"""Futures: results that are on their way."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from mesh_core._common.context import current_instance
from mesh_core._common.errors import ActorTimeout, MeshError, Unsendable
from mesh_core._futures.deadlocks import refused

if TYPE_CHECKING:
    import asyncio
    from types import TracebackType

    from mesh_core._futures.awaited import Awaited
    from mesh_core._native import Call, Completion
    from mesh_core._process.process import Process

R = TypeVar("R")
S = TypeVar("S")

_PENDING, _DONE, _FAILED = 0, 1, 2


class Future(Generic[R]):
    """The result of a call or a :class:`Promise`, which may not be there yet. Works in scripts, threads, notebooks and coroutines.

    >>> from mesh_core import Actor, endpoint, this_host
    >>> class Adder(Actor):
    ...     @endpoint
    ...     def add(self, a: int, b: int) -> int:
    ...         return a + b
    >>> with this_host().spawn_procs() as procs:
    ...     future = procs.spawn("adder", Adder).add.call_one(2, 3)
    ...     future.get(timeout=30), future.get(), future.done()
    (5, 5, True)
    """

    __slots__ = (
        "__weakref__",
        "_call",
        "_deadline",
        "_finish",
        "_limit",
        "_process",
        "_state",
        "_value",
        "_what",
    )

    _not_yet_done = "has not finished"
    _goes_on = "the call goes on"

    def __init__(
        self,
        process: Process,
        call: Awaited,
        finish: Callable[[Any], R],
        what: Callable[[], str],
        limit: float | None = None,
    ) -> None:
        self._process = process
        self._call = call
        self._finish = finish
        self._what = what
        self._limit = limit
        self._deadline = None if limit is None else time.monotonic() + limit
        self._state = _PENDING
        self._value: Any = None

    # Overridden by stream futures, which wait for one outcome of a call instead of all of them.

    def _wait(self, timeout: float | None, heed: bool = True) -> bool:
        return self._call.wait(timeout, None, heed)

    def _arrived(self) -> bool:
        return self._call.done()

    def _arrive(self) -> Coroutine[Any, Any, None]:
        return self._process.bridge().wait(self._call)

    # Before the result is seen, what was printed before it is shown (LOG-8); only in the script.

    def _is_behind(self) -> bool:
        """Whether something that its processes have printed before is not shown yet."""
        return self._call.is_behind()

    def _catch_up(self, limit: float) -> list[Completion]:
        """Return what is done when that has been shown, or after ``limit`` seconds."""
        from mesh_core._futures.output import caught_up

        return caught_up(self._process, cast("Call", self._call), limit)

    # To wait for several futures, listen to each; when one has progressed, ask it whether it is done.

    def _listen(self, listener: Completion, token: int) -> None:
        self._call.note(listener, token)

    def _forget(self, listener: Completion) -> None:
        self._call.forget(listener)

    def _progress(self) -> bool:
        """Whether it is done, after something has arrived; if not, the caller listens again."""
        return self.done()

    def _due(self) -> float | None:
        """When to call :meth:`_expire` if it is not done by then."""
        return None if self._state != _PENDING else self._deadline

    def _check_wait(self, *, awaited: bool) -> None:
        """Raise if waiting for it could never end."""
        if self._process._actor_host is not None and not self._arrived():
            self._refuse_wait(awaited=awaited)

    def get(self, timeout: float | None = None) -> R:
        """Wait for the result and return it, or raise the exception of the endpoint.

        After ``timeout`` seconds, raise :class:`ActorTimeout`. The call goes on, and you can wait for it again. To end the call itself
        at a deadline, use ``with_options(timeout=)``.
        """
        if self._state == _PENDING:
            self._come(timeout)
        if self._state == _DONE:
            value: R = self._value
            return value
        return self._outcome()

    result = get

    def _come(self, timeout: float | None, heed: bool = True) -> None:
        """Wait for the outcome. Unless ``heed`` is false, another failure may be raised meanwhile."""
        wait, last = timeout, False
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if timeout is None or left < timeout:
                wait, last = left, True
        if self._process.alarmed and heed and not self._has_news():
            self._raise_failure()
        if self._process._actor_host is not None and not self._arrived():
            self._refuse_wait(awaited=False)
        try:
            came = self._wait(wait, heed)
        except BaseException as error:
            if not isinstance(error, Exception):
                # Ctrl-C: nobody is interested in the outcome of the call any more.
                self._call.look_away()
            raise
        if not came:
            if not last:
                raise self._not_yet(timeout)
            self._expire(None)
        if self._process.shows_output and self._is_behind():
            from mesh_core._futures.output import follow

            follow(self._process, self._catch_up, timeout)
        self._settle()

    def _has_news(self) -> bool:
        """Whether it has an outcome, which takes precedence over other failures."""
        return self._arrived()

    def _raise_failure(self) -> None:
        """Raise the failure that is pending for the script, in its next call that waits."""
        error = self._process.supervision.alarm()
        if error is not None:
            raise error

    def _late(self, waited: float | None, chain: str | None) -> tuple[str, dict[str, Any]]:
        from mesh_core._futures.deadlines import late

        owner = getattr(self._what, "__self__", None)
        said, fields = late(self._process, self._call, owner)
        if chain is None:
            chain = self._chain(waited)
        return (f" ({said}{chain})" if said else ""), fields

    def _chain(self, waited: float | None) -> str:
        """Describe what the receivers without an answer do and wait for. Blocks for a short time, except on an event loop."""
        from mesh_core._futures.wait_chain import chain

        return chain(self._process, self._call, getattr(self._what, "__self__", None), waited)

    def _not_yet(self, timeout: float | None) -> ActorTimeout:
        said, fields = self._late(timeout, None)
        return ActorTimeout(
            f"{self._what()} {self._not_yet_done} within {timeout} s{said}; {self._goes_on}, and can be waited for again",
            timeout=timeout,
            **fields,
        )

    def _too_late(self, chain: str | None = "") -> ActorTimeout:
        said, fields = self._late(self._limit, chain)
        return ActorTimeout(
            f"{self._what()} did not finish within its deadline of {round(self._limit or 0.0, 6)} s; it was cancelled{said}",
            timeout=self._limit,
            **fields,
        )

    # A future has one outcome, even if several threads wait for it, cancel it and see its deadline pass. The first one to
    # take the lock decides. It cancels the call, if necessary, while it holds the lock.

    def _is_pending(self) -> bool:
        return self._state == _PENDING

    def _fail(self, error: BaseException) -> None:
        # The value first: other threads read the state without the lock.
        self._value = error
        self._state = _FAILED

    def _give_up(self, error: BaseException) -> bool:
        """Cancel the call, with this error as the outcome; false if it already has an outcome."""
        with self._process.settling:
            if self._state != _PENDING or not self._call.cancel():
                return False
            self._fail(error)
            return True

    def _expire(self, chain: str | None = "") -> None:
        # Make the error first: cancelling the call clears its list of missing receivers.
        self._give_up(self._too_late(chain))

    def _refuse_wait(self, *, awaited: bool) -> None:
        """Raise, and cancel the call, if waiting for it could never end."""
        instance = current_instance()
        if instance is not None:
            self._call.asked_by(instance.actor_id)
        owner = getattr(self._what, "__self__", None)
        error = refused(self._process, self._call, owner, self._what, awaited=awaited)
        if error is not None and self._give_up(error):
            raise error

    def _settle(self) -> None:
        # A call returns its outcomes only once, but several threads may wait for it.
        with self._process.settling:
            if self._state != _PENDING:
                return
            try:
                self._value = self._finish(self._call)
            except KeyboardInterrupt:
                self._fail(_interrupted(self._what()))
                raise
            except BaseException as error:  # noqa: BLE001 - kept, and raised at every get()
                self._fail(self._in_own_words(error))
            else:
                self._state = _DONE

    def _in_own_words(self, error: BaseException) -> BaseException:
        """Return a more detailed error if the receiver was the first to notice that the deadline has passed."""
        if (
            self._deadline is None
            or not isinstance(error, ActorTimeout)
            or error.timeout is not None
            or time.monotonic() < self._deadline
        ):
            return error
        said = self._too_late()
        said.results = error.results
        return said

    def _outcome(self) -> R:
        if self._state == _FAILED:
            self._tell()
            try:
                raise self._value.with_traceback(self._trace())
            finally:
                # Otherwise the raised error would refer to this frame, which refers to the error through `self`.
                del self
        value: R = self._value
        return value

    def _trace(self) -> TracebackType | None:
        """The traceback to start from each time the error is raised."""
        return None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return what the call raised; ``None`` if it succeeded. After ``timeout`` seconds, raise :class:`ActorTimeout`.

        Other failures that ``get`` would raise meanwhile are left to the next ``get``.
        """
        if self._state == _PENDING:
            self._come(timeout, heed=False)
        if self._state != _FAILED:
            return None
        self._tell()
        error: BaseException = self._value
        return error

    def _tell(self) -> None:
        """Note that the script has been told of this error."""
        if isinstance(self._value, MeshError):
            self._process.told(self._value)

    def unseen(self) -> BaseException | None:
        """Return the error if there is one and nobody has been told of it."""
        if self._state != _PENDING or not self._arrived():
            return None
        self._settle()
        return self._value if self._state == _FAILED else None

    def done(self) -> bool:
        """Whether the result is there; never waits."""
        return self._state != _PENDING or self._arrived()

    def cancel(self) -> bool:
        """Cancel the call; false if it was done. Its coroutine is cancelled, and its reply is dropped."""
        if self._state != _PENDING or self._call.done():
            return False
        import asyncio

        given_up = self._give_up(asyncio.CancelledError(f"{self._what()} was cancelled by its caller"))
        if given_up:
            self._let_go()
        return given_up

    def _take_back(self, *, begun: bool) -> None:
        """Ask that the task not be begun or, with ``begun``, that its coroutine be cancelled. The outcome says what happened."""
        self._call.take_back(begun)  # type: ignore[attr-defined]  # never called for the future of a promise

    def _let_go(self) -> None:
        """Called after it was cancelled, to cancel what it waited for. Without the lock: this may run the user's code."""

    def __await__(self) -> Generator[Any, None, R]:
        if self._state == _PENDING:
            if not self._arrived():
                if self._process.alarmed and not self._has_news():
                    self._raise_failure()
                yield from self._await_arrival().__await__()
            if self._process.shows_output and self._is_behind():
                from mesh_core._futures.output import follow_async

                yield from follow_async(self._process, self._catch_up).__await__()
            self._settle()
        return self._outcome()

    async def _await_arrival(self) -> None:
        if self._process._actor_host is not None:
            self._refuse_wait(awaited=True)
        try:
            if self._deadline is None:
                await self._arrive()
            else:
                import asyncio

                self._process.bridge()  # raises a clear error if no asyncio event loop runs here
                async with asyncio.timeout(self._deadline - time.monotonic()):
                    await self._arrive()
        except TimeoutError:
            import asyncio

            from mesh_core._futures.wait_chain import is_wanted

            wanted = is_wanted(self._process, self._limit)
            self._expire(await asyncio.to_thread(self._chain, self._limit) if wanted else "")
        except BaseException as error:
            # Imported only here, because most calls are awaited without an error, in microseconds.
            import asyncio

            if isinstance(error, asyncio.CancelledError):
                self.cancel()
            raise

    @staticmethod
    def of(value: S) -> Future[S]:
        """Return a future that is done, with this result: for functions that others wait for, and that do not wait themselves.

        >>> from mesh_core import Future
        >>> Future.of(3).get(), Future.of(3).then(lambda n: n + 1).get()
        (3, 4)
        """
        return _Done(value)

    def as_asyncio(self) -> asyncio.Future[R]:
        """Return this as a future of the running event loop, for ``asyncio.wait`` and similar functions."""
        import asyncio

        async def wait() -> R:
            return await self

        def ended(waiting: asyncio.Future[R]) -> None:
            if waiting.cancelled():
                self.cancel()

        waiting = asyncio.ensure_future(wait())
        # A task that is cancelled before its first step never runs the code that would cancel the call.
        waiting.add_done_callback(ended)
        return waiting

    def then(self, change: Callable[[R], S]) -> Future[S]:
        """Return a future of ``change(result)``; ``change`` runs in the thread or coroutine that waits for that future."""
        return Changed(self, change)

    def add_done_callback(self, function: Callable[[Future[R]], object]) -> None:
        """Call ``function(future)`` once when this future is done: with a result, with an exception, or cancelled.

        Functions run one after the other on the thread ``mesh-callbacks``; if the future is done already, the function runs at once,
        here. It should be short. Exceptions that it raises are logged. If it does not look at the future's exception
        (``future.exception()``), that is reported as one that nobody has looked at. The future is kept until then.

        >>> import threading
        >>> from mesh_core import Promise
        >>> promise, told = Promise[int](), threading.Event()
        >>> promise.future.add_done_callback(lambda future: told.set())
        >>> promise.set_result(1), told.wait(30)
        (True, True)
        """
        from mesh_core._futures.callbacks import add

        add(self, function)

    if not TYPE_CHECKING:  # a type checker says it by itself
        # Not __getattr__ too: it makes every access to an attribute of a future slower.
        def __iter__(self) -> Any:
            raise TypeError(
                f"cannot iterate over {self!r}: wait for its result first with .get(timeout=...), or await"
            )

    def __reduce__(self) -> Any:
        raise Unsendable(
            "cannot pickle a future, because it belongs to the process that made the call",
            f"Wait for it first, and send its value: future.get() or await future ({self!r}).",
        )

    def __repr__(self) -> str:
        state = ("waiting", "done", "failed")[self._state]
        if self._state == _PENDING and self._arrived():
            state = "done"
        return f"<Future of {self._what()}: {state}>"


class _NoProcess:
    """Stands for the process of a future that waits for nothing, which may outlive the runtime."""

    alarmed = False
    shows_output = False
    _actor_host = None

    def __init__(self) -> None:
        self.settling = threading.RLock()


class _Done(Future[R]):
    """See :meth:`Future.of`."""

    __slots__ = ()

    def __init__(self, value: R) -> None:
        nothing: Any = _NoProcess()
        super().__init__(nothing, cast("Awaited", None), lambda _: value, lambda: "something that is done")
        self._value, self._state = value, _DONE

    def _wait(self, timeout: float | None, heed: bool = True) -> bool:
        return True

    def _arrived(self) -> bool:
        return True

    async def _arrive(self) -> None:
        pass

    def _is_behind(self) -> bool:
        return False

    def _listen(self, listener: Completion, token: int) -> None:
        from mesh_core._common.current import current

        done = current().runtime.completion()
        done.set(None, False, 0)
        done.note(listener, token)

    def _forget(self, listener: Completion) -> None:
        pass


class Changed(Future[S]):
    """The result of :meth:`Future.then`."""

    __slots__ = ("_change", "_source")

    def __init__(self, source: Future[Any], change: Callable[[Any], S]) -> None:
        super().__init__(source._process, source._call, source._finish, source._what, source._limit)
        self._deadline = source._deadline
        self._source = source
        self._change = change

    def _wait(self, timeout: float | None, heed: bool = True) -> bool:
        return self._source._wait(timeout, heed)

    def _arrived(self) -> bool:
        return self._source.done()

    async def _arrive(self) -> None:
        await self._source._arrive()

    def _is_behind(self) -> bool:
        return self._source._is_behind()

    def _catch_up(self, limit: float) -> list[Completion]:
        return self._source._catch_up(limit)

    def _listen(self, listener: Completion, token: int) -> None:
        self._source._listen(listener, token)

    def _forget(self, listener: Completion) -> None:
        self._source._forget(listener)

    def _progress(self) -> bool:
        return self._state != _PENDING or self._source._progress()

    def _check_wait(self, *, awaited: bool) -> None:
        self._source._check_wait(awaited=awaited)

    def _let_go(self) -> None:
        self._source._let_go()

    def _trace(self) -> TracebackType | None:
        return self._source._trace() if self._value is self._source._value else None

    def _settle(self) -> None:
        self._source._settle()
        # Without the lock: this is the user's code, and may wait for other calls.
        try:
            value: Any = self._change(self._source._outcome())
            state = _DONE
        except BaseException as error:  # noqa: BLE001 - kept, and raised at every get()
            value, state = error, _FAILED
        with self._process.settling:
            if self._state == _PENDING:
                self._value, self._state = value, state


class StreamFuture(Future[R]):
    """One outcome of a streamed call: the ``n``-th to arrive."""

    __slots__ = ("_n",)

    _call: Call

    def __init__(self, n: int, *args: Any) -> None:
        super().__init__(*args)
        self._n = n

    def _wait(self, timeout: float | None, heed: bool = True) -> bool:
        return self._call.wait(timeout, self._n, heed)

    def _arrived(self) -> bool:
        return self._call.done() or self._call.arrived() > self._n

    async def _arrive(self) -> None:
        await self._process.bridge().wait(self._call, self._n)

    def _is_behind(self) -> bool:
        return self._call.is_behind(self._n)

    def _catch_up(self, limit: float) -> list[Completion]:
        from mesh_core._futures.output import caught_up

        return caught_up(self._process, self._call, limit, self._n)

    def _listen(self, listener: Completion, token: int) -> None:
        self._call.note(listener, token, self._n)

    # For streams of unknown length: wait, and return whether the stream has ended instead. If a deadline passes
    # meanwhile, the future raises that.

    def _is_last(self) -> bool:
        left = None if self._deadline is None else self._deadline - time.monotonic()
        return self._wait(left) and self._call.arrived() <= self._n

    async def _is_last_async(self) -> bool:
        if not self._arrived():
            import asyncio

            left = None if self._deadline is None else self._deadline - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    await self._arrive()
            except TimeoutError:
                return False
        return self._call.arrived() <= self._n


class Stream(Generic[R]):
    """The results of a call to several actors, or of a generator, in the order in which they arrive.

    Iterate with ``for``, to get futures whose ``get`` returns the next result as soon as it arrives, or with
    ``async for``, to get futures to await.
    """

    __slots__ = ("_call", "_closes", "_make", "_open_ended", "_read")

    def __init__(
        self,
        call: Call,
        make: Callable[[int], StreamFuture[R]],
        open_ended: bool = False,
        closes: bool = False,
    ) -> None:
        self._call = call
        self._make = make
        self._closes = closes
        """Whether leaving the loop cancels the call. It does for generators, whose values nobody else waits for."""
        self._open_ended = open_ended
        """Whether a rank may give any number of results, which is known only at the end."""
        self._read = 0
        """How many values of a generator were read; a second loop continues there."""

    def __len__(self) -> int:
        return len(self._call)

    def __iter__(self) -> Iterator[Future[R]]:
        if self._open_ended:
            return self._each()
        return (self._make(n) for n in range(len(self._call)))

    async def __aiter__(self) -> AsyncIterator[Future[R]]:
        n = self._read
        try:
            while n < len(self._call) or self._open_ended:
                future = self._make(n)
                if self._open_ended:
                    if await future._is_last_async():
                        return
                    self._hand_out(n)
                yield future
                n += 1
        finally:
            if self._closes:
                self.cancel()

    def _hand_out(self, n: int) -> None:
        # From here on it counts as read, so its sender may send more.
        self._call.hand_out(n)
        if self._closes:
            self._read = n + 1

    def _each(self) -> Iterator[Future[R]]:
        n = self._read
        try:
            while not (future := self._make(n))._is_last():
                self._hand_out(n)
                yield future
                n += 1
        finally:
            if self._closes:
                self.cancel()

    def __reduce__(self) -> Any:
        raise Unsendable(
            "cannot pickle a stream, because it belongs to the process that made the call",
            "Read it here and send its values, or pass a Port to have values sent elsewhere.",
        )

    def cancel(self) -> bool:
        """Cancel what has not arrived yet."""
        return self._call.cancel()


def _interrupted(what: str) -> MeshError:
    return MeshError(f"the result of {what} was being rebuilt when Ctrl-C came, and is lost; call again")


def not_here() -> MeshError:
    """Return the error of a call that its caller has cancelled."""
    return MeshError("the call was cancelled by its caller; there is no result")
