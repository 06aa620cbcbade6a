"""Calls at a lower level: :func:`send`, and :func:`as_endpoint` for methods that are not marked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from mesh_core._actors.endpoint import Arity
from mesh_core._futures.sending import SENT, Sending
from mesh_core._meshes.adverbs import Endpoint

if TYPE_CHECKING:
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.ports import Port

P = ParamSpec("P")
R = TypeVar("R")


def send(
    endpoint: Endpoint[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    port: Port[R] | None = None,
    selection: Literal["all", "choose"] | int = "all",
) -> Sending:
    """Send a message to an endpoint, and have each answer sent to ``port``, which may belong to anyone.

    ``selection`` says who gets it: ``"all"``, ``"choose"`` (one, picked at random), or a rank of the mesh.
    In a coroutine, the result can be awaited, as for ``broadcast``.

    Without a port, answers are dropped. A port does not report that an actor died: if that
    matters, use ``call``, or wait with a timeout.

    >>> from mesh_core import Actor, Channel, endpoint, send, this_host
    >>> class Squarer(Actor):
    ...     @endpoint
    ...     def square(self, n: int) -> int:
    ...         return n * n
    >>> with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
    ...     squarers = procs.spawn("squarers", Squarer)
    ...     port, receiver = Channel[int].open_ranked()
    ...     sent = send(squarers.square, (3,), port=port)
    ...     sorted((place.rank, n) for place, n in (receiver.recv().get(timeout=30) for _ in range(2)))
    [(0, 9), (1, 9)]
    """
    if not isinstance(endpoint, Endpoint):
        raise TypeError(f"send() must be given an endpoint of a mesh of actors, got {endpoint!r}")
    args, kwargs = tuple(args), dict(kwargs or {})
    if not endpoint._arity.fits(args, kwargs):
        raise endpoint._refuse(args, kwargs)
    mesh = endpoint._mesh
    if selection != "all":
        mesh = mesh._at(_pick(len(mesh), selection))
    if port is None:
        # An endpoint that answers by a port gets one at which nobody listens.
        deferral = endpoint._sender(mesh._view).tell((args, kwargs))
    else:
        deferral = endpoint._sender(mesh._view, ">").tell(((port, *args), kwargs))
    return SENT if deferral is None else endpoint._sending(deferral)


def _pick(count: int, selection: object) -> int:
    if selection == "choose":
        import random

        return random.randrange(count)
    if isinstance(selection, int) and not isinstance(selection, bool):
        if not 0 <= selection < count:
            raise ValueError(f"selection must be a rank between 0 and {count - 1}, got {selection}")
        return selection
    raise ValueError(f"selection must be 'all', 'choose' or a rank, got {selection!r}")


class NotAnEndpoint:
    """A method of an actor class that is not marked ``@endpoint``, on a mesh of such actors."""

    __slots__ = ("mesh", "name")

    def __init__(self, mesh: ActorMesh[Any], name: str) -> None:
        self.mesh = mesh
        self.name = name

    def _advice(self) -> str:
        what = f"{self.mesh._interface.class_name}.{self.name}"
        return (
            f"{what} is a plain method, not an endpoint: mark it @endpoint, or call it by "
            f"as_endpoint(mesh.{self.name}).call(...)"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a plain method cannot be called by messages."""
        raise TypeError(self._advice())

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(self._advice(), name=name, obj=self)

    def __repr__(self) -> str:
        return f"<plain method {self.mesh._interface.class_name}.{self.name} of {self.mesh!r}>"


if TYPE_CHECKING:

    @overload
    def as_endpoint(
        method: Callable[Concatenate[Port[R], P], Any], *, explicit_response_port: Literal[True]
    ) -> Endpoint[P, R]: ...
    @overload
    def as_endpoint(
        method: Callable[P, Awaitable[R]], *, explicit_response_port: Literal[False] = False
    ) -> Endpoint[P, R]: ...
    @overload
    def as_endpoint(
        method: Callable[P, R], *, explicit_response_port: Literal[False] = False
    ) -> Endpoint[P, R]: ...


def as_endpoint(method: Any, *, explicit_response_port: bool = False) -> Any:
    """Make an endpoint of a plain method of a mesh's actors, for classes that you cannot mark: ``as_endpoint(mesh.fit)``.

    The actors need no change. A method that is not a coroutine, in an actor whose endpoints all are, runs on the
    event loop like them. With ``explicit_response_port``, the method gets the :class:`Port` of the call as its first argument.

    >>> from mesh_core import Actor, as_endpoint, this_host
    >>> class Model(Actor):
    ...     def fit(self, rows: int) -> str:
    ...         return f"fitted {rows} rows"
    >>> with this_host().spawn_procs() as procs:
    ...     as_endpoint(procs.spawn("model", Model).fit).call_one(10).get(timeout=30)
    'fitted 10 rows'
    """
    if isinstance(method, Endpoint):
        return method
    if not isinstance(method, NotAnEndpoint):
        raise TypeError(
            f"as_endpoint() must be given a method of a mesh of actors, such as mesh.fit, got {method!r}"
        )
    arity = _arity(method, explicit_response_port)
    arity.mark = "!" if explicit_response_port else "."
    return method.mesh._endpoint(method.name, arity)


def _arity(method: NotAnEndpoint, port: bool) -> Arity:
    import inspect

    signature = method.mesh._interface.signature(method.name)
    if signature is None:
        # The reference carries only its name: the actors check the arguments.
        signature = inspect.signature(_anything)
    arity = Arity(signature, skip=2 if port else 1)
    arity.streams = not port and method.mesh._interface.is_generator(method.name)
    arity.port = port or arity.streams
    return arity


def _anything(self: Any, /, *args: Any, **kwargs: Any) -> None:
    """Stand in for a method whose signature is not known."""
