"""The actors of this process, as extensions see them and make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mesh_core._common.errors import MeshError
from mesh_core._futures.promise import Promise

if TYPE_CHECKING:
    import asyncio

    from mesh_core._futures.future import Future
    from mesh_core._hosting.actor_cell import ActorCell
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._native import Point

R = TypeVar("R")


class LocalActor:
    """An actor of this process that is being made; :meth:`Extension.make_actor` gets it, and may keep it."""

    __slots__ = ("__weakref__", "_cell", "_construct")

    def __init__(self, cell: ActorCell, construct: Callable[[], Any] | None) -> None:
        self._cell = cell
        self._construct = construct

    @property
    def id(self) -> int:
        """The number of its mesh of actors, the same on every rank and after a respawn; see :func:`actor_id`."""
        return self._cell.instance.actor_id

    @property
    def name(self) -> str:
        """The name with which it was spawned."""
        return self._cell.instance.name

    @property
    def cls(self) -> type:
        """Its class."""
        assert self._cell._cls is not None
        return self._cell._cls

    @property
    def point(self) -> Point:
        """Its place in the mesh that was spawned."""
        return self._cell.instance.rank

    @property
    def object(self) -> Any:
        """The object; ``None`` before it is made and after the actor has ended."""
        return self._cell.object

    @property
    def has_ended(self) -> bool:
        """Whether it was stopped or has failed."""
        return self._cell.over or self._cell.broken is not None

    def construct(self) -> Any:
        """Run the constructor with the arguments of the spawn, and return the object. Only once, and within ``make_actor``."""
        construct, self._construct = self._construct, None
        if construct is None:
            raise MeshError(
                f"cannot construct {self._cell.describe()} here: construct() is for make_actor(), once"
            )
        return construct()

    def between_messages(self, function: Callable[[Any], R]) -> Future[R]:
        """Call ``function(object)`` between two messages of the actor, ahead of those that wait.

        It runs where the actor's plain endpoints run, while no endpoint is half done, except concurrent ones. What it raises
        is raised by the future. If the actor has ended or failed, the future raises a :class:`MeshError`.
        """
        cell = self._cell
        promise = Promise[R](f"between two messages of {cell.describe()}")

        def errand() -> None:
            try:
                if cell.broken is not None:
                    raise MeshError(f"{cell.describe()} has failed")
                result = function(cell.object)
            except BaseException as error:  # noqa: BLE001 - reported to the asker
                promise.set_exception(error)
            else:
                promise.set_result(result)

        def over(_: asyncio.Future[Any]) -> None:
            if not promise.future.done():
                promise.set_exception(MeshError(f"{cell.describe()} has ended"))

        if not cell.in_turn(errand, over):
            why = "has ended" if cell.over else "has failed"
            promise.set_exception(MeshError(f"{cell.describe()} {why}"))
        return promise.future

    def __repr__(self) -> str:
        return f"<LocalActor: {self._cell.describe()}>"


def made_by(
    makers: Sequence[Callable[[LocalActor], Any]], cell: ActorCell, construct: Callable[[], Any]
) -> Any:
    """Have extensions make an actor; the first that was installed calls the next with ``construct()``."""
    for maker in reversed(makers):
        construct = _step(maker, LocalActor(cell, construct))
    return construct()


def _step(maker: Callable[[LocalActor], Any], local: LocalActor) -> Callable[[], Any]:
    def make() -> Any:
        made = maker(local)
        if not isinstance(made, local.cls):
            owner = type(getattr(maker, "__self__", maker)).__qualname__
            raise TypeError(
                f"make_actor() of {owner} must return an object of class {local.cls.__qualname__}, got {made!r}"
            )
        return made

    return make


def local_actor(number: int) -> LocalActor | None:
    """Return this process's actor of the mesh with this number; ``None`` if there is none or it has ended.

    An actor that is still being constructed is returned too; :meth:`LocalActor.between_messages` waits until it is constructed.
    """
    from mesh_core._common.current import current

    actor_host = current()._actor_host
    cell = None if actor_host is None else actor_host.actors.get(number)
    return None if cell is None or cell._cls is None else LocalActor(cell, None)


def local_actors() -> list[LocalActor]:
    """Return all actors of this process, those included that are still being constructed: for an extension that comes to a
    process that runs already.

    >>> from mesh_core.extensions import local_actors
    >>> [actor.name for actor in local_actors()]
    []
    """
    from mesh_core._common.current import current

    actor_host = current()._actor_host
    cells = [] if actor_host is None else list(actor_host.actors.values())
    return [LocalActor(cell, None) for cell in cells if cell._cls is not None]


def _actors(mesh: object, where: str) -> ActorMesh[Any]:
    from mesh_core._meshes.actors import ActorMesh

    if not isinstance(mesh, ActorMesh):
        raise TypeError(f"{where}() takes a mesh of actors, got {mesh!r}")
    return mesh


def actor_id(mesh: Any) -> int:
    """Return the number of a mesh of actors, by which each process finds its own actor of the mesh: :attr:`LocalActor.id`.

    >>> from mesh_core import Actor, this_host
    >>> from mesh_core.extensions import actor_id
    >>> class Worker(Actor): ...
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     workers = procs.spawn("workers", Worker)
    ...     actor_id(workers) == actor_id(workers.slice(gpus=1))
    True
    """
    return _actors(mesh, "actor_id")._actor_id


def actor_ranks(mesh: Any) -> list[int]:
    """Return the ranks of a mesh's actors in the mesh that was spawned: :attr:`LocalActor.point`.

    >>> from mesh_core import Actor, this_host
    >>> from mesh_core.extensions import actor_ranks
    >>> class Worker(Actor): ...
    >>> with this_host().spawn_procs({"gpus": 4}) as procs:
    ...     workers = procs.slice(gpus=slice(1, 4)).spawn("workers", Worker)
    ...     actor_ranks(workers), actor_ranks(workers.slice(gpus=2))
    ([0, 1, 2], [2])
    """
    if _actors(mesh, "actor_ranks")._location.is_joined:
        raise MeshError(
            f"{mesh!r} was joined from others, which have ranks of their own; ask for each of them"
        )
    return [mesh._root.position(rank) or 0 for rank in mesh._view]


def settled(mesh: Any) -> Future[None]:
    """Return a future that is done once each actor of a mesh has handled what this process sent to it before.

    Concurrent endpoints may still run. The future fails if an actor is dead or has failed.

    >>> from mesh_core import Actor, endpoint, this_host
    >>> from mesh_core.extensions import settled
    >>> class Worker(Actor):
    ...     @endpoint
    ...     def work(self) -> None: ...
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     workers = procs.spawn("workers", Worker)
    ...     _ = workers.work.broadcast()
    ...     settled(workers).get(timeout=30)
    """
    from mesh_core._common.codes import Request
    from mesh_core._futures.future import Future
    from mesh_core._hosting.responses import SETTLED
    from mesh_core._meshes.procs import all_well

    process, who = _actors(mesh, "settled")._process, mesh._addressee()
    target = mesh._location.target(mesh._procs_id, mesh._view)
    call = process.runtime.sender(target, mesh._actor_id, SETTLED, Request.CALL, True, who).call(((), {}))
    return Future(process, call, lambda call: all_well(call, who), lambda: f"settling {mesh._name!r}")


def procs_of(mesh: Any) -> ProcMesh:
    """Return the processes that actors are on, place by place, if this process spawned both.

    >>> from mesh_core import Actor, this_host
    >>> from mesh_core.extensions import procs_of
    >>> class Worker(Actor): ...
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     workers = procs.spawn("workers", Worker)
    ...     procs_of(workers) == procs, procs_of(workers.slice(gpus=1)).pids == procs.pids[1:]
    (True, True)
    """
    making = _actors(mesh, "procs_of")._making
    procs = None if making is None else making.procs
    if procs is None:
        raise MeshError(
            f"the processes of {mesh!r} are not known here: only the process that spawned both the "
            "processes and the actors knows them, until the actors are stopped"
        )
    return procs._with_region(mesh._view)
