"""A mesh of actors apart from its endpoints.

END-1: an endpoint may have any name but those in ``RESERVED``, and nothing of Mesh's own takes it for a method of the mesh. What a mesh has
beyond those, it has as a :class:`MeshHandle`, which has no endpoints; code that is given meshes asks :func:`mesh_of` for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from mesh_core._geometry.mesh import Mesh
from mesh_core._native import Point

if TYPE_CHECKING:
    from mesh_core._futures.future import Future
    from mesh_core._meshes.actors import ActorMesh
    from mesh_core._meshes.hosts import HostMesh
    from mesh_core._meshes.procs import ProcMesh
    from mesh_core._meshes.repair import Ranks


class MeshHandle:
    """A mesh of actors itself, whatever the names of their endpoints; ``actors.mesh``, or :func:`mesh_of`.

    >>> from mesh_core import Actor, endpoint, mesh_of, this_host
    >>> class Service(Actor):
    ...     @endpoint
    ...     def name(self) -> str:
    ...         return "an endpoint"
    >>> with this_host().spawn_procs() as procs:
    ...     services = procs.spawn("services", Service)
    ...     services.name.call_one().get(timeout=30), services.mesh.name, mesh_of(services).name
    ('an endpoint', 'services', 'services')
    """

    __slots__ = ("actors",)

    def __init__(self, actors: ActorMesh[Any]) -> None:
        self.actors = actors
        """The actors, with their endpoints."""

    @property
    def name(self) -> str:
        """The name with which the actors were spawned."""
        return self.actors._name

    @property
    def class_name(self) -> str:
        """The name of the actors' class."""
        return self.actors._interface.class_name

    def alive(self) -> list[Point]:
        """Return the points of this mesh whose actors have not failed, as far as this process knows; see :meth:`ProcMesh.alive`."""
        view = self.actors._view
        lost, extent = set(self.actors._lost()), view.extent
        return [Point(place, extent) for place in range(len(view)) if place not in lost]

    def failed(self) -> list[Point]:
        """Return the points of this mesh whose actors failed, or whose processes ended since they were constructed."""
        extent = self.actors._view.extent
        return [Point(place, extent) for place in self.actors._lost()]

    def respawn(self, ranks: Ranks = None) -> Future[None]:
        """Respawn actors that failed or whose processes were respawned, with their original constructor arguments.

        The future is done when they are constructed. References remain valid. Only the process that spawned the
        actors can do this; it keeps the constructor's arguments for it.

        Args:
            ranks: numbers or points of this mesh; by default all that have :meth:`failed`.

        >>> from mesh_core import Actor, context, endpoint, this_host
        >>> class Counter(Actor):
        ...     def __init__(self, start: int) -> None:
        ...         self.count = start
        ...     @endpoint
        ...     def add(self, n: int) -> int:
        ...         self.count += n
        ...         return self.count
        ...     @endpoint
        ...     def fail(self) -> None:
        ...         context().actor_instance.kill("a test")
        >>> with this_host().spawn_procs({"gpus": 2}) as procs:
        ...     counters = procs.spawn("counters", Counter, 10, supervise=lambda failure: True)
        ...     _ = counters.fail.broadcast()
        ...     while len(counters.failed()) < 2:
        ...         pass
        ...     counters.respawn().get(timeout=30)
        ...     counters.add.call(1).get(timeout=30).values()
        [11, 11]
        """
        from mesh_core._meshes.repair import respawn_actors

        return respawn_actors(self.actors, ranks)

    def __repr__(self) -> str:
        return f"<MeshHandle of {self.actors!r}>"


@overload
def mesh_of(mesh: ProcMesh) -> ProcMesh: ...
@overload
def mesh_of(mesh: HostMesh) -> HostMesh: ...
@overload
def mesh_of(mesh: Any) -> MeshHandle: ...
def mesh_of(mesh: Any) -> Any:
    """Return what repairs and describes a mesh, for code that is given meshes of others.

    Endpoints may be called ``failed``, ``name`` or ``mesh``. For actors this is their :class:`MeshHandle`, where nothing is
    hidden by endpoints. Processes and hosts have none, and are returned as they are.

    >>> from mesh_core import mesh_of, this_host
    >>> with this_host().spawn_procs({"gpus": 2}) as procs:
    ...     mesh_of(procs).failed()
    []
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh_of() must be given a mesh of hosts, processes or actors, got {mesh!r}")
    return mesh._itself
