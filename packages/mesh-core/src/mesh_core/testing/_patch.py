"""Replace actor classes in tests of code that spawns and calls them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

from mesh_core._actors.actor import Actor
from mesh_core._actors.endpoint import Arity, EndpointProperty, endpoint, table_of
from mesh_core._common.suggestions import did_you_mean
from mesh_core._features.substitutes import layers

F = TypeVar("F", bound=Callable[..., Any])


class patch_actor:  # noqa: N801 - used like a function, as unittest.mock.patch is
    """Spawn ``mock`` in place of ``real``, in a ``with`` block or a decorated function or coroutine function.

    ``mock`` is any actor class, derived from ``real`` or not. It must have all endpoints of ``real`` and accept the same
    calls, including those of the constructor. Otherwise a ``TypeError`` that lists everything missing is raised at once.

    The patch applies to every spawn in this process, on any thread, and in processes that are spawned meanwhile, for as long
    as they live, and in the processes that those spawn. Existing processes are not affected. Patches nest: the innermost wins,
    and its ``mock`` is not replaced by an outer patch.

    >>> from mesh_core import Actor, endpoint, this_host
    >>> from mesh_core.testing import patch_actor
    >>> class Store(Actor):
    ...     @endpoint
    ...     def get(self, key: str) -> str:
    ...         raise OSError("no database here")
    >>> class StoreInMemory(Actor):
    ...     @endpoint
    ...     def get(self, key: str) -> str:
    ...         return key.upper()
    >>> with patch_actor(Store, StoreInMemory), this_host().spawn_procs() as procs:
    ...     procs.spawn("store", Store).get.call_one("a").get(timeout=30)
    'A'
    """

    def __init__(self, real: type, mock: type) -> None:
        for cls in (real, mock):
            if not (isinstance(cls, type) and issubclass(cls, Actor)) or cls is Actor:
                raise TypeError(f"patch_actor() takes two actor classes, got {cls!r}")
        problems = list(_problems(real, mock))
        if problems:
            raise TypeError(
                f"{mock.__qualname__} cannot stand in for {real.__qualname__}: {'; '.join(problems)}. "
                "Add what is missing, or derive it from the real class"
            )
        self._real = real
        self._mock = mock

    def __enter__(self) -> type:
        layers().push(self._real, self._mock)
        return self._mock

    def __exit__(self, *_: object) -> None:
        layers().pop(self._real, self._mock)

    def __call__(self, function: F) -> F:
        """Patch while ``function`` runs; for a coroutine function, until its coroutine ends."""
        import inspect

        if isinstance(function, type):
            raise TypeError(
                "patch_actor() decorates functions and coroutines; decorate the methods of a class"
            )

        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def patched_async(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return cast("F", patched_async)

        @functools.wraps(function)
        def patched(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast("F", patched)


def _problems(real: type, mock: type) -> Iterator[str]:
    """Yield the reasons why ``mock`` does not accept all calls that ``real`` accepts."""
    here, there = table_of(real), table_of(mock)
    for name, spec in here.items():
        own = there.get(name)
        if own is None:
            plain = " (it has a method of that name: mark it @endpoint)" if hasattr(mock, name) else ""
            yield f"it has no endpoint {name!r}{plain or did_you_mean(name, there)}"
        elif complaint := _mismatch(spec.arity, own.arity):
            yield f"its {name}{own.arity.text} {complaint}, as {name}{spec.arity.text} can be called"
    wanted, given = constructor_of(real), constructor_of(mock)
    if complaint := _mismatch(wanted, given):
        yield f"its constructor {given.text} {complaint}, as {wanted.text} can be called"


def constructor_of(cls: type) -> Arity:
    """Return the arguments that a class's constructor takes."""
    import inspect

    if cls.__init__ is object.__init__:  # type: ignore[misc]  # only compared
        return Arity(inspect.Signature(), skip=0)
    return Arity(inspect.signature(cls.__init__), skip=1)  # type: ignore[misc]


def _mismatch(wanted: Arity, given: Arity) -> str:
    """Return the first complaint of ``given`` about calls at the limits of ``wanted``; empty if it accepts them all."""
    needed = dict.fromkeys(wanted.required_keywords)
    by_name = wanted.names[wanted.bare :]
    bare = (None,) * wanted.bare
    calls: list[tuple[tuple[None, ...], dict[str, None]]] = [
        ((None,) * wanted.least, needed),
        ((None,) * len(wanted.names), needed),
        (bare, dict.fromkeys((*by_name, *wanted.keywords))),
        (
            (None,) * min(wanted.bare, wanted.least),
            {**needed, **dict.fromkeys(wanted.names[wanted.bare : wanted.least])},
        ),
    ]
    if wanted.most is None:
        calls.append(((None,) * (max(len(wanted.names), given.most or 0) + 1), needed))
    if wanted.variadic_keywords:
        calls.append((bare, {**dict.fromkeys((*by_name, *wanted.keywords)), "any_other": None}))
    return next((complaint for args, kwargs in calls if (complaint := given.complaint(args, kwargs))), "")


def mock_actor(real: type, /, **answers: Any) -> type[Any]:
    """Make an actor class with the endpoints of ``real`` that gives the specified answers and records its calls.

    An answer is a value to return, an exception to raise, or a function to call with the endpoint's arguments. An endpoint
    without an answer returns ``None``. The endpoint ``calls_received`` returns the calls so far, in order, as tuples
    ``(name, args, kwargs)``. Calls are checked against the real signatures, as always.

    >>> from mesh_core import Actor, endpoint, this_host
    >>> from mesh_core.testing import mock_actor, patch_actor
    >>> class Trainer(Actor):
    ...     def __init__(self, rate: float) -> None: ...
    ...     @endpoint
    ...     def step(self, batch: int) -> float: ...
    ...     @endpoint
    ...     async def save(self, path: str) -> None: ...
    >>> mock = mock_actor(Trainer, step=0.5, save=OSError("disk full"))
    >>> with patch_actor(Trainer, mock), this_host().spawn_procs() as procs:
    ...     trainers = procs.spawn("trainers", Trainer, 1e-3)
    ...     trainers.step.call_one(8).get(timeout=30)
    ...     type(trainers.save.call_one("/tmp").exception(timeout=30)).__name__
    ...     trainers.calls_received.call_one().get(timeout=30)
    0.5
    'ActorError[OSError]'
    [('step', (8,), {}), ('save', ('/tmp',), {})]
    """
    if not (isinstance(real, type) and issubclass(real, Actor)) or real is Actor:
        raise TypeError(f"mock_actor() takes an actor class, got {real!r}")
    table = table_of(real)
    unknown = [name for name in answers if name not in table]
    if unknown:
        raise TypeError(
            f"{real.__qualname__} has no endpoint {unknown[0]!r} to answer for{did_you_mean(unknown[0], table)}"
        )
    if "calls_received" in table:
        raise TypeError(
            f"{real.__qualname__} has its own endpoint 'calls_received'. Write the mock class by hand"
        )
    members: dict[str, Any] = {
        name: _answering(name, spec, answers.get(name)) for name, spec in table.items()
    }

    def __init__(self: Any, *_args: Any, **_kwargs: Any) -> None:  # noqa: N807 - it is that
        self._received = []

    def calls_received(self: Any) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        received: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = list(self._received)
        return received

    __init__.__signature__ = _bare_signature(real.__init__)  # type: ignore[attr-defined]
    members |= {
        "__init__": __init__,
        "__doc__": f"Stands in for {real.__qualname__}.",
        "__module__": __name__,
        "calls_received": endpoint(calls_received),
    }
    return type(f"Mock{real.__name__}", (Actor,), members)


def _answering(name: str, spec: EndpointProperty[..., Any], answer: Any) -> Any:
    """Make an endpoint like ``spec`` that gives ``answer``."""

    def answered(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._received.append((name, args, kwargs))
        if isinstance(answer, BaseException):
            raise answer
        return answer(*args, **kwargs) if callable(answer) else answer

    async def answered_async(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = answered(self, *args, **kwargs)
        return await result if hasattr(result, "__await__") else result

    function: Any = answered_async if spec.is_async else answered
    function.__name__ = name
    function.__signature__ = _bare_signature(spec.function)
    return endpoint(concurrent=spec.concurrent)(function)


def _bare_signature(function: Any) -> Any:
    """Return a function's signature without annotations, whose modules a worker may not have."""
    import inspect

    if function is object.__init__:
        return inspect.Signature([inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)])
    found = inspect.signature(function)
    params = [each.replace(annotation=inspect.Parameter.empty) for each in found.parameters.values()]
    return found.replace(parameters=params, return_annotation=inspect.Signature.empty)
