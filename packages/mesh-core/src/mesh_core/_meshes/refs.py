"""References: values that stay where they were made, while a few bytes are sent in their place.

The values are in shared memory of the process that put them. The runtime counts who holds references, without
Python (``crates/mesh-runtime/src/refs/``, REF-1..4).
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from mesh_core._common.codes import MessageKind
from mesh_core._common.context import running_loop
from mesh_core._common.current import current
from mesh_core._common.errors import ActorTimeout, MeshError, SupervisionError, Unsendable, first_line
from mesh_core._futures.future import Future
from mesh_core._native import Lost
from mesh_core._native import capture as capture_kept
from mesh_core._native import kept as find_kept
from mesh_core._native import putting as begin_putting

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh_core._failures.failure import MeshFailure
    from mesh_core._native import Call, Completion, Kept, Putting
    from mesh_core._process.process import Process

T = TypeVar("T")

# The states that `Kept.open` returns.
_HERE, _AWAY, _LOST = range(3)
_STATUS = 4


class RefLost(SupervisionError):
    """The process that kept a value has ended, and the value is lost; :attr:`failure` says how, unless it was stopped."""

    def __init__(self, message: str = "", *, failure: MeshFailure | None = None) -> None:
        super().__init__(message, failure=failure)

    def __repr__(self) -> str:
        return f"RefLost({first_line(self)!r})"


class RefStoreFull(MeshError):
    """A process cannot keep another value: no room became free in time, or the value is larger than the budget."""


class Ref(Generic[T]):
    """A reference to a value that stays in the process that :func:`put` it. Send it anywhere; it is a few bytes long.

    >>> from mesh_core import put
    >>> ref = put({"weights": bytearray(1_000_000)})
    >>> ref.nbytes > 1_000_000
    True
    >>> len(ref.get()["weights"])
    1000000

    If a ``Ref`` is an argument of a call, the endpoint gets the value. Inside a list, a dictionary or any other object
    it stays a ``Ref``. The value is kept until no process holds a reference to it.

    References to the same value are equal. They can only be pickled as part of a message, where they are counted.
    """

    __slots__ = ("__weakref__", "_kept", "_where")

    def __init__(self, kept: Kept, where: str) -> None:
        self._kept = kept
        self._where = where

    def get(self, timeout: float | None = None) -> T:
        """Return the value. On the host where the value is kept, this does not wait and copies no large data.

        Each ``get`` makes a new object. Arrays and tensors in it are on pages shared with other readers until it writes to
        them; only it sees what it writes. From another host the value is fetched, in ``timeout`` seconds at most.

        Raises:
            RefLost: the process that kept the value has ended.
            ActorTimeout: the value did not arrive in time; it can be requested again.
        """
        state, value = self._kept.open()
        if state == _HERE:
            return cast("T", value)
        if state == _LOST:
            raise self._error()
        return self._fetch().get(timeout)

    def __await__(self) -> Generator[Any, None, T]:
        state, value = self._kept.open()
        if state == _HERE:
            return cast("T", value)
        if state == _LOST:
            raise self._error()
        return (yield from self._fetch().__await__())

    @property
    def nbytes(self) -> int:
        """The size of the pickled value in bytes."""
        return self._kept.nbytes

    @property
    def is_lost(self) -> bool:
        """Whether the process that kept the value is known to have ended."""
        return self._kept.lost is not None

    def _here(self) -> Any:
        """Return the value if it is on this host, else this reference."""
        state, value = self._kept.open()
        if state == _LOST:
            raise self._error()
        return value if state == _HERE else self

    def _fetch(self) -> Future[T]:
        call = self._kept.fetch()
        assert call is not None, "a small value is always at hand"
        return Future(current(), call, self._finish, self._what)

    def _what(self) -> str:
        return f"a value of {_size(self.nbytes)} from {self._where}"

    def _finish(self, call: Call) -> T:
        outcome = call.outcomes()[0]
        if isinstance(outcome, Lost):
            raise self._error(outcome)
        if outcome is None:
            raise MeshError(f"{self._what()} cannot be fetched: the runtime has been shut down")
        if outcome.kind is not MessageKind.REPLY:
            raise RefLost(f"{self._what()} is no longer kept there")
        return cast("T", self._kept.fetched(outcome))

    def _error(self, lost: Lost | None = None) -> RefLost:
        lost = lost or self._kept.lost
        value = f"the value of {_size(self.nbytes)} that {self._where} kept is lost"
        advice = "put it again, in a process that runs for as long as it is needed"
        if lost is None or lost.orderly:
            why = (lost.reason if lost is not None and lost.pid is None else "") or "its process was stopped"
            return RefLost(f"{value}: {why}; {advice}")
        from mesh_core._failures.failure import of_loss

        _, rank = lost.process
        host = self._where.rpartition("host ")[2]
        failure = of_loss(lost, None, name=self._where, host=host, point=None, rank=rank)
        return RefLost(f"{value}; {advice}: {failure.report()}", failure=failure)

    def __eq__(self, other: object) -> bool:
        return self._kept.key == other._kept.key if isinstance(other, Ref) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._kept.key)

    def __copy__(self) -> Ref[T]:
        return self  # It does not change.

    def __deepcopy__(self, _: Any) -> Ref[T]:
        return self

    def __reduce__(self) -> Any:
        address = self._kept.pack()
        if address is None:
            raise Unsendable(
                "cannot pickle a Ref outside of a message: nobody could tell how long its value is needed",
                "Send it in a message of Mesh, or pickle what its get() returns.",
            )
        return _revive, (address, self._where)

    def __repr__(self) -> str:
        state = (
            "carried along"
            if not self._kept.is_kept
            else f"lost with {self._where}"
            if self.is_lost
            else f"in {self._where}"
        )
        return f"<Ref of {_size(self.nbytes)}, {state}>"


def _revive(address: tuple[Any, ...], where: str) -> Ref[Any]:
    kept = find_kept(current().runtime, address)
    if kept is None:
        raise MeshError("a Ref was unpickled outside of the message that it came in; its value may be gone")
    return Ref(kept, where)


def put(value: T, *, timeout: float | None = None) -> Ref[T]:
    """Keep a value in this process and return a reference to it.

    >>> from mesh_core import put
    >>> batch = put(list(range(100_000)))
    >>> batch.get()[-1]
    99999

    The value is copied once, into memory that all processes of this host can map; the original can be changed
    afterwards. If the process already keeps ``ref_budget`` bytes, this waits for values to be dropped, for ``timeout``
    seconds at most. In a coroutine, use :func:`put_async`, which waits without blocking.

    Raises:
        RefStoreFull: there was no room in time, or there never will be.
    """
    process = current()
    putting = begin_putting(process.runtime, value)
    if putting.room is not None:
        _wait(process, putting, timeout)
    return Ref(putting.keep(), _here(process))


async def put_async(value: T, *, timeout: float | None = None) -> Ref[T]:  # noqa: ASYNC109 - as put() has it
    """Like :func:`put`, for coroutines: others run while this waits for room. Do not change the value until it returns.

    >>> import asyncio
    >>> from mesh_core import put_async
    >>> async def main() -> int:
    ...     ref = await put_async(bytearray(1_000_000))
    ...     return len(await ref)
    >>> asyncio.run(main())
    1000000
    """
    process = current()
    putting = begin_putting(process.runtime, value)
    room = putting.room
    if room is not None and not _collected(room):
        import asyncio

        waiting = _waiting(process, putting, room)
        try:
            async with asyncio.timeout(timeout):
                await waiting
        except TimeoutError:
            putting.give_up()
            raise _too_late(process, putting, timeout) from None
        except BaseException:
            putting.give_up()
            raise
    return Ref(putting.keep(), _here(process))


def _wait(process: Process, putting: Putting, timeout: float | None) -> None:
    room = putting.room
    assert room is not None
    if _collected(room):
        return
    if running_loop() is not None:
        putting.give_up()
        raise RefStoreFull(
            f"put() has no room for {_size(putting.nbytes)} ({_full(process)}), and would block the event loop while it waits; "
            "use 'await put_async(...)' in a coroutine"
        )
    try:
        _waiting(process, putting, room).get(timeout)
    except ActorTimeout as error:
        if room.done():
            _found(room)
            return  # It came at the last moment.
        putting.give_up()
        raise _too_late(process, putting, timeout) from error
    except BaseException:
        putting.give_up()
        raise


def _collected(room: Completion) -> bool:
    """Collect garbage that may hold references, and return whether there is room now."""
    gc.collect()
    return room.done()


def _waiting(process: Process, putting: Putting, room: Completion) -> Future[None]:
    return Future(process, room, _found, partial(_room, putting.nbytes))


def _found(room: Completion) -> None:
    outcome = room.outcome()
    if outcome is None or outcome[0] != _STATUS:
        raise MeshError("cannot put: the runtime has been shut down")


def _room(nbytes: int) -> str:
    return f"room for a value of {_size(nbytes)}"


def _full(process: Process) -> str:
    counts = process.runtime.counts()
    return (
        f"this process keeps {counts['kept']:,} values of {_size(counts['kept_bytes'])}, and may keep "
        f"{_size(process.settings.ref_bytes)}"
    )


def _too_late(process: Process, putting: Putting, timeout: float | None) -> RefStoreFull:
    return RefStoreFull(
        f"there was no room for a value of {_size(putting.nbytes)} within {timeout} s: {_full(process)}; "
        "drop references that are no longer needed, or raise ref_budget"
    )


def too_large(cost: int, budget: int) -> RefStoreFull:
    """Return the error for a value for which there can never be room."""
    return RefStoreFull(
        f"cannot put a value of {_size(cost)}: this process may keep {_size(budget)} of values altogether; put it in parts, or "
        "raise ref_budget"
    )


def _here(process: Process) -> str:
    me = process.identity
    place = "the script" if process.runtime.me == (0, 0, 0) else f"rank {me.rank} of {me.mesh_name!r}"
    return f"{place}, host {me.host}"


def _size(nbytes: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes} bytes"


# Arguments.


class Arriving(tuple[Any, ...]):
    """The arguments of a message, of which some must still be fetched; awaiting it fetches them."""

    __slots__ = ()

    def __await__(self) -> Generator[Any, None, tuple[tuple[Any, ...], dict[str, Any]]]:
        return self._all().__await__()

    async def _all(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self[0], self[1]
        found = [await each if isinstance(each, Ref) else each for each in args]
        named = {name: await each if isinstance(each, Ref) else each for name, each in kwargs.items()}
        return tuple(found), named


def arrive(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[Any, dict[str, Any]]:
    """Return a message's arguments with values in place of references. On an event loop, awaiting them fetches remote values."""
    args, kwargs = arguments
    found = tuple(each._here() if isinstance(each, Ref) else each for each in args)
    named = {name: each._here() if isinstance(each, Ref) else each for name, each in kwargs.items()}
    if not any(isinstance(each, Ref) for each in (*found, *named.values())):
        return found, named
    if running_loop() is not None:
        return Arriving((found, named)), {}
    got = tuple(each.get() if isinstance(each, Ref) else each for each in found)
    return got, {name: each.get() if isinstance(each, Ref) else each for name, each in named.items()}


# Pickles that are kept.


def capture(dump: Callable[[], Any]) -> tuple[Any, list[Ref[Any]]]:
    """Call a function that pickles something to be kept. Return its result, and the references in the pickle.

    The references must be kept as long as the pickle, and while it is unpickled.
    """
    process = current()
    out, refs = capture_kept(process.runtime, dump)
    return out, [Ref(kept, "") for kept in refs]


# Results.


def keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same endpoint with its results kept here: callers get references."""
    import inspect
    from functools import wraps

    if inspect.isasyncgenfunction(function):

        @wraps(function)
        async def kept(*args: Any, **kwargs: Any) -> Any:
            async for item in function(*args, **kwargs):
                yield await put_async(item)

        return kept
    if inspect.iscoroutinefunction(function):

        @wraps(function)
        async def kept_later(*args: Any, **kwargs: Any) -> Any:
            return await put_async(await function(*args, **kwargs))

        return kept_later
    if inspect.isgeneratorfunction(function):

        @wraps(function)
        def kept_items(*args: Any, **kwargs: Any) -> Any:
            for item in function(*args, **kwargs):
                yield put(item)

        return kept_items

    @wraps(function)
    def kept_now(*args: Any, **kwargs: Any) -> Any:
        return put(function(*args, **kwargs))

    return kept_now
