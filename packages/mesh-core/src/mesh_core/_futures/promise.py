"""Results that anybody can give: the other end of a future that no call stands behind.

CMP-1..3 in ``crates/mesh-runtime/src/completion.rs`` say what holds whoever finishes a promise, and where.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from _thread import get_ident
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from mesh_core._common.current import current
from mesh_core._common.errors import BrokenPromise, MeshError, Unsendable, first_line
from mesh_core._futures.future import _DONE, _FAILED, _PENDING, Future, _interrupted
from mesh_core._futures.promise_registry import Promises

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from mesh_core._common.tracing import Span
    from mesh_core._native import Completion
    from mesh_core._process.process import Process

R = TypeVar("R")

# What `Completion.outcome` calls them.
_VALUE, _ERROR, _CANCELLED, _BROKEN, _STATUS = range(5)

_LONGEST = 500
_NONE: tuple[int, Any] = (_CANCELLED, None)


class Promise(Generic[R]):
    """A result that anybody can give: this end is kept by who gives it, ``future`` by those who wait for it.

    >>> import threading
    >>> from mesh_core import Promise
    >>> promise = Promise[int]("answer")
    >>> threading.Thread(target=lambda: promise.set_result(42)).start()
    >>> promise.future.get(timeout=30)
    42

    All methods may be called from any thread of the process that made the promise.

    Args:
        name: what errors, the log and traces call the promise. ``inspect`` shows those that have one while somebody waits.
        finish: for promises that native code finishes, see :meth:`native_handle` and :meth:`descriptor`: called with
            the status that it gave, once, where somebody first looks at the result. What it returns is the result; what it raises is raised.
        timeout: seconds after which the future fails with :class:`ActorTimeout`, as a call with a deadline does.
    """

    __slots__ = ("__weakref__", "_call", "_finisher", "future")

    future: Future[R]
    """Whatever the promise becomes, for those who wait; always the same object."""
    _kind: ClassVar[type[_Promised[Any]]]
    """What ``future`` is, if no ``finish`` is given."""

    def __init__(
        self, name: str = "", *, finish: Callable[[int], R] | None = None, timeout: float | None = None
    ) -> None:
        process = current()
        call = process.runtime.completion()
        # The future must not refer to the promise: with that the promise would never be dropped.
        what = partial(_named, name) if name else _unnamed
        limit = None
        if timeout is not None or process.deadlines:
            limit = _limit(timeout)
        # A task of a pool has the span of the call that it becomes.
        if process.tracer is not None and self._kind is _Promised:
            span = process.tracer.promise(call, name)
            self.future = (
                _Traced(span, process, call, _unused, what, limit)
                if finish is None
                else _TracedNative(span, finish, process, call, what, limit)
            )
        elif finish is None:
            self.future = self._kind(process, call, _unused, what, limit)
        else:
            self.future = _Native(finish, process, call, what, limit)
        if name:
            call.show(name)
        self._call = call
        self._finisher = call.finisher()

    def set_result(self, value: R) -> bool:
        """Keep the promise: ``value`` is the result. Returns false, and drops it, where the future was cancelled or broken.

        A promise has one outcome: to set a second is a :class:`MeshError`, which says who has set the first.
        """
        return self._call.set(value, False, get_ident()) or self._was_late("set_result")

    def set_exception(self, error: BaseException) -> bool:
        """Break the promise: its waiters raise ``error``. Otherwise like :meth:`set_result`. If nobody ever looks, it is logged."""
        if not isinstance(error, BaseException):
            raise TypeError(f"set_exception() must be given an exception, got {error!r}")
        if isinstance(error, StopIteration):
            raise TypeError(
                "set_exception() cannot take a StopIteration, which a coroutine that awaits would mistake for its own "
                "end. Raise another exception from it."
            )
        future = self.future
        failure = _Failure(error, future._what)
        if not self._call.set(failure, True, get_ident()):
            failure.looked = True
            return self._was_late("set_exception")
        if self._call.away or type(error).__name__ == "CancelledError":
            failure.looked = True
        else:
            future._process.slots.of(Promises).failures.add(failure)
        return True

    def _was_late(self, method: str) -> bool:
        kind, value = self._call.outcome() or (_CANCELLED, None)
        # The caller cannot know of either: the other end of a descriptor may be closed at any time.
        if kind in (_CANCELLED, _BROKEN):
            return False
        what = self.future._what()
        if kind == _STATUS:
            found = f"was finished with status {value}"
        else:
            said = (
                f"has failed with {value.error!r}"
                if isinstance(value, _Failure)
                else f"has a result of type {type(value).__name__!r}"
            )
            found = f"{said}, set by {_thread(self._call.setter)}"
        raise MeshError(
            f"cannot {method}(): {what} already {found}. A promise has one outcome; make one for each."
        )

    @property
    def cancelled(self) -> bool:
        """Whether the future was given up, by ``cancel()``, a cancelled coroutine or the deadline: no result is wanted."""
        return self._call.cancelled

    def native_handle(self) -> object:
        """Return a capsule by which native code can finish the promise from any thread, without the interpreter's lock.

        The capsule is named ``mesh_core.promise`` and holds a ``struct mesh_promise *``; the page "Futures and promises"
        has it in C. Status 0 is a result of ``None``, any other a :class:`MeshError`, unless ``finish=`` was given.
        """
        return self._finisher.handle()

    def descriptor(self) -> int:
        """Return a descriptor by which the promise can be finished: the write end of a new pipe.

        For native threads and child processes that can only write: a status, as an ``int32_t`` in the byte
        order of the machine, which means what it means for :meth:`native_handle`. To close all copies of the descriptor
        before that breaks the promise (:class:`BrokenPromise`). A status that comes late, or second, is dropped.

        The descriptor is the caller's to close. It keeps the promise, is not inherited by programs that are started
        unless it is passed on, and may be written to in a forked child.

        >>> import os, subprocess, sys
        >>> promise = Promise[None]("build")
        >>> write = promise.descriptor()
        >>> code = f"import os, struct; os.write({write}, struct.pack('=i', 0))"
        >>> child = subprocess.Popen([sys.executable, "-c", code], pass_fds=[write])
        >>> os.close(write)  # so that the child has the only one
        >>> promise.future.get(timeout=30), child.wait()
        (None, 0)
        """
        return self._call.descriptor(self._finisher)

    def __reduce__(self) -> Any:
        raise Unsendable(
            "cannot pickle a promise, which belongs to the process that made it",
            "Send a port instead (port, receiver = Channel.open(once=True)): receiver.recv() is a future as well.",
        )

    def __repr__(self) -> str:
        outcome = self._call.outcome()
        state = "open" if outcome is None else ("kept", "failed", "cancelled", "broken", "kept")[outcome[0]]
        return f"<Promise: {self.future._what()}, {state}>"


class _Promised(Future[R]):
    """The future of a promise."""

    __slots__ = ("_raised",)

    _goes_on = "the promise stays open"
    _call: Completion

    def _settle(self) -> None:
        with self._process.settling:
            if self._state != _PENDING:
                return
            kind, value = self._call.outcome() or _NONE
            if kind == _VALUE:
                self._value = value
                self._state = _DONE
            elif kind == _ERROR:
                value.looked = True
                self._raised = value.error.__traceback__
                self._fail(value.error)
            else:
                self._settle_rest(kind, value)

    def _trace(self) -> TracebackType | None:
        # Where it was raised before it was set, if it was.
        raised: TracebackType | None = getattr(self, "_raised", None)
        return raised

    def _settle_rest(self, kind: int, status: int) -> None:
        if kind == _CANCELLED:
            import asyncio

            self._fail(asyncio.CancelledError(f"{self._what()} was cancelled by its caller"))
        elif kind == _BROKEN:
            self._fail(
                BrokenPromise(
                    f"{self._what()} was dropped before it had a result; keep the Promise (or its native handle) until "
                    "its result is set, and its descriptor open until a status is written"
                )
            )
        elif status:
            self._fail(MeshError(f"{self._what()} was finished with status {status}"))
        else:
            self._state = _DONE


Promise._kind = _Promised


class _Native(_Promised[R]):
    """The future of a promise that native code finishes: its value is made by who first looks."""

    __slots__ = ("_look", "_once")

    def __init__(
        self,
        look: Callable[[int], R],
        process: Process,
        call: Completion,
        what: Callable[[], str],
        limit: float | None,
    ) -> None:
        super().__init__(process, call, _unused, what, limit)
        self._look: Callable[[int], R] | None = look
        # Of its own: `look` is the user's, and may wait for other futures.
        self._once = threading.RLock()

    def _settle(self) -> None:
        with self._once:
            kind, status = self._call.outcome() or (_CANCELLED, 0)
            if kind != _STATUS or self._state != _PENDING:
                super()._settle()
                return
            look, self._look = self._look, None
            if look is None:
                raise MeshError(
                    f"finish= of {self._what()} asks for the promise's own result, which it is to make"
                )
            value: Any
            try:
                value, state = look(status), _DONE
            except KeyboardInterrupt:
                self._put(_interrupted(self._what()), _FAILED)
                raise
            except BaseException as error:  # noqa: BLE001 - kept, and raised at every get()
                value, state = error, _FAILED
            self._put(value, state)

    def _put(self, value: Any, state: int) -> None:
        with self._process.settling:
            if self._state == _PENDING:
                self._value = value
                self._state = state


class _Traced(_Promised[R]):
    """The future of a promise that has a span."""

    __slots__ = ("_span",)

    def __init__(self, span: Span, *args: Any) -> None:
        super().__init__(*args)
        self._span = span

    def _settle(self) -> None:
        super()._settle()
        self._span.end(self._value if self._state == _FAILED else None)


class _TracedNative(_Native[R]):
    """The same, for one that native code finishes."""

    __slots__ = ("_span",)

    def __init__(self, span: Span, *args: Any) -> None:
        super().__init__(*args)
        self._span = span

    def _settle(self) -> None:
        super()._settle()
        self._span.end(self._value if self._state == _FAILED else None)


class _Failure:
    """An exception on its way to who waits for a promise. If it is dropped before, it is logged (UNS-1)."""

    __slots__ = ("__weakref__", "_pid", "_what", "error", "looked")

    def __init__(self, error: BaseException, what: Callable[[], str]) -> None:
        self.error = error
        self.looked = False
        self._what = what
        self._pid = os.getpid()

    def tell(self) -> None:
        """Log it, unless somebody has looked or this is a forked copy."""
        if self.looked or self._pid != os.getpid():
            return
        self.looked = True
        text = first_line(self.error)[:_LONGEST]
        name = type(self.error).__name__
        logging.getLogger("mesh").error(
            "a promise has failed, and nobody has looked at its future: %s: %s",
            self._what(),
            f"{name}: {text}" if text else name,
        )

    def __del__(self) -> None:
        if not self.looked and not sys.is_finalizing():
            self.tell()


def _named(name: str) -> str:
    return f"promise {name!r}"


def _unnamed() -> str:
    return "a promise"


def _unused(_call: Completion) -> Any:
    raise AssertionError("a promise's future settles by itself")


def _limit(timeout: float | None) -> float | None:
    from mesh_core._common.checks import seconds
    from mesh_core._futures.deadlines import inherited

    return inherited(seconds(timeout, "Promise(timeout=)"))


def _thread(ident: int) -> str:
    for thread in threading.enumerate():
        if thread.ident == ident:
            return "this thread" if ident == get_ident() else f"thread {thread.name!r}"
    return "a thread that has ended"
