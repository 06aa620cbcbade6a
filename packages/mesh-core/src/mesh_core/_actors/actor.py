"""The base class of actors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mesh_core._actors.endpoint import ActorBase, EndpointProperty

if TYPE_CHECKING:
    import logging
    from collections.abc import Generator, Iterator
    from typing import Self

    from mesh_core._futures.future import Future
    from mesh_core._geometry.mesh import Mesh
    from mesh_core._native import Point

    class _Base(Mesh):
        """The methods of the mesh that ``spawn`` returns, for editors: it is typed as the actor's class."""

        # Actors may have endpoints and fields of these names.
        alive: Any
        class_name: Any
        failed: Any
        mesh: Any
        name: Any
        respawn: Any

        initialized: Future[None]

        def stop(self, reason: str = "") -> Future[None]: ...
        def __iter__(self) -> Iterator[tuple[Point, Self]]: ...
        def __await__(self) -> Generator[Any, None, Self]: ...

else:
    _Base = ActorBase


RESERVED = frozenset(
    {"extent", "flatten", "initialized", "rename", "size", "sizes", "slice", "split", "stop"}
)
"""Names of attributes of every actor mesh, which no endpoint may have."""

GIVING_WAY = frozenset({"alive", "class_name", "failed", "mesh", "name", "respawn"})
"""Names of attributes of an actor mesh unless an endpoint has that name: ``mesh``, and what that one has."""


class Actor(_Base):
    """An object that lives in a process of its mesh and is reached by messages only.

    Derive a class, mark methods with :func:`endpoint`, and spawn it on processes. The result of ``spawn`` is typed as
    the class itself so that editors complete its endpoints, but is a mesh of references. An actor that sends itself,
    for example by ``return self``, sends such a reference.

    >>> from mesh_core import Actor, endpoint, this_host
    >>> class Greeter(Actor):
    ...     def __init__(self, greeting: str) -> None:
    ...         self.greeting = greeting
    ...     @endpoint
    ...     def greet(self, name: str) -> str:
    ...         return f"{self.greeting}, {name}"
    >>> with this_host().spawn_procs(per_host={"gpus": 2}) as procs:
    ...     greeters = procs.spawn("greeters", Greeter, "Hello")
    ...     greeters.greet.call("world").get().values()
    ['Hello, world', 'Hello, world']
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name, value in vars(cls).items():
            if isinstance(value, (staticmethod, classmethod)) and isinstance(
                value.__func__, EndpointProperty
            ):
                raise TypeError(
                    f"{cls.__qualname__}.{name} is marked both @{type(value).__name__} and @endpoint; an endpoint must be a method "
                    "of the actor: keep only @endpoint, and add self"
                )
        taken = sorted(
            name
            for name, value in vars(cls).items()
            if isinstance(value, EndpointProperty) and name in RESERVED
        )
        if taken:
            raise TypeError(
                f"{cls.__qualname__} has an endpoint named {', '.join(map(repr, taken))}, which would be hidden by the "
                "method or attribute of that name that every mesh has; rename the endpoint"
            )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # In a message an actor becomes a reference to itself. Elsewhere, as in a checkpoint, it is pickled like any object.
        from mesh_core._native import packing

        if packing():
            from mesh_core._common.current import holder

            process = holder().process
            reference = None if process is None else process.reference_of(self)
            if reference is not None:
                return reference.__reduce__()
        return super().__reduce_ex__(protocol)

    @property
    def logger(self) -> logging.Logger:
        """A logger named after the actor's class and, inside an actor, its name and rank."""
        import logging

        from mesh_core._common.context import current_instance

        me = current_instance()
        suffix = f".{me.name}.{me.rank.rank}" if me is not None else ""
        return logging.getLogger(f"mesh.{type(self).__qualname__}{suffix}")
