"""The :func:`endpoint` decorator, and an actor class's table of endpoints."""

from __future__ import annotations

import functools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from types import FunctionType, MethodType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    cast,
    overload,
)

if TYPE_CHECKING:
    import inspect
    from typing import Never

    from mesh_core._meshes.adverbs import Endpoint
    from mesh_core._meshes.ports import Port
    from mesh_core._meshes.refs import Ref

P = ParamSpec("P")
R = TypeVar("R")

OnRestart: TypeAlias = Literal["fail", "retry", "wait"]


class ActorBase:
    """Base class of :class:`Actor` only, which lets this module recognize actor classes."""


class Arity:
    """The arguments that a function takes: enough to reject a wrong call before it is sent."""

    __slots__ = (
        "bare",
        "counts",
        "keywords",
        "least",
        "mark",
        "most",
        "names",
        "on_restart",
        "overlaps",
        "port",
        "required_keywords",
        "streams",
        "text",
        "variadic_keywords",
    )

    def __init__(self, signature: inspect.Signature, skip: int) -> None:
        params = list(signature.parameters.values())[skip:]
        positional = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        named = [p for p in params if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        self.text = "(" + ", ".join(str(p.replace(annotation=p.empty)) for p in params) + ")"
        self.least = sum(p.default is p.empty for p in positional)
        variadic = any(p.kind is p.VAR_POSITIONAL for p in params)
        self.most = None if variadic else len(positional)
        self.names = tuple(p.name for p in positional)
        # How many of them cannot be passed by name.
        self.bare = sum(p.kind is p.POSITIONAL_ONLY for p in positional)
        self.keywords = frozenset(p.name for p in named)
        self.required_keywords = frozenset(
            p.name for p in params if p.kind is p.KEYWORD_ONLY and p.default is p.empty
        )
        self.variadic_keywords = any(p.kind is p.VAR_KEYWORD for p in params)
        more = sys.maxsize if self.most is None else self.most + 1
        self.counts = range(0) if self.required_keywords else range(self.least, more)
        """How many arguments it takes if none is passed by name; callers look here before they ask :meth:`fits`."""
        self.overlaps = False
        """Whether several calls of it may run at the same time."""
        self.port = False
        """Whether the endpoint answers through a port, possibly several times."""
        self.streams = False
        """Whether it is a generator, whose items only ``stream`` can read."""
        self.on_restart: OnRestart = "fail"
        """What becomes of calls while a supervised actor is respawned."""
        self.mark = ""
        """The prefix of its name in messages; see ``_unmarked``."""

    def fits(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether such a call would bind."""
        return (not kwargs and len(args) in self.counts) or not self.complaint(args, kwargs)

    def complaint(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Say what is wrong with such a call; empty if nothing is."""
        count = len(args)
        if self.most is not None and count > self.most:
            arguments = "argument" if self.most == 1 else "arguments"
            return f"takes at most {self.most} positional {arguments}, got {count}"
        twice = [name for name in self.names[self.bare : count] if name in kwargs]
        if twice:
            return f"got multiple values for {_arguments(twice)}"
        if not self.variadic_keywords:
            unknown = [name for name in kwargs if name not in self.keywords]
            if unknown:
                return f"got unexpected {_arguments(unknown)}"
        missing = list(self.names[count : min(self.bare, self.least)])
        missing += [name for name in self.names[max(count, self.bare) : self.least] if name not in kwargs]
        missing += sorted(self.required_keywords.difference(kwargs))
        return f"missing required {_arguments(missing)}" if missing else ""

    def __getstate__(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(self.__slots__, state, strict=True):
            setattr(self, name, value)


def _arguments(names: list[str]) -> str:
    return f"argument{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


class EndpointProperty(Generic[P, R]):
    """A method that can be called from other processes; created by :func:`endpoint`.

    On an actor object it is the plain method, so that actors can be tested and can call themselves without
    messages. On a mesh it is an :class:`Endpoint`, whose adverbs say how to call it.
    """

    respond: Callable[..., Any] | None = None
    """Replies to a call instead of sending the endpoint's result: ``respond(hosted, message, args, kwargs)``. Set where actors run."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        concurrent: bool,
        explicit_response_port: bool = False,
        on_restart: OnRestart = "fail",
        idempotent: bool = False,
    ) -> None:
        import inspect

        _check_method(function)
        functools.update_wrapper(cast("Callable[..., Any]", self), function)
        self.function = function
        streams = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        self.is_async = inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)
        if concurrent and not self.is_async:
            raise TypeError(
                f"@endpoint(concurrent=True) needs a coroutine, got {function.__qualname__}; "
                "define it with 'async def', or leave concurrent out"
            )
        self.concurrent = concurrent
        self.arity = Arity(inspect.signature(function), skip=2 if explicit_response_port else 1)
        self.arity.overlaps = concurrent
        if on_restart != "fail":
            _check_restart(
                function, on_restart, idempotent, answers_once=not (streams or explicit_response_port)
            )
            self.arity.on_restart = on_restart
        if explicit_response_port:
            if streams:
                raise TypeError(
                    f"{function.__qualname__} is a generator, whose items are its answers: "
                    "yield them, or send them to the port of explicit_response_port=True, but not both"
                )
            self.arity.port = True
        elif streams:
            self.arity.port = self.arity.streams = True

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: type) -> Endpoint[P, R]: ...

    else:

        def __get__(self, instance: Any, owner: Any = None) -> Any:
            return self if instance is None else MethodType(self.function, instance)


if TYPE_CHECKING:
    _Items: TypeAlias = Iterator[R] | AsyncIterator[R]

    class _EndpointDecorator(Protocol):
        @overload
        def __call__(self, function: Callable[Concatenate[Any, P], _Items[R]]) -> EndpointProperty[P, R]: ...
        # A reference can be awaited, too, but is itself the result.
        @overload
        def __call__(
            self, function: Callable[Concatenate[Any, P], Ref[R]]
        ) -> EndpointProperty[P, Ref[R]]: ...
        @overload
        def __call__(
            self, function: Callable[Concatenate[Any, P], Awaitable[R]]
        ) -> EndpointProperty[P, R]: ...
        @overload
        def __call__(self, function: Callable[Concatenate[Any, P], R]) -> EndpointProperty[P, R]: ...

    class _PortEndpointDecorator(Protocol):
        def __call__(
            self, function: Callable[Concatenate[Any, Port[R], P], Any]
        ) -> EndpointProperty[P, R]: ...


@overload
def endpoint(function: Callable[Concatenate[Any, P], _Items[R]], /) -> EndpointProperty[P, R]: ...
@overload
def endpoint(function: Callable[Concatenate[Any, P], Ref[R]], /) -> EndpointProperty[P, Ref[R]]: ...
@overload
def endpoint(function: Callable[Concatenate[Any, P], Awaitable[R]], /) -> EndpointProperty[P, R]: ...
@overload
def endpoint(function: Callable[Concatenate[Any, P], R], /) -> EndpointProperty[P, R]: ...
@overload
def endpoint(
    *, concurrent: bool = False, on_restart: OnRestart = "fail", idempotent: bool = False
) -> _EndpointDecorator: ...
@overload
def endpoint(
    *, explicit_response_port: Literal[True], concurrent: bool = False
) -> _PortEndpointDecorator: ...
def endpoint(
    function: Any = None,
    /,
    *,
    concurrent: bool = False,
    explicit_response_port: bool = False,
    on_restart: OnRestart = "fail",
    idempotent: bool = False,
    **unknown: Never,
) -> Any:
    """Mark a method of an :class:`Actor` as callable from other processes.

    One actor may have both sync methods and coroutines. Messages are handled one at a time, in order;
    ``@endpoint(concurrent=True)`` lets a coroutine overlap with others. With ``explicit_response_port=True`` the first
    argument is the :class:`Port` of the call: what is sent there is the answer, at any time and from any process.
    A generator, sync or async, is a stream: ``stream(...)`` returns its items as they are yielded.

    ``on_restart`` says what happens to a call when a policy (``supervise=``) respawns its actor. The call fails, waits
    for the new actor unless it may have begun (``"wait"``), or is sent again in any case (``"retry"``). ``"retry"`` requires
    ``idempotent=True``: running it twice does no harm. Applies to ``call_one`` and ``choose``.

    >>> from mesh_core import Actor, endpoint
    >>> class Counter(Actor):
    ...     def __init__(self) -> None:
    ...         self.n = 0
    ...     @endpoint(on_restart="wait")
    ...     def add(self, n: int) -> int:
    ...         self.n += n
    ...         return self.n
    >>> Counter().add(3)  # without a mesh it is a plain method
    3
    """
    if unknown:
        from mesh_core._common.suggestions import unknown_option

        known = ("concurrent", "explicit_response_port", "on_restart", "idempotent")
        raise TypeError(unknown_option("endpoint", unknown, known))
    if function is None:
        return functools.partial(
            EndpointProperty,
            concurrent=concurrent,
            explicit_response_port=explicit_response_port,
            on_restart=on_restart,
            idempotent=idempotent,
        )
    return EndpointProperty(
        function,
        concurrent=concurrent,
        explicit_response_port=explicit_response_port,
        on_restart=on_restart,
        idempotent=idempotent,
    )


def _check_restart(
    function: Callable[..., Any], on_restart: object, idempotent: object, *, answers_once: bool
) -> None:
    name = function.__qualname__
    if on_restart not in ("retry", "wait"):
        raise ValueError(f"{name}: on_restart must be 'fail', 'retry' or 'wait', got {on_restart!r}")
    if not answers_once:
        raise TypeError(
            f"{name} answers through a port or as a generator, and part of its answer may have been read when its actor dies: "
            "leave on_restart out, and have the caller start over"
        )
    if on_restart == "retry" and idempotent is not True:
        raise TypeError(
            f"{name}: on_restart='retry' may run a call twice; pass idempotent=True if "
            "that does no harm, or use on_restart='wait'"
        )


def _check_method(function: object) -> None:
    if isinstance(function, EndpointProperty):
        raise TypeError(
            f"{function.function.__qualname__} is marked @endpoint twice; keep one mark, with all its options"
        )
    if isinstance(function, staticmethod):
        raise TypeError(
            f"@endpoint must mark a method of an actor, got the static method {function.__func__.__qualname__}; "
            "remove @staticmethod and add self"
        )
    if not callable(function):
        raise TypeError(f"@endpoint must mark a method, got {type(function).__name__}")


class Interface:
    """What a caller must know about an actor class: its name, and the names and arguments of its endpoints."""

    __slots__ = ("_cls", "_plain", "class_name", "endpoints")

    def __init__(self, class_name: str, endpoints: dict[str, Arity], cls: type | None = None) -> None:
        self.class_name = class_name
        self.endpoints = endpoints
        self._cls = cls
        self._plain: tuple[str, ...] | None = None

    @property
    def plain(self) -> tuple[str, ...]:
        """The names of its other public methods, which ``as_endpoint`` can make callable."""
        if self._plain is None:
            self._plain = () if self._cls is None else plain_methods(self._cls)
        return self._plain

    def is_like(self, other: Interface) -> bool:
        """Return whether actors of both can be called in the same way."""
        texts = ({name: arity.text for name, arity in each.endpoints.items()} for each in (self, other))
        return self.class_name == other.class_name and next(texts) == next(texts)

    def signature(self, name: str) -> inspect.Signature | None:
        """Return such a method's signature, if the class is known."""
        import inspect

        return None if self._cls is None else inspect.signature(getattr(self._cls, name))

    def method(self, name: str) -> Callable[..., Any] | None:
        """Return an endpoint's function or a plain method, if the class is known."""
        found = getattr(self._cls, name, None)
        if isinstance(found, EndpointProperty):
            found = found.function
        return found if callable(found) else None

    def is_generator(self, name: str) -> bool:
        """Return whether such a method yields; only known if the class is."""
        import inspect

        method = getattr(self._cls, name, None)
        return inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)

    def __getstate__(self) -> tuple[str, dict[str, Arity], tuple[str, ...]]:
        return self.class_name, self.endpoints, self.plain

    def __setstate__(self, state: tuple[str, dict[str, Arity], tuple[str, ...]]) -> None:
        self.class_name, self.endpoints, self._plain = state
        self._cls = None


def plain_methods(cls: type) -> tuple[str, ...]:
    """Return the names of an actor class's public methods that are not endpoints."""
    found: set[str] = set()
    for base in reversed(cls.__mro__):
        # All except the class Actor itself.
        if issubclass(base, ActorBase) and base is not ActorBase and ActorBase not in base.__bases__:
            for name, value in vars(base).items():
                if isinstance(value, FunctionType) and not name.startswith("_"):
                    found.add(name)
                else:
                    found.discard(name)
    return tuple(sorted(found))


def table_of(cls: type) -> dict[str, EndpointProperty[..., Any]]:
    """Return all endpoints of an actor class, including inherited ones."""
    table: dict[str, EndpointProperty[..., Any]] = {}
    for base in reversed(cls.__mro__):
        for name, value in vars(base).items():
            if isinstance(value, EndpointProperty):
                table[name] = value
            else:
                table.pop(name, None)
    return table
