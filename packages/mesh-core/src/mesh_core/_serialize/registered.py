"""Registration of how types are sent: reducers, and handlers that take large data out of the stream.

Both apply to objects of exactly the type, in the process where they are registered. A handler rebuilds the object at
the receiver, which finds the handler by the type's name and so must have it registered too.
"""

from __future__ import annotations

import threading
from _pickle import PickleBuffer
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from mesh_core._common.errors import Unsendable
from mesh_core._serialize.handlers import NoHandlerError, registered

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

# C pickle writes these itself, without asking anyone.
_BUILT_IN = frozenset(
    {bool, bytearray, bytes, complex, dict, float, frozenset, int, list, memoryview, set, str, tuple, type}
)


class _Handler:
    """How one type is taken apart and rebuilt."""

    def __init__(self, name: str, take: Callable[[Any], Any], make: Callable[[Any, list[Any]], Any]) -> None:
        self.name = name
        self.take = take
        self.make = make

    def reduce(self, obj: Any) -> tuple[Any, ...]:
        """Reduce an object, for pickle."""
        taken = self.take(obj)
        try:
            told, buffers = taken
            contiguous = all(map(_is_contiguous, buffers))
        except (TypeError, ValueError) as error:
            raise Unsendable(
                f"take() of the handler for {self.name} must return a pair of what is pickled and the buffers: {error}",
                "Correct the handler.",
            ) from error
        if not contiguous:
            raise Unsendable(
                f"take() of the handler for {self.name} returned a buffer that is not contiguous",
                "Return a contiguous copy of it.",
            )
        # Only now: a PickleBuffer that only a traceback refers to crashes some interpreters' garbage collection.
        parts = map(PickleBuffer, buffers)
        return rebuild, (self.name, told, *parts)


def _is_contiguous(buffer: Buffer) -> bool:
    with memoryview(buffer) as view:
        return view.contiguous


@cache
def _lock() -> threading.Lock:
    return threading.Lock()


def _add(cls: type, reduce: Callable[[Any], Any], handler: _Handler | None) -> Registration:
    """Register ``reduce`` for objects of a type."""
    known = registered()
    with _lock():
        before = known.reducers.get(cls)
        if before is not None and _origin(before) != _origin(reduce):
            raise ValueError(
                f"objects of {_name(cls)} already have a registration, made by {_origin(before)}; "
                "cancel() it first"
            )
        known.reducers = {**known.reducers, cls: reduce}
        if handler is not None:
            known.handlers = {**known.handlers, handler.name: handler}
    return Registration(cls, reduce, handler)


class Registration:
    """Returned by :func:`register_reducer` and :func:`register_handler`."""

    def __init__(self, cls: type, reduce: Callable[[Any], Any], handler: _Handler | None) -> None:
        self._cls = cls
        self._reduce = reduce
        self._handler = handler

    def cancel(self) -> None:
        """Send objects of the type as if nothing had been registered. A second call does nothing."""
        known, handler = registered(), self._handler
        with _lock():
            # It may have been replaced since.
            if known.reducers.get(self._cls) is self._reduce:
                known.reducers = {key: each for key, each in known.reducers.items() if key is not self._cls}
            if handler is not None and known.handlers.get(handler.name) is handler:
                known.handlers = {name: each for name, each in known.handlers.items() if each is not handler}


def register_reducer(cls: type[T], reduce: Callable[[T], Any]) -> Registration:
    """Send objects of exactly this type as what ``reduce(object)`` returns, which has the form of a ``__reduce__`` result.

    For types that cannot be pickled, or not well, and to which you cannot add a ``__reduce__``. It applies to messages that
    this process sends, not to other uses of pickle. Receivers need only the function named
    in the result of ``reduce``.

    >>> import io
    >>> from mesh_core.extensions import register_reducer
    >>> registration = register_reducer(io.StringIO, lambda text: (io.StringIO, (text.getvalue(),)))
    >>> registration.cancel()
    """
    _check(cls, reduce=reduce)
    return _add(cls, reduce, None)


def register_handler(
    cls: type[T],
    take: Callable[[T], tuple[Any, Sequence[Buffer]]],
    make: Callable[[Any, list[memoryview]], T],
) -> Registration:
    """Send the large data of objects of exactly this type beside the message, without a copy in Python.

    ``take(object)`` returns what to pickle, which should be small, and the buffers: contiguous objects with the
    buffer protocol, which must not change until the call that sends them returns. ``make(what, buffers)``
    returns the object at the receiver. The buffers are memoryviews of bytes, as many as were taken, writable if
    the originals are, and may be kept.

    Both ends must have the handler: register it where the module of the type is imported, or in an extension's ``start``.

    >>> from mesh_core.extensions import register_handler
    >>> class Image:
    ...     def __init__(self, width: int, pixels: memoryview) -> None:
    ...         self.width, self.pixels = width, pixels
    >>> registration = register_handler(
    ...     Image,
    ...     take=lambda image: (image.width, [image.pixels]),
    ...     make=lambda width, buffers: Image(width, buffers[0]),
    ... )
    >>> registration.cancel()
    """
    _check(cls, take=take, make=make)
    handler = _Handler(_name(cls), take, make)
    return _add(cls, handler.reduce, handler)


def rebuild(name: str, told: Any, *parts: Buffer) -> Any:
    """Rebuild an object from what its handler took."""
    handler = registered().handlers.get(name)
    if handler is None:
        raise NoHandlerError(f"no handler for {name} is registered in this process, and the sender has one")
    return handler.make(told, [memoryview(part).cast("B") for part in parts])


def _check(cls: type, **functions: object) -> None:
    if not isinstance(cls, type):
        raise TypeError(f"a registration must be for a class, got {cls!r}")
    if cls in _BUILT_IN:
        raise TypeError(f"cannot register {cls.__name__}: Mesh itself decides how its objects are sent")
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name} must be a function, got {function!r}")


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _origin(reduce: Any) -> str:
    """Return where a reducer is defined, so that a module that is imported again may register its own again."""
    owner = getattr(reduce, "__self__", None)
    function = owner.take if isinstance(owner, _Handler) else reduce
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
