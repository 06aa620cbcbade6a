"""Actors of which a job has one each, found by name from anywhere."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, TypeVar, cast

from mesh_core._actors.actor import Actor
from mesh_core._actors.endpoint import EndpointProperty, Interface, endpoint, table_of
from mesh_core._common.current import current
from mesh_core._geometry.location import Location
from mesh_core._meshes.actors import ActorMesh
from mesh_core._native import Extent, Region

if TYPE_CHECKING:
    from collections.abc import Callable

    from mesh_core._failures.failure import MeshFailure
    from mesh_core._futures.future import Future
    from mesh_core._process.process import Process

T = TypeVar("T")

REGISTRY = 1
"""The registry's actor id; the runtime knows it, and notifies the controller of the first call."""


class Registry(Actor):
    """Lives in the script's process; spawns and owns the actors that are asked for."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[Any, Any]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    @endpoint(concurrent=True)
    async def get_or_spawn(
        self, name: str, cls: type[Actor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Return the actor with this name; spawn it if there is none."""
        # One lock per name: a slow constructor holds up those who ask for the same actor, and nobody else.
        async with self._locks.setdefault(name, asyncio.Lock()):
            await self._catch_up()
            procs, found = self._found.get(name, (None, None))
            if found is None or found._process.runtime.is_gone(procs._procs_id, 0, 0):
                from mesh_core._meshes.hosts import this_host

                procs = this_host().spawn_procs(name=name)
                try:
                    found = await procs.spawn(name, cls, *args, **kwargs)
                except BaseException:
                    procs.stop()
                    raise
                self._found[name] = (procs, found)
            elif found._interface.class_name != cls.__qualname__:
                raise ValueError(
                    f"the controller {name!r} of this job is a {found._interface.class_name}, and a {cls.__qualname__} was asked "
                    "for; give one of them another name"
                )
            return found

    async def _catch_up(self) -> None:
        """Wait for notices on their way: the caller may know of a failure before this process does."""
        loop = asyncio.get_running_loop()
        passed = asyncio.Event()
        current().notices.barrier(lambda: loop.call_soon_threadsafe(passed.set))
        await passed.wait()

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Forget an actor that failed: the next caller gets a new one. The failure itself goes to the script."""
        procs, found = self._found.get(failure.mesh_name, (None, None))
        if found is not None and found._actor_id == failure.mesh._actor_id:
            del self._found[failure.mesh_name]
            procs.stop()
        return False


def host_registry(process: Process) -> None:
    """Host the registry of named actors (``get_or_spawn_controller``), which somebody has called."""
    process.actor_host().host(Registry, REGISTRY, "controllers")


def get_or_spawn_controller(name: str, cls: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
    """Return the one actor of a job with this name; callable from the script and from any actor.

    The first call spawns the actor, in a process of its own. Later or simultaneous callers get the same actor, and
    their arguments are ignored. It lives until the script ends. If it failed, the next
    call replaces it.

    >>> from mesh_core import Actor, endpoint, get_or_spawn_controller, shutdown
    >>> class Counter(Actor):
    ...     def __init__(self) -> None:
    ...         self.n = 0
    ...     @endpoint
    ...     def add(self, n: int) -> int:
    ...         self.n += n
    ...         return self.n
    >>> get_or_spawn_controller("counter", Counter).get().add.call_one(2).get()
    2
    >>> get_or_spawn_controller("counter", Counter).get().add.call_one(3).get()
    5
    >>> _ = shutdown()
    """
    if not isinstance(cls, type) or not issubclass(cls, Actor):
        raise TypeError(f"get_or_spawn_controller() must be given a name and an actor class, got {cls!r}")
    process = current()
    process.notices.start()
    table: dict[str, EndpointProperty[..., Any]] = table_of(Registry)
    interface = Interface(Registry.__qualname__, {key: value.arity for key, value in table.items()})
    whole = Region.whole(Extent([], []))
    registry: ActorMesh[Registry] = ActorMesh(
        process,
        interface,
        name="controllers",
        location=Location.on(0, "controller"),
        procs_id=0,
        actor_id=REGISTRY,
        root=whole,
        view=whole,
    )
    return cast("Future[T]", registry.get_or_spawn.call_one(name, cls, args, kwargs))
