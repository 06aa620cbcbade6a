"""How an endpoint is answered if its result is not simply the reply.

A message names its endpoint, and marks before the name say what else is wanted:

====== =====================================================================
``.``  a plain method, made callable by ``as_endpoint``
``!``  the same, and it gets the port of the call
``>``  the first argument is a port, to which the result is sent
``+``  the first argument is a plan: the result is combined with other ranks'
``&``  the result stays here, and the answer is a reference to it
``=``  without a name: only an answer, given once everything sent before is handled
====== =====================================================================

``marked`` turns such a name into an endpoint once; it is then in the actor's table like any other.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mesh_core._actors.endpoint import EndpointProperty, plain_methods

if TYPE_CHECKING:
    from mesh_core._hosting.actor_cell import ActorCell
    from mesh_core._native import Message

    Spec = EndpointProperty[..., Any]
    Table = dict[str, Spec]
    Args = tuple[Any, ...]
    Kwargs = dict[str, Any]

# The empty name of a stop begins with none of them.
MARKS = (".", "!", ">", "+", "&", "=")
SETTLED = "="


def marked(table: Table, cls: type, name: str, *, threaded: bool) -> Spec | None:
    """Return the endpoint that a marked name means, and keep it in ``table``; ``None`` if the class has nothing of that name."""
    mark, rest = name[0], name[1:]
    if mark == SETTLED:
        spec: Spec | None = None if rest else _nothing(threaded)
    elif mark in ".!":
        spec = _plain(cls, rest, port=mark == "!", threaded=threaded)
    else:
        base = table.get(rest)
        if base is None and rest[:1] in MARKS:
            base = marked(table, cls, rest, threaded=threaded)
        spec = (
            None
            if base is None
            else _keeping(base)
            if mark == "&"
            else _answering(base, _to_port(base) if mark == ">" else _to_rank_above(base))
        )
    if spec is not None:
        table[name] = spec
    return spec


def with_answers(table: Table) -> Table:
    """Prepare the endpoints of a class that answer through a port or by items."""
    for spec in table.values():
        _answer_by_port(spec)
    return table


def _answer_by_port(spec: Spec) -> Spec:
    if spec.respond is None and spec.arity.port:
        spec.respond = by_items(spec) if spec.arity.streams else by_port(spec)
    return spec


def _nothing(threaded: bool) -> Spec:
    def nothing(self: Any) -> None: ...

    async def nothing_async(self: Any) -> None: ...

    return EndpointProperty(nothing if threaded else nothing_async, concurrent=False)


def _plain(cls: type, name: str, *, port: bool, threaded: bool) -> Spec | None:
    if name not in plain_methods(cls):
        return None
    function: Callable[..., Any] = getattr(cls, name)
    plain = function
    if not threaded and inspect.isgeneratorfunction(plain):

        async def function(self: Any, *args: Any, **kwargs: Any) -> Any:
            for item in plain(self, *args, **kwargs):
                yield item

    elif not threaded and not (inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain)):
        # An actor of coroutines has no thread: the loop calls the method, as its coroutines would.

        async def function(self: Any, *args: Any, **kwargs: Any) -> Any:
            return plain(self, *args, **kwargs)

    return _answer_by_port(EndpointProperty(function, concurrent=False, explicit_response_port=port))


def _keeping(base: Spec) -> Spec:
    from mesh_core._meshes.refs import keeping

    return _answer_by_port(EndpointProperty(keeping(base.function), concurrent=base.concurrent))


def _answering(base: Spec, respond: Callable[..., Any]) -> Spec:
    spec: Spec = EndpointProperty(base.function, concurrent=base.concurrent)
    spec.respond = respond
    return spec


def by_port(spec: Spec) -> Callable[..., Any]:
    """Give the endpoint the port of its call, through which it answers."""
    function = spec.function

    def respond(cell: ActorCell, message: Message, args: Args, kwargs: Kwargs) -> None:
        from mesh_core._meshes.ports import Port

        port: Port[Any] = Port(message.outlet())
        try:
            function(cell.object, port, *args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - reported to the caller
            _failed(cell, message, port, error)

    async def respond_async(cell: ActorCell, message: Message, args: Args, kwargs: Kwargs) -> None:
        from mesh_core._meshes.ports import Port

        port: Port[Any] = Port(message.outlet())
        try:
            await function(cell.object, port, *args, **kwargs)
        except BaseException as error:
            _failed(cell, message, port, error, is_async=True)
            if not isinstance(error, Exception):
                raise

    return respond_async if spec.is_async else respond


def by_items(spec: Spec) -> Callable[..., Any]:
    """Send what a generator yields to its caller, until the caller has had enough."""
    function = spec.function

    def respond(cell: ActorCell, message: Message, args: Args, kwargs: Kwargs) -> None:
        from mesh_core._meshes.ports import Port

        port: Port[Any] = Port(message.outlet())
        try:
            with contextlib.closing(function(cell.object, *args, **kwargs)) as items:
                for item in items:
                    port._item(item)
        except BaseException as error:  # noqa: BLE001 - reported to the caller
            _failed(cell, message, port, error)

    async def respond_async(cell: ActorCell, message: Message, args: Args, kwargs: Kwargs) -> None:
        import asyncio

        from mesh_core._meshes.ports import Port

        port: Port[Any] = Port(message.outlet())
        try:
            async with contextlib.aclosing(function(cell.object, *args, **kwargs)) as items:
                async for item in items:
                    await port._item(item)
                    # A generator that never suspends must not hold up the other actors of its process, nor its own cancellation.
                    await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            _failed(cell, message, port, error, is_async=True)
            if not isinstance(error, Exception):
                raise

    return respond_async if spec.is_async else respond


def _tell_raised(
    cell: ActorCell, message: Message, port: Any, error: BaseException, *, is_async: bool = False
) -> None:
    """Notify hooks that an endpoint that answers to a port raised; what ends a coroutine is raised on, and reported there."""
    from mesh_core._common.errors import Undeliverable

    if (isinstance(error, Exception) or not is_async) and not (
        isinstance(error, Undeliverable) and not port._outlet.is_open
    ):
        cell.tell_raised(message.name, error)


def _failed(
    cell: ActorCell, message: Message, port: Any, error: BaseException, *, is_async: bool = False
) -> None:
    """Report that an endpoint that answers through a port raised: to its caller or, if that has its answer, in the log."""
    from mesh_core._common.errors import Undeliverable

    _tell_raised(cell, message, port, error, is_async=is_async)
    told = cell.reason_for(message, error)
    if port._outlet.is_awaited and port._outlet.is_open:
        try:
            port.exception(told)
        except Undeliverable:
            pass
        else:
            return
    elif isinstance(error, Undeliverable) and not port._outlet.is_open:
        # It kept answering until it was told that nobody listens.
        return
    if told is error:
        cell.actor_host.log_failure(message, error, cell.instance.name)


def _to_port(base: Spec) -> Callable[..., Any]:
    """Send what the endpoint returns or raises to a port that came along; give it the port if it takes one."""
    from mesh_core._common.errors import Undeliverable

    if base.arity.streams:
        return _items_to_port(base)
    function = base.function
    gives_port = base.arity.port

    def respond(cell: ActorCell, message: Message, args: Args, kwargs: Kwargs) -> None:
        port, *rest = args
        # The receiver may be gone, and nobody else waits.
        with contextlib.suppress(Undeliverable):
            try:
                value = function(cell.object, *(args if gives_port else rest), **kwargs)
            except BaseException as error:  # noqa: BLE001 - reported to the receiver
                _tell_raised(cell, message, port, error)
                port._fail(error, True)
            else:
                if not gives_port:
                    port._answer(value)

    async def respond_async(cell: ActorCell, message: Message, args: Args, kwargs: Kwargs) -> None:
        port, *rest = args
        with contextlib.suppress(Undeliverable):
            try:
                value = await function(cell.object, *(args if gives_port else rest), **kwargs)
            except BaseException as error:
                _tell_raised(cell, message, port, error, is_async=True)
                port._fail(cell.reason_for(message, error), True)
                if not isinstance(error, Exception):
                    raise
            else:
                if not gives_port:
                    await port._answer(value)

    return respond_async if base.is_async else respond


def _items_to_port(base: Spec) -> Callable[..., Any]:
    """Send what a generator yields or raises to a port that came along."""
    from mesh_core._common.errors import Undeliverable

    function = base.function

    def respond(cell: ActorCell, message: Message, args: Args, kwargs: Kwargs) -> None:
        port, *rest = args
        with contextlib.suppress(Undeliverable):
            try:
                with contextlib.closing(function(cell.object, *rest, **kwargs)) as items:
                    for item in items:
                        port._answer(item)
            except BaseException as error:  # noqa: BLE001 - reported to the receiver
                _tell_raised(cell, message, port, error)
                port._fail(error, True)

    async def respond_async(cell: ActorCell, message: Message, args: Args, kwargs: Kwargs) -> None:
        port, *rest = args
        with contextlib.suppress(Undeliverable):
            try:
                async with contextlib.aclosing(function(cell.object, *rest, **kwargs)) as items:
                    async for item in items:
                        await port._answer(item)
            except BaseException as error:
                _tell_raised(cell, message, port, error, is_async=True)
                port._fail(error, True)
                if not isinstance(error, Exception):
                    raise

    return respond_async if base.is_async else respond


def _to_rank_above(base: Spec) -> Callable[..., Any]:
    """Combine what the endpoint returns with the results of other ranks."""
    function = base.function

    def respond(cell: ActorCell, message: Message, args: Args, kwargs: Kwargs) -> None:
        from mesh_core._meshes.reduce import Reductions

        plan, *rest = args
        value = function(cell.object, *rest, **kwargs)
        Reductions.of(cell.actor_host).contribute(message, cell.instance.name, plan, value)

    async def respond_async(cell: ActorCell, message: Message, args: Args, kwargs: Kwargs) -> None:
        from mesh_core._meshes.reduce import Reductions

        plan, *rest = args
        value = await function(cell.object, *rest, **kwargs)
        Reductions.of(cell.actor_host).contribute(message, cell.instance.name, plan, value)

    return respond_async if base.is_async else respond
