"""Exceptions to bytes and back: what one process raises, another can catch.

An exception is sent as text, which always arrives, and as an object, which may not: its type may be unknown to the
receiver, its arguments may hold a lock, or its constructor may need arguments other than those in ``args``.
Nothing here calls an exception's own ``__init__``. Whatever goes wrong costs detail, never the message.
"""

from __future__ import annotations

import contextlib
import threading
import types
from _pickle import dumps as _c_dumps
from _pickle import loads as _c_loads
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from mesh_core import _serialize
from mesh_core._common.current import holder
from mesh_core._common.errors import MeshError, SupervisionError, Undeliverable, describe_point, type_name

if TYPE_CHECKING:
    from typing_extensions import Buffer

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class created at run time, not one of CPython's own
_TEXT_LIMIT = 64 * 1024
# Fields of built-in exceptions; the object that lacked an attribute may be anything, of any size.
_LEFT_BEHIND = frozenset({"obj", "args"})
_HOOKS = (
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
)


class ActorError(MeshError):
    """An endpoint or an actor's constructor raised.

    The error that a caller gets is also an instance of the original exception's type, with its ``args`` and attributes,
    so that ``except ValueError`` works across processes. If that is impossible (the type exists only in the
    remote process, cannot be subclassed, or would end the caller, like ``SystemExit``), it is just an ``ActorError``
    with :attr:`cause_type`, :attr:`cause_name` and :attr:`remote_traceback`.

    >>> error = ActorError("no such batch", actor="trainer", rank=3, host="b7", pid=4242, cause_type=KeyError)
    >>> print(error)
    no such batch
      raised as KeyError by actor 'trainer' on rank 3, host b7, pid 4242
    """

    # In one private record rather than in separate attributes: the original's may have the same names.
    _told: dict[str, Any]

    def __init__(
        self,
        message: str = "",
        *,
        actor: str = "",
        rank: int | None = None,
        point: Mapping[str, int] | None = None,
        host: str = "",
        pid: int | None = None,
        remote_traceback: str = "",
        original: BaseException | None = None,
        cause_type: type[BaseException] | None = None,
        cause_name: str = "",
    ) -> None:
        Exception.__init__(self, message)
        self._tell(
            message=message,
            actor=actor,
            rank=rank,
            point=point,
            host=host,
            pid=pid,
            remote_traceback=remote_traceback,
            original=original,
            cause_type=cause_type or (type(original) if original is not None else None),
            cause_name=cause_name,
        )

    def _tell(self, **told: Any) -> None:
        # Bypasses any __setattr__ of the original's type.
        self.__dict__["_told"] = told

    @property
    def message(self) -> str:
        """The original exception's text."""
        return str(self._told["message"])

    @property
    def actor(self) -> str:
        """The actor's name."""
        return str(self._told["actor"])

    @property
    def rank(self) -> int | None:
        """The actor's rank in its mesh."""
        rank: int | None = self._told["rank"]
        return rank

    @property
    def point(self) -> Mapping[str, int] | None:
        """The actor's coordinates in its mesh."""
        point: Mapping[str, int] | None = self._told["point"]
        return point

    @property
    def host(self) -> str:
        """The host that the actor runs on."""
        return str(self._told["host"])

    @property
    def pid(self) -> int | None:
        """The process id of the actor's process."""
        pid: int | None = self._told["pid"]
        return pid

    @property
    def remote_traceback(self) -> str:
        """The traceback as text from the actor's process, including nested ones."""
        return str(self._told["remote_traceback"])

    @property
    def original(self) -> BaseException | None:
        """The original exception, if it could be sent; itself an ``ActorError`` if one actor passed on another's."""
        original: BaseException | None = self._told["original"]
        return original

    @property
    def exception(self) -> BaseException:
        """The original exception, or this one if it could not be sent."""
        return self.original or self

    @property
    def cause_type(self) -> type[BaseException] | None:
        """The type of the original exception, if this process has it."""
        cause_type: type[BaseException] | None = self._told["cause_type"]
        return cause_type

    @property
    def cause_name(self) -> str:
        """The name of the original exception's type; always set."""
        cause_type = self.cause_type
        return str(self._told["cause_name"]) or (type_name(cause_type) if cause_type is not None else "")

    def __str__(self) -> str:
        lines = [self.message or self.cause_name or "an actor failed"]
        # A failure's report already says where it happened; a traceback is only there if an actor passed it on.
        if self.remote_traceback or not isinstance(self, SupervisionError):
            lines.append(f"  raised{f' as {name}' if (name := self.cause_name) else ''} by {self._where()}")
        if self.remote_traceback:
            lines.append("  remote traceback:")
            lines += [f"    {line}".rstrip() for line in self.remote_traceback.rstrip().splitlines()]
        return "\n".join(lines)

    def _where(self) -> str:
        if self._told.get("bootstrap"):
            where = [f"the bootstrap of processes {self.actor!r}"]
        else:
            where = [f"actor {self.actor!r}" if self.actor else "an actor"]
        if self.rank is not None:
            where[0] += f" on rank {self.rank}{describe_point(self.point)}"
        if self.host:
            where.append(f"host {self.host}")
        if self.pid is not None:
            where.append(f"pid {self.pid}")
        return ", ".join(where)

    def __reduce__(self) -> Any:
        return reduce_actor_error(self)

    # The original's type may define it, and object's default must not take precedence.
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


def encode_exception(
    exc: BaseException,
    *,
    actor: str = "",
    rank: int | None = None,
    point: Mapping[str, int] | None = None,
    host: str = "",
    pid: int | None = None,
    bootstrap: bool = False,
) -> tuple[bytes, list[memoryview]]:
    """Convert an actor's exception, and where it was raised, to part 0 and buffers. Never fails, whatever the exception does.

    >>> data, buffers = encode_exception(KeyError("seven"), actor="store", rank=0, host="b7", pid=1)
    >>> error = decode_exception(data, buffers)
    >>> isinstance(error, KeyError), error.args, error.actor
    (True, ('seven',), 'store')
    """
    passed_on = actor_error(exc)
    told = {
        "message": passed_on.message if passed_on else text_of(exc),
        "actor": str(actor),
        "rank": rank,
        "point": None if point is None else dict(point),
        "host": str(host),
        "pid": pid,
        # Raised not by an actor but by the bootstrap of processes with that name.
        "bootstrap": bootstrap,
        # Cancelled because its actor or process ended in order; the endpoint itself did not fail.
        "cut_short": _was_cut_short(exc, passed_on),
        "remote_traceback": format_traceback(exc),
        "cause_name": passed_on.cause_name if passed_on else _name_of(type(exc)),
    }
    carried, buffers = _carry(exc)
    return _c_dumps((told, carried), 5), buffers


def _was_cut_short(exc: BaseException, passed_on: ActorError | None) -> bool:
    from asyncio import CancelledError
    from concurrent.futures import CancelledError as FutureCancelledError

    kind = type(exc) if passed_on is None else passed_on.cause_type
    if kind is None:
        return False
    if issubclass(kind, (CancelledError, FutureCancelledError)):
        return True
    # If a call in the endpoint raised it, it has a traceback.
    return passed_on is None and issubclass(kind, Undeliverable) and exc.__traceback__ is None


def decode_exception(
    data: Buffer, buffers: Sequence[Buffer] = (), *, point: Mapping[str, int] | None = None
) -> ActorError:
    """Return the error that the caller raises. Never fails: what cannot be rebuilt arrives as text.

    ``point`` replaces the coordinates in the message, for a caller that has a better object for them.
    """
    told: dict[str, Any]
    carried: bytes | None
    try:
        told, carried = _c_loads(data)
    except Exception as error:  # noqa: BLE001 - must not fail: the text says what happened
        return ActorError(f"an actor failed, and its report cannot be read: {error}")
    if point is not None:
        told["point"] = point
    return _make_error(told, _revive_carried(carried, buffers))


def format_traceback(exc: BaseException) -> str:
    """Return the traceback as text, without Mesh's own frames above the user's.

    Empty for a Mesh error that was never raised: its text is enough.
    """
    import traceback

    try:
        if issubclass(type(exc), MeshError) and not (exc.__traceback__ or exc.__cause__ or exc.__context__):
            return ""
        frames = in_user_code(exc.__traceback__) or exc.__traceback__
        lines = traceback.TracebackException(type(exc), exc, frames, compact=True)
        text = "".join(lines.format())
        if issubclass(type(exc), SupervisionError) and actor_error(exc) is None:
            # The report has many lines and is shown beside the traceback.
            text = text.removesuffix(f"{exc}\n") + f"{exc}\n".partition("\n")[0] + "\n"
    except BaseException:  # noqa: BLE001 - foreign __str__ and __repr__ may raise anything
        text = f"{_name_of(type(exc))}: {text_of(exc)}\n(its traceback is not available)\n"
    return _shortened(text)


def in_user_code(trace: types.TracebackType | None) -> types.TracebackType | None:
    """Return a traceback without Mesh's own frames above the user's."""
    while trace is not None and (trace.tb_frame.f_globals.get("__name__") or "").startswith("mesh_core."):
        trace = trace.tb_next
    return trace


def reduce_actor_error(error: ActorError) -> tuple[Callable[..., ActorError], tuple[Any, ...]]:
    """Reduce an ``ActorError`` that is sent as a value or inside another one; used by its ``__reduce__``."""
    told = {name: value for name, value in error._told.items() if name not in ("original", "cause_type")}
    told["cause_name"] = error.cause_name
    point = told["point"]
    told["point"] = None if point is None else dict(point)
    original = error.original
    carried, buffers = (None, []) if original is None else _carry(original)
    # As bytes in the stream, so that an original that cannot be rebuilt does not affect the rest.
    return rebuild_actor_error, (told, carried, [bytes(buffer) for buffer in buffers])


def rebuild_actor_error(told: dict[str, Any], carried: bytes | None, buffers: list[bytes]) -> ActorError:
    """Undo :func:`reduce_actor_error`."""
    return _make_error(told, _revive_carried(carried, [bytearray(buffer) for buffer in buffers]))


# --- the exception itself ---------------------------------------------------------------------------------------


def _carry(exc: BaseException) -> tuple[bytes | None, list[memoryview]]:
    """Pickle the exception as completely as possible; return ``None`` if it is impossible."""
    attempts: tuple[Callable[[], object], ...] = (
        lambda: exc if actor_error(exc) is not None or _has_hooks(type(exc)) else _Parts(exc, safe=False),
        lambda: _Parts(exc, safe=False),
        lambda: _Parts(exc, safe=True),
    )
    for attempt in attempts:
        try:
            data, buffers = _serialize.dumps(attempt(), root="an exception")
            # Whether __reduce__ matches __init__ only shows when it is loaded.
            if isinstance(_serialize.loads(data, [bytearray(buffer) for buffer in buffers]), BaseException):
                return data, buffers
        except BaseException:  # noqa: BLE001 - foreign pickling code may raise anything
            continue
    return None, []


def _revive_carried(carried: bytes | None, buffers: Sequence[Buffer]) -> BaseException | None:
    if carried is None:
        return None
    try:
        revived = _serialize.loads(carried, buffers)
    except BaseException as error:  # noqa: BLE001 - foreign unpickling code may raise anything
        _reraise_interrupt(error)
        return None
    return revived if isinstance(revived, BaseException) else None


class _Parts:
    """Replaces an exception in a pickle; rebuilt as that exception without calling its ``__init__``."""

    def __init__(self, exc: BaseException, *, safe: bool) -> None:
        self.exc = exc
        self.safe = safe

    def __reduce__(self) -> Any:
        exc = self.exc
        state = dict(_state(exc))
        if isinstance(exc, BaseExceptionGroup):
            members = [_Parts(member, safe=self.safe) for member in exc.exceptions]
            args: tuple[Any, ...] = (_sendable(exc.message) if self.safe else exc.message, members)
        else:
            args = exc.args
            if self.safe:
                args = tuple(map(_sendable, args))
        if self.safe:
            state = {name: value for name, value in state.items() if _can_be_sent(value)}
        return instantiate, (type(exc), args, state)


def instantiate(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    """Create an exception from its parts."""
    # Not the first one in the order of lookup: the fields of an OSError exist only if OSError creates it.
    base: Any = kind
    while base.__flags__ & _HEAP_TYPE:
        base = base.__base__
    exc: BaseException = base.__new__(kind, *args)
    base.__init__(exc, *args)
    for name, value in state.items():
        # Read-only fields of built-in exceptions are set from args.
        with contextlib.suppress(AttributeError, TypeError):
            object.__setattr__(exc, name, value)
    return exc


def _state(exc: BaseException) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of an exception: its dict, its slots, and fields of built-in exceptions."""
    for entry in type(exc).__mro__:
        for name, value in vars(entry).items():
            if isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                if name in _LEFT_BEHIND or name.startswith("__"):
                    continue
                with contextlib.suppress(AttributeError):
                    if (found := value.__get__(exc, type(exc))) is not None:
                        yield name, found
    for name, value in exc.__dict__.items():
        if not (isinstance(exc, MeshError) and name in ("results", "_told")):
            yield name, value


def _has_hooks(kind: type[BaseException]) -> bool:
    """Return whether a class customizes how it is pickled."""
    return any(
        hook in vars(entry) for entry in kind.__mro__ if entry.__flags__ & _HEAP_TYPE for hook in _HOOKS
    )


def _can_be_sent(value: object) -> bool:
    try:
        data, buffers = _serialize.dumps(value, root="an exception")
        _serialize.loads(data, [bytearray(buffer) for buffer in buffers])
    except BaseException:  # noqa: BLE001 - foreign pickling code may raise anything
        return False
    return True


def _sendable(value: object) -> object:
    """Return ``value``, or its text if it cannot be sent."""
    if _can_be_sent(value):
        return value
    try:
        return _shortened(str.__str__(repr(value)))
    except BaseException:  # noqa: BLE001 - a foreign __repr__ may raise anything
        return f"<{_name_of(type(value))}>"


# --- the error that the caller gets ----------------------------------------------------------------------------


def _make_error(told: dict[str, Any], original: BaseException | None) -> ActorError:
    """Create an instance of both types if possible, or else just an ``ActorError``."""
    root = original
    while isinstance(root, ActorError):
        root = root.original
    told = {**told, "original": original, "cause_type": None if root is None else type(root)}
    told.setdefault("cause_name", "")
    cause: Any = type(root)
    if root is not None and (kind := _combined_type(cause)) is not None:
        try:
            # A group is created from its members, not from the list in its args.
            args = (
                (root.message, list(root.exceptions)) if isinstance(root, BaseExceptionGroup) else root.args
            )
            error = instantiate(kind, args, dict(_state(root)))
            if isinstance(error, ActorError):
                error._tell(**told)
                str(error)
                return error
        except BaseException as trouble:  # noqa: BLE001 - a foreign class may raise anything
            _reraise_interrupt(trouble)
    error = ActorError(told["message"])
    error._tell(**told)
    return error


@lru_cache(maxsize=256)
def _combined_type(kind: type[BaseException]) -> type[ActorError] | None:
    """Return the class that is both an ``ActorError`` and a ``kind``, or ``None`` if there can be none.

    Exceptions not derived from ``Exception`` end the process, thread or task in which they are raised, and
    ``StopIteration`` ends a loop: an error in an actor must not do that to its caller.
    """
    if not issubclass(kind, Exception) or issubclass(kind, (StopIteration, StopAsyncIteration)):
        return None
    if issubclass(ActorError, kind):
        return None
    try:
        combined = types.new_class(
            f"ActorError[{kind.__qualname__}]",
            (ActorError, kind),
            exec_body=lambda namespace: namespace.update(
                __module__="mesh_core", __doc__=f"An ActorError that is a {type_name(kind)} as well."
            ),
        )
    except Exception:  # noqa: BLE001 - a foreign metaclass or __init_subclass__ may raise anything
        return None
    return combined if issubclass(combined, ActorError) else None


# --- text -----------------------------------------------------------------------------------------------------


def actor_error(exc: BaseException) -> ActorError | None:
    """Return ``exc`` if it is an :class:`ActorError`. Checks the type; isinstance() would ask the object too."""
    return cast("ActorError", exc) if issubclass(type(exc), ActorError) else None


def text_of(exc: BaseException) -> str:
    """Return an exception's text, or say that it is not available."""
    try:
        # It may be a subclass of str with its own __str__.
        return _shortened(str.__str__(str(exc)))
    except BaseException:  # noqa: BLE001 - a foreign __str__ may raise anything
        return f"({_name_of(type(exc))}, whose text is not available)"


def _name_of(kind: type) -> str:
    try:
        return type_name(kind)
    except BaseException:  # noqa: BLE001 - a foreign metaclass may raise anything
        return "an exception without a name"


def _shortened(text: str) -> str:
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def _reraise_interrupt(error: BaseException) -> None:
    """Raise Ctrl-C again: it is meant for the user's code. Other exceptions of foreign code are not.

    It arrives in the script's main thread. In a worker that thread runs the event loop, which no exception may end.
    """
    if not isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return
    process = holder().process
    if process is None or process.identity.is_script:
        raise error
