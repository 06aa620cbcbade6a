"""Promises: futures whose result is set by any code instead of a call.

CMP-1..3 in ``crates/mesh-runtime/src/completion.rs`` say what holds for a promise, whichever code finishes it.
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

# The kinds of outcomes, as `Completion.outcome` returns them.
_VALUE, _ERROR, _CANCELLED, _BROKEN, _STATUS = range(5)

_LONGEST = 500
_NONE: tuple[int, Any] = (_CANCELLED, None)


class Promise(Generic[R]):
    """The writing end of a future: whoever holds the promise sets the result, and others wait for its ``future``.

    >>> import threading
    >>> from mesh_core import Promise
    >>> promise = Promise[int]("answer")
    >>> threading.Thread(target=lambda: promise.set_result(42)).start()
    >>> promise.future.get(timeout=30)
    42

    All methods may be called from any thread of the process that made the promise.

    Args:
        name: the name of the promise in errors, logs and traces. ``inspect`` shows promises with a name while somebody waits for them.
        finish: for promises that native code finishes (see :meth:`native_handle` and :meth:`descriptor`): a function that is called
            once, with the status, when somebody first looks at the result. It returns the result, or raises an exception.
        timeout: seconds after which the future fails with :class:`ActorTimeout`, like a call with a deadline.
    """

    __slots__ = ("__weakref__", "_call", "_finisher", "future")

    future: Future[R]
    """The future of the promise; always the same object."""
    _kind: ClassVar[type[_Promised[Any]]]
    """The class of ``future`` if there is no ``finish``."""

    def __init__(
        self, name: str = "", *, finish: Callable[[int], R] | None = None, timeout: float | None = None
    ) -> None:
        process = current()
        call = process.runtime.completion()
        # The future must not refer to the promise, or the promise would never be freed.
        what = partial(_named, name) if name else _unnamed
        limit = None
        if timeout is not None or process.deadlines:
            limit = _limit(timeout)
        # A task of a pool has the span of its call instead.
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
        """Set the result to ``value``. Returns false, and drops it, if the future was cancelled or the promise broken.

        A promise has one outcome: setting another raises a :class:`MeshError` that says which thread set the first.
        """
        return self._call.set(value, False, get_ident()) or self._was_late("set_result")

    def set_exception(self, error: BaseException) -> bool:
        """Set the outcome to ``error``, which waiters raise; otherwise like :meth:`set_result`. It is logged if nobody ever looks at it."""
        if not isinstance(error, BaseException):
            raise TypeError(f"set_exception() must be given an exception, got {error!r}")
        if isinstance(error, StopIteration):
            raise TypeError(
                "set_exception() cannot take a StopIteration: an awaiting coroutine would mistake it for its own "
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
        kind, value = self._call.outcome() or _NONE
        # The caller cannot foresee either: a descriptor may be closed at any time.
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
        """Whether no result is wanted: the future or a coroutine that awaited it was cancelled, or the deadline has passed."""
        return self._call.cancelled

    def native_handle(self) -> object:
        """Return a capsule with which native code can finish the promise from any thread, without the GIL.

        The capsule is named ``mesh_core.promise`` and holds a ``struct mesh_promise *``; the page "Futures and promises"
        shows it in C. Status 0 means a result of ``None``, any other a :class:`MeshError`, unless ``finish=`` was given.
        """
        return self._finisher.handle()

    def descriptor(self) -> int:
        """Return a file descriptor with which the promise can be finished: the write end of a new pipe.

        For native threads and child processes that can only write. Write a status, as an ``int32_t`` in the machine's byte order;
        it means the same as for :meth:`native_handle`. If all copies of the descriptor are closed before that, the promise is
        broken (:class:`BrokenPromise`). A status that comes late, or a second one, is dropped.

        The caller must close the descriptor. It keeps the promise open. Child programs inherit it only if it is passed to
        them; a forked child may write to it.

        >>> import os, subprocess, sys
        >>> promise = Promise[None]("build")
        >>> write = promise.descriptor()
        >>> code = f"import os, struct; os.write({write}, struct.pack('=i', 0))"
        >>> child = subprocess.Popen([sys.executable, "-c", code], pass_fds=[write])
        >>> os.close(write)  # so that only the child has it
        >>> promise.future.get(timeout=30), child.wait()
        (None, 0)
        """
        return self._call.descriptor(self._finisher)

    def __reduce__(self) -> Any:
        raise Unsendable(
            "cannot pickle a promise, because it belongs to the process that made it",
            "Send a port instead (port, receiver = Channel.open(once=True)): receiver.recv() is a future, too.",
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

    def _is_behind(self) -> bool:
        return False  # it is not about other processes

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
        # Where the error was raised before it was set, if it was.
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
    """The future of a promise that native code finishes. The first thread that looks makes its value."""

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
        # Not the `settling` lock: `look` is the user's code, and may wait for other futures.
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
                    f"finish= of {self._what()} asks for the promise's own result, which it should make"
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


class _Spanned(_Promised[R]):
    """Ends a span together with the promise."""

    __slots__ = ()

    _span: Span

    def __init__(self, span: Span, *args: Any) -> None:
        super().__init__(*args)
        self._span = span  # type: ignore[misc]  # the slot is in the subclasses

    def _settle(self) -> None:
        super()._settle()
        self._span.end(self._value if self._state == _FAILED else None)


class _Traced(_Spanned[R]):
    """The future of a promise, with a span."""

    __slots__ = ("_span",)


class _TracedNative(_Spanned[R], _Native[R]):
    """The future of a promise that native code finishes, with a span."""

    __slots__ = ("_span",)


class _Failure:
    """An exception on its way to those who wait for a promise. If it is dropped before anyone looks at it, it is logged (UNS-1)."""

    __slots__ = ("__weakref__", "_pid", "_what", "error", "looked")

    def __init__(self, error: BaseException, what: Callable[[], str]) -> None:
        self.error = error
        self.looked = False
        self._what = what
        self._pid = os.getpid()

    def tell(self) -> None:
        """Log it, unless somebody has looked at it or this is a forked copy."""
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
